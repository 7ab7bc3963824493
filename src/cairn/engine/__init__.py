"""The engine: models, prompts, schedule, caches and sampling. Only ``mlx/`` calls MLX."""
