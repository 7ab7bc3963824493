"""The migrations of the journal: Alembic runs them, nobody imports them."""
