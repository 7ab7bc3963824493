"""
Schemathesis against a running server, by the description that the server gives of itself.

``python -P tools/schema_check.py`` (``make schema``) starts ``ops serve`` with Pebble, whose
context is cut to a few tokens so that no made-up request writes for long, and lets schemathesis
send what the description allows, and what it does not. No answer may be a fault of the server's,
and each has the status, the type and the shape that are described. Schemathesis is run by the
command in ``$SCHEMATHESIS``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cairn.engine.model.builtin import builtin_directory
from cairn_clients.sdk_tests import served

_CONTEXT_TOKENS = 96
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
_RUN_S = 600.0


def main() -> int:
    """Run it; gives what schemathesis gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--examples", default=20, type=int, help="made-up requests an operation")
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--quick", action="store_true", help="without each value's every edge")
    given = parser.parse_args()
    phases = "examples,fuzzing" if given.quick else "examples,coverage,fuzzing"
    with tempfile.TemporaryDirectory() as home:
        model = small_context(Path(home) / "pebble")
        with served(None, "--model", str(model), "--model-name", "pebble") as url:
            command = (
                os.environ.get("SCHEMATHESIS", "schemathesis"),
                "run",
                f"{url}/openapi.json",
                f"--checks={','.join(_CHECKS)}",
                f"--phases={phases}",
                f"--max-examples={given.examples}",
                f"--seed={given.seed}",
                "--request-timeout=60",
                "--warnings=off",
                "--no-color",
            )
            # In a folder of its own: it keeps what it found where it is run.
            return subprocess.run(command, cwd=home, timeout=_RUN_S, check=False).returncode


def small_context(folder: Path) -> Path:
    """A copy of Pebble that takes few tokens."""
    shutil.copytree(builtin_directory(), folder)
    config = folder / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    fields["max_position_embeddings"] = _CONTEXT_TOKENS
    config.write_text(json.dumps(fields), "utf-8")
    return folder


if __name__ == "__main__":
    sys.exit(main())
