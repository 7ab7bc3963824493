"""Counters whose series exist before the first count: an alert on a rate needs that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter


class NewCounter(Protocol):
    """Makes counters in one registry."""

    def __call__(self, name: str, help_text: str, **label: Iterable[str]) -> Counter:
        """
        Make a counter.

        Args:
            label: the name of its label, if it has one, and the values that are known.
        """


def counters_in(registry: CollectorRegistry) -> NewCounter:
    """A function that makes counters in a registry."""

    def new_counter(name: str, help_text: str, **label: Iterable[str]) -> Counter:
        counter = Counter(name, help_text, list(label), registry=registry)
        for values in label.values():
            for value in values:
                counter.labels(value)
        return counter

    return new_counter
