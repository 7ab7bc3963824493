"""
The parts of dialogues: invented names, numbers, colours, things, and sentences without facts.

Each drawn value belongs to one split, so training never draws what the evaluation draws. A checksum
of the text decides.
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, TypeVar

T = TypeVar("T")


class Split(Enum):
    """The purpose of a draw: training or evaluation."""

    TRAIN = "train"
    HELD_OUT = "held-out"


_HELD_OUT_SHARE: Final = 8
"""One in this many names, numbers and wordings is held out of the training."""

_HEADS: Final = (
    *("bal", "ber", "bor", "cal", "cor", "dan", "dor", "fal", "fen", "gar", "gil", "hal", "hen"),
    *("jan", "jor", "kel", "kor", "lan", "lor", "mal", "mer", "mir", "nal", "nor", "pal", "per"),
    *("ral", "ron", "sal", "sel", "sil", "tal", "tam", "tor", "val", "ver", "vin", "wal", "wil"),
    *("yor", "zan", "zel"),
)
_MIDDLES: Final = ("be", "di", "fo", "gu", "li", "mo", "ne", "pi", "ra", "so", "ta", "vi")
_TAILS: Final = (
    *("bin", "da", "den", "dis", "do", "fa", "fin", "ga", "gon", "ka", "kin", "ko", "la", "lin"),
    *("lo", "ma", "min", "mo", "na", "nis", "no", "ra", "rik", "ros", "sa", "sen", "so", "ta"),
    *("ten", "tis", "to", "va", "vik", "vo", "za", "zo"),
)
_ENDINGS: Final = ("ham", "ton", "burg", "dale", "wick", "mouth", "field", "port", "stead", "ford")
_ONSETS: Final = (
    *("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"),
    *("br", "dr", "gr", "kl", "pl", "st", "tr", "sh", "th", "ch", "qu", "", ""),
)
_VOWELS: Final = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ou", "y")
_CODAS: Final = ("", "", "", "l", "n", "r", "s", "m", "d", "k", "th", "nd", "rk", "st", "x")
_ODD_SHARE: Final = 0.2
"""
One in this many names uses other syllables, with any number of tokens; twice as many in training.
"""

_FIRST_NAMES: Final = (
    *("Maria", "Peter", "Thomas", "Kate", "Bob", "Alice", "John", "Mary", "Paul", "Lisa", "Tom"),
    *("Julia", "David", "Sarah", "Michael", "Susan", "James", "Linda", "Robert", "Karen", "Daniel"),
    *("Lucas", "Sofia", "Elena", "Ivan", "Olga", "Yuki", "Kenji", "Mei", "Wei", "Priya", "Raj"),
    *("Ahmed", "Fatima", "Omar", "Layla", "Diego", "Carlos", "Lucia", "Pedro", "Ana", "Luis"),
    *("Hans", "Greta", "Lars", "Ingrid", "Sven", "Astrid", "Nils", "Freya", "Liam", "Aoife"),
    *("Jack", "Emily", "Oliver", "Amelia", "Harry", "Olivia", "George", "Grace", "Noah", "Chloe"),
    *("Max", "Mia", "Leo", "Lena", "Felix", "Hannah", "Jonas", "Clara", "Simon", "Eva", "Adam"),
    *("Nina", "Victor", "Irina", "Andrew", "Helen", "Mark", "Alexander", "Elizabeth", "William"),
    *("Chris", "Pat", "Alex", "Jo", "Kim", "Lee", "Zoe", "Ed", "Ruth", "Ellen", "Frank", "Rosa"),
    *("Bella", "Luna", "Charlie", "Bruno", "Milo", "Daisy", "Rocky", "Nala", "Simba", "Felicity"),
)
_FAMILY_NAMES: Final = (
    *("Smith", "Miller", "Johnson", "Brown", "Garcia", "Martinez", "Schmidt", "Weber", "Fischer"),
    *("Rossi", "Ferrari", "Novak", "Petrov", "Ivanov", "Tanaka", "Sato", "Wang", "Chen", "Singh"),
    *("Patel", "Khan", "Hansen", "Larsen", "Nilsson", "Murphy", "Kelly", "Wilson", "Taylor"),
    *("Clark", "Lewis", "Walker", "Hall", "Young", "King", "Wright", "Green", "Baker", "Dubois"),
)
_TOWNS: Final = (
    *("London", "Paris", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Warsaw", "Dublin"),
    *("Boston", "Chicago", "Denver", "Seattle", "Austin", "Toronto", "Tokyo", "Kyoto", "Seoul"),
    *("Delhi", "Mumbai", "Cairo", "Nairobi", "Lagos", "Lima", "Bogota", "Sydney", "Melbourne"),
    *("Hamburg", "Munich", "Zurich", "Geneva", "Milan", "Venice", "Porto", "Leeds", "York"),
    *("Bergen", "Helsinki", "Riga", "Athens", "Ghent", "Lyon", "Nice", "Graz", "Bern", "Kiel"),
)
_REAL: Final = frozenset((*_FIRST_NAMES, *_FAMILY_NAMES, *_TOWNS))
_REAL_SHARE: Final = 0.15
"""One in this many names and towns of the training is a real one; the evaluation draws none."""

COLOURS: Final = (
    *("red", "blue", "green", "yellow", "orange", "purple", "brown", "grey", "black", "white"),
    *("pink", "silver", "golden", "violet", "turquoise", "crimson", "beige", "olive", "indigo"),
)
FOODS: Final = (
    *("bread", "soup", "rice", "pasta", "apples", "pears", "cheese", "fish", "beans", "honey"),
    *("pancakes", "noodles", "plums", "carrots", "mushrooms", "lentils", "salad", "tea", "coffee"),
)
JOBS: Final = (
    *("teacher", "baker", "nurse", "carpenter", "pilot", "farmer", "painter", "plumber", "writer"),
    *("gardener", "cook", "driver", "doctor", "sailor", "librarian", "miner", "tailor", "mechanic"),
)
MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
THINGS: Final = (
    *(
        "key",
        "map",
        "lamp",
        "rope",
        "tent",
        "book",
        "letter",
        "ladder",
        "boat",
        "bicycle",
        "camera",
    ),
    *("parcel", "ticket", "umbrella", "hammer", "notebook", "guitar", "kettle", "basket", "radio"),
    *("passport", "suitcase", "blanket", "compass", "violin", "helmet", "wallet", "mirror"),
)
SPOTS: Final = (
    *(
        "kitchen",
        "garden",
        "cellar",
        "attic",
        "garage",
        "hall",
        "office",
        "barn",
        "library",
        "shed",
    ),
    *("drawer", "cupboard", "harbour", "tower", "workshop", "bathroom", "hut", "car", "church"),
)

_SUBJECTS: Final = (
    *(
        "The path",
        "The river",
        "A stone",
        "The old bridge",
        "The wind",
        "A small bird",
        "The baker",
    ),
    *(
        "Our neighbour",
        "The train",
        "The lake",
        "A grey cat",
        "The house on the hill",
        "The forest",
    ),
    *(
        "The clock in the hall",
        "The road to the pass",
        "The harbour",
        "A long letter",
        "The teacher",
    ),
    *("The meadow", "Every morning the boat", "The second floor", "The market", "A wooden door"),
)
_VERBS: Final = (
    *(
        "goes past",
        "lies behind",
        "stands near",
        "looks over",
        "leads to",
        "waits for",
        "belongs to",
    ),
    *("turns towards", "rests under", "comes from", "sings about", "remembers", "crosses", "keeps"),
    *("watches", "follows", "reaches", "hides behind", "starts at", "ends at"),
)
_OBJECTS: Final = (
    *("the mountain", "a field of wheat", "the station", "the sea", "an open window", "the mill"),
    *(
        "the last house",
        "a row of trees",
        "the empty square",
        "the morning light",
        "the lighthouse",
    ),
    *("a pile of stones", "the garden wall", "the winter road", "the valley", "some dry wood"),
    *("the summer rain", "the small island", "a cup of tea", "the first snow", "the quiet street"),
)
_ADVERBS: Final = (
    *("", "", "", " in the morning", " at night", " all year", " once a week", " without a sound"),
    *(" after the storm", " for a while", " as it always did", " until the evening", " in spring"),
)


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One of several choices."""
    return items[rng.randrange(len(items))]


