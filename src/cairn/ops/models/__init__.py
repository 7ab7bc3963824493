"""Models: short names, what is on this machine, what fits, downloads and their removal."""
