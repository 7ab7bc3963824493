"""Answers to the openings, the verdicts on them, and what is counted."""

import json
import re
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Final

import attrs
import click

from cairn_pebble.first_chat.openings import Opening, find_loop, read_openings

LONGEST_ANSWER: Final = 256
"""Tokens; an answer that has not ended by then is wrong."""
AIM: Final = 0.9
IN_ONE_CHAT: Final = "chat/"
"""Begins the id of an answer that was given in the long chat."""

_WORST_FIRST: Final = ("loop", "wrong", "honest", "fitting")
_JUDGED: Final = _WORST_FIRST[1:]


class BadVerdicts(click.ClickException):
    """A judge's file does not fit the transcript. The message says where and why."""


@attrs.frozen(kw_only=True)
class Asked:
    """
    An opening and its answer: a line of a transcript.

    Attributes:
        id: the opening's, after ``chat/`` if it was asked in the long chat.
        finish_reason: as the server gave it.
        verdict: what the program decided, or None.
        why: what it decided by.
    """

    id: str
    asked: str
    said: str
    finish_reason: str
    answer_tokens: int
    verdict: str | None = None
    why: str | None = None

    @property
    def in_one_chat(self) -> bool:
        """Whether it was asked in the long chat."""
        return self.id.startswith(IN_ONE_CHAT)


def decided(
    opening: Opening, name: str, said: str, finish_reason: str, answer_tokens: int
) -> Asked:
    """An answer with what needs no judge."""
    verdict = why = None
    if finish_reason == "length" and answer_tokens < LONGEST_ANSWER:
        # OpenAI's protocol has no reason of its own for the guard.
        verdict, why = "loop", "the repetition guard ended it"
    elif (found := find_loop(said, opening.text)) is not None:
        verdict, why = "loop", f"repeats {found!r}"
    elif finish_reason != "stop":
        verdict, why = "wrong", f"did not end within {LONGEST_ANSWER} tokens"
    elif not said.strip():
        verdict, why = "wrong", "empty"
    return Asked(
        id=name,
        asked=opening.text,
        said=said,
        finish_reason=finish_reason,
        answer_tokens=answer_tokens,
        verdict=verdict,
        why=why,
    )


def read_transcript(path: Path) -> tuple[dict[str, str], list[Asked]]:
    """The facts about the model, and the answers."""
    first, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return first, [Asked(**line) for line in lines]


def read_verdicts(path: Path, asked: Sequence[Asked]) -> dict[str, str]:
    """
    A judge's verdict on each answer that the program did not decide, by id.

    Raises:
        BadVerdicts: a line is not a verdict, or an answer has none or two.
    """
    due = {one.id: one for one in asked if one.verdict is None}
    patterns = {opening.id: opening.answer for opening in read_openings()}
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, verdict, *_ = [*line.split(maxsplit=2), "", ""]
        if not name or name.startswith("#"):
            continue
        fault = None
        if name not in due:
            fault = f"{name} is no answer of this transcript that a judge decides"
        elif verdict not in _JUDGED:
            fault = f"{name} needs one of {', '.join(_JUDGED)}, not {verdict or 'nothing'!r}"
        elif name in found:
            fault = f"{name} has a verdict already"
        elif verdict == "fitting" and not _matches(patterns[_opening(name)], due[name].said):
            fault = f"{name} cannot be fitting, because the right answer is not in it"
        if fault:
            raise BadVerdicts(f"{path}, line {number}: {fault}.")
        found[name] = verdict
    if missing := due.keys() - found.keys():
        raise BadVerdicts(f"{path} has no verdict on {', '.join(sorted(missing))}.")
    return found


def _matches(pattern: str | None, said: str) -> bool:
    return pattern is None or re.search(pattern, said, re.IGNORECASE) is not None


def _opening(name: str) -> str:
    return name.removeprefix(IN_ONE_CHAT)


def verdicts_of(asked: Sequence[Asked], judges: Sequence[dict[str, str]]) -> dict[str, str]:
    """The program's verdict on each answer, or else the worst of the judges'."""
    return {
        one.id: one.verdict or min((judge[one.id] for judge in judges), key=_WORST_FIRST.index)
        for one in asked
    }


def report(
    facts: dict[str, str],
    asked: Sequence[Asked],
    judges: Sequence[dict[str, str]],
    trained: Container[str],
) -> str:
    """
    The figures and the transcript of the long chat, as a page of Markdown.

    Args:
        trained: the ids of the openings that the training has as well.
    """
    openings = {opening.id: opening for opening in read_openings()}
    verdicts = verdicts_of(asked, judges)
    lines = ["# What Pebble answers to a stranger", ""]
    lines += [f"Weights: `{facts['weights']}`. Judges: {len(judges)}.", ""]
    if len(judges) > 1:
        same = sum(len({judge[name] for judge in judges}) == 1 for name in judges[0])
        lines += [f"The judges agree on {same} of {len(judges[0])} answers.", ""]
    for where, some in (
        ("each alone", [one for one in asked if not one.in_one_chat]),
        ("forty in one chat", [one for one in asked if one.in_one_chat]),
    ):
        lines += [f"## Asked {where}", ""]
        lines += _row("kind", "fitting", "honest", "wrong", "loop", "passed", "of")
        lines.append("|" + "---|" * 7)
        kinds = list(dict.fromkeys(openings[_opening(one.id)].kind for one in some))
        for kind in (*kinds, "all"):
            mine = [one for one in some if kind in ("all", openings[_opening(one.id)].kind)]
            count = Counter(verdicts[one.id] for one in mine)
            passed = sum(_passes(openings[_opening(one.id)], verdicts[one.id]) for one in mine)
            figures = [count[verdict] for verdict in reversed(_WORST_FIRST)]
            lines += _row(kind, *figures, passed, len(mine))
        strict = [one for one in some if not openings[_opening(one.id)].honest_passes]
        fitting = sum(verdicts[one.id] == "fitting" for one in strict)
        lines += [
            "",
            f"Where an honest refusal does not pass, {fitting} of {len(strict)} are fitting.",
            _by_training(openings, some, verdicts, trained),
            f"The aim is at least {AIM:.0%} passed, there and of all, and no loop.",
            "",
        ]
    lines += ["## The chat", ""]
    lines += _row("asked", "what it says", "verdict")
    lines.append("|---|---|---|")
    for one in asked:
        if one.in_one_chat:
            lines += _row(one.asked, one.said, verdicts[one.id])
    return "\n".join(lines) + "\n"


def _passes(opening: Opening, verdict: str) -> bool:
    return verdict == "fitting" or (verdict == "honest" and opening.honest_passes)


def _by_training(
    openings: dict[str, Opening],
    some: Sequence[Asked],
    verdicts: dict[str, str],
    trained: Container[str],
) -> str:
    known: list[bool] = []
    new: list[bool] = []
    for one in some:
        opening = openings[_opening(one.id)]
        (known if opening.id in trained else new).append(_passes(opening, verdicts[one.id]))
    return (
        f"Of the openings that are also messages in the training, {sum(known)} of {len(known)} "
        f"passed; of the others, {sum(new)} of {len(new)}."
    )


def _row(*cells: object) -> list[str]:
    texts = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return [f"| {' | '.join(texts)} |"]
