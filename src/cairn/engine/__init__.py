"""The engine: models, prompts, schedule, caches and sampling. Only mlx_* modules know MLX."""
