"""Starts an engine on a model directory: loads, fingerprints and tests the model."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from cairn.engine.answer.markers import markers_of
from cairn.engine.contract import StartedEngine
from cairn.engine.errors import ModelRefused, ModelTooLarge
from cairn.engine.growth import Growth
from cairn.engine.machine.blas import loaded_blas
from cairn.engine.machine.cuda import cuda_versions
from cairn.engine.machine.heap import give_back_free_memory
from cairn.engine.machine.memory import (
    Budgets,
    budgets_for,
    device_memory,
    machine_memory,
    memory_fault,
)
from cairn.engine.mlx.cache import counts_tokens, flat
from cairn.engine.mlx.dtype import DtypeSetting, settle_dtype
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.growth import measured_growth
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.mlx.selftest import run_self_test
from cairn.engine.mlx.state import StateShape
from cairn.engine.model import fingerprint
from cairn.engine.reports import ModelFacts, PassShapes
from cairn.journal.cache.checkpoints import STATES_A_SLAB, Checkpoints
from cairn.journal.cache.windows import LEAST_CHUNKS, SinkWindow
from cairn.journal.keys import fingerprint_of

_MEASURING = "measuring the memory of its caches"
_TESTING = "self-test: same bits on this device? (once per fingerprint)"


@attrs.frozen(kw_only=True)
class Started(StartedEngine):
    """An MLX engine that is ready to serve a model, with the model itself."""

    engine: MlxEngine
    loaded: LoadedModel


def start_engine(
    where: str,
    *,
    name: str | None,
    block_tokens: int | None,
    decode_rows: int | None,
    kv_cache: str,
    pool_bytes: int | None,
    blocks_bytes: int | None,
    tested_shapes: Callable[[Mapping[str, Any]], PassShapes | None],
    progress: Callable[[str, int, int], None],
    adapter: str | None = None,
    dtype: DtypeSetting = "auto",
    accept_tight: bool = False,
    window: tuple[int, int] | None = None,
    beside_bytes: int = 0,
    reuse: bool = True,
    state_blocks: int | None = None,
    context_tokens: int | None = None,
) -> Started:
    """
    Load a model, compute its fingerprint and test it. Must run on the engine's thread.

    Args:
        block_tokens: C, or None for the default of the device.
        decode_rows: W, or None for the default.
        kv_cache: ``slab`` for Cairn's cache classes, ``mlx-lm`` for mlx-lm's own.
        pool_bytes: the budget of slabs, or None to derive it from the size of the model. The
            context is never longer than fits in it.
        blocks_bytes: the budget of sealed blocks, or None to derive it.
        tested_shapes: the shapes of passes that an earlier start found for the fields of a
            fingerprint without its row class; None if it has not passed its self-test.
        progress: called with (what, done, total).
        adapter: the directory of an adapter over the model.
        dtype: whether to convert the weights to float32.
        accept_tight: load the model even if it may not fit in memory.
        window: (sinks, tokens of the window) that a token attends to; None for what the model's
            layers define.
        beside_bytes: what other models hold of the memory.
        reuse: False to serve a model without reuse if its layers keep more than keys and values.
        state_blocks: every how many blocks carry recurrent states; None to derive it from their
            size.
        context_tokens: the longest sequence of a model that is served without reuse; None to derive
            it from the budget.

    Raises:
        ModelRefused: it cannot be served, or the budget of slabs holds nothing.
    """
    budgets = tight = None
    memory = max(0, _memory() - beside_bytes)

    def budgets_beside(size: int) -> Budgets:
        return budgets_for(
            weights_bytes=size,
            memory_bytes=memory,
            pool_bytes=pool_bytes,
            blocks_bytes=blocks_bytes,
        )

    def fault(size: int) -> str | None:
        return memory_fault(weights_bytes=size, memory_bytes=memory, budgets=budgets_beside(size))

    def settle(model: Any) -> str:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        real_blas = sys.platform != "linux" or loaded_blas() is not None
        return settle_dtype(model, dtype, on_cpu=on_cpu, real_blas=real_blas, fault=fault)

    def fits(size: int) -> None:
        nonlocal budgets, tight
        budgets, tight = budgets_beside(size), fault(size)
        if tight is not None and not accept_tight:
            raise ModelTooLarge(
                f"{where} does not fit in memory: {tight}. Serve a smaller or quantised model, "
                "lower --pool-mb and --blocks-mb, or start with --accept-tight-memory to load it "
                "anyway."
            )

    loaded = load_model(
        where, name=name, adapter=adapter, progress=progress, fits=fits, settle_dtype=settle
    )
    assert budgets is not None
    windows = any(shape.window for shape in loaded.shapes)
    if (kv_cache == "mlx-lm" and (windows or not loaded.is_simple)) or not (
        reuse or loaded.is_simple
    ):
        # mlx-lm's classes for such layers drop what trimming would need, so nothing can be reused.
        loaded = loaded.served_cold()
    block_tokens = block_tokens or default_block_tokens()
    policy = _policy(loaded, window, block_tokens, kv_cache) if window is not None else None
    # Several rows need caches that can be read one token at a time.
    apart = bool(loaded.shapes) and loaded.is_simple
    rows = (decode_rows or default_decode_rows()) if apart else 1
    rule = _checkpoints(loaded, block_tokens, state_blocks)
    more = (budgets, context_tokens, tested_shapes, progress)
    started = _with_rows(loaded, block_tokens, rows, kv_cache, policy, rule, *more)
    started = attrs.evolve(started, tight=tight)
    if started.self_test is None or started.self_test.passed or (rows == 1 and loaded.is_simple):
        return started
    # If rows affect each other with this model or device, W becomes 1, and the fingerprint says so.
    # If continuing from a recurrent state changes bits, nothing is reused.
    less = loaded if loaded.is_simple else loaded.served_cold()
    single = _with_rows(less, block_tokens, 1, kv_cache, policy, None, *more)
    narrowed = (started.facts, started.self_test)
    return attrs.evolve(single, narrowed=narrowed, tight=tight)


def freed_memory() -> int:
    """
    Return freed memory to the operating system. Returns the bytes of the arrays that MLX still
    holds. Must run on the engine's thread.
    """
    gc.collect()  # the modules of a model reference each other
    mx.clear_cache()
    give_back_free_memory()
    return mx.get_active_memory()


def default_block_tokens() -> int:
    """The default of C: small chunks waste little on a CPU, a GPU needs larger ones."""
    return 64 if mx.default_device().type == mx.DeviceType.cpu else 256


def default_decode_rows() -> int:
    """The default of W."""
    return 4


def device_facts() -> Mapping[str, str]:
    """MLX's description of the device, and the versions of CUDA's libraries if MLX uses them."""
    device = mx.default_device()
    facts: dict[str, Any] = {"device": str(device)}
    if device.type == mx.DeviceType.gpu:
        facts |= mx.device_info() if hasattr(mx, "device_info") else {}
    stable = ("device", "device_name", "architecture", "name", "compute_capability")
    found = {key: str(value) for key, value in facts.items() if key in stable}
    return found | (cuda_versions() if device.type == mx.DeviceType.gpu else {})


def _memory() -> int:
    """The memory that a model can use here."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu and hasattr(mx, "device_info")
    return device_memory(machine_memory(), mx.device_info() if on_gpu else {})


