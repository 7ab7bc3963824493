"""
How people state facts and ask for them in everyday words.

Covers what people have and know, what follows in the same sentence, and remarks in between. The
lists of `dialogues` and `words` stay unchanged, because the model card's figures were measured with
them. Nothing here is a sentence of `by_hand`; a test checks that.
"""

from __future__ import annotations

import random
from typing import Final

import attrs

from cairn_pebble.texts import words
from cairn_pebble.texts.values import Value, amount, code, day, dish, of, person, spot, time
from cairn_pebble.texts.words import Split, pick


@attrs.frozen
class Relation:
    """
    A property that can have different values.

    Attributes:
        topic: what is asked for, as in "the name of my dentist"; it identifies the fact.
        draw: makes values.
        clauses: the fact as a clause; ``{}`` is the value.
        direct: whole questions.
        answer: the fact as Pebble says it, with the value last.
        topics: other words for the topic.
    """

    topic: str
    draw: Value
    clauses: tuple[str, ...]
    direct: tuple[str, ...]
    answer: str
    topics: tuple[str, ...] = ()


# --- relations -----------------------------------------------------------------------------------

RELATIVES: Final = (
    *("grandfather", "dentist", "landlord", "flatmate", "coach", "nephew", "niece", "godmother"),
    *("hairdresser", "lawyer", "tutor", "partner", "twin", "supervisor", "tenant", "trainer"),
    *("parrot", "rabbit", "hamster", "pony", "tortoise", "kitten", "puppy", "goat", "best friend"),
    *("guide", "assistant", "apprentice", "rival", "captain", "pen friend", "stepfather"),
)


def _called(who: str) -> Relation:
    return Relation(
        f"my {who}'s name",
        person,
        (
            *(f"my {who}'s name is {{}}", f"my {who} goes by {{}}", f"we call my {who} {{}}"),
            *(f"the name of my {who} is {{}}", f"everyone calls my {who} {{}}"),
            *(f"my {who} answers to {{}}", f"I have a {who}, {{}}", f"{{}} is my {who}"),
            *(f"I call my {who} {{}}", f"my {who} happens to be {{}}", f"{{}} is my {who}'s name"),
        ),
        (
            *(f"who is my {who}?", f"what do I call my {who}?", f"which name does my {who} have?"),
            *(f"what name does my {who} go by?", f"my {who} is called what?"),
            *(f"do you recall my {who}'s name?", f"how do we call my {who}?"),
        ),
        f"Your {who}'s name is {{}}.",
        (f"the name of my {who}",),
    )


_KEYS: Final[tuple[tuple[str, Value], ...]] = (
    *((noun, code) for noun in ("gate code", "booking reference", "licence plate", "badge number")),
    *((noun, code) for noun in ("tracking number", "serial number", "membership number")),
    *((noun, words.number) for noun in ("alarm code", "locker combination", "extension")),
    *((noun, words.number) for noun in ("library card number", "postcode", "tram line", "case")),
    *((noun, words.number) for noun in ("shoe size", "row", "bike lock code", "invoice number")),
    *((noun, words.word) for noun in ("login", "code name", "network", "handle", "magic word")),
)


def _key(noun: str, draw: Value) -> Relation:
    return Relation(
        f"my {noun}",
        draw,
        (
            *(f"my {noun} is {{}}", f"the {noun} is {{}}", f"it says {{}} as my {noun}"),
            *(f"they gave me {{}} as my {noun}", f"I use {{}} as my {noun}"),
            *(f"I got a new {noun}, {{}}", f"for my {noun} I have {{}}", f"{{}} is my {noun}"),
            *(f"my {noun} reads {{}}", f"my {noun} should be {{}}"),
        ),
        (
            *(f"which {noun} did I give you?", f"what did I say my {noun} is?"),
            *(f"how does my {noun} read?", f"what's that {noun} of mine?", f"my {noun} is what?"),
        ),
        f"Your {noun} is {{}}.",
        (f"the {noun}", f"that {noun}"),
    )


_DATES: Final = (
    *("appointment", "exam", "interview", "rehearsal", "check-up", "party", "deadline", "wedding"),
    *("concert", "lesson", "trip", "visit", "delivery", "race", "audition", "holiday"),
)


