"""
The engine's self-test at start, on the loaded model and this device.

It checks that the canonical schedule is bitwise stable (warm equals cold, the slab's size makes no
difference, and a row of a decode pass depends on neither its position nor its neighbours), whether
the naive schedule would have been, and that the numbers are right. Stable bits are not enough,
because a wrong computation can be perfectly stable. Before that, it looks for a row class
(``passes/search.py``), with which prefill passes may begin anywhere; the checks then run with it.
It also measures how many rows a decode pass needs (``passes/decode_shapes.py``), and whether some
of them may be those of a draft (``passes/draft_rows.py``).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
import numpy as np
import structlog
from mlx_lm.models.cache import make_prompt_cache

from cairn.engine.errors import EngineFault, GrammarDeadEnd, ModelRefused
from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.passes.decode_shapes import measured_shapes
from cairn.engine.mlx.passes.draft_rows import measured_without_drafts
from cairn.engine.mlx.passes.search import Found, measured_row_class
from cairn.engine.reports import (
    DecodeRow,
    Drawn,
    DrawSpec,
    PassReport,
    SelfTestFault,
    SelfTestReport,
)
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import passes, slab_capacity

if TYPE_CHECKING:
    from cairn.engine.mlx.engine import MlxEngine
    from cairn.engine.mlx.model import LoadedModel

log = structlog.get_logger("cairn")

_STEPS = 3
_TOP = 8
_GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=_TOP)

TOLERANCE = {"float32": 1e-4, "tf32": 3e-2, "float16": 3e-2, "bfloat16": 8e-2}
"""
The largest relative difference from mlx-lm's plain pass that counts as the same numbers. It allows
for rounding of the activations; a wrong computation is off by tens of percent. TF32 is float32 with
the factors of products rounded to as many digits as float16 has.
"""

EXACT_PRODUCT = 1e-5
"""
The largest relative error of a product of float32 matrices whose factors were not rounded.
"""


CHECKS = (
    "warm_equals_cold",
    "slab_size_does_not_matter",
    "rows_do_not_matter",
    "numbers_are_right",
    "naive_differs",
)
"""The checks, in order."""


def run_self_test(
    loaded: LoadedModel,
    engine: MlxEngine,
    block_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SelfTestReport:
    """
    Test the schedule on a loaded model. Leaves no slab and no block in the engine, and sets its
    ``row_class``.

    Args:
        progress: called with (row classes that were tried, all that could be).

    Raises:
        ModelRefused: the model's code needs a cache method that Cairn's caches do not have.
    """
    began = time.perf_counter_ns()
    engine.row_class = None
    found = measured_row_class(
        engine,
        vocabulary_tokens=_vocabulary_tokens(loaded),
        block_tokens=block_tokens,
        progress=progress,
    )
    if found.row_class is not None:
        engine.row_class = found.row_class
        try:
            tested = _tested(loaded, engine, block_tokens, began)
        except ModelRefused as refused:
            why = str(refused)
        else:
            failed = {name for name, holds in tested.findings.items() if not holds}
            if failed <= {"rows_do_not_matter", "naive_differs"}:
                return _with_class(tested, found)  # rows of a decode pass: not of the row class
            why = ", ".join(name for name, holds in tested.findings.items() if not holds)
        # The canonical schedule asks less of the model.
        engine.row_class = None
        found = Found(
            row_class=None, reason=f"with it the self-test failed: {why}", late=found.late
        )
    return _with_class(_tested(loaded, engine, block_tokens, began), found)


def _with_class(tested: SelfTestReport, found: Found) -> SelfTestReport:
    if found.reason:
        log.info("prefill passes", row_class=found.row_class, fact=found.reason)
    return attrs.evolve(
        tested,
        row_class=found.row_class,
        row_class_reason=found.reason,
        row_class_late=found.late,
    )


def _vocabulary_tokens(loaded: LoadedModel) -> int:
    """How many tokens the test feeds, from the first id on."""
    vocabulary = int(loaded.config.get("vocab_size", 1000) or 1000)
    return min(vocabulary, 50_000)


def _tested(
    loaded: LoadedModel, engine: MlxEngine, block_tokens: int, began: int
) -> SelfTestReport:
    """As ``run_self_test``, with the engine's row class."""
    findings: dict[str, bool] = {}
    if not loaded.is_simple:
        try:
            return _found(SelfTest(loaded, engine, block_tokens), findings, began)
        except Exception as error:  # a model's code may raise anything; nothing is reused then
            check = next(name for name in CHECKS if name not in findings)
            return _ended({**findings, check: False}, SelfTestFault.of(error), began)
    try:
        test = SelfTest(loaded, engine, block_tokens)
    except Exception as error:  # likewise
        if engine.decode_rows > 1:  # it may work with one row
            return _ended({"rows_do_not_matter": False}, SelfTestFault.of(error), began)
        raise loaded.cannot_run(error) from error
    return _found(test, findings, began)


