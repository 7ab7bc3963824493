"""The private server of a drill, its client, and their conversation."""
