"""Fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import httpx
import pytest
import trio

from cairn.http.app import create_app
from cairn.http.server.listen import bind_socket, serve_http
from cairn.http.server.waiting import WaitingLimits
from tests.http.fake_service import FakeService

Serve = Callable[[FakeService], Awaitable[str]]


async def run_server(
    service: FakeService,
    shutdown: trio.Event,
    grace_s: float = 1.0,
    limits: WaitingLimits | None = None,
    *,
    task_status: trio.TaskStatus[str],
) -> None:
    """Serve on a free port until shut down; reports the address as ``started``."""
    app = create_app(service)
    await serve_http(
        app,
        bind_socket("127.0.0.1", 0),
        shutdown=shutdown,
        on_ready=task_status.started,
        on_stop=app.streams.stop,
        grace_s=grace_s,
        limits=limits,
    )


@pytest.fixture
async def serve(nursery: trio.Nursery) -> AsyncIterator[Serve]:
    """A function that serves a service until the test ends, and returns its address."""
    shutdown = trio.Event()

    async def start(service: FakeService) -> str:
        return await nursery.start(partial(run_server, service, shutdown))

    yield start
    shutdown.set()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client on trio."""
    async with httpx.AsyncClient(timeout=60) as client:
        yield client
