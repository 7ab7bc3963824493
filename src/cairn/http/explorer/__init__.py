"""The explorer: pages for people, about sessions, decisions, the cache and bugs."""
