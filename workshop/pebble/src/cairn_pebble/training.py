"""
The training: numbered batches, steps of Muon and AdamW, checkpoints to resume from.

Batches follow from the seed, the stage and their number, so an interrupted training resumes as if
it had never stopped. If only its weights are left, a new training can continue from them: the
optimisers start with fresh state, and learning rates warm up again. Several processes share the
work if MLX finds more than one (its ring over loopback on a CPU); each reads its own batches, and
gradients are averaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import attrs
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt
from mlx.nn.utils import average_gradients, value_and_grad
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import Tokenizer

from cairn_pebble.attention import attention_in_blocks
from cairn_pebble.dialogues import Dialogue
from cairn_pebble.export import Exported
from cairn_pebble.positions import GivenRope, positions_from, spread_out
from cairn_pebble.recipe import Shape, Stage
from cairn_pebble.sequences import Renderer, Sequence
from cairn_pebble.texts.words import Split

Said: TypeAlias = Callable[[Dialogue], Dialogue]
Gradients: TypeAlias = Callable[[Model, "Batch"], tuple[Any, Any]]
"""From a batch to ((answers, loss, right), gradients)."""


def _as_drawn(dialogue: Dialogue) -> Dialogue:
    return dialogue


_MUON_RATE: Final = 0.02
_ADAM_RATE: Final = 0.003
_WARM_STEPS: Final = 40
_ANSWERS_STEP: Final = 256
_WIDTH_STEP: Final = 64
"""Rows are padded to a multiple of this, so that few shapes are compiled."""
POOL_TOKENS: Final = 120_000
"""Approximate time between two checkpoints."""


@attrs.frozen
class Progress:
    """
    The progress of a training.

    Attributes:
        tokens: read so far, of ``total``, with padding.
        loss: over the answers, in nats per token, over the last steps.
        right: the share of answer tokens that were the most likely ones, over the last steps.
    """

    stage: str
    tokens: int
    total: int
    loss: float
    right: float


def new_model(shape: Shape, seed: int) -> Model:
    """A Qwen3 with initial weights."""
    mx.random.seed(seed)
    model = Model(
        ModelArgs(
            model_type="qwen3",
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=1e-6,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.max_position_embeddings,
            rope_theta=shape.rope_theta,
            tie_word_embeddings=True,
        )
    )
    shape_of_rows = (shape.vocab_size, shape.hidden_size)
    model.model.embed_tokens.weight = mx.random.normal(shape_of_rows) * 0.06
    for layer in model.layers:
        # A layer's output is small at first, so that depth does not drown its input.
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3
    mx.eval(model.parameters())
    return model


@attrs.frozen
class Start:
    """
    Weights to continue from.

    Attributes:
        exported: the weights.
        behind: the number of completed stages, which are skipped.
    """

    exported: Exported
    behind: int


class OtherTraining(Exception):
    """The checkpoint belongs to a different training."""


class Training:
    """A training that can be interrupted and resumed."""

    def __init__(
        self,
        renderer: Renderer,
        shape: Shape,
        stages: tuple[Stage, ...],
        folder: Path,
        *,
        seed: int = 0,
        start: Start | None = None,
        said: Said = _as_drawn,
        drawers: int = 0,
        gradients: Gradients | None = None,
    ) -> None:
        """
        Args:
            folder: the checkpoint's folder; an existing checkpoint is resumed.
            start: the weights it began from, if any; must be the same when a checkpoint is resumed.
            said: changes each drawn dialogue.
            drawers: processes that draw and encode dialogues before they are needed; 0 to draw them
                here, in between. A GPU waits for one that draws.
            gradients: computes a step up to its gradients; None for MLX.

        Raises:
            OtherTraining: the checkpoint belongs to a different training.
        """
        self._stages = stages
        self._path = folder / "checkpoint"
        self._seed = seed
        self._group = mx.distributed.init()
        self._pools = _Pools(renderer, seed, said, drawers)
        self._gradients = gradients
        self.model = new_model(shape, seed)
        self._rope = GivenRope(shape.head_dim, shape.rope_theta)
        self._optimizer = optim.MultiOptimizer(
            [
                optim.Muon(learning_rate=0.0, momentum=0.95, weight_decay=0.01),
                optim.AdamW(learning_rate=0.0, betas=[0.9, 0.95], weight_decay=0.0),
            ],
            [lambda path, weight: weight.ndim == 2 and "embed" not in path],
        )
        self._first = start.behind if start else 0
        if start:
            self.model.load_weights(list(start.exported.weights.items()))
        self._optimizer.init(self.model.trainable_parameters())
        skipped = sum(stage.tokens for stage in stages[: self._first])
        self._stands = {"stage": self._first, "pool": 0, "tokens": skipped, "steps": 0}
        self._follows_from = [
            seed,
            self._group.size(),
            attrs.asdict(shape),
            renderer.tokenizer.to_str(),
        ]
        if start:
            self._follows_from += [start.exported.digest, start.behind]
        if self._path.with_suffix(".safetensors").exists():
            self._load()

    @property
    def leads(self) -> bool:
        """Whether this process is the one that reports progress and writes files."""
        return self._group.rank() == 0

    @property
    def tokens(self) -> int:
        """
        How many tokens were read so far, including those read by the weights that it began from.
        """
        return self._stands["tokens"]

    @property
    def total(self) -> int:
        """How many tokens there are to read in all stages, including the skipped ones."""
        return sum(stage.tokens for stage in self._stages)

    def run(self, told: Callable[[Progress], None]) -> None:
        """
        Train to the end of the last stage.

        Args:
            told: called with the progress after each pool of batches: about every minute on two
                cores.
        """
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        attention = attention_in_blocks() if on_cpu else contextlib.nullcontext()
        with positions_from(self._rope, self.model), attention, self._pools:
            step = self._gradients or self.mlx_gradients()
            while self._stands["stage"] < len(self._stages):
                stage = self._stages[self._stands["stage"]]
                before = sum(one.tokens for one in self._stages[: self._stands["stage"]])
                while self._stands["tokens"] < before + stage.tokens:
                    self._read(stage, step, told)
                    self._stands["pool"] += 1
                    self._save()
                self._stands |= {"stage": self._stands["stage"] + 1, "pool": 0}
                self._save()

    def _read(self, stage: Stage, step: Gradients, told: Callable[[Progress], None]) -> None:
        """Train on one pool of batches."""
        # All ranks take the same number of steps, so each makes a pool from the same draw and takes
        # its part.
        size, rank = self._group.size(), self._group.rank()
        batches = self._pools.take(stage, self._stands["pool"], stage.batch_tokens // size)
        batches += batches[: -len(batches) % size]  # the same number for each rank
        sums = np.zeros(3)
        for start in range(0, len(batches), size):
            mine = batches[start + rank]
            figures, gradients = step(self.model, mine)
            if size > 1:
                gradients = average_gradients(gradients, self._group)
            self._update(gradients)
            sums += [float(figure) for figure in figures]
            self._stands["tokens"] += sum(one.ids.size for one in batches[start : start + size])
            self._stands["steps"] += 1
        count, loss, right = sums
        told(
            Progress(
                stage=stage.name,
                tokens=self._stands["tokens"],
                total=self.total,
                loss=loss / count,
                right=right / count,
            )
        )

    def mlx_gradients(self) -> Gradients:
        """A step up to its gradients, by MLX."""

        def loss(
            model: Model,
            ids: mx.array,
            positions: mx.array,
            places: mx.array,
            due: mx.array,
            counts: mx.array,
        ) -> tuple[mx.array, Any]:
            self._rope.positions = positions
            states = model.model(ids)
            # Logits only for the tokens to learn: a third of all.
            logits = model.model.embed_tokens.as_linear(
                states.reshape(-1, states.shape[-1])[places]
            )
            chosen = mx.take_along_axis(logits, due[:, None], -1)[:, 0]
            lost = ((mx.logsumexp(logits, -1) - chosen) * counts).sum()
            right = ((logits.argmax(-1) == due) * counts).sum()
            return lost / counts.sum(), (counts.sum(), lost, right)

        graded = value_and_grad(self.model, loss)

        def step(*batch: mx.array) -> tuple[Any, Any]:
            (_, figures), gradients = graded(self.model, *batch)
            return figures, gradients

        state = [self.model.state]
        compiled = mx.compile(step, inputs=state, outputs=state)
        return lambda _, batch: compiled(*map(mx.array, attrs.astuple(batch)))

    def rate(self) -> float:
        """The share of the highest learning rates for the next step."""
        stage = self._stages[self._stands["stage"]]
        before = sum(one.tokens for one in self._stages[: self._stands["stage"]])
        done = min(1.0, (self._stands["tokens"] - before) / stage.tokens)
        first, last = stage.rates
        warm = min(1.0, (self._stands["steps"] + 1) / _WARM_STEPS)
        return warm * (first + (last - first) * done)

    def _update(self, gradients: Any) -> None:
        rate = self.rate()
        muon, adam = self._optimizer.optimizers
        muon.learning_rate = _MUON_RATE * rate
        adam.learning_rate = _ADAM_RATE * rate
        clip: Any = optim.clip_grad_norm
        gradients, _ = clip(gradients, 1.0)
        self._optimizer.update(self.model, gradients)
        mx.eval(self.model.parameters(), self._optimizer.state)

    def _save(self) -> None:
        """
        Replace the last checkpoint. If the process dies during this, the last one stays intact.
        """
        if not self.leads:
            return
        arrays = dict(tree_flatten({"model": self.model.parameters()}))
        arrays |= dict(tree_flatten({"optimizer": self._optimizer.state}))
        arrays = {name: one for name, one in arrays.items() if isinstance(one, mx.array)}
        draft = self._path.with_suffix(".draft.safetensors")
        begun = min(self._stands["stage"] + 1, len(self._stages))
        told = {
            "stands": json.dumps(self._stands),
            "begun": str(begun),
            "identity": self._identity(begun),
        }
        mx.save_safetensors(str(draft), arrays, told)
        draft.replace(self._path.with_suffix(".safetensors"))

    def _identity(self, begun: int) -> str:
        """
        A hash of everything that this many stages depend on, except the code that draws dialogues.

        Later stages are not included, so a recipe may be extended at its end. Skipped stages are
        not either: the weights that the training began from represent them.
        """
        stages = [_plain(stage) for stage in self._stages[self._first : begun]]
        told = json.dumps([*self._follows_from, stages])
        return hashlib.sha256(told.encode()).hexdigest()

    def _load(self) -> None:
        loaded: Any = mx.load(str(self._path.with_suffix(".safetensors")), return_metadata=True)
        arrays, told = loaded
        begun = int(told.get("begun", 0))
        if begun > len(self._stages) or told["identity"] != self._identity(begun):
            raise OtherTraining(
                f"{self._path}.safetensors is of another recipe, seed, tokenizer, number of "
                "processes or beginning. Choose another folder, or remove it to start again."
            )
        found = tree_unflatten(list(arrays.items()))
        self.model.update(found["model"])
        self._optimizer.state = found["optimizer"]
        self._stands = json.loads(told["stands"])
        mx.eval(self.model.parameters(), self._optimizer.state)


def read_checkpoint(folder: Path) -> tuple[dict[str, mx.array], int]:
    """The weights of a folder's checkpoint, by name, and how many tokens they have read."""
    loaded: Any = mx.load(str(folder / "checkpoint.safetensors"), return_metadata=True)
    arrays, told = loaded
    weights = {
        name.removeprefix("model."): one
        for name, one in arrays.items()
        if name.startswith("model.")
    }
    return weights, json.loads(told["stands"])["tokens"]


