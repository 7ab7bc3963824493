"""
The fields that no check of the journal binds, each with the reason: what ``test_tampering.py`` lets
pass, and the table of docs/audit.md.

A field is here if some change of it contradicts nothing that the journal has; others may be found.
"""

from __future__ import annotations

_CLOCK = "read from a clock, for people; no decision depends on it"
_RATE = "read from a clock; only `adoption_declined` depends on it"
_OTHER_NODE = "bound by the journal of that node"
_FLEET = "what another journal has; `ops verify --fleet` compares it"
_HANDED = "a copy of what another journal has, whose row is named"
_WORDS = "a sentence for people; the act itself is bound"
_REPORTED = "what disk, memory or system said, which nothing else measures"
_OPERATOR = "chosen by the operator; its effects are checked where they show"
_CLIENT = "chosen by the client; nothing that the server computes says it again"
_TEXT = "a text of the client's protocol, which the journal does not compute"
_LIMIT = "a limit: it contradicts the journal only where a measured number exceeds it"
_ENGINE = "a measurement; only `ops replay --engine` measures it again"
_LATER = "bound by the rows that use it later; the last ones are used by none"

_NAME = "a name that is drawn at random, of what the row says besides"
_AGAIN = "a replay computes it again, and shows that; of a crash it is the only word"

