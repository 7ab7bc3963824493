"""
The built-in model: a small Qwen3 with random weights, made on the machine that serves it.

`ops serve` without `--model` has to serve something on a machine that has downloaded nothing. So
the model is made, once, into the data directory: a tokenizer trained on a text that ships with
Cairn, weights drawn from a fixed seed, and a chat template with Qwen3's behaviour. What it says
means nothing; everything around it is real.

1. The files are the same bytes on every run and every platform. Weights come from the raw bits of
   PCG64, whose stream numpy guarantees (that of its normal distribution it does not), and from
   sums of integers, so that no mathematical library has a say in them.
2. A directory is complete or absent. It is made beside its place, its manifest last, and renamed.
3. Only a directory that carries our manifest, or an empty one, is ever replaced.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
from attrs import validators
from safetensors.numpy import save as tensors_to_bytes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BUILTIN_NAME: Final = "cairn-builtin"

MANIFEST_NAME: Final = "cairn-builtin.json"

RECIPE_VERSION: Final = 1
"""Counted up with every change in this module that changes a byte of the files."""

TEXT_END: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"

SPECIAL_TOKENS: Final = (TEXT_END, TURN_START, TURN_END)
"""Left out when text is decoded without special tokens."""

MARKER_TOKENS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""One token each, but text like any other: whoever parses thinking and tool calls looks for it."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as (what was done, steps done, steps in all) after each step."""

_Array: TypeAlias = npt.NDArray[np.float32]

_CONTROL_TOKENS: Final = SPECIAL_TOKENS + MARKER_TOKENS

# The files that are read from the package.
_CORPUS_NAME: Final = "builtin_corpus.txt"
_TEMPLATE_NAME: Final = "builtin_chat_template.jinja"

# Where a text is cut before pairs are merged: words with their space, single digits, signs.
_SPLIT_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Scales of the weights, found by trying. With tied embeddings the row of the last token stands in
# the residual stream and wins the logits again, and the model says one token for ever. So what the
# layers add is some ten times as large as the embeddings. Sharp attention (norms of queries and
# keys whose product is 3, not 1) makes the next token depend on many before it; without it, greedy
# output soon walks in a circle.
_EMBEDDING_STD: Final = 0.16
_LAYER_GAIN: Final = 2.0
_HEAD_NORM: Final = 1.75
_NORM_STD: Final = 0.05
# A turn ends by itself now and then. Other control tokens, and pieces of characters, which would
# make an answer hard to read, hardly ever come up.
_TURN_END_GAIN: Final = 1.7
_QUIET_GAIN: Final = 0.25


class BuiltinModelError(Exception):
    """
    The built-in model cannot be made: the place is taken or cannot be written, or the specification
    does not fit.
    """


@attrs.frozen(kw_only=True)
class BuiltinSpec:
    """
    The shape of the built-in model and the seed of its weights.

    Two specifications that are equal give the same files; see `RECIPE_VERSION`.
    """

    hidden_size: int = attrs.field(default=256, validator=validators.ge(1))
    layer_count: int = attrs.field(default=4, validator=validators.ge(1))
    head_count: int = attrs.field(default=8, validator=validators.ge(1))
    kv_head_count: int = attrs.field(default=4, validator=validators.ge(1))
    head_dim: int = attrs.field(default=32, validator=validators.ge(2))
    intermediate_size: int = attrs.field(default=768, validator=validators.ge(1))
    vocab_size: int = attrs.field(default=2048, validator=validators.ge(256 + len(_CONTROL_TOKENS)))
    max_position_embeddings: int = attrs.field(default=32768, validator=validators.ge(1))
    tie_word_embeddings: bool = True
    rope_theta: float = attrs.field(default=1_000_000.0, validator=validators.gt(0.0))
    rms_norm_eps: float = attrs.field(default=1e-6, validator=validators.gt(0.0))
    seed: int = attrs.field(default=0, validator=validators.ge(0))

    def __attrs_post_init__(self) -> None:
        """Refuse shapes that no Qwen3 can have."""
        if self.head_count % self.kv_head_count != 0:
            raise ValueError("head_count is not a multiple of kv_head_count")
        if self.head_dim % 2 != 0:
            raise ValueError("head_dim is odd, and rotary positions turn pairs")


def ensure_builtin_model(
    directory: Path,
    *,
    spec: BuiltinSpec = BuiltinSpec(),
    progress: Progress | None = None,
) -> Path:
    """
    Make the built-in model in this directory, unless it is there; return the directory.

    A directory that is complete and made from the same recipe is not touched. One that is ours but
    damaged or from another recipe is replaced. Two processes may call this at the same time: one
    makes the model, the other waits for it.

    Args:
        directory: Where the model shall lie. Parents are created.
        spec: Shape and seed.
        progress: Told after each step; not called if there is nothing to do.

    Raises:
        BuiltinModelError: When the directory holds something that we did not make or cannot be
            written, or the corpus does not yield a vocabulary of the size wanted.
    """
    recipe = _recipe(spec)
    try:
        if _is_complete(directory, recipe):
            return directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(directory):
            if not _is_complete(directory, recipe):
                _refuse_foreign(directory)
                _make(directory, spec, recipe, progress or _no_progress)
    except OSError as error:
        raise BuiltinModelError(
            f"The built-in model cannot be made at {directory}: {error.strerror}. It takes about "
            "20 MB; free some space, or name another place with --data-dir."
        ) from error
    return directory


