"""
Prompts to token ids: always those of the whole text, and only what is new goes through the
tokenizer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from cairn.engine.mlx.model import load_model
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message, render
from tests.journal.model import profile
from tests.support.fake_engine import FakeTokenizer
from tests.support.models.tokenizers import END, KINDS, MARK, START, added, bpe, like_qwen, wrapped

EXAMPLES = 150

TOKENS = [START, END, MARK, "</think>", "</s>", "<a>", "<a><b>", "b><", "<|endoftext|>", END + ">"]
SPACES = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000", "\x1c", "\x85", "▁"]
WORDS = [
    "Stones",
    "STONES",
    "stones",
    "ON",
    "on",
    "one upon",
    "a",
    "x",
    "_",
    "it's",
    "12",
    "345",
    "user\n",
]
ODD = [
    "é",
    "e",
    "\u0301",
    "ß",
    "İ",
    "石",
    "の",
    "🪨",
    "👩\u200d🚀",
    "\u200b",
    "\ufeff",
    "\x00",
    "ﬁ",
    "≠",
]

FRAGMENTS = st.one_of(
    st.sampled_from(TOKENS),
    st.sampled_from([START, END, MARK]),
    st.sampled_from(TOKENS).flatmap(
        lambda token: st.tuples(st.integers(0, len(token)), st.integers(0, len(token))).map(
            lambda ends: token[min(ends) : max(ends)]
        )
    ),
    st.sampled_from(SPACES),
    st.sampled_from(WORDS + ODD),
    st.text(max_size=3),
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@attrs.frozen
class Edit:
    """
    An edit of a text between two requests: a part of it is replaced.

    Attributes:
        place: where, from 0 to 1.
        reach: how much is replaced, from 0 to 1.
    """

    place: float
    reach: float
    text: str

    def of(self, text: str) -> str:
        """The text after it."""
        start = round(self.place * len(text))
        return text[:start] + self.text + text[start + round(self.reach * (len(text) - start)) :]


PARTS = st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0, 1)
EDITS = st.lists(
    st.builds(Edit, st.just(1.0) | PARTS, PARTS, TEXTS).filter(lambda edit: edit.place <= 1),
    max_size=8,
)


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Any:  # mlx-lm has no types
    """A tokenizer of each kind."""
    return wrapped(KINDS[request.param]())


@pytest.fixture(scope="module")
def loaded(model_directory: Path) -> Any:
    """A tokenizer that is loaded from files as a model's is."""
    return load_model(str(model_directory)).tokenizer


