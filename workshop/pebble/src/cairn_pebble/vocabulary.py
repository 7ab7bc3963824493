"""
Add tokens to the vocabulary of an exported model, for the words of first messages.

The tokenizer of 0.1.0 was trained on the first dialogues, so it spelled out four of ten words that
users type: "hi" was two tokens, "hello" three. The first layers of the model hardly attended to
such pieces, so it answered "hi", "ok" and "help" alike. As one token, "hi" was learned within
700,000 tokens of first messages. Merges are added after the old ones: a text without new tokens
stays the same.

    python -P -m cairn_pebble.vocabulary --from /tmp/pebble/model --out /tmp/words

The result is a model of the recipe ``2m-words``, to go on from:

    python -P -m cairn_pebble.train --work /tmp/on --from /tmp/words --after rest
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import attrs
import mlx.core as mx
from tokenizers import Tokenizer

from cairn_pebble.export import export, read_exported
from cairn_pebble.recipe import ADDED_TOKENS, RECIPES
from cairn_pebble.sequences import template
from cairn_pebble.texts.first_messages import first_messages
from cairn_pebble.texts.words import Split
from cairn_pebble.training import new_model

Merge: TypeAlias = tuple[str, str]

_DIALOGUES: Final = 12_000
_SPACE: Final = "Ġ"
_SHRINK: Final = 0.6
"""The sum of two rows is larger than either; with this factor new rows have the usual size."""


def typed_words(tokenizer: Tokenizer, dialogues: int = _DIALOGUES) -> Counter[str]:
    """
    How often users type each word of small letters in first messages, as the tokenizer splits a
    text before it merges. Words of a name, a number or a mark are left out: they are copied, and
    copying is learned by their pieces.
    """
    split: Any = tokenizer.pre_tokenizer
    rng, found = Random(0), Counter[str]()
    for _ in range(dialogues):
        for message in first_messages(rng, Split.TRAIN).messages:
            if message["role"] == "user":
                found.update(word for word, _ in split.pre_tokenize_str(message["content"]))
    plain = {word: word.removeprefix(_SPACE) for word in found}
    return Counter(
        {word: found[word] for word, one in plain.items() if one.isalpha() and one.islower()}
    )


def new_merges(
    words: Mapping[str, int], pieces: Mapping[str, tuple[str, ...]], count: int
) -> list[Merge]:
    """
    The pairs that byte-level BPE would merge next, most frequent first.

    Args:
        words: how often each occurs.
        pieces: of each word, the tokens.
        count: of merges; fewer are returned if each word is one token before that.
    """
    left, merges = dict(pieces), list[Merge]()
    while len(merges) < count:
        pairs = Counter[Merge]()
        for word, parts in left.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        merge = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(merge)
        left = {word: _merged(parts, merge) for word, parts in left.items()}
    return merges


def _merged(parts: tuple[str, ...], merge: Merge) -> tuple[str, ...]:
    found: list[str] = []
    for part in parts:
        if found and (found[-1], part) == merge:
            found[-1] += part
        else:
            found.append(part)
    return tuple(found)


def with_merges(tokenizer: Tokenizer, merges: Sequence[Merge]) -> Tokenizer:
    """
    A tokenizer with further merges. Their tokens get the ids of the control tokens, which keep the
    last ids and so move up. Does not modify the first tokenizer.
    """
    told = json.loads(tokenizer.to_str())
    model, following = told["model"], tokenizer.get_vocab_size(with_added_tokens=False)
    for number, merge in enumerate(merges):
        model["vocab"]["".join(merge)] = following + number
        model["merges"].append(list(merge))
    for token in told["added_tokens"]:
        token["id"] += len(merges)
    return Tokenizer.from_str(json.dumps(told))


def with_rows(embeddings: mx.array, tokenizer: Tokenizer, merges: Sequence[Merge]) -> mx.array:
    """
    Embeddings, (V, D), with a row for each merge, made of those of its two parts: (V + merges, D).
    The new rows are before those of the control tokens.

    Args:
        tokenizer: the one without the merges.
    """
    rows = {token: embeddings[number] for token, number in tokenizer.get_vocab().items()}
    for first, second in merges:
        rows[first + second] = (rows[first] + rows[second]) * _SHRINK
    new = [rows["".join(merge)][None] for merge in merges]
    control = tokenizer.get_vocab_size(with_added_tokens=False)
    return mx.concatenate([embeddings[:control], *new, embeddings[control:]])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", type=Path, dest="start", required=True, help="an exported model of 2m"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    shape = RECIPES["2m"].shape
    exported = read_exported(options.start, shape)
    tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
    words = typed_words(tokenizer)
    pieces = {word: tuple(one.value for one in tokenizer.model.tokenize(word)) for word in words}
    merges = new_merges(words, pieces, ADDED_TOKENS)
    if len(merges) < ADDED_TOKENS:
        sys.exit(f"Only {len(merges)} tokens can be added; the recipe 2m-words has {ADDED_TOKENS}.")
    grown = attrs.evolve(shape, vocab_size=shape.vocab_size + len(merges))
    weights = dict(exported.weights)
    name = "model.embed_tokens.weight"
    weights[name] = with_rows(weights[name], tokenizer, merges)
    model = new_model(grown, 0)
    model.load_weights(list(weights.items()))
    export(options.out, model, with_merges(tokenizer, merges), template(), grown)
    split = sum(words[word] for word, parts in pieces.items() if len(parts) > 1)
    print(
        f"{len(merges)} tokens added. Before, {split / words.total():.0%} of the words that users "
        f"type in first messages were several tokens. Written to {options.out}"
    )


if __name__ == "__main__":
    main()