def _date(noun: str) -> Relation:
    return Relation(
        f"the day of my {noun}",
        day,
        (
            *(f"my {noun} is on {{}}", f"they set my {noun} for {{}}", f"my {noun} falls on {{}}"),
            *(f"the day of my {noun} is {{}}", f"I have my {noun} on {{}}"),
            *(f"my {noun} was moved to {{}}", f"{{}} is the day of my {noun}"),
        ),
        (
            *(
                f"when is my {noun}?",
                f"which day is my {noun}?",
                f"on what day do I have my {noun}?",
            ),
            *(f"for when is my {noun} set?", f"my {noun} is on which day?"),
        ),
        f"Your {noun} is on {{}}.",
        (f"the date of my {noun}",),
    )


_TIMES: Final = (
    "train",
    "bus",
    "ferry",
    "shift",
    "dinner",
    "film",
    "course",
    "tour",
    "flight home",
)


def _time(noun: str) -> Relation:
    return Relation(
        f"the time of my {noun}",
        time,
        (
            *(f"my {noun} is at {{}}", f"my {noun} starts at {{}}", f"I have my {noun} at {{}}"),
            *(f"the time of my {noun} is {{}}", f"my {noun} won't be before {{}}"),
        ),
        (
            *(f"what time is my {noun}?", f"at what time is my {noun}?", f"when is my {noun}?"),
            *(f"how late is my {noun}?",),
        ),
        f"Your {noun} is at {{}}.",
        (f"when my {noun} is",),
    )


_LIKED: Final[tuple[tuple[str, Value], ...]] = (
    ("season", of("spring", "summer", "autumn", "winter")),
    (
        "animal",
        of("foxes", "owls", "whales", "bears", "otters", "hares", "eagles", "deer", "seals"),
    ),
    ("instrument", of("flute", "cello", "drums", "harp", "trumpet", "organ", "banjo", "oboe")),
    ("sport", of("rowing", "tennis", "chess", "skiing", "running", "climbing", "swimming")),
    ("flower", of("roses", "tulips", "lilies", "daisies", "poppies", "asters", "violets")),
    ("dish", dish),
    ("dessert", dish),
    ("subject", of("history", "music", "algebra", "geography", "biology", "physics", "drawing")),
    ("language", of("Latin", "Greek", "Finnish", "Basque", "Welsh", "Korean", "Swahili", "Polish")),
    ("writer", person),
    ("painter", person),
    ("beach", words.place),
    ("valley", words.place),
)


def _liked(noun: str, draw: Value) -> Relation:
    return Relation(
        f"my favourite {noun}",
        draw,
        (
            *(f"my favourite {noun} is {{}}", f"the {noun} that I like most is {{}}"),
            *(f"if I had to choose one {noun}, it would be {{}}", f"no {noun} is as good as {{}}"),
            *(f"of every {noun} I know I prefer {{}}", f"as a {noun} I would pick {{}} any time"),
        ),
        (
            *(f"which {noun} do I like most?", f"what {noun} do I prefer?"),
            *(f"which {noun} would I pick?", f"what is the {noun} that I like most?"),
        ),
        f"Your favourite {noun} is {{}}.",
        (f"the {noun} that I prefer",),
    )


def _left(thing: str) -> Relation:
    return Relation(
        f"where my {thing} is",
        spot,
        (
            *(f"my {thing} is {{}}", f"I left my {thing} {{}}", f"I have hidden my {thing} {{}}"),
            *(f"you will find my {thing} {{}}", f"I keep my {thing} {{}}", f"my {thing} lies {{}}"),
        ),
        (
            *(f"where is my {thing}?", f"where did I leave my {thing}?", f"where's my {thing}?"),
            *(f"have you seen my {thing}?", f"where do I keep my {thing}?"),
        ),
        f"Your {thing} is {{}}.",
        (f"the place of my {thing}",),
    )


def _paid(thing: str) -> Relation:
    return Relation(
        f"the price of my {thing}",
        amount,
        (
            *(f"my {thing} cost {{}}", f"I paid {{}} for my {thing}", f"my {thing} was {{}}"),
            *(f"they wanted {{}} for my {thing}", f"the price of my {thing} was {{}}"),
        ),
        (
            *(f"what did I pay for my {thing}?", f"how much was my {thing}?"),
            *(f"what did my {thing} cost?", f"how much did I pay for my {thing}?"),
        ),
        f"Your {thing} cost {{}}.",
        (f"what my {thing} cost",),
    )


