"""Everything that calls MLX. Used by one thread alone."""

from cairn.engine.machine.descriptors import descriptor_limits_held
from cairn.engine.machine.imports import quick_imports

# Its first import is here, because it would change the limits of this process.
with descriptor_limits_held(), quick_imports():
    import mlx_lm as mlx_lm
