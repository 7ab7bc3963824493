"""Signals: the first one lets running answers finish, the second one ends the process at once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    assert_valid,
    eventually,
    run_ops,
    started,
    stopped_at,
    user,
)


def noticed_signal(server: Serving) -> None:
    """Wait until the server has noticed a signal."""
    eventually(lambda: "Stopping after the running answers" in server.stderr())


def refused(server: Serving, client: httpx.Client) -> bool:
    """Whether a request is refused: no connection, or 503."""
    try:
        return 503 == client.get(f"{server.url}/v1/models").status_code
    except httpx.TransportError:
        return True


@pytest.mark.long
def test_a_closed_terminal_drains(start: Start, lengthy: Any):
    """
    SIGHUP ends the server as SIGTERM does, and a second one from the shell changes nothing; the
    signals without a meaning are ignored.
    """
    server = start()
    running = Listener(server, **lengthy[0], max_tokens=300).decoding()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        server.signal(number)
    noticed_signal(server)
    server.signal(signal.SIGHUP)
    assert running.end().done
    assert ("length", 300) == (running.finish_reason, len(running.tokens))
    assert 0 == server.wait()
    assert isinstance(server.recorded()[-1].event, ev.ServerStopped)


def test_status_and_stop(start: Start, lengthy: Any):
    """
    `ops status` shows a server, on whatever port, and what it reused; `ops stop` waits for the
    answer that runs, says so, and the server is gone.
    """
    server = start()
    where = ("--data-dir", server.data_dir)
    code, out, _ = run_ops("status", *where)
    assert (0, True) == (code, f"address:   {server.url}\n" in out)
    running = Listener(server, **lengthy[0], max_tokens=300).decoding()
    code, out, err = run_ops("stop", *where)
    assert running.end().done
    assert (0, 0) == (code, server.wait())
    assert f"Stopping the server at {server.url} (process {server.pid})" in err
    assert ": 1 request finished" in out
    code, out, _ = run_ops("status", *where)
    assert 3 == code
    assert "prompt tokens in the last hour (1 answer)" in out
    code, out, err = run_ops("stop", *where)
    assert (0, "", f"No server uses {server.data_dir}.\n") == (code, out, err)


@pytest.mark.long
def test_a_server_of_nohup_outlives_its_terminal(tmp_path: Path, model_directory: Path):
    """A server that was started to ignore SIGHUP goes on."""
    within = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with started(tmp_path / "home", "--model", model_directory, within=within) as server:
        server.signal(signal.SIGHUP)
        assert 200 == server.post(messages=[user("Hello")], max_tokens=2).status_code
        assert "Stopping" not in server.stderr()
        assert 0 == server.stop()


def test_a_running_answer_is_completed(start: Start, cold: Serving, lengthy: Any):
    """
    Nothing that began is cut off, in the queue or in a session; no new request is admitted, on a
    new connection or an old one; the journal ends with the stop.
    """
    server = start("--decode-rows", 1)
    with httpx.Client() as connected, httpx.Client() as new:
        assert 200 == connected.get(f"{server.url}/v1/models").status_code
        unguarded = {**lengthy[0], "repetition_guard": False}
        running = Listener(server, **unguarded, max_tokens=800).decoding()
        queued = Listener(server, user("Hello"), max_tokens=2)
        server.queued(1)
        server.signal(signal.SIGTERM)
        noticed_signal(server)
        eventually(lambda: refused(server, new))
        # The listener closes first, and a moment later the open connections. One that stayed open
        # would serve requests until the running answer has ended.
        eventually(lambda: refused(server, connected))
        assert not running.ended.is_set()
    assert running.end().done
    assert queued.end().done
    assert ("length", 800) == (running.finish_reason, len(running.tokens))
    assert 0 == server.wait()
    last = server.recorded()[-1].event
    assert isinstance(last, ev.ServerStopped)
    assert 2 == len(server.events(ev.RequestFinished))
    assert_valid(server.data_dir)


def test_an_idle_server_stops_while_clients_are_connected(start: Start):
    """A connection that a client keeps open for its next request does not delay the stop."""
    server = start()
    with httpx.Client() as connected:
        assert 200 == connected.get(f"{server.url}/v1/models").status_code
        assert 0 == server.stop()
    assert isinstance(server.recorded()[-1].event, ev.ServerStopped)


@pytest.mark.long_but("2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start: Start, lengthy: Any, number: signal.Signals):
    """The answer is cut off, what the client received is committed, and the next start finds it."""
    server = start()
    running = Listener(server, **lengthy[0], max_tokens=5_000).decoding()
    server.signal(number)
    noticed_signal(server)
    server.signal(number)
    assert 130 == server.wait()
    assert not running.end().done
    assert_valid(server.data_dir)
    assert [] == server.events(ev.RequestFinished) + server.events(ev.ServerStopped)
    assert server.released(running.request)[0].startswith(running.text)


def test_a_request_longer_than_the_drain_gets_an_error(start: Start, lengthy: Any):
    """
    A request in a session gets the error in mid-stream, one in the queue as a 503; both are
    journaled.
    """
    server = start("--decode-rows", 1, "--drain", 0.1)
    running = Listener(server, **lengthy[0], max_tokens=20_000, logprobs=False).accepted()
    queued = Listener(server, user("Hello"), max_tokens=2)
    server.queued(1)
    assert 0 == server.stop()
    error = running.end().error
    assert error is not None
    assert "server_stopping" == error["code"]
    assert not running.done
    assert 503 == queued.end().status
    assert queued.refusal is not None
    assert "server_stopping" == queued.refusal["error"]["code"]
    assert 1 == len(server.events(ev.RequestCancelled, stage="server_stopped"))
    assert 1 == len(server.events(ev.RequestRejected, status=503, code="server_stopping"))
    assert isinstance(server.recorded()[-1].event, ev.ServerStopped)
    assert_valid(server.data_dir)


@pytest.mark.long
def test_a_start_that_is_given_up_is_not_a_lost_server(
    start: Start, tmp_path: Path, model_directory: Path
):
    """
    It ends at once, although the model is still loading, and the next start reports no lost server.
    """
    home = tmp_path / "given up"
    code, said = stopped_at("loading the model", home, "--model", model_directory)
    assert 130 == code
    assert said.endswith("Stopped before the server was ready.\n")
    assert "Traceback" not in said
    server = start(data_dir=home)
    assert [] == server.events(ev.ServerLost)
    assert ["asked to, before it served anything"] == [
        event.reason for event in server.events(ev.ServerStopped)
    ]
    assert "without shutting down" not in server.stderr()
    assert 0 == server.stop()
    assert_valid(home)
