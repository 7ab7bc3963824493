"""What is remembered of the journal's texts: within its bytes; the front of what does not fit."""

from __future__ import annotations

from cairn.actors.agents.text_cache import TextCache, held_bytes
from cairn.engine.prompt.template import Message


def test_what_was_not_used_for_the_longest_time_goes():
    """And what it took is given back."""
    remembered = TextCache(4000)
    for key in "abc":
        remembered.use([(key, key * 1000)])
    full = remembered.bytes
    remembered.use([("a", "a" * 1000)])
    remembered.use([("d", "d" * 1000)])
    assert ["a" * 1000, None, "c" * 1000, "d" * 1000] == [remembered.find(key) for key in "abcd"]
    assert full == remembered.bytes <= 4000


def test_of_what_does_not_fit_the_front_is_kept():
    """
    A line that is gone through from the front again and again, and does not fit: what fits of it is
    found each time. One alone that does not fit drives nothing out.
    """
    remembered = TextCache(4000)
    line = [(number, "x" * 1000) for number in range(9)]
    for _ in range(3):
        remembered.use(line)
        assert [0, 1, 2] == [key for key, _ in line if remembered.find(key) is not None]
    remembered.use([("large", "x" * 5000)])
    assert [0, 1, 2] == [key for key, _ in line if remembered.find(key) is not None]


def test_what_is_forgotten_takes_nothing():
    """By its key or its value."""
    remembered = TextCache()
    remembered.use([(1, "one"), (2, "two")])
    remembered.forget(lambda key, _: key == 1)
    remembered.forget(lambda _, value: value == "two")
    assert (0, None, None) == (remembered.bytes, remembered.find(1), remembered.find(2))


def test_the_bytes_of_a_value():
    """Texts count wherever they stand in it, as deep as a call's arguments may go."""
    small = held_bytes(Message(role="assistant", content=""))
    deep: object = "x" * 1000
    for _ in range(5000):
        deep = [deep]
    call = {"function": {"arguments": deep}}
    assert held_bytes(Message(role="assistant", content="x" * 1000)) >= small + 1000
    assert held_bytes(Message(role="assistant", content="", tool_calls=(call,))) >= small + 1000
