"""The JSON objects of ``/tokenize``, ``/detokenize`` and ``/props``, as they are sent."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.http.wire.sent import Sent


class TokenList(Sent, kw_only=True):
    """The tokens of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int
    ignored: list[str] | UnsetType = UNSET


class TokensText(Sent):
    """The text of tokens, under the names that llama.cpp and vLLM have for it."""

    content: str
    prompt: str


class PropsParams(Sent, kw_only=True):
    """The sampling parameters of a request that sets none, under llama.cpp's names."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    n_predict: int


class GenerationSettings(Sent):
    """The context, and the defaults of a request."""

    n_ctx: int
    params: PropsParams


class Modalities(Sent):
    """What the model takes besides text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


class Props(Sent, kw_only=True):
    """Facts about the server and its model, under llama.cpp's names."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    build_info: str
