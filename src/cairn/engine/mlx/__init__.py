"""Everything that calls MLX. Used by one thread alone."""
