"""What clients received of their answers, compared with the journal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cairn.journal import events as ev
from tests.support.processes.subprocess_server import Listener, recorded


def assert_journaled(
    data_dir: Path, streams: Iterable[Listener], answers: Iterable[tuple[str, str]] = ()
) -> None:
    """
    Assert that everything a client received of a request is journaled, from the beginning.

    Args:
        answers: (request, text) of each answer that was sent whole.
    """
    texts: dict[str, str] = {}
    logprobs: dict[str, list[float]] = {}
    finished = set()
    for place in recorded(data_dir):
        match place.event:
            case ev.TokensEmitted() as event:
                texts[event.request] = texts.get(event.request, "") + event.text
            case ev.CacheExtended(request=str() as request) as event:
                logprobs.setdefault(request, []).extend(event.logprobs)
                texts[request] = texts.get(request, "") + event.text
            case ev.RequestFinished() as event:
                finished.add(event.request)
            case _:
                pass
    for stream in streams:
        if stream.chunks:
            assert texts.get(stream.request, "").startswith(stream.text)
            drawn = [logprob for _, logprob in stream.tokens]
            assert logprobs.get(stream.request, [])[: len(drawn)] == drawn
            assert stream.finish_reason is None or stream.request in finished
    for request, text in answers:
        assert text == texts.get(request, "")
        assert request in finished