def phrase(rng: random.Random, split: Split, *parts: Sequence[str]) -> str:
    """
    A wording: one of each part, in order.

    The training sees every part, but one combination in eight is held out, ignoring case and final
    punctuation. The evaluation draws held-out combinations, except those that the shipped weights
    have read before wordings were combinations.
    """

    while True:
        chosen = [pick(rng, part) for part in parts]
        text = "".join(chosen)
        held_out = is_held_out_wording(text)
        if split is Split.TRAIN and not held_out:
            return text
        if split is Split.HELD_OUT and held_out and not _read_before(chosen):
            return text


_OLD_WORDINGS: Final = re.compile(
    r"\{\} (a|one) \{\}|(now|please) \{\} the \{\}|now, what is [^.?!]*|thank you, pebble"
)


def _read_before(chosen: list[str]) -> bool:
    """
    Whether a wording may be one of the whole sentences of Pebble's first 11.8 million tokens.

    Those are sentences with nothing before or after them, and a few more.
    """
    alone = sum(map(bool, chosen)) == 1
    return alone or _OLD_WORDINGS.fullmatch(_plain("".join(chosen))) is not None


def inside(text: str) -> str:
    """
    A sentence as it appears after others: without the capital that only its position required.
    """
    return text if text.startswith("I ") or text[:2].isupper() else f"{text[:1].lower()}{text[1:]}"