def whole(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of a text that is tokenised as a whole."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def follow(tokenizer: Any, text: str, edits: list[Edit], kept_bytes: int) -> None:
    """Encode a text and all its edits, with one encoder and as a whole."""
    encoder = Encoder(tokenizer, max_bytes=kept_bytes)
    assert encoder.whole_because is None
    for edit in [Edit(1.0, 0.0, ""), *edits]:
        text = edit.of(text)
        assert whole(tokenizer, text) == encoder.encode(text, tenant="t"), ascii(text)


@profile(EXAMPLES)
@given(text=TEXTS, edits=EDITS, kept_bytes=st.sampled_from([0, 700, 10**6]))
def test_the_ids_are_those_of_the_whole(
    tokenizer: Any, text: str, edits: list[Edit], kept_bytes: int
) -> None:
    """Whatever the text, whatever was encoded before, and however little is remembered."""
    follow(tokenizer, text, edits, kept_bytes)


@profile(EXAMPLES)
@given(text=TEXTS, edits=EDITS, kept_bytes=st.sampled_from([0, 700, 10**6]))
def test_the_ids_are_those_of_the_whole_of_a_model_from_files(
    loaded: Any, text: str, edits: list[Edit], kept_bytes: int
) -> None:
    """The same with a tokenizer that mlx-lm loads."""
    follow(loaded, text, edits, kept_bytes)


def said(turns: int) -> Conversation:
    """A conversation of some turns, the last one the user's."""
    words = "the path goes on over stones that lie one upon another "
    return Conversation(
        messages=tuple(
            Message(role=("user", "assistant")[turn % 2], content=f"{turn} {words * 20}")
            for turn in range(turns)
        )
    )


def test_a_turn_costs_what_is_new_in_it(loaded: Any) -> None:
    """
    After a long conversation, an answer and a new question of few words send few characters
    through the tokenizer; and the ids are those of the whole.
    """
    encoder = Encoder(loaded)
    before = said(41)
    text = render(loaded, before)
    encoder.encode(text, tenant="t")
    assert 0 < encoder.encoded_characters <= len(text)

    asked = (Message(role="assistant", content="So."), Message(role="user", content="And then?"))
    longer = render(loaded, attrs.evolve(before, messages=before.messages + asked))
    encoded = encoder.encoded_characters
    assert whole(loaded, longer) == encoder.encode(longer, tenant="t")

    assert len(longer) > 40_000
    assert encoder.encoded_characters - encoded < 100
    assert encoder.cached_characters > 0.99 * len(longer)


def test_an_edit_costs_the_message_that_it_is_in(loaded: Any) -> None:
    """The pieces after an edit are found as well as those before it."""
    encoder = Encoder(loaded)
    before = said(41)
    encoder.encode(render(loaded, before), tenant="t")

    messages = list(before.messages)
    messages[20] = Message(role="user", content="Another way.")
    edited = render(loaded, attrs.evolve(before, messages=tuple(messages)))
    encoded = encoder.encoded_characters
    assert whole(loaded, edited) == encoder.encode(edited, tenant="t")

    assert encoder.encoded_characters - encoded < 100


def test_nothing_is_found_for_another_tenant(loaded: Any) -> None:
    """How long a prompt takes does not tell one tenant what another one said."""
    encoder = Encoder(loaded)
    text = render(loaded, said(3))
    encoder.encode(text, tenant="one")
    encoded = encoder.encoded_characters

    encoder.encode(text, tenant="other")
    assert 2 * encoded == encoder.encoded_characters

    encoder.encode(text, tenant="one")
    encoder.encode(text, tenant="other")
    assert 2 * encoded == encoder.encoded_characters


def test_the_pieces_of_a_tenant_are_forgotten(loaded: Any) -> None:
    """Its texts are tokenised again, and those of another tenant are not."""
    encoder = Encoder(loaded)
    text = render(loaded, said(3))
    encoder.encode(text, tenant="other")
    held = encoder.cached_bytes
    encoder.encode(text, tenant="one")
    encoder.forget("one")
    assert held == encoder.cached_bytes
    encoded = encoder.encoded_characters

    encoder.encode(text, tenant="other")
    assert encoded == encoder.encoded_characters
    encoder.encode(text, tenant="one")
    assert encoded < encoder.encoded_characters


def test_the_least_recently_used_pieces_are_evicted() -> None:
    """With room for two pieces, the third evicts the least recently used one."""
    encoder = Encoder(wrapped(like_qwen()), max_bytes=1000)
    one, two, three = (f"{START}{word}" for word in ("one", "two", "six"))

    def costs(text: str) -> bool:
        before = encoder.encoded_characters
        encoder.encode(text, tenant="t")
        return encoder.encoded_characters > before

    assert [True, True, False, True] == [costs(text) for text in (one, two, one, three)]
    assert [False, True] == [costs(text) for text in (one, two)]


def test_the_cache_is_bounded(loaded: Any) -> None:
    """Texts that go on for ever leave no more than the budget, and one beyond it leaves nothing."""
    encoder = Encoder(loaded, max_bytes=20_000)
    for turn in range(50):
        encoder.encode(f"{START}{turn} {'stone ' * 40}", tenant="t")
        assert encoder.cached_bytes <= 20_000
    assert encoder.cached_bytes > 10_000

    encoder.encode(START + "stone " * 10_000, tenant="t")
    assert 0 == encoder.cached_bytes


def test_several_threads_at_once() -> None:
    """Threads that encode texts of their own and shared ones all get the ids of the whole."""
    tokenizer = wrapped(like_qwen())
    texts = [
        "".join(f"{START}{word} {n % 7}{END}\n" for n in range(place + 30))
        for place, word in enumerate(["user", "stones", "a path", "石"])
    ]
    right = [whole(tokenizer, text) for text in texts]
    encoder = Encoder(tokenizer, max_bytes=4000)
    wrong: list[str] = []

    def run(first: int) -> None:
        for turn in range(60):
            place = (first + turn) % len(texts)
            if right[place] != encoder.encode(texts[place], tenant=f"t{first % 2}"):
                wrong.append(texts[place])

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == wrong
    assert 4 * 60 * sum(map(len, texts)) // 4 == (
        encoder.encoded_characters + encoder.cached_characters
    )


class Meeting(Encoder):
    """An encoder whose calls wait for each other between looking up and remembering."""

    barrier: threading.Barrier | None = None

    def _encode_each(self, pieces: Iterable[str]) -> dict[str, tuple[int, ...]]:
        fresh = super()._encode_each(pieces)
        if self.barrier is not None:
            self.barrier.wait()
        return fresh


