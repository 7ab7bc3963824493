"""Names of files in the directories of models and adapters, as mlx-lm writes them."""

from __future__ import annotations

ADAPTER_WEIGHTS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
