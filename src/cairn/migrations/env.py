"""Run by Alembic through ``schema.migrate``, which gives it a connection in a transaction."""

from alembic import context

from cairn.journal.rows.database.tables import VERSION_TABLE

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table=VERSION_TABLE, transactional_ddl=True)
context.run_migrations()
