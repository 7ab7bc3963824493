"""
Measures the table of docs/models.md: how models of mlx-lm's families are served.

For each family, a small model with random weights is made from mlx-lm's own classes and started as
``ops serve`` does, with the engine's self-test: the same bits warm and cold, in each row of a
decode pass, alone and among others, and the same numbers as mlx-lm's plain pass. Windows are
shorter than the test's prompt.

``python -P tools/model_table.py`` prints the table, or only the rows of the families that are
named; ``--write`` puts it into the page. All families take some minutes. On Linux a BLAS whose bits
depend on shapes is preloaded, as in the server, because any other proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from cairn.engine.machine.blas import find_blas, loaded_blas

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN = "<!-- the table: tools/model_table.py --write -->"
END = "<!-- the end of the table -->"
_COLUMNS = (
    *("kind", "family (`model_type`)", "its layers keep", "served", "grain", "rows (W)"),
    "same bits",
)
_MEMORY_BYTES = 256 * 1024 * 1024
_KEPT = {
    "KVCache": "keys and values",
    "RotatingKVCache": "a window of them",
    "ArraysCache": "a state",
}


@attrs.frozen(kw_only=True)
class Row:
    """
    How models of one family are served.

    Attributes:
        keeps: what the layers keep for the tokens, in words.
        served: warm, cold, or why not.
        grain: 1 or C; 0 if nothing is reused.
        rows: W; 0 if the model is not served.
        same_bits: what the self-test found; None if the model is not served.
        control: whether the naive schedule gave different bits; if not, the rest proves nothing.
    """

    kind: str
    family: str
    keeps: str
    served: str
    rows: int
    same_bits: bool | None
    grain: int = 0
    control: bool = True

    @property
    def line(self) -> str:
        """The row in the page."""
        bits = "" if self.same_bits is None else "yes" if self.same_bits else "**no**"
        rows = str(self.rows) if self.rows else ""
        grain = {0: "", 1: "1"}.get(self.grain, "C")
        cells = (self.kind, f"`{self.family}`", self.keeps, self.served, grain, rows, bits)
        return f"| {' | '.join(cells)} |"


def measured(family: str, source: Path) -> Row:
    """
    Start a small model of a family, and report how it is served.

    Args:
        source: a model directory whose tokenizer and template are copied.
    """
    from mlx_lm.models.cache import make_prompt_cache

    from cairn.engine.errors import ModelRefused
    from cairn.engine.mlx.cache import flat
    from cairn.engine.mlx.start import start_engine
    from tests.support.models.model_families import kind_of

    kind = kind_of(family)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            directory = _made(family, Path(temporary) / family, source)
            started = start_engine(
                str(directory),
                name=family,
                block_tokens=64,
                decode_rows=4,
                kv_cache="slab",
                pool_bytes=_MEMORY_BYTES,
                blocks_bytes=_MEMORY_BYTES,
                tested_shapes=lambda _: None,
                progress=lambda *_: None,
            )
        except ModelRefused as refused:
            why = " ".join(str(refused).replace(f"{temporary}/", "").split())
            return Row(
                kind=kind, family=family, keeps="", served=f"no: {why}", rows=0, same_bits=None
            )
    tested = started.self_test
    assert tested is not None
    caches = make_prompt_cache(started.loaded.model)
    names = dict.fromkeys(type(cache).__name__ for cache in flat(caches))
    several = ", several in one layer" if len(flat(caches)) > len(caches) else ""
    return Row(
        kind=kind,
        family=family,
        keeps=", ".join(sorted(_KEPT.get(name, name) for name in names)) + several,
        served="warm" if started.facts.reusable else "cold",
        rows=started.facts.decode_rows,
        same_bits=tested.passed,
        grain=started.facts.grain if started.facts.reusable else 0,
        control=tested.findings["naive_differs"],
    )


def _made(family: str, directory: Path, source: Path) -> Path:
    """
    A small model of a family. If its class cannot be imported, a model of a different family under
    its name.
    """
    from tests.support.models.model_families import config_of, make_family_model

    try:
        return make_family_model(directory, source, config_of(family))
    except SystemExit:
        shutil.rmtree(directory)
        made = make_family_model(directory, source, config_of("llama"))
        settings = {**config_of("llama"), "model_type": family}
        (made / "config.json").write_text(json.dumps(settings), "utf-8")
        return made


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    heads = (f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}")
    return "\n".join((*heads, *(row.line for row in rows)))


def with_table(page: str, found: str) -> str:
    """The page with its table replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{found}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all, if none is named")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    asked = parser.parse_args(arguments)
    blas = find_blas() if sys.platform == "linux" and loaded_blas() is None else None
    if blas is not None:
        os.environ["LD_PRELOAD"] = str(blas)
        os.execv(sys.executable, [sys.executable, "-P", __file__, *arguments])
    from tests.support.models.model_families import FAMILIES
    from tests.support.models.random_model import make_random_model

    known = [family for families in FAMILIES.values() for family in families]
    if asked.write and asked.families:
        parser.error("the page has all families or none: --write takes no names")
    if strange := set(asked.families) - set(known):
        parser.error(f"not among the families: {', '.join(sorted(strange))}")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        source = make_random_model(Path(temporary) / "random")
        for family in asked.families or known:
            rows.append(measured(family, source))
            hidden = "" if rows[-1].control else " (the naive way has the same bits here)"
            print(rows[-1].line + hidden, file=sys.stderr, flush=True)
    found = table(rows)
    print(found)
    if asked.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), found), "utf-8")
    return 0 if all(row.control or not row.rows for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
