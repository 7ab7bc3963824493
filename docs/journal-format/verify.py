"""
Verifies an export of a Cairn journal with Python's standard library alone; none of Cairn's code is
used. docs/journal-format.md says what it checks, and what it cannot.

    python verify.py journal.jsonl [NOTES] [PUBLIC_KEY]

NOTES is a file of checkpoints that was kept elsewhere. Without PUBLIC_KEY the export's own is used.
Exit code: 0 all checks pass, 1 something is broken, 2 it cannot be read, 3 all that can be checked
passes, but these are the rows of one session only.
"""

import base64
import hashlib
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
# The numbers of Ed25519 (RFC 8032).
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D, ROOT = -121665 * pow(121666, -1, P) % P, pow(2, (P - 1) // 4, P)


def fields(line):
    """The fields of an object, each as its text: hashes cover bytes, not values."""
    decoder, found, at = json.JSONDecoder(), {}, line.index("{") + 1
    while True:
        key, at = decoder.raw_decode(line, line.index('"', at))
        begin = line.index(":", at) + 1
        begin += len(line[begin:]) - len(line[begin:].lstrip())
        _, at = decoder.raw_decode(line, begin)
        if key in found:
            raise ValueError(f"the key {key} is there twice")
        found[key] = line[begin:at]
        rest = line[at:].strip()
        if rest == "}":
            return found
        if not rest.startswith(","):
            raise ValueError(f"{rest[:20]!r} is not the end of an object")


def stored(text):
    """The bytes of a payload: an object's text, or what base64 says; None for null."""
    if text == "null":
        return None
    return text.encode() if text.startswith("{") else base64.b64decode(json.loads(text))


def hashed(*parts):
    """SHA-256 over parts, each with its length in eight bytes before it."""
    return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts))


def sha256(content):
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def check_row(raw, head, faults):
    """Check one row against the one before it; returns the hash that it has."""
    public, private = stored(raw.pop("payload")), stored(raw.pop("private"))
    row = {name: json.loads(text) for name, text in raw.items()}
    time = row["time"]
    if isinstance(time, str):
        if not TIME.fullmatch(time):
            raise ValueError(f"{time} is not a time as an export has it")
        time = (datetime.fromisoformat(time) - EPOCH) // timedelta(microseconds=1)
    at = f"row {row['position']}"
    if head is not None and row["previous_hash"] != head:
        faults.append(f"{at} is not chained to the one before")
    if private is not None and sha256(private) != row["private_digest"]:
        faults.append(f"{at}: the private payload was changed")
    numbers = ((row["position"], 8), (row["seq"], 8), (row["version"], 4), (time, 8))
    position, seq, version, moment = (number.to_bytes(size, "big") for number, size in numbers)
    stream, event_id, kind = (row[name].encode() for name in ("stream", "event_id", "kind"))
    due = hashed(
        *(row["previous_hash"].encode(), position, stream, seq, event_id, kind),
        *(version, moment, public, row["private_digest"].encode()),
    )
    if due != row["hash"]:
        faults.append(f"{at} was changed")
    return row["hash"]


def add(p, q):
    """The sum of two points of Ed25519, in projective coordinates (x, y, z, x*y)."""
    a, b = (p[1] - p[0]) * (q[1] - q[0]), (p[1] + p[0]) * (q[1] + q[0])
    c, d = 2 * p[3] * q[3] * D, 2 * p[2] * q[2]
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(factor, point):
    """A multiple of a point."""
    result = (0, 1, 1, 0)
    while factor:
        result = add(result, point) if factor & 1 else result
        point, factor = add(point, point), factor >> 1
    return result


def point_of(encoded):
    """The point of 32 bytes."""
    y, sign = int.from_bytes(encoded, "little") % 2**255, encoded[31] >> 7
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if (x * x - square) % P == 0 else x * ROOT % P
    if y >= P or (x * x - square) % P or (x == 0 and sign):
        raise ValueError("no point of the curve")
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


