"""How Pebble is trained: batches, steps, checkpoints, and weights to continue from."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from tokenizers import Tokenizer

from cairn.engine.model.builtin import builtin_directory
from cairn_pebble import dialogues, train
from cairn_pebble import training as training_module
from cairn_pebble.attention import causal_attention
from cairn_pebble.dialogues import Dialogue
from cairn_pebble.export import OtherModel, export, read_exported
from cairn_pebble.positions import GivenRope, spread_out
from cairn_pebble.recipe import RECIPES, SHIPPED, STAGES, Shape, Stage
from cairn_pebble.sequences import TURN_START, Renderer, Sequence, template
from cairn_pebble.texts.words import Split
from cairn_pebble.training import (
    OtherTraining,
    Progress,
    Start,
    Training,
    new_model,
    pool,
    read_checkpoint,
)
from workshop.pebble.tests.pebble_parts import SHORT, SMALL, pebble_renderer, pebble_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Pebble's own tokenizer."""
    return pebble_tokenizer()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """What turns dialogues into tokens."""
    return pebble_renderer()


def test_gradients_by_torch_are_the_same(renderer: Renderer, tmp_path: Path, monkeypatch: Any):
    """PyTorch computes the figures and gradients of a step that MLX computes, up to rounding."""
    pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch)")
    from cairn_pebble.by_torch import TorchGradients

    shape = attrs.evolve(SMALL, layers=2)
    steps: dict[str, list[tuple[Any, Any]]] = {}

    class Recorded:
        def __init__(self, name: str, step: Any) -> None:
            self.step, self.found = step, steps.setdefault(name, [])

        def __call__(self, model: Any, batch: Any) -> Any:
            self.found.append(self.step(model, batch))
            return self.found[-1]

    monkeypatch.setattr(training_module, "POOL_TOKENS", 2_000)
    stage = attrs.evolve(SHORT, tokens=2_000, longest=256, spread=2_000)
    by_torch = Recorded("torch", TorchGradients(shape))
    trainings = []
    for name, step in (("mlx", None), ("torch", by_torch)):
        (tmp_path / name).mkdir()
        trainings.append(Training(renderer, shape, (stage,), tmp_path / name, gradients=step))
    compiled = trainings[0].mlx_gradients
    monkeypatch.setattr(trainings[0], "mlx_gradients", lambda: Recorded("mlx", compiled()))

    for one in trainings:
        one.run(lambda _: None)

    (figures, gradients), (other_figures, other_gradients) = steps["mlx"][0], steps["torch"][0]
    assert [float(one) for one in figures] == pytest.approx(list(other_figures), rel=1e-4)
    named, others = (dict(tree_flatten(one)) for one in (gradients, other_gradients))
    assert set(named) == set(others)
    for name, one in named.items():
        np.testing.assert_allclose(
            np.array(one), np.array(others[name]), atol=1e-3 * float(mx.abs(one).max()), rtol=0
        )


