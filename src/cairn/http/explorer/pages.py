"""
How a page is made: templates with everything escaped, and headers that let nothing else run.

The policy allows the explorer's own script and style file and nothing inline, and no script may
turn text into HTML (trusted types). So text of a conversation that got past the escaping would
still not run.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from quart import Response, redirect

from cairn.http.explorer import shown
from cairn.http.wire.json import encode
from cairn.journal.agents import session_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

_HERE = Path(__file__).parent
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_YEAR_S = 365 * 24 * 60 * 60

_FILTERS = (
    *(shown.ago, shown.brief, shown.clock, shown.coded, shown.count, shown.cut, shown.duration),
    *(shown.moment, shown.plural, shown.share, shown.size, shown.span, shown.unmarked),
)
_FUNCTIONS = (
    *(
        shown.first_token,
        shown.folded,
        shown.kind_of,
        shown.longest,
        shown.reused,
        shown.segments,
        shown.speed,
    ),
    *(shown.turn_bar, shown.verdict),
)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update({one.__name__: one for one in _FILTERS})
    made.filters["json"] = lambda value: encode(value).decode()
    made.globals.update({one.__name__: one for one in _FUNCTIONS})
    made.filters["indented"] = lambda value: msgspec.json.format(encode(value), indent=2).decode()
    made.globals.update(asset=asset_address, shell=shlex.quote, session_of=session_of)
    return made


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    """A page of a template."""
    now_us = time.time_ns() // 1000
    text = _environment().get_template(template).render(now_us=now_us, **values)
    response = Response(text, status=status, content_type="text/html; charset=utf-8")
    # It has texts of conversations: no cache may keep it, and no other page may be told of it.
    response.headers["cache-control"] = "no-store"
    return with_policy(response)


def with_policy(response: Response) -> Response:
    """The response with the headers that let nothing but the explorer's own script run."""
    response.headers["content-security-policy"] = POLICY
    response.headers["x-content-type-options"] = "nosniff"
    # Not ``no-referrer``: browsers would then hide the origin of the login form, too.
    response.headers["referrer-policy"] = "same-origin"
    response.headers["cross-origin-opener-policy"] = "same-origin"
    return response


def redirected(to: str) -> Response:
    """The response to a form, which leads to a page."""
    response = redirect(to, 303)
    assert isinstance(response, Response)
    return with_policy(response)


def asset(name: str) -> Response | None:
    """A file of the explorer; None if there is none of this name."""
    found = _assets().get(name)
    if found is None:
        return None
    content, content_type, _ = found
    response = Response(content, content_type=content_type)
    # Its address changes with its content.
    response.headers["cache-control"] = f"public, max-age={_YEAR_S}, immutable"
    return with_policy(response)


def asset_address(name: str) -> str:
    """The address of a file, which changes with its content."""
    return f"/explorer/assets/{name}?{_assets()[name][2]}"


@cache
def _assets() -> dict[str, tuple[bytes, str, str]]:
    found = {}
    for path in sorted((_HERE / "assets").iterdir()):
        content = path.read_bytes()
        content_type = f"{_TYPES[path.suffix]}; charset=utf-8"
        found[path.name] = content, content_type, hashlib.sha256(content).hexdigest()[:12]
    return found
