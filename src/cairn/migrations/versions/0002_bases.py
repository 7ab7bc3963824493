"""The table of the base: what stands in the place of rows that were pruned."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """The table of the base, which has one row at most. No event is touched."""
    big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "bases",
        sa.Column("position", big, primary_key=True, autoincrement=False),
        sa.Column("head", sa.Text, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("state_digest", sa.Text, nullable=False),
    )
