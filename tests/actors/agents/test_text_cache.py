"""The cache of the journal's texts: bounded in bytes, and which texts it drops."""

from __future__ import annotations

from cairn.actors.agents.text_cache import TextCache, held_bytes
from cairn.engine.prompt.template import Message


def test_the_least_recently_used_is_dropped():
    """Its bytes no longer count."""
    cache = TextCache(4000)
    for key in "abc":
        cache.use([(key, key * 1000)])
    full = cache.bytes
    cache.use([("a", "a" * 1000)])
    cache.use([("d", "d" * 1000)])
    assert ["a" * 1000, None, "c" * 1000, "d" * 1000] == [cache.find(key) for key in "abcd"]
    assert full == cache.bytes <= 4000


def test_the_first_of_a_sequence_that_does_not_fit_stay_cached():
    """
    A sequence that is read repeatedly and does not fit: its first values are found each time. A
    single value that does not fit drops no other value.
    """
    cache = TextCache(4000)
    sequence = [(number, "x" * 1000) for number in range(9)]
    for _ in range(3):
        cache.use(sequence)
        assert [0, 1, 2] == [key for key, _ in sequence if cache.find(key) is not None]
    cache.use([("large", "x" * 5000)])
    assert [0, 1, 2] == [key for key, _ in sequence if cache.find(key) is not None]


def test_forgotten_values_take_no_bytes():
    """Values are dropped by key or by value."""
    cache = TextCache()
    cache.use([(1, "one"), (2, "two")])
    cache.forget(lambda key, _: key == 1)
    cache.forget(lambda _, value: value == "two")
    assert (0, None, None) == (cache.bytes, cache.find(1), cache.find(2))


def test_the_bytes_of_a_value():
    """Texts count at any depth, as deep as the arguments of a call may go."""
    small = held_bytes(Message(role="assistant", content=""))
    deep: object = "x" * 1000
    for _ in range(5000):
        deep = [deep]
    call = {"function": {"arguments": deep}}
    assert held_bytes(Message(role="assistant", content="x" * 1000)) >= small + 1000
    assert held_bytes(Message(role="assistant", content="", tool_calls=(call,))) >= small + 1000
