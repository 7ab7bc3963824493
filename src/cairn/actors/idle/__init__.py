"""What the server does while no request is in flight: expiry and shadow checks."""