def _with_rows(
    loaded: LoadedModel,
    block_tokens: int,
    rows: int,
    kv_cache: str,
    policy: SinkWindow | None,
    rule: Checkpoints | None,
    budgets: Budgets,
    asked_tokens: int | None,
    tested_shapes: Callable[[Mapping[str, Any]], PassShapes | None],
    progress: Callable[[str, int, int], None],
) -> Started:
    growth = None
    if not loaded.shapes:
        progress(_MEASURING, 0, 1)
        growth = measured_growth(loaded, block_tokens)
        progress(_MEASURING, 1, 1)
    if growth is None:
        context = _context(loaded, policy, budgets.pool_bytes, block_tokens)
    else:
        context = asked_tokens or growth.context_within(
            budgets.pool_bytes, loaded.context_tokens, block_tokens
        )
    if context < 2:  # a prompt and an answer, of a token each
        raise ModelRefused(
            f"{loaded.name} cannot be served: the memory for sessions ({budgets.pool_bytes} bytes) "
            f"does not hold the KV of one block of {block_tokens} tokens "
            f"({_memory_words(loaded, growth, block_tokens)}). Start with a larger --pool-mb"
            + ("." if loaded.state_bytes else " or a smaller --block-tokens.")
        )
    try:
        fields = fingerprint.collect(
            directory=loaded.directory,
            adapter=loaded.adapter,
            device=device_facts(),
            dtypes=_dtypes(loaded.model),
            block_tokens=block_tokens,
            decode_rows=rows,
            kv_cache=kv_cache,
            windows=[shape.window for shape in loaded.shapes],
            policy=policy,
            states=_states(loaded, rule),
            context_tokens=context,
            progress=lambda done, total: progress(
                "reading the weights for the fingerprint", done, total
            ),
        )
    except OSError:
        loaded.refuse_changed()  # most likely a file was removed in the meantime
        raise
    loaded.refuse_changed()
    # They decide what of an answer is shown.
    markers = markers_of(loaded.tokenizer)
    fields["markers"] = list(markers.all_texts)
    if (form := markers.form_of_calls) is not None:
        fields["calls"] = list(form)
    engine = MlxEngine(
        loaded,
        decode_rows=rows,
        own_classes=kv_cache == "slab",
        policy=policy,
        checkpoints=rule,
        growth=growth,
    )
    self_test, shapes = None, tested_shapes(fields)
    if shapes is None:
        progress(_TESTING, 0, 1)
        self_test = run_self_test(loaded, engine, block_tokens, partial(progress, _TESTING))
        progress(_TESTING, 1, 1)
        shapes = PassShapes()
        if self_test.passed:
            shapes = PassShapes(
                decode=self_test.decode_shapes,
                row_class=self_test.row_class,
                row_class_reason=self_test.row_class_reason,
                without_drafts=self_test.without_drafts,
            )
    engine.decode_shapes = shapes.decode or (rows,)
    engine.row_class = shapes.row_class
    engine.without_drafts = shapes.without_drafts
    # It decides about bits, and a search that ran out of time may have found another one.
    fields["row_class"] = list(engine.row_class.fields if engine.row_class else ())
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    facts = ModelFacts(
        name=loaded.name,
        fingerprint=fingerprint_of(fields),
        fields=fields,
        layers=len(loaded.shapes) or _layers_that_count(loaded),
        kv_token_bytes=token_bytes,
        block_tokens=block_tokens,
        decode_rows=rows,
        context_tokens=context,
        reusable=bool(loaded.shapes),
        eos_ids=loaded.eos_ids,
        vocabulary_tokens=loaded.vocabulary_tokens,
        defaults=loaded.defaults,
        template=loaded.template,
        dtype=loaded.dtype,
        policy=policy,
        state_bytes=loaded.state_bytes,
        checkpoints=rule,
        growth=growth,
        model_context_tokens=loaded.context_tokens if context < loaded.context_tokens else 0,
        row_class=engine.row_class,
        row_class_reason=shapes.row_class_reason,
        without_drafts=engine.without_drafts,
    )
    if self_test is not None or growth is not None:
        engine.give_back_memory()
    return Started(
        engine=engine,
        loaded=loaded,
        facts=facts,
        tokenizer=loaded.tokenizer,
        directory=loaded.directory,
        adapter=loaded.adapter,
        self_test=self_test,
        narrowed=None,
        budgets=budgets,
        tight=None,
    )


