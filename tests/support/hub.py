"""
A hub of models on the loopback, with the addresses that the hub's client needs.

It lists models with sizes and hashes, sends files and parts of them, and fails where a test wants
that: it cuts a file off, sends other bytes than it lists, or refuses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs

_MODEL = re.compile(r"/api/models/(?P<name>[^?]+?)(?:/revision/[^?]+)?(?:\?.*)?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_RANGE = re.compile(r"bytes=(\d+)-")
_HELD_S = 60.0
_LARGE = (".safetensors", ".bin", ".gguf")


@attrs.define
class Hub:
    """
    Models by name, each with its files.

    Attributes:
        url: for the variable ``HF_ENDPOINT``.
        cut_after: how many bytes of a file are sent before the connection is cut; once for each
            file. After that the file is refused until it is removed from ``refused``.
        held: files of which only the beginning that ``cut_after`` names is sent until this is set.
        altered: files that are sent with other contents than the listed ones.
        sizes: that are listed instead of the real ones.
        gated: models that only those get who accepted their terms.
        requests: method, path and the first byte of each request.
    """

    url: str = ""
    models: dict[str, dict[str, bytes]] = attrs.field(factory=dict)
    cut_after: dict[str, int] = attrs.field(factory=dict)
    refused: set[str] = attrs.field(factory=set)
    held: threading.Event | None = None
    altered: set[str] = attrs.field(factory=set)
    sizes: dict[str, int] = attrs.field(factory=dict)
    gated: set[str] = attrs.field(factory=set)
    requests: list[tuple[str, str, int]] = attrs.field(factory=list)

    def add(self, name: str, directory: Path, **more: bytes) -> None:
        """List a model with the files of a directory."""
        files = {one.name: one.read_bytes() for one in directory.iterdir() if one.is_file()}
        self.models[name] = {**files, **more}

    def revision_of(self, name: str) -> str:
        """The commit of a model, which follows from its files."""
        digest = hashlib.sha1(usedforsecurity=False)
        for file, content in sorted(self.models[name].items()):
            digest.update(file.encode() + digest_of(file, content).encode())
        return digest.hexdigest()

    def sent(self, file: str) -> list[int]:
        """The first byte of each time that a file was sent."""
        return [at for method, path, at in self.requests if method == "GET" and path.endswith(file)]


def digest_of(file: str, content: bytes) -> str:
    """The hash that a hub lists of a file: SHA-256 of large files, else git's of a blob."""
    if file.endswith(_LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

        def _answer(self, *, with_body: bool) -> None:
            found = _RANGE.match(self.headers.get("range", ""))
            start = int(found[1]) if found else 0
            hub.requests.append((self.command, self.path, start))
            if file := _FILE.fullmatch(self.path):
                self._file(file["name"], file["file"], start, with_body=with_body)
            elif model := _MODEL.fullmatch(self.path):
                self._model(model["name"], with_body=with_body)
            else:
                self._send(404, b"{}", {}, with_body=with_body)

        def _model(self, name: str, *, with_body: bool) -> None:
            if name not in hub.models:
                self._send(404, b"{}", {"x-error-code": "RepoNotFound"}, with_body=with_body)
                return
            siblings = []
            for file, content in hub.models[name].items():
                size = hub.sizes.get(file, len(content))
                one: dict[str, Any] = {"rfilename": file, "size": size, "blobId": "0" * 40}
                if file.endswith(_LARGE):
                    one["lfs"] = {"sha256": digest_of(file, content), "size": size}
                    one["lfs"]["pointerSize"] = 134
                else:
                    one["blobId"] = digest_of(file, content)
                siblings.append(one)
            body = {"id": name, "sha": hub.revision_of(name), "siblings": siblings}
            headers = {"content-type": "application/json"}
            self._send(200, json.dumps(body).encode(), headers, with_body=with_body)

        def _file(self, name: str, file: str, start: int, *, with_body: bool) -> None:
            content = hub.models.get(name, {}).get(file)
            if name in hub.gated:
                self._send(403, b"{}", {"x-error-code": "GatedRepo"}, with_body=with_body)
                return
            if content is None:
                self._send(404, b"{}", {"x-error-code": "EntryNotFound"}, with_body=with_body)
                return
            headers = {
                "etag": f'"{digest_of(file, content)}"',
                "x-repo-commit": hub.revision_of(name),
                "accept-ranges": "bytes",
            }
            if file in hub.altered:
                content = bytes(len(content))
            if not with_body:
                self._send(200, content, headers, with_body=False)
            elif file in hub.refused:
                self._send(503, b"{}", {}, with_body=True)
            elif (cut := hub.cut_after.pop(file, None)) is not None:
                self._head(200, len(content), headers)
                self.wfile.write(content[:cut])
                self.wfile.flush()
                if hub.held is not None:
                    hub.held.wait(_HELD_S)
                else:
                    hub.refused.add(file)
                self.close_connection = True
            elif start:
                headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self._send(206, content[start:], headers, with_body=True)
            else:
                self._send(200, content, headers, with_body=True)

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str], *, with_body: bool
        ) -> None:
            self._head(status, len(body), headers)
            if with_body:
                self.wfile.write(body)

        def _head(self, status: int, size: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("content-length", str(size))
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