def _ended(
    findings: dict[str, bool], fault: SelfTestFault | None, began: int, error: float = 0.0
) -> SelfTestReport:
    return SelfTestReport(
        findings=findings,
        error_max=error,
        duration_us=(time.perf_counter_ns() - began) // 1000,
        fault=fault,
    )


def _found(test: SelfTest, findings: dict[str, bool], began: int) -> SelfTestReport:
    """
    Run all checks in order. Each finding is put into ``findings`` at once, so that it is kept if
    the next check raises.
    """
    findings["warm_equals_cold"] = test.warm_equals_cold()
    findings["slab_size_does_not_matter"] = test.slab_size()
    findings["rows_do_not_matter"] = test.rows()
    error = test.error()
    findings["numbers_are_right"] = error <= _tolerance(test.loaded)
    findings["naive_differs"] = test.naive_differs()
    tested = _ended(findings, test.fault, began, error)
    if not tested.passed:
        return tested
    shapes = test.decode_shapes()
    without_drafts = test.without_drafts(shapes)
    return attrs.evolve(
        _ended(findings, None, began, error), decode_shapes=shapes, without_drafts=without_drafts
    )


def _tolerance(loaded: LoadedModel) -> float:
    # A state may have a wider dtype than the values that are computed from it.
    dtypes = {dtype for shape in loaded.shapes for dtype in shape.dtypes} or {mx.float32}
    names = [str(dtype).removeprefix("mlx.core.") for dtype in dtypes]
    if "float32" in names and rounds_products():
        names.append("tf32")
    return max(TOLERANCE.get(name, TOLERANCE["bfloat16"]) for name in names)


def rounds_products() -> bool:
    """
    Whether this device rounds the factors of float32 products, as MLX's CUDA backend does unless
    MLX_ENABLE_TF32=0. Measured, because several variables and the device decide it.
    """
    factors = np.random.default_rng(20261127).standard_normal((2, 256, 256)).astype(np.float32)
    left, right = factors.astype(np.float64)
    product = np.array(mx.array(factors[0]) @ mx.array(factors[1]))
    exact = left @ right
    return bool(np.linalg.norm(product - exact) > EXACT_PRODUCT * np.linalg.norm(exact))


@attrs.frozen
class _Answer:
    """
    The tokens of a greedy answer with their log-probabilities, and a digest of its whole KV.
    """

    drawn: tuple[Drawn, ...]
    kv: str


