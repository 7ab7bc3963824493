"""The threads next to trio's: the engine's and the journal writer's."""
