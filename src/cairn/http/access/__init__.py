"""API keys, tenants, and the web pages of other origins."""