def is_held_out_wording(text: str) -> bool:
    """
    Whether a wording is never trained on.

    The checksums of `is_held_out` depend on the parts of a text separately, so with some sets of
    parts no combination would be held out.
    """
    return hashlib.sha256(_plain(text).encode()).digest()[0] % _HELD_OUT_SHARE == 0


def _plain(text: str) -> str:
    return text.strip(" ?.!").casefold()


def is_held_out(text: str) -> bool:
    """Whether a name or number is never trained on."""
    return zlib.crc32(text.casefold().encode()) % _HELD_OUT_SHARE == 0


def of_split(rng: random.Random, split: Split, draw: Callable[[random.Random], str]) -> str:
    """
    One result of ``draw`` for the split.

    For training, a value that is not held out and contains no held-out number; for evaluation, a
    held-out value.
    """
    while True:
        text = draw(rng)
        if is_held_out(text):
            if split is Split.HELD_OUT and text not in _REAL:
                return text
        elif split is Split.TRAIN and not any(map(is_held_out, _NUMBERS.findall(text))):
            return text


_NUMBERS: Final = re.compile(r"(?<![^\W_])\d{2,}(?![^\W_])")


def _syllables(rng: random.Random, odd: float = _ODD_SHARE) -> str:
    """
    A name in small letters.

    Args:
        odd: the share of names with other syllables.
    """
    if rng.random() < odd:
        parts = [_ONSETS, _VOWELS, _CODAS] * rng.choices((1, 2, 3), (1, 6, 2))[0]
    elif rng.random() < 0.25:
        parts = [_HEADS, _MIDDLES, _TAILS]
    else:
        parts = [_HEADS, _TAILS]
    return "".join(pick(rng, part) for part in parts)


def is_of_syllables(text: str) -> bool:
    """Whether a name, town or password consists of the syllables that are single tokens."""
    return all(_KNOWN.fullmatch(word) for word in text.casefold().split())


_KNOWN: Final = re.compile(
    rf"({'|'.join(_HEADS)})({'|'.join(_MIDDLES)})?({'|'.join((*_TAILS, *_ENDINGS))})"
)


def name(rng: random.Random, split: Split) -> str:
    """An invented name: most are first names, some have a family name."""
    name = _one_name(rng, split, _FIRST_NAMES)
    if rng.random() < 0.05:
        name += " " + _one_name(rng, split, _FAMILY_NAMES)
    return name


def _one_name(rng: random.Random, split: Split, real: Sequence[str]) -> str:
    if split is Split.TRAIN and rng.random() < _REAL_SHARE:
        return pick(rng, real)
    odd = _ODD_SHARE * (2 if split is Split.TRAIN else 1)
    return of_split(rng, split, lambda rng: _syllables(rng, odd).capitalize())


def units() -> str:
    """
    The units that most values consist of, each cut out as the tokenizer splits texts.

    These are syllables, pairs of digits, and the words to choose from.
    """
    begin = [*map(str.capitalize, _HEADS), *(f" {head}" for head in _HEADS)]
    follow = [f"1{part}" for part in (*_MIDDLES, *_TAILS, *_ENDINGS)]
    pairs = [f" {number:02}" for number in range(100)]
    chosen = [f" {word}" for word in (*COLOURS, *FOODS, *JOBS, *MONTHS, *THINGS, *SPOTS)]
    return "".join(begin + follow + pairs + chosen)


def age(rng: random.Random, split: Split) -> str:
    """Years of a life."""
    return of_split(rng, split, lambda rng: str(rng.randrange(10, 100)))


def place(rng: random.Random, split: Split) -> str:
    """The name of an invented town."""

    def draw(rng: random.Random) -> str:
        middle = pick(rng, _MIDDLES) if rng.random() < 0.6 else ""
        return (pick(rng, _HEADS) + middle + pick(rng, _ENDINGS)).capitalize()

    if split is Split.TRAIN and rng.random() < _REAL_SHARE:
        return pick(rng, _TOWNS)
    return of_split(rng, split, draw)


def number(rng: random.Random, split: Split) -> str:
    """A number of two to six digits."""
    digits = rng.choices((2, 3, 4, 5, 6), (2, 3, 4, 1, 1))[0]
    return of_split(rng, split, lambda rng: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def word(rng: random.Random, split: Split) -> str:
    """A made-up word, as in passwords."""
    return of_split(rng, split, _syllables)


def sentence(rng: random.Random) -> str:
    """A sentence without facts."""
    return f"{pick(rng, _SUBJECTS)} {pick(rng, _VERBS)} {pick(rng, _OBJECTS)}{pick(rng, _ADVERBS)}."


def prose(rng: random.Random, count: int) -> str:
    """The given number of sentences."""
    return " ".join(sentence(rng) for _ in range(count))
