"""
The HTTP layer: a folder for each protocol, and one place for errors.

``app`` has the routes, and ``service`` is the server as they see it. In each protocol's folder,
``request`` reads a body, ``objects`` are the structs that are sent, and ``answers`` builds them.
``wire`` has what the protocols share; ``wire/errors`` turns every error into an HTTP answer.
"""
