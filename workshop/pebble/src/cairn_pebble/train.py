"""
Make Pebble, the model that comes with Cairn: dialogues from a seed, training, evaluation, export.

Without an accelerator, two processes share the work over loopback. Each needs one core and a real
BLAS, without which MLX's matrix products are several times slower on Linux:

    export LD_PRELOAD=$(python -P -m cairn.engine.machine.blas)
    python -P -m cairn_pebble.train --recipe 2m-third --work /tmp/pebble --ranks 2
    python -P -m cairn_pebble.vocabulary --from /tmp/pebble/model --out /tmp/words
    python -P -m cairn_pebble.train --work /tmp/on --ranks 2 --from /tmp/words --after rest

glibc returns large arrays to the system in each step and requests them again, which once took more
than half of the time. If `top` shows that much system time, make glibc keep them:

    export MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_MMAP_THRESHOLD_=4294967296

An interrupted training resumes from its last checkpoint in ``--work``. Without a checkpoint, a
training can continue from exported weights: ``--from`` is their directory, and ``--after`` the last
stage of the recipe that they were trained on. The stages up to that one are skipped, and the
optimisers start with fresh state.

With PyTorch (``pip install torch``), ``--torch`` computes the gradients by it, and MLX does the
rest: on an x86 CPU, a third more tokens a second. Each of ``--ranks`` uses one core.

``--recipe 7m`` makes a model of seven million parameters, stored in 8 bits, with everyday openings.
On a GPU, let other processes draw the dialogues. One command trains, exports and measures:

    python -P -m cairn_pebble.train --recipe 7m --work /tmp/pebble-7m --drawers 12

``--share 0.3`` reads 0.3 of the tokens of each stage.

``--export`` writes the model of the last checkpoint and exits; it also works while a training runs.
``--evaluate`` only measures an exported model, and writes EVALUATION.md next to it:

    python -P -m cairn_pebble.train --out src/cairn/pebble --evaluate
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from cairn.engine.model.files import directory_fault
from cairn_pebble import evaluation
from cairn_pebble.recipe import RECIPES, SHIPPED, Recipe
from cairn_pebble.sequences import TURN_END, Renderer, template, train_tokenizer
from cairn_pebble.texts import by_hand, plain
from cairn_pebble.texts.words import Split

_TOKENIZER_DIALOGUES = 6000
_PORT = 42_010
_WORK = Path(".cache/pebble")
_TOPICS_SHOWN = 20


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=_WORK, help="folder of the checkpoints [default: %(default)s]"
    )
    parser.add_argument("--out", type=Path, help="folder of the model [default: WORK/model]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the work")
    parser.add_argument("--share", type=float, default=1.0, help="of the tokens of each stage")
    parser.add_argument("--count", type=int, default=400, help="dialogues a skill to evaluate on")
    parser.add_argument("--evaluate", action="store_true", help="measure only")
    parser.add_argument(
        "--recipe", choices=sorted(RECIPES), default=SHIPPED, help="[default: %(default)s]"
    )
    parser.add_argument(
        "--drawers", type=int, default=0, help="processes that draw dialogues ahead of the training"
    )
    parser.add_argument(
        "--torch", action="store_true", help="compute gradients by PyTorch, faster on an x86 CPU"
    )
    parser.add_argument(
        "--from", type=Path, dest="start", metavar="FOLDER", help="go on from an exported model"
    )
    parser.add_argument(
        "--after",
        choices=sorted({stage.name for one in RECIPES.values() for stage in one.stages}),
        metavar="STAGE",
        help="the last stage that the model of --from has read",
    )
    parser.add_argument(
        "--export", action="store_true", help="write the model of the last checkpoint only"
    )
    options = parser.parse_args()
    options.out = options.out or options.work / "model"
    if options.evaluate:
        if fault := directory_fault(str(options.out)):
            sys.exit(f"{fault} Train one first, or name one with --out.")
        _evaluate(options)
        return
    if (options.start is None) != (options.after is None):
        parser.error("--from needs --after, and --after needs --from")
    stages = [stage.name for stage in RECIPES[options.recipe].stages]
    if options.after is not None and options.after not in stages:
        parser.error(f"--after of this recipe is one of {', '.join(stages)}")
    if RECIPES[options.recipe].grown and options.start is None and not options.export:
        parser.error(f"{options.recipe} goes on from a model with added tokens; add --from")
    if options.start and (fault := directory_fault(str(options.start))):
        sys.exit(f"{fault} Name an exported model with --from.")
    if options.export:
        _export(options)
        return
    # Find an unwritable directory before the hours of training, not after them.
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.ranks > 1 and "MLX_RANK" not in os.environ:
        sys.exit(_in_ranks(options.ranks))
    _train(options)
    if os.environ.get("MLX_RANK", "0") == "0":
        _evaluate(options)


def _in_ranks(ranks: int) -> int:
    """Run this command once for each rank."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"127.0.0.1:{_PORT + rank}"] for rank in range(ranks)], hosts)
        hosts.flush()
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", *sys.argv],
                env={
                    **os.environ,
                    "MLX_HOSTFILE": hosts.name,
                    "MLX_RANK": str(rank),
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
            for rank in range(ranks)
        ]
        try:
            # If one process ends early, the others wait for it forever.
            while all(process.poll() is None for process in processes):
                time.sleep(0.5)
            codes = [process.poll() for process in processes]
            if not any(codes):
                codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()
    return max(abs(code or 0) for code in codes)


