"""
The tables of a journal, without those that PostgreSQL alone has (``lease``, ``key_table``).

The migrations define the schema; the tables must equal what they make of an empty database, and a
test compares the two.
"""

from __future__ import annotations

import sqlalchemy as sa

REVISION = "0001"
"""The head of the migrations. Defined here so that a store opens without loading Alembic."""

VERSION_TABLE = "cairn_schema"
"""Where Alembic keeps the revision. The name is Cairn's own, and identifies a Cairn journal."""

metadata = sa.MetaData()

_big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # INTEGER is SQLite's row id
# There is no index besides the key: one by stream would write a page for each row of each session
# that answers. A reader of one stream reads all rows.
events = sa.Table(
    "events",
    metadata,
    sa.Column("position", _big, primary_key=True, autoincrement=False),
    sa.Column("stream", sa.Text, nullable=False),
    sa.Column("seq", _big, nullable=False),
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("time_us", _big, nullable=False),
    sa.Column("public", sa.LargeBinary, nullable=False),
    sa.Column("private", sa.LargeBinary),
    sa.Column("private_digest", sa.Text, nullable=False),
    sa.Column("previous_hash", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
)
bases = sa.Table(
    "bases",
    metadata,
    sa.Column("position", _big, primary_key=True, autoincrement=False),
    sa.Column("head", sa.Text, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("state_digest", sa.Text, nullable=False),
)
