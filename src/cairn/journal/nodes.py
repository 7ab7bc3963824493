"""
The nodes of a fleet: servers that share a database, each with a journal of its own in a schema.

What a client may name later, such as a response or an agent, carries the name of its node, so that
a router finds the node that has it.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

SCHEMA_PREFIX: Final = "node_"
"""How the schemas of nodes begin."""

NODE_MAX: Final = 16

_NAME = re.compile(r"[a-z][a-z0-9]*")
_IN_OPTIONS = re.compile(rf"-c\s*search_path={SCHEMA_PREFIX}([a-z][a-z0-9]*)(?!\S)")
_APART: Final = "."  # in no name of a node, and in no id that the server makes


@attrs.frozen
class NodeHead:
    """
    What a node's journal ends with.

    Attributes:
        is_news: whether it has grown since the head that was seen last, by more than heads that it
            saw itself.
        is_lost: whether that head is not in it any more.
        accepted: position and hash of its row by which its operator accepted that; None if there
            is none.
        fault: why it cannot be read; None if it can. Otherwise nothing else is known.
    """

    node: str
    position: int
    hash: str
    is_news: bool
    is_lost: bool
    accepted: tuple[int, str] | None = None
    fault: str | None = None

    @classmethod
    def unread(cls, node: str, fault: str) -> NodeHead:
        """That of a journal that cannot be read."""
        return cls(node, 0, "", is_news=False, is_lost=False, fault=fault)


def is_node_name(name: str) -> bool:
    """
    Whether a node may have this name, which becomes part of a schema's name, of ids and of URLs.
    """
    return len(name) <= NODE_MAX and _NAME.fullmatch(name) is not None


def schema_of(node: str) -> str:
    """The schema with the journal of a node."""
    return f"{SCHEMA_PREFIX}{node}"


def node_in(options: str) -> str | None:
    """The node whose schema these options of a connection to PostgreSQL name; None if none."""
    found = _IN_OPTIONS.search(options)
    return found[1] if found is not None and is_node_name(found[1]) else None


def node_of_schema(schema: str) -> str | None:
    """The node whose journal is in a schema; None if it is no node's."""
    name = schema.removeprefix(SCHEMA_PREFIX)
    return name if name != schema and is_node_name(name) else None


def on_node(node: str | None, name: str) -> str:
    """
    An id that carries the name of its node, as it is if it carries that already.

    Args:
        node: None for a server that is alone.
    """
    if node is None or name.startswith(f"{node}{_APART}"):
        return name
    return f"{node}{_APART}{name}"


def node_named(name: str) -> str | None:
    """The node whose name an id carries; None if it carries none."""
    node, apart, rest = name.partition(_APART)
    return node if apart and rest and is_node_name(node) else None
