"""The OpenAPI description of the server, served at ``/openapi.json``."""