def _policy(
    loaded: LoadedModel, window: tuple[int, int], block_tokens: int, kv_cache: str
) -> SinkWindow:
    """
    The policy for a window.

    Raises:
        ModelRefused: the model or its settings do not allow it.
    """
    sinks, tokens = window
    why = None
    if not loaded.shapes or not loaded.is_simple:
        why = "some of its layers keep more than keys and values"
    elif any(shape.window for shape in loaded.shapes):
        why = "some of its layers have windows of their own"
    elif kv_cache != "slab":
        why = "mlx-lm's cache classes do not support attention sinks"
    if why is not None:
        raise ModelRefused(
            f"{loaded.name} cannot be served under --kv-policy sink_window: {why}. Use "
            "--kv-policy full."
        )
    if tokens < LEAST_CHUNKS * block_tokens:
        raise ModelRefused(
            f"A window of {tokens} tokens is too short for blocks of {block_tokens}: it needs at "
            f"least {LEAST_CHUNKS * block_tokens}. Use a larger --window-tokens, or a smaller "
            "--block-tokens."
        )
    return SinkWindow.of(sinks, tokens, block_tokens)


def _checkpoints(loaded: LoadedModel, block_tokens: int, blocks: int | None) -> Checkpoints | None:
    """Which blocks carry recurrent states; None if no layer has one."""
    if not loaded.state_bytes:
        return None
    if blocks:
        return Checkpoints(block_tokens=block_tokens, blocks=blocks)
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    return Checkpoints.of(block_tokens, token_bytes, loaded.state_bytes)


