"""How much of the disk block files may take, if the operator does not say."""

from __future__ import annotations

import os
from pathlib import Path

BUDGET_MAX = 4 << 30
"""The most that block files take together by default, in bytes."""

TOKENS = 65_536
"""
The tokens that a model's block files have room for by default, if its context is not longer: as
many conversations of 4,096 tokens as there are slabs by default.
"""


def disk_budget_for(
    *,
    token_bytes: int,
    block_bytes: int,
    block_tokens: int,
    context_tokens: int,
    others_bytes: int,
) -> int:
    """
    The budget of block files in bytes: room for ``TOKENS`` tokens, or for the model's whole context
    if that is longer, beside the files that other models left; but at most ``BUDGET_MAX``. Pure.

    Args:
        token_bytes: the KV of a token.
        block_bytes: what a block has beside the KV of its tokens, such as recurrent states.
        others_bytes: the block files of other fingerprints. Without them a model that is tried for
            an hour would push out what another one left.
    """
    blocks = -(-max(TOKENS, context_tokens) // block_tokens)
    return min(BUDGET_MAX, blocks * (block_tokens * token_bytes + block_bytes) + others_bytes)


def other_files_bytes(folder: Path, fingerprint: str) -> int:
    """
    The size of the block files of other fingerprints, in bytes. Reads no contents, follows no
    links, and counts nothing that cannot be listed.
    """
    size = 0
    for where, below, names in os.walk(folder):
        if Path(where) == folder and fingerprint in below:
            below.remove(fingerprint)
        for name in names:
            try:
                size += Path(where, name).lstat().st_size
            except OSError:
                continue  # removed meanwhile
    return size
