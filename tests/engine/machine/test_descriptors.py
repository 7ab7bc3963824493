"""The descriptors that the operator granted are kept when MLX's packages are imported."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from cairn.engine.machine.descriptors import descriptor_limits_held

_SHOWN = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"


def limits_after(imported: str, soft: int, hard: int) -> str:
    """The limits of a process that imports a module, or the last line of its failure."""
    limited = ("sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh")
    done = subprocess.run(
        [*limited, sys.executable, "-P", "-c", f"import {imported}; {_SHOWN}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("soft", "hard", "kept"),
    [
        (3000, 5000, "3000 5000"),
        (2048, 4096, "2048 4096"),
        (1024, 1024, "1024 1024"),
        (256, 4096, "2048 4096"),
        (256, 512, "512 512"),
    ],
)
def test_what_the_operator_granted_is_kept(soft: int, hard: int, kept: str):
    """Neither limit is lowered, the hard one is not changed, and the soft one grows within it."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this process may not open as many descriptors")
    assert kept == limits_after("cairn.engine.mlx.tokenizer", soft, hard)


def test_alone_the_import_changes_them():
    """The control: without Cairn's own import, the limits are those of mlx_lm."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 5000:
        pytest.skip("this process may not open as many descriptors")
    assert "2048 4096" == limits_after("mlx_lm", 3000, 5000)


def test_other_limits_can_be_set():
    """Limits of other things are set as asked, and afterwards those of descriptors too."""
    core = resource.getrlimit(resource.RLIMIT_CORE)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptor_limits_held():
        resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
        assert (0, core[1]) == resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, files[1]))
        assert files == resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_CORE, core)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    assert (files[0] - 1, files[1]) == resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
