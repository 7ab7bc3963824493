"""
Compaction: a conversation that has become long is replaced by what its user said and a summary,
which the model writes. The server keeps none of it: the client sends the items back with its next
request.
"""

from __future__ import annotations

from typing import Final

import attrs

from cairn.engine.answer.parts import Said
from cairn.engine.prompt.template import Message
from cairn.http.responses.answers import usage_of
from cairn.http.responses.conversation import SEALED, items_of
from cairn.http.responses.form import PREFIX, ResponsesRequest
from cairn.http.responses.objects import CompactedResponse
from cairn.http.wire.answers import WholeAnswer, cairn_object

_ASK: Final = (
    "Summarise our conversation so far, so that it can go on from your summary alone. Keep every "
    "fact, decision, name, path and number that may still matter, say what is done and what is "
    "left to do, and write nothing else."
)


def compacting(read: ResponsesRequest) -> ResponsesRequest:
    """The request for a summary of a conversation. It is neither stored nor streamed."""
    command = read.command
    assert command.conversation is not None
    messages = (*command.conversation.messages, Message(role="user", content=_ASK))
    conversation = attrs.evolve(command.conversation, messages=messages, calls=False)
    command = attrs.evolve(command, conversation=conversation, keep=None, constraint=None)
    return attrs.evolve(read, command=command, stream=False)


class CompactedAnswer(WholeAnswer):
    """Builds the items that replace the conversation."""

    def __init__(self, read: ResponsesRequest) -> None:
        super().__init__(read)
        assert read.command.conversation is not None
        *before, _ = read.command.conversation.messages
        self._asked = [message for message in before if message.role == "user"]

    def body(self) -> CompactedResponse:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        accepted, finished = self._ends()
        summary = "".join(part.text for part in self._parts if isinstance(part, Said))
        item = {
            "id": f"cmp_{accepted.request}",
            "type": "compaction",
            "encrypted_content": f"{SEALED}{summary}",
        }
        return CompactedResponse(
            id=f"{PREFIX}{accepted.request}",
            created_at=accepted.created_s,
            output=[*items_of(self._asked, accepted.request), item],
            usage=usage_of(finished),
            cairn=cairn_object(accepted, self._ignored),
        )