class SelfTest:
    """
    The checks, on one synthetic prompt of two and a half chunks.

    Attributes:
        fault: the exception that ended a check, if others ran after it; else None.
    """

    def __init__(self, loaded: LoadedModel, engine: MlxEngine, block_tokens: int) -> None:
        self.loaded = loaded
        self.engine = engine
        self.block_tokens = block_tokens
        self.vocabulary_tokens = _vocabulary_tokens(loaded)
        words = np.random.default_rng(20260101).integers(
            0, self.vocabulary_tokens, 4 * block_tokens
        )
        self.words = [int(word) for word in words]
        self.prompt = self.words[: 2 * block_tokens + block_tokens // 2]
        self.capacity = slab_capacity(
            len(self.prompt) + 2 * _STEPS, block_tokens, loaded.context_tokens
        )
        self.fault: SelfTestFault | None = None
        self.cold = self._answer(self.prompt)

    def warm_equals_cold(self) -> bool:
        """A prompt that reuses a block sealed from another slab gives the bits of a cold one."""
        if not self.loaded.shapes:
            return self._answer(self.prompt) == self.cold  # nothing is reused; compare two runs
        states = bool(self.loaded.state_bytes) or None
        slab = self.engine.open_slab(self.capacity).slab
        self._prefill(slab, self.prompt[: self.block_tokens], 0)
        self.engine.seal(slab, "self-test", 0, self.block_tokens, store=True, states=states)
        self.engine.close_slab(slab)
        warm = self._answer(self.prompt, shared=("self-test",))
        again = warm if self.loaded.is_simple else self._answer(self.prompt, cut_back=True)
        self.engine.evict("self-test")
        return warm == self.cold == again

    def slab_size(self) -> bool:
        """A larger slab gives the same bits."""
        return self._answer(self.prompt, capacity=2 * self.capacity) == self.cold

    def rows(self) -> bool:
        """The last row alone, and the first row among others, give the bits of the first alone."""
        width = self.engine.decode_rows
        if width == 1:
            return True
        try:
            alone = self._answer(self.prompt, place=width - 1)
            among = self._answer(self.prompt, among_others=True)
        except Exception as error:  # as above
            self.fault = SelfTestFault.of(error)
            return False
        return self.cold == alone == among

    def decode_shapes(self) -> tuple[int, ...]:
        """The numbers of rows that give the bits of W rows."""
        try:
            return measured_shapes(
                self.engine,
                vocabulary_tokens=self.vocabulary_tokens,
                block_tokens=self.block_tokens,
            )
        except Exception as error:  # as above; W rows are known to work
            log.warning("decode passes always have W rows", fact=str(error))
            return (self.engine.decode_rows,)

    def without_drafts(self, shapes: tuple[int, ...]) -> str:
        """Why passes of these numbers of rows have no draft rows; empty if they may."""
        before, self.engine.decode_shapes = self.engine.decode_shapes, shapes
        try:
            return measured_without_drafts(
                self.engine,
                vocabulary_tokens=self.vocabulary_tokens,
                block_tokens=self.block_tokens,
            )
        except Exception as error:  # as above; passes of one token for each session work
            log.warning("decode passes have no draft rows", fact=str(error))
            return f"they failed: {type(error).__name__}"
        finally:
            self.engine.decode_shapes = before

    def error(self) -> float:
        """The largest relative difference of the likeliest log-probabilities from a plain pass."""
        worst = 0.0
        sequence = list(self.prompt)
        for drawn in self.cold.drawn:
            logits = self.loaded.model(
                mx.array(sequence)[None], cache=make_prompt_cache(self.loaded.model)
            )[0, -1].astype(mx.float32)
            plain = np.array(logits - mx.logsumexp(logits))
            scale = max(1e-6, float(np.abs(plain).max()))
            worst = max(worst, *(abs(plain[word] - value) / scale for word, value in drawn.top))
            sequence.append(drawn.token)
        # A value that is not finite counts as the largest error; the journal takes numbers only.
        return float(worst) if math.isfinite(worst) else sys.float_info.max

    def naive_differs(self) -> bool:
        """
        Whether the naive schedule (the new tokens in one pass, on KV from other passes) would have
        changed bits here. Reported but not required: on some devices it changes nothing.
        """
        # Two cuts: in the middle, and before the last token as in decoding. A difference may show
        # in only one of them.
        cuts = (self.block_tokens // 2 + 1, len(self.prompt) - 1)
        row_class, cold = self.engine.row_class, self.cold
        self.engine.row_class = None  # with one, the same cuts would change nothing
        try:
            if row_class is not None:
                cold = self._answer(self.prompt)
            return any(self._answer(self.prompt, naive_cut=cut) != cold for cut in cuts)
        finally:
            self.engine.row_class = row_class

    def _answer(
        self,
        prompt: Sequence[int],
        *,
        shared: Sequence[str] = (),
        capacity: int | None = None,
        place: int = 0,
        among_others: bool = False,
        cut_back: bool = False,
        naive_cut: int | None = None,
    ) -> _Answer:
        """
        The first tokens of a greedy answer, with their likeliest log-probabilities.

        Args:
            cut_back: continue from the first two chunks of the prompt after cutting a slab with
                other tokens back to them.
            naive_cut: run the prompt in two passes that meet there, against the schedule.
        """
        engine, width = self.engine, self.engine.decode_rows
        slab = engine.open_slab(capacity or self.capacity).slab
        others = [
            engine.open_slab(self.capacity).slab for _ in range(width - 1 if among_others else 0)
        ]
        try:
            if shared:
                engine.share(slab, shared, 0)
            held = len(shared) * self.block_tokens
            if cut_back:
                held = self._cut_back(slab)
            if naive_cut is None:
                trace = [_drawn(self._prefill(slab, prompt, held))]
            else:
                # The size of growing caches is only known for canonical passes.
                engine.pool.get(slab).set_apart_bytes = sys.maxsize
                engine.run_chunk(slab, prompt[:naive_cut], None)
                trace = [_drawn(engine.run_chunk(slab, prompt[naive_cut:], _GREEDY))]
            next_tokens = {slab: trace[0].token}
            for number, other in enumerate(others):
                length = self.block_tokens + 7 * (number + 1)
                next_tokens[other] = _drawn(self._prefill(other, self.words[-length:], 0)).token
            in_rows: list[int | None]
            in_rows = [*others[:place], slab, *others[place:]] if among_others else [None] * width
            in_rows[place] = slab
            for _ in range(_STEPS):
                rows = [
                    None
                    if row_slab is None
                    else DecodeRow(slab=row_slab, token=next_tokens[row_slab], draw=_GREEDY)
                    for row_slab in in_rows
                ]
                for row_slab, report in zip(in_rows, engine.decode(rows), strict=True):
                    if isinstance(report, (EngineFault, GrammarDeadEnd)):
                        raise report
                    if row_slab is not None and report is not None:
                        next_tokens[row_slab] = _drawn(report).token
                        if row_slab == slab:
                            trace.append(_drawn(report))
            kv = ""
            if (tested := engine.pool.get(slab)).fixed:
                states = bool(self.loaded.state_bytes)
                kv = mlx_blocks.digest(mlx_blocks.cut(tested, 0, tested.end, states=states))
            return _Answer(tuple(trace), kv)
        finally:
            engine.close_slab(slab)
            for other in others:
                engine.close_slab(other)

    def _cut_back(self, slab: int) -> int:
        """
        Fill a slab with the first two chunks of the prompt by way of several trims. Returns their
        number of tokens.
        """
        engine, end = self.engine, 2 * self.block_tokens
        self._prefill(slab, self.words[-self.block_tokens - 3 :], 0)
        engine.trim(slab, 0)
        self._prefill(slab, self.prompt[:end], 0)
        engine.seal(slab, "not kept", self.block_tokens, end, store=False)
        others = [*self.prompt[:end], *self.words[-self.block_tokens // 4 :]]
        token = _drawn(self._prefill(slab, others, end)).token
        report = engine.decode([DecodeRow(slab=slab, token=token, draw=_GREEDY)])[0]
        if not isinstance(report, PassReport):
            raise report or EngineFault("no report")
        engine.trim(slab, end)
        return end

    def _prefill(self, slab: int, prompt: Sequence[int], start: int) -> PassReport:
        report = None
        for begin, end in passes(start, len(prompt), self.block_tokens):
            draw = _GREEDY if end == len(prompt) else None
            report = self.engine.run_chunk(slab, prompt[begin:end], draw)
        assert report is not None
        return report


def _drawn(report: PassReport) -> Drawn:
    assert report.drawn is not None
    return report.drawn