def _plain(stage: Stage) -> dict[str, Any]:
    """A stage in a form that can be hashed: the names and settings of what it draws."""
    mix = [
        [draw.func.__name__, draw.keywords, share]
        if isinstance(draw, partial)
        else [getattr(draw, "__name__", ""), {}, share]
        for draw, share in stage.mix
    ]
    return attrs.asdict(stage, filter=attrs.filters.exclude("mix")) | {"mix": mix}


@attrs.frozen
class _Drawer:
    """
    Draws pools of batches. Each follows from the seed, its stage and its number.

    Attributes:
        tokenizer: as text, for other processes.
    """

    tokenizer: str
    template: str
    seed: int
    said: Said

    def pool(self, stage: Stage, number: int, tokens: int) -> list[Batch]:
        """The batches of a pool, in a process that may be any."""
        rng = Random(f"{self.seed}/{stage.name}/{number}")
        return pool(_renderer(self.tokenizer, self.template), stage, rng, tokens, self.said)


@cache
def _renderer(tokenizer: str, template: str) -> Renderer:
    return Renderer(Tokenizer.from_str(tokenizer), template)


class _Pools:
    """The pools of a training in their order; the next ones may be drawn by other processes."""

    def __init__(self, renderer: Renderer, seed: int, said: Said, drawers: int) -> None:
        self._drawer = _Drawer(renderer.tokenizer.to_str(), renderer.template, seed, said)
        self._drawers = drawers
        self._executor: ProcessPoolExecutor | None = None
        self._drawn: dict[tuple[str, int], Future[list[Batch]]] = {}

    def __enter__(self) -> None:
        if self._drawers:
            # A fork would copy the threads of MLX's device.
            self._executor = ProcessPoolExecutor(self._drawers, get_context("spawn"))

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
        self._drawn.clear()

    def take(self, stage: Stage, number: int, tokens: int) -> list[Batch]:
        """The batches of a pool. Begins to draw the next ones."""
        if self._executor is None:
            return self._drawer.pool(stage, number, tokens)
        for key in [key for key in self._drawn if key[0] != stage.name]:
            self._drawn.pop(key).cancel()
        for later in range(number, number + 2 * self._drawers):
            if (stage.name, later) not in self._drawn:
                drawn = self._executor.submit(self._drawer.pool, stage, later, tokens)
                self._drawn[stage.name, later] = drawn
        return self._drawn.pop((stage.name, number)).result()