def _tokenizer(path: Path, recipe: Recipe) -> Tokenizer:
    """Train on dialogues of the training split; a recipe gives the same result on every machine."""
    if not path.exists():
        rng, renderer = Random(0), Renderer(Tokenizer.from_str(_EMPTY), template())
        texts = [
            renderer.text(draw(rng, Split.TRAIN))
            for draw in (plain.dialogue, *recipe.kinds)
            for _ in range(_TOKENIZER_DIALOGUES)
        ]
        texts += [plain.units()] * _TOKENIZER_DIALOGUES
        draft = path.with_suffix(f".{os.getpid()}")
        train_tokenizer(texts, recipe.shape.vocab_size).save(str(draft))
        draft.replace(path)
    return Tokenizer.from_file(str(path))


def _take_tokenizer(found: Path, path: Path) -> None:
    """A model keeps its own tokenizer, which is then copied to the checkpoint folder."""
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(found.read_bytes())
        draft.replace(path)
    if Tokenizer.from_file(str(found)).to_str() != Tokenizer.from_file(str(path)).to_str():
        sys.exit(f"{path} is of another model than {found}. Choose another folder with --work.")


_EMPTY = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


def _train(options: argparse.Namespace) -> None:
    import attrs

    from cairn_pebble.export import OtherModel, export, read_exported
    from cairn_pebble.training import OtherTraining, Start, Training
    from cairn_pebble.training import Progress as Stands

    recipe = RECIPES[options.recipe]
    shape = recipe.shape
    start = None
    if options.start:
        behind = 1 + [stage.name for stage in recipe.stages].index(options.after)
        try:
            start = Start(read_exported(options.start, shape), behind)
        except OtherModel as error:
            sys.exit(str(error))
        _take_tokenizer(options.start / "tokenizer.json", options.work / "tokenizer.json")
    tokenizer = _tokenizer(options.work / "tokenizer.json", recipe)
    stages = tuple(
        attrs.evolve(one, tokens=int(one.tokens * options.share)) for one in recipe.stages
    )
    renderer = Renderer(tokenizer, template())
    gradients = None
    if options.torch:
        from cairn_pebble.by_torch import TorchGradients

        gradients = TorchGradients(shape)
    try:
        training = Training(
            renderer,
            shape,
            stages,
            options.work,
            seed=options.seed,
            start=start,
            said=recipe.said,
            drawers=options.drawers,
            gradients=gradients,
        )
    except OtherTraining as error:
        sys.exit(str(error))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        disable=not training.leads,
    )
    with bar:
        task = bar.add_task("training", total=training.total, completed=training.tokens)
        began, resumed = time.monotonic(), training.tokens

        def told(stands: Stands) -> None:
            text = f"{stands.stage}: loss {stands.loss:.3f}, right {stands.right:.2%}"
            bar.update(task, completed=stands.tokens, description=text)
            if training.leads and not sys.stdout.isatty():
                speed = (stands.tokens - resumed) / (time.monotonic() - began)
                left = timedelta(seconds=int((stands.total - stands.tokens) / speed))
                print(
                    f"{stands.tokens / 1e6:.2f} of {stands.total / 1e6:.1f} M tokens, {text}, "
                    f"{speed:,.0f} tokens a second, {left} left",
                    flush=True,
                )

        training.run(told)
    if training.leads:
        export(options.out, training.model, tokenizer, template(), shape, recipe.packing)