_DONE: Final[tuple[tuple[str, str, str, Value], ...]] = (
    ("studies", "study", "what", of("law", "music", "botany", "history", "medicine", "maths")),
    ("plays", "play", "what", of("the flute", "the cello", "chess", "the harp", "tennis")),
    ("rides", "ride", "what", of("a scooter", "a mule", "a tandem", "a pony", "a moped")),
    ("teaches", "teach", "what", of("Latin", "judo", "drawing", "pottery", "physics", "cooking")),
    ("speaks", "speak", "what", of("Welsh", "Greek", "Finnish", "Basque", "Swahili", "Polish")),
    ("collects", "collect", "what", of("stamps", "coins", "shells", "postcards", "clocks")),
    ("moved to", "move to", "where", words.place),
    ("grew up in", "grow up in", "where", words.place),
    ("cooks", "cook", "what", dish),
    ("supports", "support", "what", words.place),
    ("admires", "admire", "whom", person),
)
"""What people do: about others, in questions, the question word, and possible values."""


def _doing(rng: random.Random, split: Split) -> Relation:
    verb, base, what, draw = pick(rng, _DONE)
    past = what == "where"
    if rng.random() < 0.35:
        mine = verb if past else base
        do = "did" if past else "do"
        return Relation(
            f"{what} I {mine}",
            draw,
            (f"I {mine} {{}}", f"I {mine} {{}} myself", f"these days I {mine} {{}}"),
            (f"{what} {do} I {base}?", f"do you know {what} I {mine}?"),
            f"You {mine} {{}}.",
        )
    who = person(rng, split)
    clause = f"my {pick(rng, RELATIVES)} {who}" if rng.random() < 0.5 else who
    do = "did" if past else "does"
    return Relation(
        f"{what} {who} {verb}",
        draw,
        (f"{clause} {verb} {{}}", f"{clause} {verb} {{}} now", f"{clause} also {verb} {{}}"),
        (f"{what} {do} {who} {base}?", f"do you know {what} {who} {verb}?"),
        f"{who} {verb} {{}}.",
    )


def relation(rng: random.Random, split: Split) -> Relation:
    """One of all relations."""
    kind = rng.randrange(20)
    if kind < 5:
        return _called(pick(rng, RELATIVES))
    if kind < 9:
        return _key(*pick(rng, _KEYS))
    if kind < 11:
        return _date(pick(rng, _DATES))
    if kind < 12:
        return _time(pick(rng, _TIMES))
    if kind < 14:
        return _liked(*pick(rng, _LIKED))
    if kind < 16:
        return _left(pick(rng, words.THINGS))
    if kind < 17:
        return _paid(pick(rng, words.THINGS))
    return _doing(rng, split)


def relations_of(rng: random.Random, draw: Value, count: int) -> list[Relation]:
    """Different relations with values of one kind: names, numbers, codes or made-up words."""
    if draw is person:
        return [_called(who) for who in rng.sample(RELATIVES, count)]
    some = [key for key in _KEYS if key[1] is draw]
    return [_key(*key) for key in rng.sample(some, min(count, len(some)))]


# --- around a fact -------------------------------------------------------------------------------

OPENED: Final = (
    *("", "", "", "", "hey, ", "ok so ", "fyi, ", "btw, ", "listen: ", "right, ", "um, "),
    *("good to meet you, ", "one more thing: ", "before I forget, ", "also, ", "as I said, "),
    *("I should mention that ", "it so happens that ", "since you ask, ", "just for the record, "),
    *("my news: ", "what I can tell you is that ", "guess what, ", "to begin with, ", "and "),
    *("you may want to know that ", "I think I never told you, but ", "let me add that "),
)
CLOSED: Final = (
    *("", "", "", ".", ".", ".", "!", ", ok?", ". Got it?", ". Don't forget.", ". Keep it safe."),
    *(
        ". I will ask you later.",
        ". Save that for me.",
        " :)",
        "...",
        ". So much for that.",
        ", fine?",
    ),
    *(", you see.", ". Anyway.", ". Write it down.", ", in case you wonder.", ", by the way."),
)
_TAILED: Final = (
    *(", and I am glad of it", ", which nobody knows", ", at least for now", ", believe it or not"),
    *(", as of this week", ", if I am not mistaken", ", and that is good", ", whatever they say"),
    *(" since last year", " for the time being", " as far as I know", " at the moment", " again"),
)
_TAIL_BEGINS: Final = (" and ", ", and ", ", because ", ", but ", ", although ", ", while ", "; ")