def pool(
    renderer: Renderer, stage: Stage, rng: Random, tokens: int, said: Said = _as_drawn
) -> list[Batch]:
    """
    Group rows of similar length into batches, padded with zeros of no weight.

    Every row that was drawn is in a batch.
    """
    rows: list[Sequence] = []
    draws, shares = zip(*stage.mix, strict=True)
    drawn = 0
    while drawn < POOL_TOKENS:
        draw = rng.choices(draws, shares)[0]
        dialogue = said(draw(rng, Split.TRAIN))
        sequence = renderer.sequence(dialogue, rng)
        length = len(sequence.ids) - 1
        if length > stage.longest:
            continue
        rows.append(sequence)
        drawn += length
    rows.sort(key=lambda one: len(one.ids))
    found = []
    # Start from the shortest rows so that none is left out; otherwise short rows would be.
    while rows:
        some = 1
        while some < len(rows) and some < _count(rows[some], tokens):
            some += 1
        found.append(_batch(rows[:some], tokens, stage.spread, rng))
        rows = rows[some:]
    rng.shuffle(found)
    return found


def _width(longest: Sequence) -> int:
    return -(-(len(longest.ids) - 1) // _WIDTH_STEP) * _WIDTH_STEP


def _count(longest: Sequence, tokens: int) -> int:
    """The rows of a batch, by its longest row: one shape for each width, compiled once."""
    return max(1, tokens // _width(longest))


@attrs.frozen
class Batch:
    """
    Attributes:
        ids: (B, T), int32.
        positions: (B, T), float32.
        places: (K,), int32: which of the B * T tokens precede a token to learn.
        due: (K,), int32: the token that follows there.
        counts: (K,), float32: how much each is learned; 0 for padding.
    """

    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.float32]
    places: npt.NDArray[np.int32]
    due: npt.NDArray[np.int32]
    counts: npt.NDArray[np.float32]


def _batch(some: list[Sequence], tokens: int, spread: int, rng: Random) -> Batch:
    """A batch of rows, the longest last. Missing rows contribute nothing to the loss."""
    width, count = _width(some[-1]), _count(some[-1], tokens)
    ids = np.zeros((count, width + 1), np.int32)
    answers = np.zeros((count, width + 1), np.float32)
    positions = np.tile(np.arange(width, dtype=np.float32), (count, 1))
    for row, one in enumerate(some):
        length = len(one.ids)
        ids[row, :length] = one.ids
        answers[row, :length] = one.answers
        positions[row, : length - 1] = spread_out(length - 1, one.turns, spread, rng)
    places = np.flatnonzero(answers[:, 1:])
    due = ids[:, 1:].reshape(-1)[places]
    missing = -len(places) % _ANSWERS_STEP
    counts = answers[:, 1:].reshape(-1)[places]
    return Batch(
        ids=ids[:, :-1],
        positions=positions,
        places=np.pad(places, (0, missing)).astype(np.int32),
        due=np.pad(due, (0, missing)),
        counts=np.pad(counts, (0, missing)),
    )
