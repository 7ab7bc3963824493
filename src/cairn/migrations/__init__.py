"""The migrations of the journal: Alembic runs them; no module imports them."""
