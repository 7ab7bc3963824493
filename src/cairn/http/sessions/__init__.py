"""What clients and pages may look at: sessions, their turns and events, the cache, and bugs."""
