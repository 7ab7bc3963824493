"""
The dtype that a model computes in: that of its weights, or float32.

On a Linux CPU neither half precision nor quantised weights ever reach the BLAS. A matrix product of
256 rows has some 80 GFLOP/s in float32 there, 5 in half precision and 0.3 in four bits. On a GPU
the model's own dtype is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

DtypeSetting: TypeAlias = Literal["auto", "float32", "model"]
"""``model`` keeps what the weights have, ``auto`` takes what is faster here and fits in memory."""

_FLOAT32_BYTES: Final = 4
_WORD_BITS: Final = 32


class CannotWiden(Exception):
    """The weights cannot be converted to float32."""


def settle_dtype(
    model: Any,
    setting: DtypeSetting,
    *,
    on_cpu: bool,
    real_blas: bool,
    fault: Callable[[int], str | None],
) -> str:
    """
    Decide on a dtype, and convert the weights to it. Modifies the model, but computes nothing:
    weights that were not read yet are read when they are used.

    Args:
        model: mlx-lm's module.
        real_blas: whether matrix products in float32 go to a real BLAS; the reference BLAS is
            slower with them than MLX is with half precision.
        fault: called with the bytes of the weights in float32; returns why they do not fit, or
            None.

    Returns:
        The dtype and why, for people.

    Raises:
        CannotWiden: float32 was requested and is not possible.
    """
    own = " and ".join(own_dtypes(model))
    if own == "float32":
        return own
    if setting == "model":
        return f"{own}, as requested"
    if setting == "auto":
        if not on_cpu:
            return f"{own}, as the model has it"
        if not real_blas and not list(_quantised(model)):
            return f"{own}, because there is no real BLAS for float32; see `ops doctor`"
        if (no_room := fault(float32_bytes(model))) is not None:
            return f"{own}, slow on a CPU, because float32 does not fit: {no_room}"
    try:
        dequantize_model(model)
        model.set_dtype(mx.float32)
    except Exception as error:  # formats that mlx-lm or MLX do not unpack fail in many ways
        fact = " ".join(str(error).split())[:300] or type(error).__name__
        if setting == "float32":
            raise CannotWiden(fact) from error
        return f"{own}, slow on a CPU, because it cannot be unpacked: {fact}"
    why = "as requested" if setting == "float32" else "because a CPU computes it faster"
    return f"{' and '.join(own_dtypes(model))}, converted from {own}, {why}"


def own_dtypes(model: Any) -> list[str]:
    """The kinds of weights of a model, in words: ``4-bit``, ``bfloat16``."""
    quantised = dict(_quantised(model))
    found = {f"{module.bits}-bit" for module in quantised.values()}
    for name, array in _parameters(model):
        module, _, kind = name.rpartition(".")
        part = module in quantised and kind in ("weight", "scales", "biases")
        if not part and mx.issubdtype(array.dtype, mx.floating):
            found.add(str(array.dtype).removeprefix("mlx.core."))
    return sorted(found)


def float32_bytes(model: Any) -> int:
    """How much memory the weights take if all of them are in float32."""
    quantised = dict(_quantised(model))
    total = 0
    for name, array in _parameters(model):
        module, _, kind = name.rpartition(".")
        if module in quantised and kind == "weight":
            total += array.size * _WORD_BITS // quantised[module].bits * _FLOAT32_BYTES
        elif module in quantised and kind in ("scales", "biases"):
            continue
        elif mx.issubdtype(array.dtype, mx.floating):
            total += array.size * _FLOAT32_BYTES
        else:
            total += array.nbytes
    return total


def widened_on_record(dtypes: Mapping[str, int]) -> DtypeSetting:
    """
    The setting that gives a model the dtypes of a fingerprint again.

    Args:
        dtypes: how many parameters have which dtype.
    """
    return "float32" if set(dtypes) <= {"float32"} else "model"


def _quantised(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers with packed weights, by path."""
    for name, module in model.named_modules():
        if hasattr(module, "bits") and "scales" in module:
            yield name, module


def _parameters(model: Any) -> list[tuple[str, Any]]:
    found: Any = tree_flatten(model.parameters())
    return list(found)
