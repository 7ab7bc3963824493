"""
The pages on which a session is closed or forgotten. Each is asked twice: a button leads to a page
that says what will be done, and the form on it must be ticked. Reading these pages changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

from quart import Blueprint, Response, g, request

from cairn.actors.looking import NothingThere
from cairn.http.explorer.forms import form_fields
from cairn.http.explorer.pages import redirected
from cairn.http.explorer.shown import agent_of
from cairn.http.service import Service, SessionService
from cairn.http.sessions.objects import forgotten_object, shown_name
from cairn.http.sessions.routes import named_session
from cairn.http.wire.checks import ClientError
from cairn.journal.tenants import session_name, session_tenant


def add_forget_pages(
    pages: Blueprint,
    prefix: str,
    service: Callable[[], Service],
    of_all: Callable[[], bool],
    shown: Callable[..., Response],
) -> None:
    """
    Add the pages.

    Args:
        prefix: of their addresses.
        service: the server as the caller sees it.
        of_all: whether the caller may change the sessions of all tenants.
        shown: renders a template with the values that all pages have.
    """

    def held(name: str) -> tuple[SessionService, str]:
        found = service().sessions(of_all=of_all())
        return found, named_session(found, name)

    def asking(what: Literal["close", "forget"]) -> Response:
        _, session = held(request.args.get("id", ""))
        look, words = service().looking(of_all=of_all(), texts=False), ""
        with contextlib.suppress(NothingThere):  # it was pruned
            summary = look.session(session).summary
            words = summary.words if look.sees_texts(summary) else ""
        return shown("forget.html", what=what, done=None, words=words, **_names(session))

    @pages.get(f"{prefix}/session/close")
    async def ask_close() -> Response:
        return asking("close")

    @pages.get(f"{prefix}/session/forget")
    async def ask_forget() -> Response:
        return asking("forget")

    @pages.post(f"{prefix}/session/close")
    async def close() -> Response:
        form = await _ticked()
        found, session = held(form.get("id", ""))
        await found.close(session)
        return redirected(f"{prefix}/session?id={quote(_names(session)['id'], safe='')}")

    @pages.post(f"{prefix}/session/forget")
    async def forget() -> Response:
        form = await _ticked()
        found, session = held(form.get("id", ""))
        done = await found.forget(session, with_agent=form.get("agent") == "yes")
        return shown(
            "forget.html", what="forget", done=forgotten_object(done, g.tenant), **_names(session)
        )


def _names(session: str) -> dict[str, Any]:
    """The names of a session, as the caller has them, and of its agent."""
    return {
        "id": shown_name(session, session_tenant(session), g.tenant),
        "agent": agent_of(session_name(session)),
    }


async def _ticked() -> dict[str, str]:
    """
    The fields of the form, which must be ticked and come from a page of this server.

    Raises:
        ClientError: it is not, or does not.
    """
    fields = await form_fields()
    if fields.get("sure") != "yes":
        raise ClientError("tick the box that says that you mean it; nothing was changed")
    return fields
