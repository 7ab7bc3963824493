"""Stored responses: those that a request refers to, and those that are looked up or deleted."""

from __future__ import annotations

from collections.abc import Mapping

from cairn.actors.requests.messages import StoredTurn
from cairn.http.responses.answers import stored_response
from cairn.http.responses.conversation import items_of
from cairn.http.responses.form import ResponsesRequest, request_of
from cairn.http.responses.objects import DeletedResponse, ItemPage, Response
from cairn.http.responses.request import Draft
from cairn.http.service import Service
from cairn.http.wire.checks import ClientError

_PAGE = 20
_PAGE_MAX = 100


async def completed(draft: Draft, service: Service) -> ResponsesRequest:
    """
    A request with everything that it refers to, from the journal.

    Raises:
        ClientError: a response is not stored, or the input cannot be used.
        RefusalError: the journal cannot be read now.
    """
    history: tuple[StoredTurn, ...] = ()
    if draft.previous is not None:
        found = await service.history(draft.previous)
        if found is None:
            raise ClientError(
                f"the response {draft.named[:100]!r}, or one before it, is not stored: it was sent "
                "with store: false, did not complete, was deleted, or was pruned from the journal; "
                "send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = found
    turns = {}
    for request in sorted(draft.referred):
        turn = await service.turn(request)
        if turn is not None:
            turns[request] = turn
    return draft.complete(history, turns)


async def look_up(name: str, service: Service, query: Mapping[str, str]) -> Response:
    """
    A stored response.

    Args:
        query: of the address.

    Raises:
        ClientError: it is not stored, or a stream is requested.
    """
    if query.get("stream", "false").lower() not in ("false", "0", ""):
        raise ClientError(
            "stream is not supported for stored responses; leave it out",
            param="stream",
            code="unsupported_value",
        )
    return stored_response(await _turn(name, service))


async def look_up_input(name: str, service: Service, query: Mapping[str, str]) -> ItemPage:
    """
    A page of the input items of a stored response.

    Args:
        query: ``limit``, ``order`` and ``after`` of the address.

    Raises:
        ClientError: it is not stored, or the query is invalid.
    """
    limit, order = _page(query.get("limit", str(_PAGE))), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ClientError("order must be asc or desc", param="order")
    after = query.get("after")
    turn = await _turn(name, service)
    items = list(items_of(turn.asked, turn.request))
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ClientError(
                f"after is {after[:100]!r}, which is not an item of this response", param="after"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    return ItemPage(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > len(page),
    )


def _page(limit: str) -> int:
    digits = limit.lstrip("0")
    # Python refuses to parse numbers with thousands of digits.
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(_PAGE_MAX))
    found = int(digits) if is_number else 0
    if not 1 <= found <= _PAGE_MAX:
        raise ClientError(f"limit must be between 1 and {_PAGE_MAX}", param="limit")
    return found


async def delete(name: str, service: Service) -> DeletedResponse:
    """
    Delete a stored response.

    Raises:
        ClientError: it is not stored.
    """
    if not await service.forget(request_of(name)):
        raise _not_found(name)
    return DeletedResponse(id=name)


async def _turn(name: str, service: Service) -> StoredTurn:
    turn = await service.turn(request_of(name))
    if turn is None:
        raise _not_found(name)
    return turn


def _not_found(name: str) -> ClientError:
    return ClientError(
        f"response {name[:100]!r} not found: it was sent with store: false, did not complete, was "
        "deleted, or was pruned from the journal",
        code="response_not_found",
        status=404,
    )
