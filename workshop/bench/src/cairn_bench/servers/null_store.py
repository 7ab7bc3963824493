"""
Cairn with a journal that is never written, so that `ops bench` can measure the cost of writing.

Not for production: nothing of it outlives the process, and nothing can be inspected afterwards.
``python -P -m cairn_bench.servers.null_store`` takes the options of `ops serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import trio

from cairn.engine.machine.heap import use_one_heap
from cairn.http.server.listen import bind_socket
from cairn.journal.rows.store import MemoryStore
from cairn.ops.common.locations import log_path
from cairn.ops.common.logs import set_up_logs
from cairn.ops.serve.command import serve
from cairn.ops.serve.data_dir import make_home
from cairn.ops.serve.run import ENDED_AT_ONCE, serve_over


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal comes."""
    use_one_heap()  # as `ops serve` does: the two differ only in where rows are written
    with serve.make_context("null_store", list(arguments)) as context:
        options = context.params
        data_dir = options["data_dir"]
        make_home(data_dir)
        set_up_logs(log_path(data_dir))
        listener = bind_socket(options["host"], options["port"])
        served = trio.run(serve_over, options, MemoryStore(), listener, data_dir, None)
    return 0 if served else ENDED_AT_ONCE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
