"""
Small tokenizers of the kinds that models use, each trained here on a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

START, END, MARK = "<|im_start|>", "<|im_end|>", "<think>"

LINES = [
    "The Stones of a cairn lie One upon another, and the path goes ON from there.",
    "def path(stones):\n    return [stone for stone in stones if stone.is_dry]\n\n",
    "Über die Brücke, 石の上にも三年; 12 + 345 = 357. It's what they'd said!  \t Twice.",
    "user assistant system <|im start end think| >< |> im_ _end",
]

GPT2 = r"'s|'t|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def added(*contents: str, **flags: bool) -> list[AddedToken]:
    """Added tokens, by default with ``normalized=False``."""
    return [AddedToken(content, **{"normalized": False, **flags}) for content in contents]


def wrapped(tokenizer: Tokenizer) -> Any:
    """A tokenizer as a loaded model has it: transformers' object in mlx-lm's wrapper."""
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def bpe(
    pattern: str = QWEN,
    *,
    prefix: bool = False,
    tokens: Sequence[AddedToken] = (),
    normalizer: Any = None,
) -> Tokenizer:
    """A byte-level BPE that splits words by a pattern."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator(LINES, trainer)
    made.add_tokens(list(tokens) or added(START, END, MARK))
    return made


def like_qwen() -> Tokenizer:
    """NFC, then a byte-level BPE; several special tokens, and one that is not special."""
    made = bpe(normalizer=normalizers.NFC(), tokens=added(MARK, "</think>"))
    made.add_special_tokens(added(START, END))
    return made


def like_gpt2() -> Tokenizer:
    """A space before every stretch, and a template that would put a token around the text."""
    made = bpe(GPT2, prefix=True)
    made.add_special_tokens(added("<|endoftext|>"))
    end = made.token_to_id("<|endoftext|>")
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
            ),
        ]
    )
    return made


def like_llama() -> Tokenizer:
    """
    The older form: the normaliser puts a bar before every stretch, and there are no words.
    """
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.train_from_iterator(LINES, _pieces_trainer())
    made.add_special_tokens(added("<unk>", START, END))
    return made


def like_mistral(scheme: str = "first", *, split: bool = False) -> Tokenizer:
    """Metaspace: a bar before each word, and depending on the scheme one before the text."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    made.train_from_iterator(LINES, _pieces_trainer())
    made.add_special_tokens(added("<unk>", START, END))
    made.add_tokens(added(MARK))
    return made


def like_gemma() -> Tokenizer:
    """Spaces become bars, words are split after them, and runs of newlines are added tokens."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.train_from_iterator(LINES, _pieces_trainer())
    made.add_special_tokens(added("<unk>", START, END))
    made.add_tokens(added("\n\n", "\n\n\n", "  ", "\t"))
    return made


def like_t5() -> Tokenizer:
    """Unigram after NFKC and a normaliser that collapses spaces."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    made.train_from_iterator(LINES, trainer)
    made.add_special_tokens(added(START, END))
    return made


def like_bert() -> Tokenizer:
    """Lower case, WordPiece, and added tokens that are only matched after normalisation."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"]
    )
    made.train_from_iterator(LINES, trainer)
    made.add_special_tokens(added(START, END))
    made.add_tokens(added("Stones", "ON", "one u", normalized=True))
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made


def stripping() -> Tokenizer:
    """Added tokens that strip white space on the left, on the right, and on both sides."""
    made = bpe(tokens=added("\n\n", "  "))
    made.add_tokens(added(START, lstrip=True, rstrip=True))
    made.add_tokens(added(END, rstrip=True))
    made.add_tokens(added(MARK, lstrip=True))
    made.add_tokens(added("</s>", "\tx"))
    return made


def stripping_phi() -> Tokenizer:
    """Metaspace at the beginning of the text, and all tokens but one strip on the right."""
    made = like_mistral()
    made.add_special_tokens(added(START, END, rstrip=True))
    return made


def overlapping() -> Tokenizer:
    """Added tokens that share their beginning or end with others, or are contained in others."""
    within = ("<a>", "<a><b>", "b><", "a", "><|", "\n<|im", "<|im_")
    return bpe(tokens=added(*within, START, END, END + ">"))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "like qwen": like_qwen,
    "like gpt2": like_gpt2,
    "like llama": like_llama,
    "like mistral": like_mistral,
    "bar always": lambda: like_mistral("always", split=True),
    "bar never": lambda: like_mistral("never"),
    "like gemma": like_gemma,
    "like t5": like_t5,
    "like bert": like_bert,
    "stripping": stripping,
    "stripping phi": stripping_phi,
    "overlapping": overlapping,
}
"""All that can be cut. Those that cannot are made in the tests of their refusal."""


def _pieces_trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=200, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
