"""The parameters that mean the same in every protocol, and the report of those that are ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypedDict, cast, get_args

import attrs
import msgspec
import structlog

from cairn.actors.requests.messages import Generate, ServerFacts
from cairn.engine.names import NAME_MAX, is_name
from cairn.engine.prompt.template_settings import GRADES
from cairn.engine.sampling import Sampling
from cairn.engine.ttl import seconds_of
from cairn.http.wire.checks import ClientError, JsonObject, check_count, check_known
from cairn.http.wire.suggestions import meant
from cairn.journal.events import CacheMode
from cairn.journal.tenants import AGENT_SESSIONS

log = structlog.get_logger(__name__)

#: Clients that send one of these name a group of conversations, not one conversation.
GROUP_HEADERS = ("x-claude-code-session-id", "x-session-id", "session-id")

#: The efforts of thinking that a client may choose.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

INT64_MAX = 2**63 - 1

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

#: A client may invent any number of names; the answer reports this many, cut to this length.
_IGNORED_MAX = 64
_IGNORED_NAME_MAX = 100


class CairnFields(msgspec.Struct, kw_only=True):
    """The fields that a request of every protocol may have: the model, and Cairn's extensions."""

    model: str | None = None
    stream: bool | None = None
    repetition_guard: bool | None = None
    cache_prompt: bool | None = None
    cache_mode: str | None = None
    session_id: str | None = None
    ttl: int | str | None = None
    explain: bool | None = None


class CommonFields(CairnFields, kw_only=True):
    """``CairnFields``, and sampling as OpenAI's and Anthropic's protocols have it."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@attrs.frozen(kw_only=True)
class ReadRequest:
    """
    A request that was read: a command, and how to send its answer.

    Attributes:
        ignored: the parameters that were sent and are ignored, sorted.
        more: the same for further prompts, whose answers follow those to the first one.
    """

    command: Generate
    stream: bool
    ignored: tuple[str, ...] = ()
    more: tuple[Generate, ...] = ()


class Common(TypedDict):
    """``CommonFields``, as a command has them."""

    requested_model: str
    sampling: Sampling
    seed: int | None
    session_name: str | None
    cache_prompt: bool
    cache_mode: CacheMode
    ttl_s: int | None
    explain: bool


class Ignored:
    """Reports ignored parameters to clients, and logs each name once."""

    def __init__(self, names_max: int = 256) -> None:
        self._names: set[str] = set()
        self._names_max = names_max

    def add(self, name: str, meant: str | None = None) -> None:
        """Log the name, if it is new, with the known name that may be meant."""
        # A client that invents names must not fill the memory or the log.
        if name in self._names or len(self._names) >= self._names_max:
            return
        self._names.add(name)
        hint = {} if meant is None else {"did_you_mean": meant}
        log.warning("parameter ignored", parameter=name, **hint)

    def report(
        self,
        names: Iterable[str],
        known: Iterable[str],
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, ...]:
        """
        The names for an answer, sorted, with the known name after a misspelt one. Logs new ones.

        Args:
            aliases: known names, by the names that other servers use.
        """
        found = sorted({name[:_IGNORED_NAME_MAX] for name in names})[:_IGNORED_MAX]
        known = frozenset(known)
        reported = []
        for name in found:
            # A known name is ignored in this request only; a path names a field within one.
            is_known = name in known or "." in name
            near = None if is_known else aliases.get(name) or meant(name, sorted(known))
            self.add(name, near)
            reported.append(name if near is None else f"{name} (did you mean {near}?)")
        return tuple(reported)


def unknown(fields: JsonObject, known: Iterable[str], **within: Iterable[str]) -> set[str]:
    """
    The fields with a value that an adapter does not know.

    Args:
        within: the known fields of some objects within the body, by the object's name.
    """
    names = {name for name in fields.keys() - set(known) if fields[name] is not None}
    for outer, inner in within.items():
        if isinstance(fields.get(outer), Mapping):
            names |= {f"{outer}.{name}" for name in unknown(fields[outer], inner)}
    return names


def common(wire: CommonFields, facts: ServerFacts) -> Common:
    """
    The fields of a command that every protocol reads in the same way.

    Raises:
        ClientError: a value cannot be used.
    """
    return Common(
        requested_model=model_name(wire.model),
        sampling=_sampling(wire, facts),
        # Of 64 bits, signed or unsigned.
        seed=integer("seed", wire.seed, -(2**63), 2**64 - 1),
        session_name=_session_name(wire.session_id),
        cache_prompt=wire.cache_prompt is not False,
        cache_mode=_cache_mode(wire.cache_mode),
        ttl_s=_ttl(wire.ttl),
        explain=wire.explain is True,
    )


def _sampling(wire: CommonFields, facts: ServerFacts) -> Sampling:
    """The sampling parameters, with the server's defaults for those that are left out."""
    names = [field.name for field in attrs.fields(Sampling)]
    given = {name: value for name in names if (value := getattr(wire, name, None)) is not None}
    # Other servers take -1 for no limit, and read 0 as a share that only the likeliest token has.
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("top_p") == 0:
        given |= {"top_p": 1.0, "top_k": 1}
    integer("top_k", given.get("top_k"), 0, INT64_MAX)
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"], facts.vocabulary_tokens)
    try:
        return attrs.evolve(facts.defaults, **given)
    except ValueError as error:  # its message begins with the parameter's name
        raise ClientError(str(error), param=str(error).split()[0]) from error


