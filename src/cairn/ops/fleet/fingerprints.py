"""
In which fields the fingerprints of a fleet's nodes differ. Nodes share nothing over such a
difference, and answer with different bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.rows.codec import decode

_LONG = 80
_SAME_MODEL = "serve the same model directory"
_SAME_VERSIONS = "install the same versions on all nodes (requirements.lock)"
_SAME_OPTIONS = "start the nodes with the same options and settings"
_SAME_MACHINES = "use machines of one kind, or a fleet for each kind"
_ADVICE = {
    **dict.fromkeys(("weights", "tokenizer", "adapter"), _SAME_MODEL),
    **dict.fromkeys(
        ("mlx", "mlx_libraries", "mlx_lm", "transformers", "llguidance", "cairn_engine"),
        _SAME_VERSIONS,
    ),
    **dict.fromkeys(("tail_rule", "blas", "shards"), _SAME_VERSIONS),
    **dict.fromkeys(("device", "system", "system_build", "processor"), _SAME_MACHINES),
    "context_tokens": "give sessions the same memory on all nodes (--pool-mb)",
    "environment": "set the same variables for all nodes",
    "row_class": "if the processors are the same, test again on an idle machine: ops serve "
    "--test-again",
}
"""What to do about a field that differs; about others: the same options."""

Models = Mapping[str, ev.ModelLoaded]
"""The models that a node loaded in its last run, by the names that clients see."""


@attrs.frozen
class Difference:
    """
    A field in which fingerprints differ.

    Attributes:
        field: its name, with that of the part that differs.
        values: node to what it has there, for people.
        advice: what to do.
    """

    field: str
    values: Mapping[str, str]
    advice: str

    def __str__(self) -> str:
        """The field with the value of each node."""
        return f"{self.field}: " + ", ".join(f"{node} {has}" for node, has in self.values.items())


def loaded_models(url: str, nodes: Sequence[str] = ()) -> dict[str, Models]:
    """
    The models of each node of a fleet; none of a node that has loaded none. A journal without rows,
    which a refused start leaves, counts as none.

    Args:
        url: the database, or the journal of a node in it.
        nodes: these only; all, if there are none.

    Raises:
        StoreError: a journal cannot be read.
    """
    from cairn.journal.rows.database.fleet import nodes_of
    from cairn.journal.rows.database.urls import fleet_url, node_url
    from cairn.journal.rows.store_sql import SqlStore, is_empty

    found: dict[str, Models] = {}
    for node in nodes or nodes_of(url):
        with contextlib.closing(
            SqlStore.open(node_url(fleet_url(url), node), read_only=True)
        ) as store:
            if is_empty(store):
                continue
            models: dict[str, ev.ModelLoaded] = {}
            base = store.base()
            with contextlib.suppress(ValueError):  # a damaged one, likewise
                if base is not None and (loaded := base.snapshot.loaded) is not None:
                    models[loaded.name] = loaded
            for row in store.read(kinds=(ev.ServerStarted.kind, ev.ModelLoaded.kind)):
                # What cannot be read is a finding of `ops verify`.
                with contextlib.suppress(DamagedRow, UnknownEvent):
                    event = decode(row).event
                    if isinstance(event, ev.ModelLoaded):
                        models[event.name] = event
                    else:
                        models = {}
        found[node] = models
    return found


def differences(nodes: Mapping[str, Models]) -> list[Difference]:
    """
    The fields in which nodes differ that serve the same model: one of the same name, or the only
    one of each.
    """
    served = {node: models for node, models in nodes.items() if models}
    if all(len(models) == 1 for models in served.values()):
        served = {node: {"": next(iter(models.values()))} for node, models in served.items()}
    found = []
    for name in dict.fromkeys(name for models in served.values() for name in models):
        of = {node: models[name].fields for node, models in served.items() if name in models}
        flat = {node: dict(_flat(fields)) for node, fields in of.items()}
        for field in dict.fromkeys(field for fields in flat.values() for field in fields):
            values = {node: fields.get(field) for node, fields in flat.items()}
            if len({repr(value) for value in values.values()}) > 1:
                advice = _ADVICE.get(field.partition(".")[0], _SAME_OPTIONS)
                shown = {node: _shown(value, values) for node, value in values.items()}
                found.append(Difference(f"{name} {field}".strip(), shown, advice))
    return found


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: object, values: Mapping[str, object]) -> str:
    """A value; of a long one, the words that another node's value does not have."""
    if value is None:
        return "none"
    text = str(value)
    if len(text) <= _LONG:
        return text
    others = [set(str(other).split()) for other in values.values() if other != value]
    own = [word for word in text.split() if any(word not in other for other in others)]
    return " ".join(("…", *own))