UNBOUND: dict[str, dict[str, str]] = {
    "*": {
        "event_id": "drawn at random, so that an append is done once",
        "time_us": _CLOCK,
    },
    "server_started": {
        "boot": _LATER,
        "cairn_version": "the version's own word",
        "settings": _OPERATOR,
    },
    "server_stopped": {"reason": _WORDS},
    "node_taken_over": {"token": "any that no earlier lease had", "by": _OPERATOR},
    "heads_seen": {"heads": "what other journals have; `ops verify --fleet` compares them"},
    "loss_seen": {
        "position": _FLEET,
        "row_hash": _FLEET,
    },
    "model_loaded": {
        "grain": _LATER,
        "name": _OPERATOR,
        "directory": _OPERATOR,
        "adapter": _OPERATOR,
        "dtype": "a sentence for people; the dtypes are among the fingerprint's fields",
        "layers": _LATER,
        "reusable": _LATER,
        "pool_slabs": _LIMIT,
        "pool_bytes": _LIMIT,
        "blocks_bytes": _LIMIT,
        "blocks_max": _LIMIT,
        "min_cache_tokens": _LIMIT,
        "state_blocks": _LATER,
    },
    "self_test_finished": {
        "findings": "of checks that hold either way, and of a test that failed",
        "error_max": _ENGINE,
        "decode_shapes": "without the last one, which is W: how passes are put together",
        "row_class": "of a fingerprint that does not have it",
        "row_class_reason": _WORDS,
        "without_drafts": _WORDS,
        "duration_us": _CLOCK,
        "from_cache": "where the result came from; the test ran once under this fingerprint",
    },
    "model_unloaded": {"reason": _WORDS, "active_bytes": _REPORTED},
    "model_load_failed": {"name": _CLIENT, "reason": _WORDS},
    "operator_acted": {
        "action": "a decision of a person; only `accept_unstable` has an effect that is checked",
        "detail": _WORDS,
    },
    "loss_accepted": {
        "fact": _WORDS,
        "heads": "heads that the journal no longer has; `ops verify` names each that it looks for",
    },
    "journal_stalled": {
        "reason": _REPORTED,
        "error": _REPORTED,
        "rows_waiting": _REPORTED,
        "requests_refused": _REPORTED,
        "duration_us": _CLOCK,
    },
    "request_rejected": {
        "request": "of a request that no other row has",
        "tenant": "of a request that no other row has",
        "status": "of a request that no other row has",
        "code": "of a request that no other row has",
    },
    "embeddings_computed": {
        "request": "of a request that no other row has",
        "tenant": "of a request that no other row has",
        "model": _OPERATOR,
        "fingerprint": "of a model that no other row has",
        "inputs": _CLIENT,
        "tokens": "a measurement that no other row has",
        "duration_us": _CLOCK,
    },
    "session_opened": {
        "group": _CLIENT,
        "named": "that it is named by its client, who names it again later",
    },
    "request_received": {
        "cache_mode": "where both modes give the same decision",
        "base_request": "where the prompt is the same either way",
        "base_parts": "where the parts are the same either way",
        "protocol": _CLIENT,
        "client": _CLIENT,
        "group": _CLIENT,
        "new_parts": "a MAC under the tenant's secret; a later request that continues it has it",
        "max_tokens": "an answer that ended by itself was shorter",
        "sampling": "only `ops replay --engine` draws again",
        "seed": "only `ops replay --engine` draws again",
        "seed_given": _CLIENT,
        "requested_model": _CLIENT,
        "grammar": "only `ops replay --engine` draws again",
        "ttl_s": _CLIENT,
        "thoughts": _CLIENT,
        "words": "the prompt's token ids are bound; their words need the tokenizer",
        "waited_us": _CLOCK,
        "traceparent": _CLIENT,
    },
    "path_selected": {
        "diverged_text": "words around the first token that differs, for people",
        "diverged_from": "the words there in the nearest session, for people",
    },
    "slab_acquired": {
        "slab": _LATER,
        "capacity_tokens": "within its bounds; `ops replay --engine` opens it again",
    },
    "slab_released": {"reason": _WORDS},
    "blocks_restored": {"duration_us": _CLOCK},
    "cache_extended": {
        "logprobs": "bound by a shadow check of the answer, else by `ops replay --engine`",
        "drafted": "within what passes can have; drafts change no bit",
        "accepted": "within what passes can have; drafts change no bit",
        "sampled": "tokens after the end of the answer, which no row uses",
        "emitted": "which row released a token",
        "text": "bound by a stored answer, else by `ops replay --engine`",
        "duration_us": _RATE,
    },
    "cache_trimmed": {"reason": _WORDS},
    "block_sealed": {
        "key": "a MAC under the tenant's secret, if it is of an answer or of a short block",
        "digest": "bound by each later row that measures the block, else by `ops replay --engine`",
        "bytes": _LATER,
    },
    "block_evicted": {"reason": "among those that are possible for the block"},
    "block_files_scanned": {"budget_bytes": _LIMIT, "removed_files": _REPORTED},
    "block_spill_failed": {
        "key": "which block could not be written; it is as it was",
        "reason": _REPORTED,
    },
    "block_loaded": {"duration_us": _CLOCK},
    "block_file_rejected": {
        "key": "bound where the file is this node's own",
        "reason": _REPORTED,
        "moved_to": _REPORTED,
        "node": "the node that wrote the file, whose journal does not know of this row",
    },
    "block_file_removed": {"reason": "`space` or `expired`; the file is gone either way"},
    "adoption_declined": {
        "key": "a block that was not read; no row follows from it",
        "blocks": "how many were not read; no row follows from it",
    },
    "block_adopted": {
        "digest": "bound by each later row that measures the block, and by the other node's row",
        "bytes": _LATER,
        "node": _OTHER_NODE,
        "position": _OTHER_NODE,
        "row_hash": _OTHER_NODE,
        "ttl_s": _CLIENT,
        "duration_us": _RATE,
    },
    "tokens_emitted": {
        "text": "bound by a stored answer, else by `ops replay --engine`",
    },
    "call_rejected": {
        "reason": "the verdict of the parser of the model's format",
        "detail": _WORDS,
    },
    "turn_stored": {
        "previous": "a turn of the tenant; which of them its client named is in no other row",
        "created_s": _CLOCK,
        "question": "the prompt's token ids are bound; their words need the tokenizer",
        "note": _TEXT,
        "texts": _TEXT,
        "texts_at": "a row of the session that has a text of this name",
    },
    "session_forgotten": {
        "rows": "the rows without their keys are counted again by `ops verify`",
        "key_ids": _OPERATOR,
        "blocks": "some of the blocks on record; which are the session's needs its rows",
        "removed": "some of these",
        "same_text": "some of the sessions on record",
    },
    "agent_created": {
        "tenant": "of an agent that has no turn",
        "agent": _LATER,
        "model": _CLIENT,
        "max_context": _CLIENT,
        "persist": _LATER,
        "created_s": _CLOCK,
        "system": _CLIENT,
        "tools": _CLIENT,
    },
    "session_released": {"to": _FLEET, "to_node": _FLEET},
    "session_adopted": {
        "model": _CLIENT,
        "max_context": _CLIENT,
        "created_s": _CLOCK,
        "of_agent": _HANDED,
        "node": _FLEET,
        "position": _FLEET,
        "row_hash": _FLEET,
        "system": _HANDED,
        "tools": _HANDED,
    },
    "turn_adopted": {
        "request": _LATER,
        "of_request": _HANDED,
        "created_s": _CLOCK,
        "finish_reason": _HANDED,
        "prompt_tokens": _HANDED,
        "cached_tokens": _HANDED,
        "completion_tokens": _HANDED,
        "answer_tokens": _HANDED,
        "node": _FLEET,
        "position": _FLEET,
        "row_hash": _FLEET,
        "end_position": _FLEET,
        "end_hash": _FLEET,
        "question": _HANDED,
        "answer": _HANDED,
    },
    "request_finished": {"finish_reason": "`stop` in the place of `length`: the longest answer"},
    "request_cancelled": {"stage": "what ended the request, outside the journal"},
    "prewarm_started": {
        "next_role": "what the template expects next",
        "new_keys": "of a prewarm that sealed none of these blocks",
    },
    "prewarm_abandoned": {"reason": "what came first, outside the journal"},
    "session_settled": {"complete": "without a prewarm, whether a request came first"},
    "session_closed": {"reason": _WORDS},
    "shadow_started": {
        "of_session": "of a check that ended before it compared anything",
        "request": "of a check that ended before it compared anything",
        "slab": _LATER,
        "capacity_tokens": "the engine's, for the check alone",
    },
    "shadow_checked": {"cuts": _ENGINE, "duration_us": _CLOCK},
    "shadow_skipped": {
        "of_session": "of a check that did not happen",
        "request": "of a check that did not happen",
        "reason": "of a check that did not happen",
    },
    "invariant_violated": {
        "bug_id": _NAME,
        "invariant": "of a crash, which no check repeats; a report says that it did not come again",
        "at_position": "of a crash, which no check repeats",
        "of_session": _AGAIN,
        "request": "for people; a replay finds the row by its position",
        "fingerprint": "for people; the model is that of the rows before",
        "cairn_version": "the version's own word",
        "message": _AGAIN,
        "expected": _AGAIN,
        "actual": _AGAIN,
        "trace": "of a crash, which no check repeats; else empty",
    },
    "session_quarantined": {"bug_id": _NAME},
    "blocks_quarantined": {"bug_id": _NAME, "keys": _LATER},
    "admission_closed": {"bug_id": _NAME},
}
"""Kind of an event, ``*`` for the columns of every row, to field to reason."""


def table() -> str:
    """The list as docs/audit.md has it."""
    lines = ["| event | field | why nothing binds it |", "|---|---|---|"]
    for kind, fields in UNBOUND.items():
        name = "every row" if kind == "*" else f"`{kind}`"
        lines += [f"| {name} | `{field}` | {reason} |" for field, reason in fields.items()]
    return "\n".join(lines)