def tail(rng: random.Random) -> str:
    """How a sentence continues after the value, so that Pebble learns where to stop copying."""
    kind = rng.random()
    if kind < 0.55:
        return ""
    if kind < 0.75:
        return pick(rng, _TAILED)
    return pick(rng, _TAIL_BEGINS) + remark(rng).rstrip(".!")


_WHO: Final = ("I", "we", "they", "the neighbours", "my family", "you", "people here", "some of us")
_DID: Final = (
    *("slept badly", "went out", "had to wait", "missed the bus", "stayed at home", "made soup"),
    *("cleaned the windows", "watched the rain", "lost the way", "fixed the roof", "fed the hens"),
    *("ran out of milk", "met an old friend", "took a long walk", "forgot the time", "sang a lot"),
    *(
        "worked until late",
        "planted some trees",
        "read the paper",
        "painted the door",
        "were tired",
    ),
)
_WHEN: Final = (
    *("", "", "", " yesterday", " all day", " this morning", " last week", " again", " as usual"),
    *(
        " in the rain",
        " with the children",
        " after lunch",
        " before noon",
        " for an hour",
        " twice",
    ),
    *(" on the way home", " in a hurry", " with two cups of tea", " without a reason", " together"),
)
_IT: Final = (
    *("it rained", "it is cold", "the sun is out", "the shop was shut", "dinner was good"),
    *("the train was full", "there is snow on the hills", "the coffee is gone", "work was hard"),
    *("the garden looks nice", "nothing much happened", "the kids are loud", "my back hurts"),
)


def remark(rng: random.Random) -> str:
    """A sentence with no fact that is asked for later, starting with a small letter."""
    kind = rng.random()
    if kind < 0.4:
        return f"{pick(rng, _WHO)} {pick(rng, _DID)}{pick(rng, _WHEN)}."
    if kind < 0.6:
        return f"{pick(rng, _IT)}{pick(rng, _WHEN)}."
    text = words.sentence(rng)
    return text[:1].lower() + text[1:]


ASK_OPENED: Final = (
    *("", "", "", "", "", "hm, ", "quick question: ", "ok, ", "wait, ", "sorry, ", "ah, "),
    *("just checking: ", "now tell me, ", "btw, ", "let me see: ", "back to me: ", "help me out, "),
    *("I can't recall, ", "once more, ", "a test: ", "uh, ", "oh no, ", "say, ", "another thing: "),
)
ASKED: Final = (
    *("what is {}?", "what's {}?", "give me {}", "I need {}", "let me hear {}", "repeat {}"),
    *("what did I say about {}?", "what was {} again?", "which was {}?", "any idea about {}?"),
    *("what do you have as {}?", "can you look up {}?", "do you have {}?", "tell me {} again"),
    *("I'm looking for {}", "state {}", "and {}?", "how about {}?", "what about {}?"),
)
ASK_CLOSED: Final = (
    *("", "", "", "", "", " again", " pls", ", if you remember", ", do you know", " please"),
    *(" I told you earlier.", " You should know.", " I really need it.", " Thanks!", " Any idea?"),
    *(" It slipped my mind.", " I mentioned it before."),
)


def casual(rng: random.Random, text: str) -> str:
    """Vary capitals, apostrophes and final punctuation as users type them. Values are unchanged."""
    if rng.random() < 0.5:
        text = text[:1].upper() + text[1:]
    if rng.random() < 0.2:
        for whole, short in _SHORTENED:
            text = text.replace(whole, short)
    kind = rng.random()
    if kind < 0.2:
        text = text.rstrip("?.!")
    elif kind < 0.25 and text.endswith("?"):
        text += rng.choice(("?", "!", "??"))
    return text


_SHORTENED: Final = (
    *(("what's", "whats"), ("I'm", "im"), ("don't", "dont"), ("can't", "cant"), ("won't", "wont")),
    *(("where's", "wheres"), (" you ", " u "), ("What's", "Whats"), ("Where's", "Wheres")),
)