def test_a_piece_that_two_threads_add_counts_once() -> None:
    """
    Two threads that miss the same piece add it only once, and the count of bytes is right.
    """
    tokenizer = wrapped(like_qwen())
    alone, meeting = Encoder(tokenizer), Meeting(tokenizer)
    meeting.barrier = threading.Barrier(2, timeout=60)
    text = f"{START}user\nstones{END}"
    threads = [
        threading.Thread(target=meeting.encode, args=(text,), kwargs={"tenant": "t"})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    alone.encode(text, tenant="t")
    assert alone.cached_bytes == meeting.cached_bytes


def test_half_a_character_is_refused_as_ever(loaded: Any) -> None:
    """What the tokenizer cannot take raises what it raises for the whole, and is not remembered."""
    encoder = Encoder(loaded)
    for _ in range(2):
        with pytest.raises(TypeError):
            encoder.encode(f"{START}user\n\ud800{END}", tenant="t")
    with pytest.raises(TypeError):
        whole(loaded, f"{START}user\n\ud800{END}")
    assert 0 == encoder.cached_bytes


def test_a_tokenizer_that_cannot_be_cut_takes_the_whole() -> None:
    """
    If cuts cannot be shown to be safe, ids are the same, nothing is cached, and a reason is given.
    """
    tokenizer = wrapped(bpe(tokens=added(START, END, single_word=True)))
    encoder = Encoder(tokenizer)
    text = f"{START}user\nstones{END}"

    for _ in range(2):
        assert whole(tokenizer, text) == encoder.encode(text, tenant="t")
    assert encoder.whole_because is not None
    assert "single word" in encoder.whole_because
    assert (2 * len(text), 0) == (encoder.encoded_characters, encoder.cached_characters)
    assert 0 == encoder.cached_bytes


@pytest.mark.parametrize("setting", ["truncation", "padding", "encode_special_tokens"])
def test_settings_of_the_library_are_noticed(setting: str) -> None:
    """If another caller enabled truncation or padding in the library, pieces are not used."""
    tokenizer = wrapped(like_qwen())
    encoder = Encoder(tokenizer)
    assert encoder.whole_because is None
    backend = tokenizer.backend_tokenizer
    if setting == "truncation":
        backend.enable_truncation(3)
    elif setting == "padding":
        backend.enable_padding(length=40)
    else:
        backend.encode_special_tokens = True

    text = f"{START}user\nstones on stones{END}"
    ids = encoder.encode(text, tenant="t")
    assert whole(tokenizer, text) == ids
    assert 0 == encoder.cached_characters + encoder.cached_bytes


def test_a_library_that_does_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe: if pieces give different ids than the whole, nothing is cut."""
    tokenizer = wrapped(like_qwen())
    owner = tokenizer.encode.__self__
    other = wrapped(bpe(tokens=added(START, END, MARK, "</think>"))).backend_tokenizer
    # What transformers encodes with is not what the pieces would be encoded with.
    monkeypatch.setattr(type(owner), "backend_tokenizer", other)

    encoder = Encoder(tokenizer)

    assert encoder.whole_because is not None
    assert "has other ids when it is cut" in encoder.whole_because


def test_a_raw_prompt_is_tokenised_as_a_whole() -> None:
    """The tokenizer adds its special tokens to it; it counts, and nothing of it is remembered."""
    tokenizer = wrapped(KINDS["like gpt2"]())
    encoder = Encoder(tokenizer)
    text = f"{START}user\nstones{END}"

    for _ in range(2):
        assert tuple(tokenizer.encode(text)) == encoder.encode_raw(text)
    assert tuple(tokenizer.encode(text)) != whole(tokenizer, text)
    assert (2 * len(text), 0) == (encoder.encoded_characters, encoder.cached_characters)
    assert 0 == encoder.cached_bytes


def test_a_tokenizer_of_another_library_takes_one_text_at_a_time() -> None:
    """Its own ids are used, for raw prompts and for others."""
    tokenizer = FakeTokenizer()
    encoder = Encoder(tokenizer)
    expected = tuple(map(ord, "two stones"))
    assert expected == encoder.encode("two stones", tenant="t") == encoder.encode_raw("two stones")


def test_a_tokenizer_that_breaks_the_library_is_left_alone() -> None:
    """
    Where one token strips white space that another one is and strips too, the library panics on
    texts such as the probe's. The server serves all the same.
    """
    tokens = [*added(START, rstrip=True), *added("\n", lstrip=True)]
    tokenizer = wrapped(bpe(tokens=tokens))

    encoder = Encoder(tokenizer)

    assert encoder.whole_because is not None
    assert "the library fails on a probe" in encoder.whole_because
    text = f"{START}user\nstones"
    assert whole(tokenizer, text) == encoder.encode(text, tenant="t")


@pytest.mark.parametrize("can_be_cut", [True, False])
def test_an_interrupt_is_no_fault_of_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, can_be_cut: bool
) -> None:
    """It ends the process as always, at either probe."""
    uncut = bpe(tokens=added(START, single_word=True))
    tokenizer = wrapped(like_qwen() if can_be_cut else uncut)

    def interrupted(*_: Any, **__: Any) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr("cairn.engine.prompt.encoder.encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Encoder(tokenizer)


def test_a_tokenizer_that_cannot_take_any_text_is_left_alone() -> None:
    """
    One without a token for unknown words fails on texts that the probe makes up; it still serves
    those that it can take.
    """
    words = Tokenizer(models.WordLevel({"stone": 0, "on": 1, "a": 2, "b": 3, ",": 4}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(added(START, END))
    tokenizer = wrapped(words)

    encoder = Encoder(tokenizer)

    assert encoder.whole_because is not None
    assert "probe cannot be tokenised" in encoder.whole_because
    text = f"{START} stone on stone {END}"
    assert whole(tokenizer, text) == encoder.encode(text, tenant="t")
