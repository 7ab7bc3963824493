"""``cairn pull`` and ``cairn rm``: download a model, and remove one."""

from __future__ import annotations

import shutil
from difflib import get_close_matches
from pathlib import Path

import click

from cairn.ops.cli import Unreadable
from cairn.ops.common.completions import complete_pull, complete_rm
from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.common.output import confirm, printable
from cairn.ops.common.program import program
from cairn.ops.models.fitting import Fit, gigabytes, this_machine
from cairn.ops.models.found import hub_cache, hub_folder
from cairn.ops.models.names import hub_name, meant
from cairn.ops.models.pull import listed_on_hub
from cairn.ops.models.ready import downloaded, listed_fit, memory_words
from cairn.ops.models.short_names import PEBBLE
from cairn.ops.serve.api_keys import api_key_option
from cairn.ops.state.running import health_of, running


@click.command(
    epilog=example("ops pull qwen3-4b", "ops pull mlx-community/Qwen3-4B-4bit"),
)
@click.argument("name", shell_complete=complete_pull)
@click.option("-y", "--yes", is_flag=True, help="Download it even if it does not fit in memory.")
def pull(name: str, yes: bool) -> None:
    """
    Download a model, or bring it up to date.

    NAME is a short name (`ops models --all` lists them) or a name on the Hugging Face Hub. Says
    first whether it fits on the disk and in memory, and compares the hashes of all files with those
    that the hub lists. A download that was cut off continues where it ended. The last line is the
    model's directory, which is in the cache that all programs of the hub share.
    """
    full = hub_name(name)
    if full is None:
        what = "is built in" if name == PEBBLE else "is a path on this machine"
        raise Unreadable(
            f"{printable(name)} {what}. Serve it with `{program()} serve --model NAME`."
        )
    listed = listed_on_hub(full)
    machine = this_machine()
    if listed_fit(listed, machine) is Fit.NO and not yes:
        words = memory_words(listed, machine, f"{program()} pull")
        confirm(f"{words}\nDownload it all the same?")
    directory = downloaded(listed, machine)
    click.echo(f"Ready: `{program()} serve --model {printable(name)}`.", err=True)
    click.echo(str(directory))


@click.command(epilog=example("ops rm qwen3-4b", "ops rm --yes mlx-community/Qwen3-4B-4bit"))
@click.argument("name", shell_complete=complete_rm)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@data_dir_option
@api_key_option
def rm(name: str, yes: bool, data_dir: Path, api_key: str | None) -> None:
    """
    Remove a downloaded model from the hub's cache, with what was downloaded of it in part.

    Other programs that use the hub's cache lose it too. What conversations with it are on record
    stays, and continues once it is here again.
    """
    full = hub_name(name)
    if full is None:
        what = "is built in" if name == PEBBLE else "is a path, which the hub's cache does not have"
        raise Unreadable(f"{printable(name)} {what}, so it is not removed.")
    folder = hub_folder(full)
    if not folder.is_dir():
        near = get_close_matches(full, _names_here(), n=2)
        more = f" Did you mean {' or '.join(near)}?" if near else meant(name)
        raise Unreadable(
            f"{printable(full)} is not here: {hub_cache()} does not have it.{more} "
            f"`{program()} models` lists what is here."
        )
    if full in _served(data_dir, api_key):
        raise Unreadable(
            f"{printable(full)} is served at the moment. Stop the server first: `{program()} stop`."
        )
    size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    if not yes:
        confirm(f"Remove {printable(full)} ({gigabytes(size)}) from {hub_cache()}?")
    _remove(folder, full)
    click.echo(f"Removed {printable(full)}: {gigabytes(size)}.")


def _remove(folder: Path, name: str) -> None:
    """
    Remove a model's folder from the hub's cache.

    Raises:
        Unreadable: some of it is left.
    """
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(hub_cache())
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.repo_id == name:
            cache.delete_revisions(*(one.commit_hash for one in repo.revisions)).execute()
    try:
        if folder.exists():  # it has no revision yet
            shutil.rmtree(folder)
    except OSError as error:
        raise Unreadable(
            f"{folder} could not be removed completely: {error.strerror}. Check who owns it."
        ) from error


def _names_here() -> list[str]:
    """The models of the hub's cache, without a look into them."""
    folders = hub_cache().glob("models--*--*")
    return [one.name.removeprefix("models--").replace("--", "/", 1) for one in folders]


def _served(data_dir: Path, key: str | None) -> set[str]:
    """The models of the server that uses a data directory."""
    server = running(data_dir)
    health = health_of(server.url, key) if server is not None and server.url is not None else None
    listed = (health or {}).get("models", ())
    return {str(one["name"]) for one in listed} | {str((health or {}).get("model"))}
