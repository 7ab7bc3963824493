"""
The way of a request, from its arrival to the session that serves it, and of its replies.

``admission`` lists all places where a request can wait.
"""
