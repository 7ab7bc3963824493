"""
The one function through which mlx-lm's models attend, which they import by name.

``install`` replaces it in the modules of models by ``attend``, which looks at the type of the keys:
arrays go to mlx-lm's own function, rows of several sessions to ``rows.py``, and segments of one to
``segments.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from cairn.engine.mlx.passes import rows, segments

_plain_attention = base.scaled_dot_product_attention


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    **kwargs: Any,
) -> mx.array:
    """
    ``mlx_lm.models.base.scaled_dot_product_attention`` for every kind of keys. Takes its arguments
    by position too, because some models pass them so.

    Raises:
        TypeError: the model uses rows or segments in a way that is not supported.
    """
    special = {"scale": scale, "mask": mask, **kwargs}
    if isinstance(keys, rows.RowsOnly):
        return rows.attend(_plain_attention, queries, keys, values, **special)
    if isinstance(keys, segments.SegmentKeys):
        return segments.attend(_plain_attention, queries, keys, values, **special)
    plain: mx.array = _plain_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, **kwargs
    )
    return plain


def install() -> None:
    """Replace mlx-lm's attention by ``attend`` in all loaded model modules."""
    for name, module in list(sys.modules.items()):
        models = name.startswith("mlx_lm.models.") and module is not base
        if models and getattr(module, "scaled_dot_product_attention", None) is _plain_attention:
            module.scaled_dot_product_attention = attend  # type: ignore[attr-defined]
