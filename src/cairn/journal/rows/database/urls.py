"""URLs of journals: a file of SQLite, a database of PostgreSQL, or the schema of a node in one."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from cairn.journal.errors import StoreError
from cairn.journal.nodes import node_in, node_of_schema, schema_of


def journal_url(data_dir: Path) -> str:
    """The URL of the journal in a data directory. Creates nothing."""
    return sqlite_url(data_dir / "journal.db")


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file, whatever characters are in its path."""
    url = sa.URL.create("sqlite", database=str(path.absolute()))
    return url.render_as_string(hide_password=False)


def sqlite_path(url: str) -> Path:
    """The file of an SQLite URL."""
    path = file_of(parsed_url(url))
    if path is None:
        raise StoreError(f"{place_name(parsed_url(url))} is not a file.")
    return path


def node_url(url: str, node: str) -> str:
    """
    The URL of a node's journal: its schema in the database of the fleet.

    Raises:
        StoreError: the database is not PostgreSQL, or the URL names a schema.
    """
    parsed = parsed_url(url)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(
            f"{place_name(parsed)} cannot have the journal of a node, because the nodes of a fleet "
            "share a PostgreSQL database. Write --journal postgresql://user@host/name."
        )
    given = parsed.query.get("options", "")
    options = given if isinstance(given, str) else " ".join(given)
    if "search_path" in options:
        raise StoreError(
            f"{place_name(parsed)} names a schema, and so does --node {node}. Omit one of them."
        )
    chosen = f"{options} -csearch_path={schema_of(node)}".strip()
    return url_text(parsed.update_query_dict({"options": chosen}))


def node_of(url: str) -> str | None:
    """The node whose journal a URL names; None if it is not that of a node."""
    parsed = parsed_url(url)
    given = parsed.query.get("options", "")
    options = given if isinstance(given, str) else " ".join(given)
    return node_in(options) if parsed.get_backend_name() == "postgresql" else None


def fleet_url(url: str) -> str:
    """The URL of the database of a fleet, by that of a node's journal in it (``node_url``)."""
    parsed = parsed_url(url)
    given = parsed.query.get("options", "")
    words = given.split() if isinstance(given, str) else list(given)
    own = [word for word in words if node_of_schema(word.removeprefix("-csearch_path=")) is None]
    if own == words:
        return url
    rest = {name: value for name, value in parsed.query.items() if name != "options"}
    if own:
        rest["options"] = " ".join(own)
    return url_text(parsed.set(query=rest))


def parsed_url(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except SQLAlchemyError as error:
        raise StoreError(
            f"{url!r} is not a database URL; write sqlite:////path/to/journal.db or "
            "postgresql://user@host/name."
        ) from error
    if parsed.get_backend_name() == "sqlite" and not parsed.database:
        raise StoreError("A journal in memory would be lost; name a file: sqlite:////path/to/it.db")
    # The bare name means psycopg2 to some versions of SQLAlchemy; Cairn uses psycopg.
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def url_text(url: sa.URL, *, hide_password: bool = False) -> str:
    """A URL without the driver, which ``parsed_url`` adds."""
    is_psycopg = url.drivername == "postgresql+psycopg"
    plain = url.set(drivername="postgresql") if is_psycopg else url
    return plain.render_as_string(hide_password=hide_password)


def place_of(url: str) -> str:
    """Where a journal is, for people; never shows a password."""
    return place_name(parsed_url(url))


def file_of(url: sa.URL) -> Path | None:
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def place_name(url: sa.URL) -> str:
    """Where a journal is, for people; never shows a password."""
    path = file_of(url)
    return str(path) if path is not None else url_text(url, hide_password=True)
