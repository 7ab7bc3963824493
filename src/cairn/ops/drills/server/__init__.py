"""The private server of a drill, its client, and the conversation held with it."""
