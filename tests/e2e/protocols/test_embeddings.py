"""Embeddings by a real server, beside answers."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.journal import events as ev
from tests.support.models.embedding_model import DIMENSIONS, make_embedding_model
from tests.support.processes.subprocess_server import ask, assert_valid, run_ops, started, user

pytestmark = pytest.mark.slow

TEXTS = ["The path goes over the hill.", "A stone.", "Where the river bends, a mill stands. " * 12]


def test_vectors_beside_answers(tmp_path: Path) -> None:
    """
    Texts alone and together have the same bits, before and after an answer and in either encoding;
    the journal has the requests without their texts, and is valid.
    """
    place = make_embedding_model(tmp_path / "vectors")
    models = tmp_path / "models.toml"
    models.write_text(
        "[models.pebble]\nbuiltin = true\n"
        f"[models.vectors]\npath = '{place}'\nembeddings = true\nmatryoshka = true\n"
        'aliases = ["text-embedding-3-small"]\n',
        encoding="utf-8",
    )

    with started(tmp_path / "home", "--models", models) as server:

        def embed(given: Any, **more: Any) -> list[Any]:
            body = {"model": "text-embedding-3-small", "input": given, **more}
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
            assert 200 == answer.status_code, answer.text
            assert "x-request-id" in answer.headers
            return [one["embedding"] for one in answer.json()["data"]]

        together = embed(TEXTS)
        assert [DIMENSIONS] * 3 == list(map(len, together))
        assert ask(server, user("Hello")).text
        assert together == [embed(text)[0] for text in TEXTS]
        assert together[::-1] == embed(TEXTS[::-1])
        for numbers, encoded in zip(together, embed(TEXTS, encoding_format="base64"), strict=True):
            raw = base64.b64decode(encoded)
            assert tuple(numbers) == struct.unpack(f"<{DIMENSIONS}f", raw)
        (short,) = embed(TEXTS[0], dimensions=8)
        assert 8 == len(short)
        assert pytest.approx(1.0, rel=1e-5) == sum(one * one for one in short)

        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [("pebble", "chat"), ("vectors", "embedding")] == [
            (one["id"], one["cairn"]["kind"]) for one in listed
        ]
        wrong = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"model": "vectors", "messages": [user("Hello")]},
        )
        assert (400, "wrong_kind_of_model") == (wrong.status_code, wrong.json()["error"]["code"])
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'cairn_embedding_requests_total{model="vectors"} 7.0' in metrics
        assert 0 == server.stop()

    events = server.events(ev.EmbeddingsComputed)
    assert [3, 1, 1, 1, 3, 3, 1] == [one.inputs for one in events]
    assert 1 == len({one.fingerprint for one in events})
    assert_valid(server.data_dir)
    code, out, err = run_ops("export", "--data-dir", server.data_dir)
    assert 0 == code, err
    assert "embeddings_computed" in out
    assert "goes over the hill" not in out


def test_a_model_that_is_not_for_embeddings(tmp_path: Path) -> None:
    """The server does not start, and says what to do."""
    place = make_embedding_model(tmp_path / "vectors")
    (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', "utf-8")
    models = tmp_path / "models.toml"
    models.write_text(
        f"[models.pebble]\nbuiltin = true\n[models.v]\npath = '{place}'\nembeddings = true\n",
        encoding="utf-8",
    )
    code, _, err = run_ops("serve", "--models", models, "--data-dir", tmp_path / "home")
    assert 2 == code
    assert "Choose an embedding model of a decoder family, such as Qwen3-Embedding." in err
