"""Everything that calls MLX. Used by one thread alone."""

from cairn.engine.machine.descriptors import descriptor_limits_held

# Its first import is here, because it would change the limits of this process.
with descriptor_limits_held():
    import mlx_lm as mlx_lm
