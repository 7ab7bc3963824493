"""What the documentation names exists, and what exists is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import attrs
import pytest

from cairn.journal.events import ALL_EVENTS
from cairn.journal.invariants import SENTENCES
from cairn.journal.lifecycle import STEPS
from cairn.journal.paths import Reason
from cairn.ops.cli import COMMANDS
from cairn.ops.drills.table import DRILLS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + list((ROOT / "docs").rglob("*.md"))
)
NOTES = sorted((ROOT / "docs" / "design").glob("2*.md"))
HEADINGS = ["Context", "Decision", "Alternatives", "Out of scope"]

#: The beginnings of repository paths; ``journal.db`` and ``~/models`` are paths of other places.
ROOMS = ("src/", "tests/", "docs/", "tools/", "workshop/", ".ci/")
BUGS = ROOT / "docs" / "bugs"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def relative(path: Path) -> str:
    """A page's path in the repository, as the test's id."""
    return path.relative_to(ROOT).as_posix()


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next heading of its level."""
    found = re.split(rf"^## {re.escape(heading)}$", page.read_text(encoding="utf-8"), flags=re.M)
    assert 2 == len(found), f"{relative(page)} has no section {heading}"
    return re.split(r"^## ", found[1], flags=re.M)[0]


def first_cells(table: str) -> list[str]:
    """The first cells of a table's rows, without backticks, header and rule."""
    cells = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    return [cell.strip("`") for cell in cells[2:]]


