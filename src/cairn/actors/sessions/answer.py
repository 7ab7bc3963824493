"""The answer as it grows: drawn tokens go in, events and replies to the client come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cairn.actors.requests.messages import Delta, Finished, TokenInfo
from cairn.actors.requests.ticket import Ticket
from cairn.engine.answer.parts import AnswerPart, AnswerParts, Released
from cairn.engine.answer.text import AnswerText
from cairn.engine.contract import Tokenizer
from cairn.engine.prompt.template import Message, message_of
from cairn.engine.prompt.turns import messages_text, parts_text
from cairn.engine.reports import Drawn, PassReport
from cairn.journal import events as ev
from cairn.journal.repetition import Repetition


class Answer:
    """
    One answer: takes tokens, and streams the text that is certain after the events that explain it.
    """

    def __init__(
        self,
        ticket: Ticket,
        path: ev.PathSelected,
        text: AnswerText,
        parts: AnswerParts,
        tokenizer: Tokenizer,
        ends: frozenset[int],
        append: Callable[[ev.Event], int],
        rows_of_texts: Callable[[Mapping[str, str]], Mapping[str, int]],
    ) -> None:
        """
        Args:
            path: the decision under which the request is served.
            ends: tokens that end an answer.
            append: appends an event of the session's stream and returns the receipt.
            rows_of_texts: see ``SessionCache.rows_of_texts``.
        """
        self._ticket = ticket
        self._path = path
        self._text = text
        self._parts = parts
        self._tokenizer = tokenizer
        self._ends = ends
        self._append = append
        self._rows_of_texts = rows_of_texts
        self._waiting: list[Drawn] = []
        self._certain = ""
        self._certain_tokens = 0
        self._parts_sent: list[AnswerPart] = []
        self._taken = 0
        self._emitted = 0
        self._receipt = 0
        self._reason: ev.FinishReason | None = None
        self._stop_text: str | None = None
        self._by_itself = False
        guarded = ticket.prepared.command.sampling.repetition_guard
        self._repetition = Repetition() if guarded else None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self._reason is not None

    def take(self, drawn: Sequence[Drawn]) -> bool:
        """
        Take in tokens, those after the end excepted. True if the answer is complete. ``release``
        streams the text that is certain then.
        """
        if self._ticket.prepared.max_tokens == 0:
            # The last pass of the prompt always draws a token, which is not part of this answer.
            self._reason = "length"
        for one in drawn:
            if self.ended:
                break
            self._taken += 1
            if one.token in self._ends:
                self._reason = "stop"
                self._by_itself = True
                break
            self._waiting.append(one)
            piece = self._text.add(one.token)
            self._certain += piece.text
            self._certain_tokens += piece.tokens
            if piece.stopped:
                self._reason, self._stop_text = "stop", piece.stop
            elif self._taken >= self._ticket.prepared.max_tokens:
                self._reason = "length"
            if self._repetition is not None and self._repetition.add(one.token):
                self._reason = self._reason or "repetition"
        return self.ended

    def finish(self) -> Message:
        """
        Stream the rest, store the turn if the client asked for that, and record the end.

        Returns:
            The answer, as its client will send it back.
        """
        rest = self._text.finish()
        if rest.stopped:
            self._reason, self._stop_text = "stop", rest.stop
        self._certain += rest.text
        self._certain_tokens = len(self._waiting)
        self.release()
        last = self._parts.finish(complete=self._by_itself)
        self._send(last)
        ticket, session = self._ticket, self._path.session
        assert self._reason is not None
        prompt_tokens = len(ticket.prepared.prompt_ids)
        cached_tokens = self._path.reused_tokens
        self._store_turn()
        receipt = self._append(
            ev.RequestFinished(
                session=session,
                request=ticket.id,
                finish_reason=self._reason,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                answer_tokens=self._taken,
                completion_tokens=self._taken,
            )
        )
        ticket.finished = True
        ticket.reply(
            receipt,
            Finished(
                finish_reason=self._reason,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=self._taken,
                sealed_tokens=ticket.sealed_tokens,
                stop_text=self._stop_text,
                ended_in_call=any(one.reason == "truncated" for one in last.rejected),
            ),
        )
        return message_of(self._parts_sent)

    def _store_turn(self) -> None:
        ticket = self._ticket
        keep = ticket.prepared.command.keep
        if keep is None:
            return
        texts_at = self._rows_of_texts(keep.texts)
        self._append(
            ev.TurnStored(
                session=self._path.session,
                request=ticket.id,
                tenant=ticket.tenant,
                agent=keep.agent,
                previous=keep.previous,
                created_s=ticket.created_s,
                question=messages_text(keep.asked),
                answer=parts_text(self._parts_sent),
                note=keep.note,
                texts={name: text for name, text in keep.texts.items() if name not in texts_at},
                texts_at=texts_at,
            )
        )

    def release(self, record: Callable[[int, str], int] | None = None) -> None:
        """
        Stream the text that is certain by now.

        Args:
            record: appends the passes that made its last tokens, with how many tokens are released
                and their text, and returns the receipt. None if these are on record.
        """
        text, tokens = self._certain, self._certain_tokens
        self._certain, self._certain_tokens = "", 0
        released, self._waiting = self._waiting[:tokens], self._waiting[tokens:]
        if record is not None:
            self._receipt = record(tokens, text)
        elif text or tokens:
            self._receipt = self._append(
                ev.TokensEmitted(
                    session=self._path.session,
                    request=self._ticket.id,
                    first=self._emitted,
                    emitted=len(released),
                    ids=tuple(one.token for one in released),
                    text=text,
                )
            )
        if not text and not tokens:
            return
        self._emitted += len(released)
        with_infos = self._ticket.prepared.command.top_logprobs is not None
        infos = tuple(self._info(one) for one in released) if with_infos else ()
        self._send(self._parts.add(text), infos)

    def _send(self, found: Released, tokens: tuple[TokenInfo, ...] = ()) -> None:
        """Send the client what is certain by now. It is on record before."""
        for one in found.rejected:
            self._receipt = self._append(
                ev.CallRejected(
                    session=self._path.session,
                    request=self._ticket.id,
                    reason=one.reason,
                    text=one.text,
                    detail=one.detail,
                )
            )
        self._parts_sent.extend(found.parts)
        # Text that is not a complete part yet is not sent; a keep-alive may go out meanwhile.
        if found.parts or tokens or found.calling is not None:
            delta = Delta(parts=found.parts, tokens=tokens, calling=found.calling)
            self._ticket.reply(self._receipt, delta)

    def _info(self, drawn: Drawn) -> TokenInfo:
        text, raw = self._text_of(drawn.token)
        top = tuple((token, *self._text_of(token), logprob) for token, logprob in drawn.top)
        return TokenInfo(id=drawn.token, text=text, raw=raw, logprob=drawn.logprob, top=top)

    def _text_of(self, token: int) -> tuple[str, bytes | None]:
        """The text and bytes of a single token."""
        token_bytes = self._ticket.prepared.token_bytes
        assert token_bytes is not None
        text = self._tokenizer.decode([token])
        return text, token_bytes.of(token, text)


def into(
    batch: list[PassReport], report: PassReport | BaseException | None
) -> tuple[bool, BaseException | None]:
    """Add a report to its batch: (whether it was the last one, the failure)."""
    if isinstance(report, PassReport):
        batch.append(report)
        return False, None
    return True, report


def runs(batch: Sequence[PassReport]) -> list[list[PassReport]]:
    """
    Groups decode passes in which each adds its tokens to every layer after the one before.
    What the passes in the middle measured then follows from the last one. A pass that measured
    something else is a separate group, so that the checks see it.
    """
    found: list[list[PassReport]] = []
    for report in batch:
        last = found[-1][-1] if found else None
        follows = (
            last is not None
            and (report.start, report.end) == (last.end, last.end + len(report.ran))
            and report.coverage
            == tuple((n, start, end + len(report.ran)) for n, start, end in last.coverage)
        )
        if follows:
            found[-1].append(report)
        else:
            found.append([report])
    return found
