"""
The journals of the other nodes of a fleet, in which a node reads the agents that it adopts.

Reading checks the chain of a whole journal, so it is for a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import attrs

from cairn.actors.journal_keys import KeyTable
from cairn.journal.errors import JournalError, StoreError
from cairn.journal.handover import Released, released_agent
from cairn.journal.rows.database.fleet import nodes_of
from cairn.journal.rows.database.urls import fleet_url, node_url
from cairn.journal.rows.store_sql import SqlStore


@attrs.frozen
class FleetJournals:
    """
    The journals of a fleet, as one node reads them.

    Attributes:
        node: that node.
    """

    _url: str = attrs.field(repr=False)
    node: str
    _keys: KeyTable | None = attrs.field(repr=False)

    def has(self, node: str) -> bool:
        """
        Whether there is a node of this name.

        Raises:
            StoreError: the database cannot be read.
        """
        return node in nodes_of(fleet_url(self._url))

    def released(self, node: str, agent: str, tenant: str, rest: Callable[[], None]) -> Released:
        """
        An agent that another node released.

        Args:
            rest: called every so many rows that are read.

        Raises:
            NoSuchAgent, NotReleased, StoreError: as ``released_agent``.
        """
        url = node_url(fleet_url(self._url), node)
        keys = self._keys.of_other(url) if self._keys is not None else None
        try:
            with contextlib.closing(SqlStore.open(url, read_only=True)) as store:
                return released_agent(store, node, agent, tenant, keys=keys, rest=rest)
        except StoreError:
            raise
        except JournalError as error:
            raise StoreError(f"The journal of {node} cannot be read: {error}") from error
