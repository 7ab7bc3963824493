"""The threads beside trio's: the engine's and the journal writer's."""
