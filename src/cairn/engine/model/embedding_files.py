"""
What the files of an embedding model say about it. Reads files; imports nothing heavy.

Models in the format of sentence-transformers have ``modules.json``, which lists what makes a vector
of the hidden states, and ``1_Pooling/config.json``. Cairn takes the state of the last token and
divides it by its length; a model that was trained for something else would give wrong vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from cairn.engine.json_text import parsed
from cairn.engine.model.files import directory_fault

TEXT_TOKENS_MAX = 8192
"""The longest text, whatever the model takes: what OpenAI's models take."""

_LAST_TOKEN = "pooling_mode_lasttoken"
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@attrs.frozen(kw_only=True)
class Matryoshka:
    """
    The lengths to which the vectors of a model may be cut.

    Attributes:
        any_length: whether any length will do.
        lengths: those that will do otherwise; empty if the vectors cannot be cut.
    """

    any_length: bool = False
    lengths: tuple[int, ...] = ()

    def allows(self, dimensions: int) -> bool:
        """Whether vectors may be cut to a length."""
        return self.any_length or dimensions in self.lengths


def embedding_fault(where: str) -> str | None:
    """
    Why a directory cannot be served as an embedding model, in a sentence; None if nothing is wrong.
    Reads no weights.
    """
    if (fault := directory_fault(where)) is not None:
        return fault
    place = Path(where).expanduser()
    try:
        modules, pooling = _json(place / "modules.json"), _json(place / "1_Pooling/config.json")
    except (OSError, ValueError) as error:
        return f"{where} cannot be read: {error}."
    if not (modules is None or _is_list_of_objects(modules)):
        return f"{where}: modules.json is no list of modules."
    if not isinstance(pooling, dict | None):
        return f"{where}: 1_Pooling/config.json is no object."
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules or ()]
    if strange := [kind for kind in kinds if kind not in _KNOWN_MODULES]:
        return (
            f"{where} has a module {strange[0]} after the model (modules.json), which cannot be "
            "served. Choose an embedding model without one, such as Qwen3-Embedding."
        )
    used = {name for name, is_used in (pooling or {}).items() if _is_mode(name) and is_used}
    if pooling is not None and used != {_LAST_TOKEN}:
        return (
            f"{where} makes its vectors from other states than that of the last token "
            "(1_Pooling/config.json), which cannot be served. Choose an embedding model of a "
            "decoder family, such as Qwen3-Embedding."
        )
    return None


def _is_list_of_objects(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(one, dict) for one in found)


def _is_mode(name: object) -> bool:
    return str(name).startswith("pooling_mode_")


def read_matryoshka(where: str) -> Matryoshka:
    """
    What config.json says about shorter vectors, under the names that vLLM reads.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    config = _json(Path(where).expanduser() / "config.json") or {}
    lengths = config.get("matryoshka_dimensions")
    if isinstance(lengths, list):
        return Matryoshka(lengths=tuple(one for one in lengths if type(one) is int))
    return Matryoshka(any_length=config.get("is_matryoshka") is True)


def _json(path: Path) -> Any:
    """What a file says; None if it does not exist."""
    return parsed(path.read_text(encoding="utf-8")) if path.is_file() else None