# -- the directory ---------------------------------------------------------------------------------


def _make(directory: Path, spec: BuiltinSpec, recipe: str, progress: Progress) -> None:
    """Write all files beside the directory and put them in its place with one rename."""
    partial = directory.with_name(f".{directory.name}.partial")
    retired = directory.with_name(f".{directory.name}.retired")
    for left_over in (partial, retired):
        # Of a maker that was killed: we hold the lock, so it is nobody's work in hand.
        shutil.rmtree(left_over, ignore_errors=True)

    partial.mkdir()
    try:
        manifest: dict[str, dict[str, int | str]] = {}
        for name, content in _files(spec, progress):
            _write(partial / name, content)
            manifest[name] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        record = {"name": BUILTIN_NAME, "recipe": recipe, "files": manifest}
        _write(partial / MANIFEST_NAME, _json_bytes(record))

        if directory.exists():
            directory.rename(retired)
        partial.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def _is_complete(directory: Path, recipe: str) -> bool:
    """Whether the manifest is of this recipe and all of its files are there, byte for byte."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
        if manifest["recipe"] != recipe:
            return False
        return all(
            hashlib.sha256((directory / name).read_bytes()).hexdigest() == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, KeyError, TypeError, AttributeError):
        # A manifest that cannot be read is a damaged one.
        return False


def _refuse_foreign(directory: Path) -> None:
    """Raise if the directory holds something that we did not make."""
    if not directory.exists() or (directory / MANIFEST_NAME).exists():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise BuiltinModelError(f"{directory} is taken by something other than the built-in model")


@contextmanager
def _only_maker(directory: Path) -> Iterator[None]:
    """Wait until no other process makes this model, and keep others out meanwhile."""
    with directory.with_name(f".{directory.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _recipe(spec: BuiltinSpec) -> str:
    """Name everything that the files are made from."""
    ingredients = {
        "version": RECIPE_VERSION,
        "spec": attrs.asdict(spec),
        "corpus": hashlib.sha256(_package_text(_CORPUS_NAME).encode()).hexdigest(),
        "template": hashlib.sha256(_package_text(_TEMPLATE_NAME).encode()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


# -- the files -------------------------------------------------------------------------------------


def _files(spec: BuiltinSpec, progress: Progress) -> Iterator[tuple[str, bytes]]:
    """Yield each file's name and content, telling the progress on the way."""
    step_count = spec.layer_count + 3

    tokenizer = _train_tokenizer(spec)
    yield "tokenizer.json", (tokenizer.to_str(pretty=True) + "\n").encode()
    yield "tokenizer_config.json", _json_bytes(_tokenizer_config(spec))
    progress("tokenizer trained", 1, step_count)

    vocabulary = tokenizer.get_vocab()
    turn_end_id, text_end_id = vocabulary[TURN_END], vocabulary[TEXT_END]
    yield "config.json", _json_bytes(_config(spec, turn_end_id, text_end_id))
    yield "generation_config.json", _json_bytes(_generation_config(turn_end_id, text_end_id))

    bits = np.random.PCG64(spec.seed)
    weights = _outer_weights(bits, spec, _row_gains(tokenizer))
    progress("embeddings drawn", 2, step_count)
    for layer in range(spec.layer_count):
        weights.update(_layer_weights(bits, spec, layer))
        progress(f"layer {layer + 1} drawn", layer + 3, step_count)
    yield "model.safetensors", tensors_to_bytes(weights, metadata={"format": "mlx"})
    progress("model written", step_count, step_count)


def _train_tokenizer(spec: BuiltinSpec) -> Tokenizer:
    """
    Train a byte-level BPE on the corpus; the control tokens get the last ids, as in Qwen3.

    Nothing is normalised, so any text comes back as it was.

    Raises:
        BuiltinModelError: When the corpus is too small for the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size - len(_CONTROL_TOKENS),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_package_text(_CORPUS_NAME).splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKER_TOKENS])
    if tokenizer.get_vocab_size() != spec.vocab_size:
        raise BuiltinModelError(
            f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {spec.vocab_size}"
        )
    return tokenizer


def _config(spec: BuiltinSpec, turn_end_id: int, text_end_id: int) -> dict[str, object]:
    """Build config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": turn_end_id,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": spec.head_count,
        "num_hidden_layers": spec.layer_count,
        "num_key_value_heads": spec.kv_head_count,
        "pad_token_id": text_end_id,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }


