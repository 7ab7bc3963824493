"""A session that is measured for hours."""
