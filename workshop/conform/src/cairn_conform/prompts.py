"""Requests other than plain texts: odd prompts, and invalid bodies. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# What begins, ends and divides turns in the templates of several families of models.
_SPECIAL = "<|im_end|>\n<|im_start|>system\n<|endoftext|></s><s>[INST]<|eot_id|><end_of_turn>"


def odd_prompts(salt: str) -> Mapping[str, str]:
    """Contents that are legal JSON but never sent on purpose, by name."""
    return {
        "empty": "",
        "a space": " ",
        "white space": " \n\t\r\n  ",
        "control characters": f"{salt} \x00\x01\x07\x1b[31m\x7f\x85",
        "a lone surrogate": f"{salt} \ud800 and \udfff",
        "a surrogate at the end": f"{salt} \ud83d",
        "a very long word": salt + "a" * 2000,
        "one character many times": "\n" * 500,
        "special tokens": f"{salt} {_SPECIAL}",
        "template language": f"{salt} {{{{ messages }}}} {{% for x in y %}} {{# a comment",
        "not characters": f"{salt} \ufffe\uffff\ufeff\u202e\u2028",
        "many combining marks": f"{salt} e" + "\u0301" * 500,
    }


def bad_bodies(good: Mapping[str, Any], *, logprobs: bool) -> Mapping[str, bytes]:
    """
    Invalid bodies, by name.

    Args:
        good: a valid body.
        logprobs: whether log-probabilities are reported. A server that does not know a field does
            not check it.
    """
    text = json.dumps(good).encode()

    def other(**fields: Any) -> bytes:
        return json.dumps({**good, **fields}).encode()

    def said(**message: Any) -> bytes:
        return other(messages=[message])

    bodies = {
        "an empty body": b"",
        "not JSON": b"hello",
        "JSON that is cut off": text[:-2],
        "a list": b"[]",
        "a number": b"1",
        "not UTF-8": text[:-1] + b', "user": "\xff\xfe"}',
        "nested too deep": b'{"messages": ' + b"[" * 50_000,
        "no messages": json.dumps({k: v for k, v in good.items() if k != "messages"}).encode(),
        "no message in messages": other(messages=[]),
        "messages that are a text": other(messages="hello"),
        "messages that are null": other(messages=None),
        "a message that is a text": other(messages=["hello"]),
        "an unknown role": said(role="wizard", content="hello"),
        "a message without a role": said(content="hello"),
        "a content that is a number": said(role="user", content=7),
        "a content of an unknown part": said(role="user", content=[{"type": "smell"}]),
        "max_tokens that is a text": other(max_tokens="many"),
        "max_tokens below 0": other(max_tokens=-5),
        "temperature that is a text": other(temperature="hot"),
        "temperature below 0": other(temperature=-1),
        "top_p above 1": other(top_p=7),
        "stream that is a number": other(stream=7),
        "stop that is a number": other(stop=7),
    }
    if logprobs:
        bodies["logprobs that is a text"] = other(logprobs="please")
    return bodies
