"""What a running server does, how to stop it, and what is set: ``ops status`` and the like."""