def test_no_dialogue_is_left_out_of_the_batches(renderer: Renderer, monkeypatch: Any):
    """
    Every drawn dialogue that is short enough is learned from, even the shortest, in batches of one
    shape for each width; gaps are padding with no weight.
    """
    drawn: list[Sequence] = []
    whole = Renderer.sequence

    def remembering(self: Renderer, dialogue: Dialogue, rng: Random | None = None) -> Sequence:
        drawn.append(whole(self, dialogue, rng))
        return drawn[-1]

    monkeypatch.setattr(Renderer, "sequence", remembering)
    monkeypatch.setattr(training_module, "POOL_TOKENS", 30_000)
    (stage,) = (attrs.evolve(one, longest=1024) for one in STAGES if one.name == "names")

    found = pool(renderer, stage, Random(1), 4096)

    learned = [one for one in drawn if len(one.ids) - 1 <= stage.longest]
    assert 20 < len(learned) < len(drawn)
    assert min(len(one.ids) for one in learned) < 100
    assert sum(int(one.answers[1:].sum()) for one in learned) == sum(
        int(batch.counts.sum()) for batch in found
    )
    due = sorted(
        int(one) for sequence in learned for one in sequence.ids[1:][sequence.answers[1:] > 0]
    )
    got = [int(token) for batch in found for token in batch.due[batch.counts > 0]]
    assert due == sorted(got)
    shapes = {batch.ids.shape for batch in found}
    assert len(shapes) == len({width for _, width in shapes})
    assert all(rows == max(1, 4096 // width) for rows, width in shapes)


@pytest.mark.long
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """
    A training that is interrupted after a checkpoint and resumed from fresh state ends with the
    same weights, bit for bit. The checkpoint of a different training is refused.
    """

    class Left(Exception):
        pass

    seen: list[int] = []

    def leaves(stands: Progress) -> None:
        seen.append(stands.tokens)
        if len(seen) == 2:
            raise Left

    monkeypatch.setattr(training_module, "POOL_TOKENS", 4000)
    short = attrs.evolve(SHORT, tokens=10_000, batch_tokens=512)
    longer = attrs.evolve(short, name="longer", longest=192, tokens=3000)
    stages = (short, longer)

    def training(folder: str, seed: int = 0, stages: tuple[Stage, ...] = stages) -> Training:
        (tmp_path / folder).mkdir(exist_ok=True)
        return Training(renderer, SMALL, stages, tmp_path / folder, seed=seed)

    told: list[Progress] = []
    rest: list[Progress] = []
    whole = training("whole")
    whole.run(told.append)
    with pytest.raises(Left):
        training("left").run(leaves)
    again = training("left")
    again.run(rest.append)

    assert told[0].loss > told[1].loss
    assert told[1:] == rest
    with pytest.raises(OtherTraining, match="another recipe"):
        training("left", seed=1)
    other_mix = (attrs.evolve(stages[0], mix=((dialogues.talk, 1),)), longer)
    for others in (stages[:1], other_mix, (stages[0], attrs.evolve(longer, rates=(1.0, 0.5)))):
        with pytest.raises(OtherTraining, match="another recipe"):
            training("left", stages=others)
    # A recipe may be extended at its end.
    training("left", stages=(*stages, attrs.evolve(SHORT, name="more")))
    before, after = (dict(tree_flatten(one.model.parameters())) for one in (whole, again))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert np.array_equal(weight, after[name]), name


def test_a_training_goes_on_from_exported_weights(
    renderer: Renderer, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """
    Without a checkpoint, training continues from weights: the stages that they have completed are
    skipped, learning rates warm up again, and an interrupted training then ends as if it had never
    stopped.
    """

    class Left(Exception):
        pass

    def leaves(stands: Progress) -> None:
        raise Left

    # Compiling takes ten times as long as these steps; the test above covers it.
    monkeypatch.setattr(mx, "compile", lambda step, **_: step)
    monkeypatch.setattr(training_module, "POOL_TOKENS", 1000)
    tiny = attrs.evolve(SHORT, tokens=2000, batch_tokens=256)
    stages = (tiny, *(attrs.evolve(tiny, name=name) for name in ("second", "third")))

    def training(folder: str, start: Start | None) -> Training:
        (tmp_path / folder).mkdir(exist_ok=True)
        return Training(renderer, SMALL, stages, tmp_path / folder, start=start)

    export(tmp_path / "model", new_model(SMALL, 5), tokenizer, template(), SMALL)
    exported = read_exported(tmp_path / "model", SMALL)
    start = Start(exported, 1)
    whole = training("whole", start)
    assert exported.weights.keys() == parameters(whole).keys()
    for name, weight in parameters(whole).items():
        assert np.array_equal(exported.weights[name], weight), name
    assert tiny.tokens == whole.tokens
    told: list[Progress] = []
    rates: list[float] = []
    rate = Training.rate

    def seen(self: Training) -> float:
        rates.append(rate(self))
        return rates[-1]

    monkeypatch.setattr(Training, "rate", seen)
    whole.run(told.append)
    assert [step / 40 for step in range(1, len(rates) + 1)] == rates
    with pytest.raises(Left):
        training("left", start).run(leaves)
    again = training("left", start)
    rest: list[Progress] = []
    again.run(rest.append)

    assert ["second", "third"] == list(dict.fromkeys(one.stage for one in told))
    assert told[-len(rest) :] == rest
    for name, weight in parameters(whole).items():
        assert np.array_equal(parameters(again)[name], weight), name
    for other in (None, Start(exported, 2), Start(attrs.evolve(exported, digest="0"), 1)):
        with pytest.raises(OtherTraining, match="beginning"):
            training("left", other)
    weights, tokens = read_checkpoint(tmp_path / "left")
    assert whole.tokens == tokens
    for name, weight in parameters(whole).items():
        assert np.array_equal(weights[name], weight), name


def parameters(training: Training) -> dict[str, mx.array]:
    """Of the model, by name."""
    return dict(tree_flatten(training.model.parameters()))


def test_quantised_weights_are_gone_on_from(tokenizer: Tokenizer, tmp_path: Path):
    """
    Weights that were quantised after the export are float32 again, close to their old values; a
    model of a different shape is refused.
    """
    model = new_model(SMALL, 5)
    export(tmp_path, model, tokenizer, template(), SMALL)
    whole = read_exported(tmp_path, SMALL)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    quantised, config = quantize_model(model, config, 32, 8)
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), dict(tree_flatten(quantised.parameters()))
    )
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    found = read_exported(tmp_path, SMALL)

    assert whole.weights.keys() == found.weights.keys()
    assert whole.digest != found.digest
    for name, weight in whole.weights.items():
        assert mx.float32 == found.weights[name].dtype
        assert np.allclose(weight, found.weights[name], atol=0.02), name
    with pytest.raises(OtherModel, match="hidden_size"):
        read_exported(tmp_path, attrs.evolve(SMALL, hidden_size=64))


def test_given_positions_turn_as_counted_ones_do():
    """At positions 0, 1, 2, ... queries are rotated as by the embeddings that a server uses."""
    shape = Shape()
    states = mx.random.normal((2, 3, 700, shape.head_dim), key=mx.random.key(1))
    rope = GivenRope(shape.head_dim, shape.rope_theta)
    rope.positions = mx.tile(mx.arange(700, dtype=mx.float32), (2, 1))
    counted = RoPE(shape.head_dim, base=shape.rope_theta)(states)
    assert np.allclose(counted, rope(states), atol=1e-4)


def test_attention_in_blocks_is_attention():
    """Values and gradients equal those of MLX's own attention, whatever the length."""
    for tokens in (1, 64, 200):
        queries, keys, values = (
            mx.random.normal((2, heads, tokens, 16), key=mx.random.key(heads + place))
            for place, heads in enumerate((4, 2, 2))
        )

        def usual(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            attend = mx.fast.scaled_dot_product_attention
            return attend(queries, keys, values, scale=0.25, mask="causal")

        def blocks(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            return causal_attention(queries, keys, values, scale=0.25)

        def gradients(attend: Any, given: tuple[mx.array, ...]) -> Any:
            return mx.grad(lambda *all_: (attend(*all_) ** 2).sum(), argnums=(0, 1, 2))(*given)

        given = (queries, keys, values)
        assert np.allclose(usual(*given), blocks(*given), atol=1e-5)
        for due, found in zip(gradients(usual, given), gradients(blocks, given), strict=True):
            assert np.allclose(due, found, atol=1e-3)


def test_turns_are_spread_and_left_whole():
    """Positions jump where a turn begins, and nowhere else; none is too high."""
    rng, turns, spread = Random(4), np.array([0, 10, 40]), 0
    for _ in range(200):
        steps = np.diff(spread_out(60, turns, 500, rng))
        assert {1.0} == set(np.delete(steps, [9, 39]))
        assert steps.sum() < 500
        spread += steps.sum() > 59
    assert 100 < spread < 200


def test_an_answer_is_next_to_what_it_answers(renderer: Renderer, tokenizer: Tokenizer):
    """Positions jump before turns of others, and never before a turn of Pebble's own."""
    sequence = renderer.sequence(dialogues.recall(Random(1), Split.TRAIN), Random(1))
    begins = {tokenizer.decode([sequence.ids[turn + 1]]) for turn in sequence.turns}
    assert "user" in begins
    assert begins <= {"user", "system"}
    assert f"{TURN_START}assistant" in tokenizer.decode(
        sequence.ids.tolist(), skip_special_tokens=False
    )


def test_the_exported_model_is_the_trained_one(
    renderer: Renderer, tokenizer: Tokenizer, tmp_path: Path
):
    """mlx-lm loads the exported directory, and gives the logits of the model in training."""
    from mlx_lm import load

    training = Training(renderer, SMALL, (SHORT,), tmp_path)
    export(tmp_path / "model", training.model, tokenizer, template(), SMALL)
    loaded: Any = load(str(tmp_path / "model"))
    model, read = loaded
    ids = mx.array([read.encode("What is a cairn?")])
    assert np.array_equal(training.model(ids), model(ids))
    assert template() == read.chat_template


@pytest.mark.long
def test_pools_are_the_same_from_other_processes(renderer: Renderer, tmp_path: Path):
    """Weights do not depend on which process draws the dialogues."""

    def weights(folder: str, drawers: int) -> dict[str, mx.array]:
        (tmp_path / folder).mkdir()
        stages = (attrs.evolve(SHORT, tokens=1000), attrs.evolve(SHORT, name="more", tokens=1000))
        training = Training(renderer, SMALL, stages, tmp_path / folder, drawers=drawers)
        training.run(lambda stands: None)
        return parameters(training)

    here, there = weights("here", 0), weights("there", 1)

    for name, weight in here.items():
        assert np.array_equal(weight, there[name]), name


def test_packed_weights_fit_and_are_what_was_trained(tokenizer: Tokenizer, tmp_path: Path):
    """
    A model of nearly seven million parameters takes less than 8 MB in 8 bits with all its files;
    mlx-lm loads it as packed, the trained model stays in float32, and their logits are close.
    """
    from mlx_lm import load

    recipe = RECIPES["7m"]
    model = new_model(recipe.shape, 5)
    export(tmp_path, model, tokenizer, template(), recipe.shape, recipe.packing)
    loaded: Any = load(str(tmp_path))
    packed, _ = loaded
    ids = mx.array([tokenizer.encode("What is a cairn?").ids])

    leaves: Any = tree_flatten(model.parameters())
    count = sum(one.size for _, one in leaves)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    # The card, the measured figures and 512 more tokens take a tenth of a megabyte.
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 7_900_000
    assert 6_900_000 < count < 7_000_000
    assert {"bits": 8, "group_size": 64, "mode": "affine"} == config["quantization"]
    assert 8 == packed.model.layers[0].mlp.down_proj.bits
    assert {mx.float32} == {one.dtype for _, one in leaves}
    exact, rough = np.array(model(ids)), np.array(packed(ids))
    assert not np.array_equal(exact, rough)
    assert np.abs(exact - rough).max() < 0.05 * np.abs(exact).max()


def test_the_recipe_is_what_ships():
    """The shape in the recipe is that of the weights in the package."""
    config = json.loads((builtin_directory() / "config.json").read_text("utf-8"))
    shape = attrs.asdict(RECIPES[SHIPPED].shape)
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads"}
    assert shape == {name: config[names.get(name, name)] for name in shape}


def test_a_grown_recipe_needs_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its tokenizer is not made from dialogues, so it does not start from nothing."""
    monkeypatch.setattr("sys.argv", ["train", "--recipe", "2m-words"])
    with pytest.raises(SystemExit):
        train.main()
    assert "2m-words goes on from a model with added tokens" in capsys.readouterr().err
