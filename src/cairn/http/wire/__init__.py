"""What all protocols share: JSON, parameters, formats, limits and errors."""
