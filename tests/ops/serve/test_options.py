"""The effects of the options of ``ops serve``."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from cairn.ops.serve.command import serve
from cairn.ops.serve.run import settings_of


@pytest.mark.parametrize(("arguments", "prewarms"), [([], True), (["--no-prewarm"], False)])
def test_prewarm_can_be_switched_off(tmp_path: Path, arguments: list[str], prewarms: bool) -> None:
    """It is on, and the option switches it off; the journal records which."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert prewarms == settings.prewarm
    assert prewarms != settings.on_record["no_prewarm"]


def test_the_default_heartbeat(tmp_path: Path) -> None:
    """Keep-alives come every fifteen seconds or less: the Anthropic clients rely on pings."""
    options = serve.make_context("serve", ["--data-dir", str(tmp_path)]).params
    assert 15 >= settings_of(options, tmp_path).limits.heartbeat_s


def test_a_heartbeat_that_is_too_slow(tmp_path: Path) -> None:
    """More than fifteen seconds are refused: clients rely on pings, and retry without them."""
    with pytest.raises(click.BadParameter, match="15"):
        serve.make_context("serve", ["--heartbeat", "15.5", "--data-dir", str(tmp_path)])
    options = serve.make_context("serve", ["--heartbeat", "15", "--data-dir", str(tmp_path)]).params
    assert 15 == settings_of(options, tmp_path).limits.heartbeat_s


@pytest.mark.parametrize("option", ["--heartbeat", "--drain", "--request-timeout"])
def test_nan_is_refused(tmp_path: Path, option: str) -> None:
    """NaN would pass any range check, because every comparison with it is false."""
    with pytest.raises(click.BadParameter, match="nan is not a number"):
        serve.make_context("serve", [option, "nan", "--data-dir", str(tmp_path)])


@pytest.mark.parametrize(("arguments", "seconds"), [([], 60), (["--slab-idle", "0"], 0)])
def test_how_long_slabs_are_kept(tmp_path: Path, arguments: list[str], seconds: int) -> None:
    """A minute, or the option's value; the journal has it."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert seconds == settings.limits.slab_idle_s == settings.on_record["slab_idle"]


@pytest.mark.parametrize(
    ("arguments", "share", "by_default"),
    [
        ([], 0.01, True),
        (["--shadow-check", "0.01"], 0.01, False),
        (["--shadow-check", "0"], 0, False),
    ],
)
def test_the_share_of_answers_that_is_checked(
    tmp_path: Path, arguments: list[str], share: float, by_default: bool
) -> None:
    """One in a hundred, or the option's value; the journal has it."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert (share, by_default) == (settings.shadow_share, settings.shadow_by_default)
    assert share == settings.on_record["shadow_check"]


@pytest.mark.parametrize(
    ("arguments", "seconds"), [([], 86_400), (["--ttl", "90"], 90), (["--ttl", "7d"], 604_800)]
)
def test_the_ttl(tmp_path: Path, arguments: list[str], seconds: int) -> None:
    """A day, or the option's value; the journal has it."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert seconds == settings.limits.ttl_s == settings.on_record["ttl"]


def test_an_invalid_ttl(tmp_path: Path) -> None:
    """It is refused with a valid value."""
    with pytest.raises(click.BadParameter, match="'soon' must be a number of seconds"):
        serve.make_context("serve", ["--ttl", "soon", "--data-dir", str(tmp_path)])


@pytest.mark.parametrize(("arguments", "least"), [([], 0), (["--min-cache-tokens", "200"], 200)])
def test_the_shortest_cached_prompt(tmp_path: Path, arguments: list[str], least: int) -> None:
    """Any prompt of at least one block, or the option's value; the journal has it."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert least == settings.min_cache_tokens == settings.on_record["min_cache_tokens"]


@pytest.mark.parametrize(("arguments", "most"), [([], None), (["--blocks-max", "9"], 9)])
def test_the_most_blocks_in_memory(tmp_path: Path, arguments: list[str], most: int | None) -> None:
    """As many as fit, or the option's value, which is on record."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert most == settings.blocks_max == settings.on_record.get("blocks_max")


@pytest.mark.parametrize("seconds", ["-1", "nan", "100000"])
def test_slabs_are_kept_for_a_day_at_most(tmp_path: Path, seconds: str) -> None:
    """An invalid time is refused, and so is an implausible one."""
    with pytest.raises(click.BadParameter):
        serve.make_context("serve", ["--slab-idle", seconds, "--data-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ([], None),
        (["--kv-policy", "sink_window"], (4, 4096)),
        (
            ["--kv-policy", "sink_window", "--sink-tokens", "0", "--window-tokens", "512"],
            (0, 512),
        ),
        (["--window-tokens", "512", "--kv-policy", "sink_window"], (4, 512)),
    ],
)
def test_what_a_token_attends_to(
    tmp_path: Path, arguments: list[str], window: tuple[int, int] | None
) -> None:
    """To all tokens before it, or to sinks and a window; the journal records which."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert window == settings.window
    assert ("full" if window is None else "sink_window") == settings.on_record["kv_policy"]


@pytest.mark.parametrize("option", ["--sink-tokens", "--window-tokens"])
@pytest.mark.parametrize("policy", [[], ["--kv-policy", "full"]])
@pytest.mark.parametrize("tokens", ["64", "4096"])
def test_window_options_without_a_window(
    tmp_path: Path, option: str, policy: list[str], tokens: str
) -> None:
    """If every token attends to all before it, window options are refused, not ignored."""
    with pytest.raises(click.UsageError, match=f"{option} has no effect with --kv-policy full"):
        serve.make_context("serve", [option, tokens, *policy, "--data-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [([], None), (["--keep", "30d"], 2_592_000), (["--keep", "1d"], 86_400)],
)
def test_how_long_rows_are_kept(tmp_path: Path, arguments: list[str], seconds: int | None) -> None:
    """All of them for ever, or as long as the operator says; the journal has it."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert seconds == settings.keep_s == settings.on_record.get("keep")


def test_rows_are_kept_for_a_day_at_least(tmp_path: Path) -> None:
    """A typing error would remove what cannot be restored."""
    with pytest.raises(click.BadParameter, match="is less than a day"):
        serve.make_context("serve", ["--keep", "30m", "--data-dir", str(tmp_path)])


@pytest.mark.parametrize("arguments", [[], ["--fold-all"]])
def test_the_snapshot_can_be_left_out(tmp_path: Path, arguments: list[str]) -> None:
    """It is in the data directory, and the option has the start fold the whole journal."""
    options = serve.make_context("serve", [*arguments, "--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert (tmp_path / "snapshot", bool(arguments)) == (settings.snapshot, settings.fold_all)
