"""How a request is answered, as the request says it and as the journal keeps it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec
from msgspec.structs import asdict, replace

from cairn.http.responses.objects import Echo
from cairn.http.wire.json import encode
from cairn.http.wire.parameters import ReadRequest

PREFIX = "resp_"

#: In characters. A reference takes about as much room as repeating a text of this length.
_SHORT = 100


@attrs.frozen(kw_only=True)
class Form:
    """
    How to answer a request. The journal keeps it with the turn: as a note of the turn's own, and as
    texts that are the same in most turns (``note`` and ``texts``; ``form_of`` reads both).

    Attributes:
        echo: the parameters that the response repeats.
        model: the name of the model that answers.
        summarised: whether reasoning is sent as its own summary, because there is no other.
        sealed: whether reasoning is also sent as ``encrypted_content``, for clients that send back
            nothing else of it.
    """

    echo: Echo
    model: str
    summarised: bool = False
    sealed: bool = False

    def note(self) -> str:
        """The form as text, without the parameters that ``texts`` has."""
        texts = self.texts()
        echo = {name: value for name, value in asdict(self.echo).items() if name not in texts}
        return encode({**attrs.asdict(self, recurse=False), "echo": echo}).decode()

    def texts(self) -> dict[str, str]:
        """The parameters that are long, such as tools, instructions and formats, by name."""
        texts = {name: encode(value).decode() for name, value in asdict(self.echo).items()}
        return {name: text for name, text in texts.items() if len(text) > _SHORT}


def form_of(note: str, texts: Mapping[str, str]) -> Form:
    """The form that ``Form.note`` and ``Form.texts`` were made of."""
    form = msgspec.json.decode(note, type=Form)
    more = {name: msgspec.json.decode(text) for name, text in texts.items()}
    return attrs.evolve(form, echo=replace(form.echo, **more))


@attrs.frozen(kw_only=True)
class ResponsesRequest(ReadRequest):
    """A request of responses, with everything that it refers to."""

    form: Form


def request_of(name: str) -> str:
    """The request that the response of this name answers."""
    return name.removeprefix(PREFIX)