def _biases(wire: Mapping[str, float], vocabulary_tokens: int) -> dict[int, float]:
    for token in wire:
        # A row of logits has no element for another id, and the device does not check.
        if not _TOKEN_ID.fullmatch(token) or int(token) >= vocabulary_tokens:
            raise ClientError(
                f"logit_bias has the key {token[:NAME_MAX]!r}, which is not a token id of this "
                f"model; its token ids are 0 to {vocabulary_tokens - 1}",
                param="logit_bias",
            )
    return {int(token): bias for token, bias in wire.items()}


def thinking(
    effort: str | None, where: str, facts: ServerFacts
) -> tuple[JsonObject, frozenset[str]]:
    """
    The template settings of an effort of thinking, and what of it is ignored: an effort has no
    effect if the model's template has no switch for it.

    Args:
        effort: None if the request has none.
        where: its path in the body.

    Raises:
        ClientError: it is unknown.
    """
    if effort is None:
        return {}, frozenset()
    check_known(effort, EFFORTS, where)
    settings: dict[str, object] = {}
    if "enable_thinking" in facts.switches:
        settings["enable_thinking"] = effort != "none"
    if "reasoning_effort" in facts.switches and effort in GRADES:
        settings["reasoning_effort"] = effort
    return settings, frozenset(() if settings else {where})


def integer(name: str, value: int | None, low: int, high: int) -> int | None:
    """
    A value between two limits, inclusive.

    Raises:
        ClientError: it is out of range.
    """
    if value is None or low <= value <= high:
        return value
    limits = f"between {low} and {high}"
    if high == INT64_MAX:  # no client comes near it, and it would distract from the other limit
        limits = f"at least {low}" if value < low else f"at most {high}"
    raise ClientError(f"{name} must be {limits}", param=name)


def longest(name: str, value: int | None, low: int = 1) -> int | None:
    """
    The longest answer that a request allows; None if it leaves that to the server.

    Raises:
        ClientError: it is out of range.
    """
    # On other servers, -1 says that the client sets no limit.
    return None if value == -1 else integer(name, value, low, INT64_MAX)


def stop_texts(name: str, texts: tuple[str, ...], texts_max: int) -> tuple[str, ...]:
    """
    The texts that end an answer.

    Raises:
        ClientError: there are too many, or one is empty.
    """
    check_count(texts, name, texts_max)
    if "" in texts:
        raise ClientError(
            f"{name} contains an empty string, which would end any answer; remove it", param=name
        )
    return texts


def model_name(value: str | None) -> str:
    """
    The model that a request names; empty if it names none.

    Raises:
        ClientError: the name is too long for the journal.
    """
    if value is not None and len(value) > NAME_MAX:
        raise ClientError(f"model is longer than {NAME_MAX} characters", param="model")
    return value or ""


def _session_name(value: str | None) -> str | None:
    """
    The session that a request names, if any.

    Raises:
        ClientError: the name is invalid.
    """
    if value is not None and not is_name(value):
        raise ClientError(
            f"session_id must be 1 to {NAME_MAX} printable characters", param="session_id"
        )
    if value is not None and value.startswith(AGENT_SESSIONS):
        raise ClientError(
            f"session_id must not begin with {AGENT_SESSIONS!r}, which is reserved for agents; "
            "choose another name, or use the agent: POST /v1/agents/ID/generate",
            param="session_id",
        )
    return value


def _ttl(value: int | str | None) -> int | None:
    """
    The TTL of the session and blocks that a request uses, in seconds, if it sets one.

    Raises:
        ClientError: it is not a duration.
    """
    if value is None:
        return None
    try:
        return seconds_of(value)
    except ValueError as error:
        raise ClientError(f"ttl {error}", param="ttl") from error


def _cache_mode(value: str | None) -> CacheMode:
    """
    What a request may reuse; everything by default.

    Raises:
        ClientError: the mode is unknown.
    """
    if value is None:
        return "full"
    check_known(value, get_args(CacheMode), "cache_mode")
    return cast(CacheMode, value)


def group(headers: Mapping[str, str]) -> str | None:
    """
    The group of conversations that a client's headers name, if any.

    Args:
        headers: looked up by names in lower case.
    """
    for name in GROUP_HEADERS:
        if (found := group_name(headers.get(name))) is not None:
            return found
    return None


def group_name(value: str | None) -> str | None:
    """
    The group that a text names, if it is a valid name. An invalid one is ignored, because the group
    is only a hint about where to look first.
    """
    name = (value or "").strip()
    return name if is_name(name) else None
