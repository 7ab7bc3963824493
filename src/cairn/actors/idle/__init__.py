"""
What the server does while no request is in flight: expiry and shadow checks.

What a session computes before its next turn is in ``sessions/prewarm.py``.
"""