def _states(loaded: LoadedModel, rule: Checkpoints | None) -> dict[str, Any] | None:
    """
    The fingerprint's field for layers that keep more than keys and values, or several caches each.
    None if there are none.
    """
    if loaded.is_simple:
        return None
    states = [one.arrays if isinstance(one, StateShape) else () for one in loaded.shapes]
    return {
        "blocks": rule.blocks if rule is not None else 0,
        "together": list(loaded.together),
        "layers": [[f"{dtype} {list(shape)}" for shape, dtype in arrays] for arrays in states],
    }


def _memory_words(loaded: LoadedModel, growth: Growth | None, block_tokens: int) -> str:
    """The memory that a block takes, for a message."""
    if growth is not None:
        return f"{growth.bytes_at(block_tokens)} bytes in mlx-lm's own caches"
    each = f"{sum(shape.token_bytes for shape in loaded.shapes)} bytes each"
    if not loaded.state_bytes:
        return each
    return f"{each}, and {STATES_A_SLAB * loaded.state_bytes} bytes of states"


def _context(
    loaded: LoadedModel, policy: SinkWindow | None, pool_bytes: int, block_tokens: int
) -> int:
    """
    The longest sequence that the model takes and that a slab of fixed arrays within the budget
    holds.
    """
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    pool_bytes -= STATES_A_SLAB * loaded.state_bytes
    if pool_bytes < 0:
        return 0
    if not token_bytes:  # only states
        return loaded.context_tokens
    if policy is not None and policy.rows * token_bytes <= pool_bytes:
        return loaded.context_tokens
    return min(loaded.context_tokens, pool_bytes // token_bytes // block_tokens * block_tokens)


def _layers_that_count(loaded: LoadedModel) -> int:
    caches = make_prompt_cache(loaded.model)
    return sum(counts_tokens(layer) for layer in flat(caches))


def _dtypes(model: Any) -> dict[str, int]:
    counted: collections.Counter[str] = collections.Counter()
    parameters: Any = tree_flatten(model.parameters())
    for _, parameter in parameters:
        counted[str(parameter.dtype).removeprefix("mlx.core.")] += 1
    return dict(counted)
