"""Checkpoints are signed notes of C2SP: what its own example has is read and verified here."""

import base64
import hashlib

import attrs
import pytest

from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import (
    EXTENSION,
    Note,
    PublicKey,
    Signer,
    last_of,
    read_notes,
)

# The example of c2sp.org/signed-note.
EXAMPLE_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
EXAMPLE = (
    "This is an example message.\n\n"
    "\N{EM DASH} example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsY"
    "jOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)
SEED = bytes(range(32))
SIGNER = Signer(SEED)
HEADS = [Head(at, hashlib.sha256(bytes([at])).hexdigest()) for at in (3, 20, 12)]


def read(text: str) -> Note:
    """The one note of a text."""
    (note,) = read_notes(text)
    return note


def test_the_example():
    """Its key and its note are read, and the signature fits; with a letter changed it does not."""
    key = PublicKey.parse(EXAMPLE_KEY)
    assert EXAMPLE_KEY == str(key)
    note = read(EXAMPLE)
    assert (True, EXAMPLE) == (note.signed_by(key), note.whole)
    assert False is read(EXAMPLE.replace("This", "Thus")).signed_by(key)
    assert note.signed_by(SIGNER.public) is None
    with pytest.raises(ValueError, match="line 1 is not the checkpoint of a journal"):
        _ = note.head


def test_a_checkpoint():
    """Origin, position, hash, extension, a blank line, the signature; the same each time."""
    text = SIGNER.note(HEADS[0])
    name = SIGNER.public.name
    assert text == SIGNER.note(HEADS[0])
    lines = text.split("\n")
    hashed = base64.b64encode(bytes.fromhex(HEADS[0].hash)).decode()
    assert [name, "3", hashed, EXTENSION, ""] == lines[:5]
    assert lines[5].startswith(f"\N{EM DASH} {name} ")
    assert [""] == lines[6:]
    note = read(text)
    assert (HEADS[0], True, name) == (note.head, note.signed_by(SIGNER.public), note.origin)
    assert SIGNER.public == PublicKey.parse(str(SIGNER.public))
    assert SIGNER.public.name.startswith("cairn-journal/")
    assert str(SEED) not in repr(SIGNER)


@pytest.mark.parametrize("change", range(len(SIGNER.note(HEADS[0]).split("\n\n")[0])))
def test_a_changed_checkpoint(change: int):
    """Whatever letter of it is changed, the signature no longer fits."""
    text = SIGNER.note(HEADS[0])
    changed = text[:change] + ("x" if text[change] != "x" else "y") + text[change + 1 :]
    assert False is read(changed).signed_by(SIGNER.public)


def test_another_key():
    """The signature of another key is none of this one; a second signature does not harm."""
    other = Signer(bytes(32))
    note = read(SIGNER.note(HEADS[0]))
    assert note.signed_by(other.public) is None
    both = attrs.evolve(note, signatures=(("witness", bytes(68)), *note.signatures))
    assert True is read(both.whole).signed_by(SIGNER.public)


def test_several_notes():
    """They are read in order, with their lines; the last one of a key is found."""
    text = "".join(map(SIGNER.note, HEADS)) + Signer(bytes(32)).note(Head(99, "0" * 64))
    notes = list(read_notes(text))
    assert [1, 7, 13, 19] == [note.line for note in notes]
    assert HEADS == [note.head for note in notes[:3]]
    assert HEADS[2] == last_of(notes, SIGNER.public, SIGNER.origin)
    assert last_of(notes, SIGNER.public, "another journal") is None
    assert [] == list(read_notes(""))
    other = Signer(SEED, "ab")
    assert (f"{SIGNER.origin}/ab", SIGNER.public) == (other.origin, other.public)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello\n", "note at line 1 has no signature"),
        ("hello\n\n", "note at line 1 has no signature"),
        (SIGNER.note(HEADS[0]) + "more", "note at line 7 has no signature"),
        ("\N{EM DASH} a YWJjZGU=\n", "line 1 is a signature, and no note is before it"),
        ("a\n\N{EM DASH} a YWJjZGU=\n", "line 2 is a signature, and no note is before it"),
        ("a\n\n\N{EM DASH} a YWJj\n", "line 3 is not a signature"),
        ("a\n\n\N{EM DASH} a %%%%\n", "line 3 is not a signature"),
        ("a\n\n\N{EM DASH}  YWJjZGU=\n", "line 3 is not a signature"),
    ],
)
def test_a_text_that_is_no_note(text: str, words: str):
    """The error names the line."""
    with pytest.raises(ValueError, match=words):
        list(read_notes(text))


@pytest.mark.parametrize(
    "body",
    [
        "a\n1\n",
        f"a\n1\nAAAA\n{EXTENSION}\n",
        f"a\n01\n{base64.b64encode(bytes(32)).decode()}\n{EXTENSION}\n",
        f"a\nx\n{base64.b64encode(bytes(32)).decode()}\n{EXTENSION}\n",
        f"a\n1\n%\n{EXTENSION}\n",
        f"a\n1\n{base64.b64encode(bytes(32)).decode()}\n{EXTENSION}\nmore\n",
        f"a\n1\n{base64.b64encode(bytes(32)).decode()}\nanother chain\n",
    ],
)
def test_a_note_that_is_no_checkpoint(body: str):
    """It has no head."""
    with pytest.raises(ValueError, match="is not the checkpoint of a journal"):
        _ = Note(1, body, ()).head


@pytest.mark.parametrize(
    "text",
    ["", "a", "a+b+c", EXAMPLE_KEY.replace("530d", "530e"), EXAMPLE_KEY[:-4], f"+{EXAMPLE_KEY}"],
)
def test_a_text_that_is_no_key(text: str):
    """Name, id and key have to be there, and to fit each other."""
    with pytest.raises(ValueError, match="is not the public half of a key"):
        PublicKey.parse(text)
