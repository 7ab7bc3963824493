"""From a request that comes to its replies, up to the session that serves it."""