def _generation_config(turn_end_id: int, text_end_id: int) -> dict[str, object]:
    """Build generation_config.json."""
    return {
        "do_sample": True,
        "eos_token_id": [turn_end_id, text_end_id],
        "pad_token_id": text_end_id,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def _tokenizer_config(spec: BuiltinSpec) -> dict[str, object]:
    """Build tokenizer_config.json, with a class that takes tokenizer.json as it is."""
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": _package_text(_TEMPLATE_NAME),
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": spec.max_position_embeddings,
        "pad_token": TEXT_END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


# -- the weights -----------------------------------------------------------------------------------


def _outer_weights(
    bits: np.random.PCG64, spec: BuiltinSpec, row_gains: _Array
) -> dict[str, _Array]:
    """
    Draw embeddings, final norm and, where it is not tied, the head.

    Args:
        row_gains: (vocab_size, 1), float32; scales the rows that make the logits.
    """
    shape = (spec.vocab_size, spec.hidden_size)
    weights = {
        "model.embed_tokens.weight": _normal(bits, shape, std=_EMBEDDING_STD),
        "model.norm.weight": _norm(bits, spec.hidden_size),
    }
    if not spec.tie_word_embeddings:
        weights["lm_head.weight"] = _normal(bits, shape, std=_EMBEDDING_STD)
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    weights[head] *= row_gains
    return weights


def _row_gains(tokenizer: Tokenizer) -> _Array:
    """Say how loud each token's row is in the head: (vocab_size, 1), float32."""
    gains = np.ones((tokenizer.get_vocab_size(), 1), dtype=np.float32)
    for token, token_id in tokenizer.get_vocab().items():
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if token == TURN_END:
            gains[token_id] = _TURN_END_GAIN
        elif token in _CONTROL_TOKENS or not _is_readable(text):
            gains[token_id] = _QUIET_GAIN
    return gains


def _is_readable(text: str) -> bool:
    """Whether this is neither a piece of a character nor a control character."""
    # Not str.isprintable: its tables differ from one Python to the next.
    return "\ufffd" not in text and all(char == "\n" or " " <= char != "\x7f" for char in text)


def _layer_weights(bits: np.random.PCG64, spec: BuiltinSpec, layer: int) -> dict[str, _Array]:
    """
    Draw one layer, under the names of mlx-lm's Qwen3.

    Inputs are normed, so a matrix that adds to the residual stream with std gain / sqrt(fan in)
    adds about the gain for each dimension.
    """
    hidden, middle = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
    place = f"model.layers.{layer}"

    def matrix(rows: int, columns: int, gain: float = 1.0) -> _Array:
        return _normal(bits, (rows, columns), std=gain / math.sqrt(columns))

    return {
        f"{place}.input_layernorm.weight": _norm(bits, hidden),
        f"{place}.self_attn.q_proj.weight": matrix(queries, hidden),
        f"{place}.self_attn.k_proj.weight": matrix(keys, hidden),
        f"{place}.self_attn.v_proj.weight": matrix(keys, hidden),
        f"{place}.self_attn.o_proj.weight": matrix(hidden, queries, _LAYER_GAIN),
        f"{place}.self_attn.q_norm.weight": _norm(bits, spec.head_dim, mean=_HEAD_NORM),
        f"{place}.self_attn.k_norm.weight": _norm(bits, spec.head_dim, mean=_HEAD_NORM),
        f"{place}.post_attention_layernorm.weight": _norm(bits, hidden),
        f"{place}.mlp.gate_proj.weight": matrix(middle, hidden),
        f"{place}.mlp.up_proj.weight": matrix(middle, hidden),
        f"{place}.mlp.down_proj.weight": matrix(hidden, middle, _LAYER_GAIN),
    }


def _norm(bits: np.random.PCG64, size: int, mean: float = 1.0) -> _Array:
    """Draw the weights of a norm: around the mean, so that a norm left out shows."""
    return _normal(bits, (size,), std=_NORM_STD, mean=mean)


def _normal(
    bits: np.random.PCG64, shape: tuple[int, ...], *, std: float, mean: float = 0.0
) -> _Array:
    """
    Draw nearly normal numbers: the sum of four 16-bit integers each, scaled (tails end at 3.5 std).

    Up to the scaling all is integers, and that is one multiplication and one addition in float64,
    which IEEE 754 rounds in one way: rule 1 above.
    """
    raw = np.asarray(bits.random_raw(math.prod(shape)), dtype="<u8")
    sums = raw.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
    # Each of the four has mean (2^16 - 1) / 2 and variance (2^32 - 1) / 12.
    centred = (sums - 2 * (2**16 - 1)).astype(np.float64)
    drawn: _Array = (centred * (std / math.sqrt((2**32 - 1) / 3)) + mean).astype(np.float32)
    return drawn.reshape(shape)


# -- small things ----------------------------------------------------------------------------------


def _package_text(name: str) -> str:
    """Read a text that ships with the package, with line ends as they were written."""
    content = resources.files("cairn.engine").joinpath(name).read_bytes()
    return content.decode().replace("\r\n", "\n")


def _json_bytes(value: object) -> bytes:
    """Encode as JSON that is the same bytes for equal values."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file and see it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """See a directory's entries on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_progress(done: str, step: int, step_count: int) -> None:
    """Tell nobody."""
