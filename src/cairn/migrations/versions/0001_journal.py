"""The tables of the journal: its events, and the base of the rows that were pruned."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables. There is no way down: a journal is never rewritten."""
    big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "events",
        sa.Column("position", big, primary_key=True, autoincrement=False),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("seq", big, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("time_us", big, nullable=False),
        sa.Column("public", sa.LargeBinary, nullable=False),
        sa.Column("private", sa.LargeBinary),
        sa.Column("private_digest", sa.Text, nullable=False),
        sa.Column("previous_hash", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
    )
    # Who may commit, see `journal/rows/database/lease.py`. A file locks SQLite's journals instead.
    if op.get_bind().dialect.name == "postgresql":
        op.create_table(
            "lease",
            sa.Column("node", sa.Text, primary_key=True),
            sa.Column("token", sa.BigInteger, nullable=False),
            sa.Column("holder", sa.Text, nullable=False),
        )
        # The keys of a node, see `journal/rows/database/key_table.py`; empty for other journals.
        op.create_table(
            "keys",
            sa.Column("id", sa.Text, primary_key=True),
            sa.Column("subject", sa.Text, nullable=False),
            sa.Column("wrapped", sa.LargeBinary, nullable=False),
        )
        op.create_table(
            "journal_key",
            sa.Column("node", sa.Text, primary_key=True),
            sa.Column("known", sa.LargeBinary, nullable=False),
            sa.Column("place", sa.Text, nullable=False),
            sa.Column("made", sa.BigInteger, nullable=False),
            sa.Column("removed", sa.BigInteger, nullable=False),
            sa.Column("secret_known", sa.LargeBinary),
        )
    # What replaces the rows that were pruned: one row at most.
    op.create_table(
        "bases",
        sa.Column("position", big, primary_key=True, autoincrement=False),
        sa.Column("head", sa.Text, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("state_digest", sa.Text, nullable=False),
    )
