"""The HTTP border: one adapter for each protocol, one place for errors."""
