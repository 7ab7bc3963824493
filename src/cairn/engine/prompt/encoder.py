"""
Prompts to token ids, tokenising only what is new in them.

The ids are always those of the whole text. A text is cut into pieces that a tokenizer treats
separately (``cuts`` has the argument). The ids of known pieces come from a cache, and the others
are tokenised. It makes no difference where in a text a piece was seen: the turns after an edit are
found as well as those before it.

1. If it cannot be shown that pieces give the ids of the whole, the whole is tokenised.
2. The pieces of one tenant are never looked up for another, because the time that an answer takes
would reveal them.
3. The cache is bounded in bytes; the least recently used pieces are evicted.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cairn.engine.contract import Tokenizer
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.cuts import Cuts, NotShown, backend_of, cuts_of
from cairn.engine.prompt.specials import MARK, Specials, unescaped
from cairn.engine.prompt.template import Conversation, encode
from cairn.journal.token_ids import shared

CACHE_BYTES: Final = 64 * 2**20
"""About fifty conversations of 100,000 tokens."""

_ENTRY_BYTES: Final = 256
"""What an entry takes apart from text and ids: key, links, and its share of the table."""

_PROBED_TOKENS: Final = 16

_PROBE: Final = " Ab c\n\n  é\u0301 12+3 "


class Encoder:
    """
    Turns rendered conversations into token ids. Thread-safe.

    Attributes:
        whole_because: why every text is tokenised as a whole; None if pieces are reused.
        encoded_characters: how many characters were tokenised, raw prompts included.
        cached_characters: for how many the ids came from the cache.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_bytes: int = CACHE_BYTES,
        specials: Specials | None = None,
    ) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper. It must not be changed afterwards.
            max_bytes: what cached pieces may take.
            specials: the special tokens that are text in messages; None if they are control tokens
                there too.
        """
        self._tokenizer = tokenizer
        self._specials = specials
        self._pieces = _PieceCache(max_bytes)
        self._cuts: Cuts | None = None
        self._backend: Any = None
        self._counting = threading.Lock()
        # transformers sets up the library's object at every call, so one call at a time.
        self._encoding_whole = threading.Lock()
        self._direct = False  # whether the library's object alone gives the same ids
        self.whole_because: str | None = None
        self.encoded_characters = 0
        self.cached_characters = 0
        try:
            cuts, self._backend = cuts_of(tokenizer)
            self._probe(cuts)
            self._cuts = cuts
        except NotShown as reason:
            self.whole_because = str(reason)
        self._direct = self._probe_whole()

    def render(self, conversation: Conversation) -> str:
        """
        The prompt of a conversation, as text for ``encode``: it may have marks at which special
        tokens of messages are cut.

        Raises:
            TemplateError: the template raised, or the model has none.
        """
        if self._specials is None:
            return prompts.render(self._tokenizer, conversation)
        marked = self._specials.marked(conversation)
        text = prompts.render(self._tokenizer, marked)
        return text if marked is conversation else unescaped(text)

    def plain(self, rendered: str) -> str:
        """A rendered prompt without marks."""
        return rendered if self._specials is None else rendered.replace(MARK, "")

    def encode(self, text: str, *, tenant: str) -> tuple[int, ...]:
        """
        The token ids of a text in which special tokens are written out, as by a template. Caches
        its pieces.

        Args:
            text: as ``render`` gives it.
        """
        if self._specials is None or MARK not in text:
            return self._encode_unmarked(text, tenant)
        ids: list[int] = []
        for part in filter(None, text.split(MARK)):
            ids.extend(self._encode_unmarked(part, tenant))
        return tuple(ids)

    def _encode_unmarked(self, text: str, tenant: str) -> tuple[int, ...]:
        if self._cuts is None or not self._is_plain():
            self._count(len(text), 0)
            return self._whole(text)
        pieces = self._cuts.pieces(text)
        ids_of = self._pieces.look_up(tenant, pieces)
        fresh = self._encode_each(piece for piece in pieces if piece not in ids_of)
        self._pieces.keep(tenant, fresh)
        encoded = sum(map(len, fresh))
        self._count(encoded, len(text) - encoded)
        ids_of.update(fresh)
        ids: list[int] = []
        for piece in pieces:
            ids.extend(ids_of[piece])
        return tuple(ids)

    def encode_raw(self, text: str) -> tuple[int, ...]:
        """
        The token ids of a raw prompt, to which the tokenizer adds its special tokens. It is
        tokenised as a whole and not cached.
        """
        self._count(len(text), 0)
        return self._whole(text, special=True)

    def forget(self, tenant: str) -> None:
        """Drop the cached pieces of a tenant's texts."""
        self._pieces.forget(tenant)

    @property
    def cached_bytes(self) -> int:
        """The size of the cached pieces."""
        return self._pieces.bytes

    def _whole(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        if self._direct and self._is_plain():
            return self._by_library(text, special=special)
        with self._encoding_whole:
            return shared(encode(self._tokenizer, text, special=special))

    def _by_library(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The ids that the library's object gives. Unlike transformers', it takes many threads."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return shared(encoding.ids)

    def _probe_whole(self) -> bool:
        """Whether the library's object gives the ids that transformers gives. Sets it."""
        try:
            self._backend = backend_of(self._tokenizer)
        except NotShown:
            return False
        try:
            return self._same_by_library(special=True) and self._same_by_library(special=False)
        except BaseException as error:  # the library raises nothing narrower
            # A panic in Rust is not an Exception. The text is at fault, not the server.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return False

    def _same_by_library(self, *, special: bool) -> bool:
        ids = self._whole(_PROBE, special=special)  # transformers sets up the object by it
        return self._is_plain() and ids == self._by_library(_PROBE, special=special)

    def _is_plain(self) -> bool:
        """
        Whether the library's object is set up as transformers would do it. Other callers may have
        enabled truncation or padding.
        """
        backend = self._backend
        return (
            backend.truncation is None
            and backend.padding is None
            and not backend.encode_special_tokens
        )

    def _encode_each(self, pieces: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """
        The ids of pieces, each once.

        One call for all of them: only this form of the library's call releases other threads and
        encodes pieces in parallel. Without offsets it gives the same ids, but faster.
        """
        distinct = list(dict.fromkeys(pieces))
        if not distinct:
            return {}
        encodings = self._backend.encode_batch_fast(distinct, add_special_tokens=False)
        return {
            piece: shared(encoding.ids) for piece, encoding in zip(distinct, encodings, strict=True)
        }

    def _probe(self, cuts: Cuts) -> None:
        """
        Test the argument of ``cuts`` on texts that contain everything that a step may depend on.

        Raises:
            NotShown: the pieces give different ids than the whole.
        """
        tokens = cuts.tokens
        for place, token in enumerate(tokens[:_PROBED_TOKENS]):
            other = tokens[place - 1]
            text = (
                f"{token}Ab c{other}{token}{token} d,{token} \n{other}\n\n e{token}\t\u0301é "
                f"{token}{token[:-1]}{token}  {other[1:]}12{token}3"
            )
            try:
                whole = self._whole(text)  # first: transformers sets up the library's object by it
            except Exception as error:  # the library raises nothing narrower
                raise NotShown(f"a probe cannot be tokenised: {error}") from error
            except BaseException as error:
                # A panic in Rust is not an Exception. The text is at fault, not the server.
                if type(error).__name__ != "PanicException":
                    raise
                raise NotShown(f"the library fails on a probe: {error}") from error
            each = self._encode_each(cuts.pieces(text))
            if whole != tuple(id_ for piece in cuts.pieces(text) for id_ in each[piece]):
                raise NotShown(f"a text with {token!r} has other ids when it is cut there")

    def _count(self, encoded: int, reused: int) -> None:
        with self._counting:
            self.encoded_characters += encoded
            self.cached_characters += reused


class _PieceCache:
    """The ids of pieces by tenant and text, within a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.bytes = 0
        self._ids: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def look_up(self, tenant: str, pieces: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """The ids of those pieces that are known. Marks them as recently used."""
        found: dict[str, tuple[int, ...]] = {}
        with self._lock:
            for piece in pieces:
                ids = self._ids.get((tenant, piece))
                if ids is not None:
                    self._ids.move_to_end((tenant, piece))
                    found[piece] = ids
        return found

    def forget(self, tenant: str) -> None:
        """Drop the pieces of a tenant."""
        with self._lock:
            for of, piece in [one for one in self._ids if one[0] == tenant]:
                self.bytes -= _held_bytes(piece, self._ids.pop((of, piece)))

    def keep(self, tenant: str, fresh: Mapping[str, tuple[int, ...]]) -> None:
        """Add pieces, and evict the least recently used ones."""
        with self._lock:
            for piece, ids in fresh.items():
                if (tenant, piece) not in self._ids:
                    self._ids[tenant, piece] = ids
                    self.bytes += _held_bytes(piece, ids)
            while self.bytes > self._budget_bytes:
                (_, piece), ids = self._ids.popitem(last=False)
                self.bytes -= _held_bytes(piece, ids)


def _held_bytes(piece: str, ids: tuple[int, ...]) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + _ENTRY_BYTES