def quoted(page: Path) -> Iterator[str]:
    """Everything in backticks on a page, outside code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    yield from re.findall(r"`([^`\n]+)`", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_paths_named_on_a_page_exist(page: Path):
    """Every path of the repository in backticks, in text or in a command, exists."""
    words = [word for code in quoted(page) for word in code.split()]
    named = [word.rstrip(".,;:") for word in words if word.startswith(ROOMS)]
    assert [] == [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_inside_the_repository_lead_somewhere(page: Path):
    """Every relative link and picture leads to a file, and to a heading if it names one."""
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert [] == broken


def test_every_kind_of_event_is_described_and_no_other():
    """The table of events has a row for each kind, in the order of ``ALL_EVENTS``."""
    assert [event.kind for event in ALL_EVENTS] == first_cells(section(ARCHITECTURE, "Events"))


def test_the_fields_marked_as_private_are_the_private_ones():
    """A field is marked **P** in the table of events if and only if it is private."""
    rows = {
        line.split("|")[1].strip(" `"): line.split("|")[3]
        for line in section(ARCHITECTURE, "Events").splitlines()
        if line.startswith("| `")
    }
    for event in ALL_EVENTS:
        fields = {field.name: field for field in attrs.fields(event)}
        private = {name for name, field in fields.items() if field.metadata.get("private")}
        assert private == set(re.findall(r"`(\w+)` \*\*P\*\*", rows[event.kind])), event.kind
        named = set(re.findall(r"`(\w+)`", rows[event.kind]))
        assert named <= set(fields), event.kind


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_kinds_of_events_in_commands_exist(page: Path):
    """A command on a page that selects events by their kind names one that there is."""
    kinds = re.findall(r"\bkind=(\w+)", page.read_text(encoding="utf-8"))
    assert set() == set(kinds) - {event.kind for event in ALL_EVENTS}


def test_every_invariant_is_described_in_its_own_words_and_no_other():
    """The table of invariants is that of ``SENTENCES``: names, sentences, scopes."""
    lines = section(ARCHITECTURE, "Invariants").splitlines()
    rows = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in lines if "|" in line]
    expected = [(name, sentence, scope) for name, (sentence, scope) in SENTENCES.items()]
    assert expected == rows[2:]


def test_every_invariant_has_its_page():
    """
    ``docs/bugs`` has a page for each invariant, for a crash and for the world, and no other page.
    Each begins with its name and contains the sentence of its invariant; the index lists all of
    them in order.
    """
    pages = {page.stem: " ".join(page.read_text("utf-8").split()) for page in BUGS.glob("*.md")}
    index = pages.pop("README")
    assert {*SENTENCES, "CRASH", "WORLD"} == set(pages)
    assert [f"{name}.md" for name in [*SENTENCES, "CRASH", "WORLD"]] == re.findall(
        r"\(([A-Z0-9-]+\.md)\)", index
    )
    for name, text in pages.items():
        assert text.startswith(f"# {name}: ")
    for name, (sentence, _) in SENTENCES.items():
        assert sentence.lower() in pages[name].lower(), name


@pytest.mark.parametrize("name", [*SENTENCES, "CRASH", "WORLD"])
def test_a_page_of_a_bug_names_its_drills_and_no_others(name: str):
    """The page lists the drills of its invariant, and has at least one."""
    drills = [one.name for one in DRILLS.values() if one.invariant == name]
    text = section(BUGS / f"{name}.md", "Rehearse it")
    assert drills == re.findall(r"`ops drill ([a-z-]+)`", text)
    assert drills


def test_every_reason_is_described_and_no_other():
    """The table of paths names each reason that the rules give."""
    named = re.findall(r"^\| new_session \| `(\w+)`", section(ARCHITECTURE, "Paths"), flags=re.M)
    assert list(get_args(Reason)) == named


def test_the_page_on_low_hit_rates_has_every_reason():
    """Each reason has a row with what happened and what helps; the metrics it names exist."""
    page = ROOT / "docs" / "how-to" / "low-hit-rate.md"
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", section(page, "3. By the reason"), flags=re.M)
    assert sorted(get_args(Reason)) == sorted(rows)
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    named = set(re.findall(r"`(cairn_\w+)`", page.read_text("utf-8")))
    assert 8 < len(named)
    assert {name for name in named if name not in metrics} == set()


def test_the_drawing_of_a_sessions_life_is_the_table_of_legal_steps():
    """The arrows and the list of steps without a change of state are together exactly ``STEPS``."""
    text = section(ARCHITECTURE, "The life of a session")
    arrows = re.findall(r"^    (\w+) --> (\w+): (\S+)$", text, flags=re.M)
    drawn = {(start, trigger, end) for start, end, trigger in arrows}
    for line in text.splitlines():
        if line.startswith("| ") and "`" in line:
            _, step, triggers, _ = (cell.strip() for cell in line.split("|"))
            drawn |= {(step, trigger, step) for trigger in re.findall(r"`([^`]+)`", triggers)}
    steps = {
        (str(start), trigger, str(end))
        for start, table in STEPS.items()
        for trigger, end in table.items()
    }
    assert steps == drawn


def test_every_command_is_named():
    """The README names each command, and no other: those of the journal as `ops`."""
    text = (ROOT / "README.md").read_text("utf-8")
    named = set(re.findall(r"`(?:\./)?(?:ops|cairn) ([a-z]+)", text))
    assert set(COMMANDS) == named


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_make_targets_on_a_page_are_in_the_makefile(page: Path):
    """Every ``make`` target on a page exists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    text = page.read_text(encoding="utf-8")
    called = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M))
    assert set() == called - targets


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_a_decision_note_has_its_date_and_four_headings(note: Path):
    """A note has its date, the context, the decision, the alternatives and what it leaves out."""
    text = note.read_text(encoding="utf-8")
    day = re.match(r"(\d{4})(\d\d)(\d\d)-", note.name)
    assert day is not None
    assert "-".join(day.groups()) in text.splitlines()
    assert re.findall(r"^## (.+)$", text, flags=re.M) == HEADINGS


def test_every_note_is_in_the_index_and_no_other():
    """The index of design notes links each note exactly once as an entry."""
    index = (ROOT / "docs" / "design" / "README.md").read_text("utf-8")
    rows = [line for line in index.splitlines() if line.startswith("|")]
    entries = [re.findall(r"\((2\w+-[\w-]+\.md)\)", row)[:1] for row in rows]
    assert [note.name for note in NOTES] == sorted(name for found in entries for name in found)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_name_no_path_of_a_machine(page: Path):
    """No page has an absolute path of the machine on which it was written."""
    text = page.read_text(encoding="utf-8")
    assert [] == re.findall(r"/(?:work|root|home|tmp|Users)/[^\s`]*", text)
