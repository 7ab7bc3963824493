"""The forms that the explorer's pages send."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

from quart import g, request
from werkzeug.exceptions import RequestEntityTooLarge

from cairn.http.access.pages import forged, is_own

_FORM_BYTES: Final = 4096


async def form_fields() -> dict[str, str]:
    """
    The fields of the request's form, the first value of each.

    Raises:
        ClientError: no page of this server sent it.
        RequestEntityTooLarge: it is larger than these forms are.
    """
    if not is_own(request):
        raise forged()
    if (request.content_length or 0) > _FORM_BYTES:
        raise RequestEntityTooLarge
    body = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    g.body_is_read = True
    if len(body) > _FORM_BYTES:
        raise RequestEntityTooLarge
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}
