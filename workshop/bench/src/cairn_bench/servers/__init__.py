"""The servers and models that are measured, and requests to them."""