def is_signed(key, signature, text):
    """Whether an Ed25519 signature fits."""
    number = int.from_bytes(signature[32:], "little")
    if len(signature) != 64 or number >= L:
        return False
    digest = hashlib.sha512(signature[:32] + key + text).digest()
    try:
        product = times(int.from_bytes(digest, "little") % L, point_of(key))
        right = add(point_of(signature[:32]), product)
    except ValueError:
        return False
    left = times(number, point_of((4 * pow(5, -1, P) % P).to_bytes(32, "little")))
    return all((left[n] * right[2] - right[n] * left[2]) % P == 0 for n in (0, 1))


def notes_of(text):
    """The signed notes of a text: (what is signed, the lines of its signatures) each."""
    body, signatures = [], []
    for line in [*text.splitlines(keepends=True), ""]:
        if signatures and not line.startswith("\u2014 "):
            yield "".join(body[:-1]), signatures
            body, signatures = [], []
        (signatures if line.startswith("\u2014 ") else body).append(line)


def check_note(note, signatures, public_key, seen, faults):
    """Check the signature of a checkpoint, and that the chain has its row."""
    name, key_id, encoded = public_key.strip().split("+", 2)
    position, root = note.split("\n")[1:3]
    for line in signatures:
        signer, signed = line.split(" ", 1)[1].split(" ")
        signed = base64.b64decode(signed)
        if signer == name and signed[:4].hex() == key_id:
            if not is_signed(base64.b64decode(encoded)[1:], signed[4:], note.encode()):
                faults.append(f"the signature of the checkpoint of row {position} does not fit")
            break
    else:
        faults.append(f"the checkpoint of row {position} is not signed by {name}")
    if seen.get(int(position)) != base64.b64decode(root).hex():
        faults.append(f"the checkpoint of row {position} is not in the chain")


def verify(lines, kept="", public_key=None):
    """The faults of an export in the order of its lines, its head, and whether it is an excerpt."""
    faults, seen, head, named, base, excerpt = [], {}, "0" * 64, None, None, False
    position, stream, seq = 0, None, 0
    for number, line in enumerate(lines, start=1):
        raw = fields(line)
        if "checkpoint" in raw:
            public_key = public_key or json.loads(raw["public_key"])
            kept += json.loads(raw["note"])
            continue
        if number == 1 and ("base" in raw or "excerpt" in raw):
            position, head = json.loads(raw["position"]), json.loads(raw["head"])
            excerpt, seen[position] = "excerpt" in raw, head
            if excerpt:
                stream, seq = json.loads(raw["stream"]), json.loads(raw["seq"])
            state, digest = stored(raw.get("state", "null")), json.loads(raw["state_digest"])
            if state is not None and sha256(state) != digest:
                faults.append("the state of the base was changed")
            parts = [str(position).encode(), head.encode(), digest.encode()]
            sizes = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
            base = None if excerpt else sha256(b"cairn base 1" + sizes)
            continue
        at = json.loads(raw["position"])
        if number == 1 and at > 1 and json.loads(raw["stream"]).startswith("session/"):
            excerpt, stream = True, json.loads(raw["stream"])
        seq += 1
        if excerpt and (json.loads(raw["stream"]), json.loads(raw["seq"])) != (stream, seq):
            faults.append(f"row {at}: rows are missing before it")
        if json.loads(raw["kind"]) == "journal_pruned":
            named = json.loads(raw["payload"])["base_digest"]
        # One session's rows are not all there, so only neighbours can be compared.
        head = check_row(raw, head if at == position + 1 or not excerpt else None, faults)
        position, seen[at] = at, head
    if not excerpt and base != named:
        faults.append("the base is not the one that the last journal_pruned names")
    if not excerpt:
        for note, signatures in notes_of(kept):
            check_note(note, signatures, public_key, seen, faults)
    return faults, f"{position}:{head}", excerpt


def main(path, notes=None, public_key=None):
    """Verify a file; returns the exit code."""
    try:
        kept = Path(notes).read_text("utf-8") if notes else ""
        with Path(path).open(encoding="utf-8", newline="\n") as lines:
            faults, head, excerpt = verify(lines, kept, public_key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        print(f"{path} cannot be read: {error}")
        return 2
    print("\n".join([*faults, f"head: {head}", f"broken: {len(faults)}"]))
    if excerpt:
        print("not checked: whether rows of other sessions were changed or removed (an excerpt)")
    return 1 if faults else 3 if excerpt else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
