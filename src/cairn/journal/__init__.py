"""The journal: events, the fold, decisions and invariants. Pure but for store_sql."""