def _export(options: argparse.Namespace) -> None:
    """The model of the last checkpoint, at whatever stage of the recipe."""
    from cairn_pebble.export import export
    from cairn_pebble.training import new_model, read_checkpoint

    recipe, path = RECIPES[options.recipe], options.work / "tokenizer.json"
    shape = recipe.shape
    if not (options.work / "checkpoint.safetensors").exists() or not path.exists():
        sys.exit(f"There is no checkpoint in {options.work}. Name its folder with --work.")
    weights, tokens = read_checkpoint(options.work)
    model = new_model(shape, 0)
    model.load_weights(list(weights.items()))
    export(options.out, model, Tokenizer.from_file(str(path)), template(), shape, recipe.packing)
    print(f"{tokens / 1e6:.2f} M tokens, written to {options.out}")


def _evaluate(options: argparse.Namespace) -> None:
    """Generate from the exported model, as a server would load it, and print the table."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    loaded: Any = load(str(options.out))
    model, tokenizer = loaded
    renderer = Renderer(
        Tokenizer.from_file(str(options.out / "tokenizer.json")),
        (options.out / "chat_template.jinja").read_text("utf-8"),
    )
    end = tokenizer.convert_tokens_to_ids(TURN_END)

    def say(prompt: str) -> tuple[str, bool]:
        ids = mx.array(tokenizer.encode(prompt, add_special_tokens=False))
        said: list[int] = []
        for token, _ in generate_step(ids, model, max_tokens=evaluation.LONGEST_ANSWER):
            if int(token) == end:
                return tokenizer.decode(said, skip_special_tokens=False), True
            said.append(int(token))
        return tokenizer.decode(said, skip_special_tokens=False), False

    console, results = Console(soft_wrap=True), []
    bar = Progress(
        TextColumn("answers"), BarColumn(), TextColumn("{task.completed}"), TimeRemainingColumn()
    )
    total = evaluation.tries(options.count) + _TOPICS_SHOWN
    total += len(by_hand.SPOKEN) + len(by_hand.WISHES)
    with bar:
        task = bar.add_task("answers", total=total)

        def counted(prompt: str) -> tuple[str, bool]:
            bar.advance(task)
            return say(prompt)

        for result in evaluation.evaluate(
            renderer, counted, options.count, options.seed, RECIPES[options.recipe].said
        ):
            results.append(result)
            skill = result.skill
            bar.console.print(
                f"{skill.name}: {result.right} of {result.tried} (aim: {skill.least:.0%})",
                highlight=False,
            )
            for due, said in result.wrong[:2]:
                text = f"  due  {due!r}\n  said {said!r}"
                bar.console.print(text, markup=False, highlight=False)
        spoken = list(by_hand.spoken(renderer, counted))
        called = list(by_hand.called(renderer, counted))
        talk = list(evaluation.small_talk(renderer, counted, _TOPICS_SHOWN))
    weights = hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest()
    what = (
        f"Measured by `python -P -m cairn_pebble.train --evaluate --count {options.count} "
        f"--seed {options.seed}`, greedy, float32, by mlx-lm,\non dialogues whose names, numbers, "
        "pairs of verb and noun in tools, and combinations of the\nparts of sentences were held "
        "out of the training; each part by itself was trained on (see the card).\nSHA-256 of the "
        f"weights:\n`{weights}`"
    )
    page = options.out / "EVALUATION.md"
    page.write_text(evaluation.report(results, spoken, called, talk, what), encoding="utf-8")
    console.print(f"written to {page}", highlight=False)


if __name__ == "__main__":
    main()
