"""Long steps show progress: a bar on a terminal, a line each in a file."""

from __future__ import annotations

import pytest

from cairn.ops.serve.progress import ShownProgress


def show(steps: int) -> None:
    """Two long steps, one after the other."""
    with ShownProgress() as progress:
        for what in ("downloading the model", "loading the model"):
            for step in range(steps + 1):
                progress(what, step, steps)


def test_bars_on_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a bar on stderr, which is removed at the end; stdout stays clean."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")

    show(4)

    out, err = capfd.readouterr()
    assert "" == out
    for what in ("downloading the model", "loading the model"):
        assert what in err
    assert "━" in err
    assert "..." not in err


def test_a_line_each_in_a_file(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps there are, each is announced once."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    show(100)

    assert ("", "downloading the model ...\nloading the model ...\n") == capfd.readouterr()


def test_nothing_is_shown_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's thread may report progress after the server has stopped."""
    with ShownProgress() as progress:
        progress("loading", 0, 1)
    progress("reading", 0, 1)
    assert "loading ...\n" == capsys.readouterr().err
