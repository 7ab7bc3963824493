"""The routes of Ollama's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version

from quart import Quart, Response

from cairn.actors.requests.messages import Embedded, ListedModel, ServerFacts
from cairn.http.adapter import AnswerBuilder, StreamBuilder, json_response
from cairn.http.embeddings.request import EmbeddingsRequest
from cairn.http.ollama.answers import (
    ChatAnswer,
    ChatStream,
    TextAnswer,
    TextStream,
    chat_piece,
    text_piece,
)
from cairn.http.ollama.embeddings import (
    read_embed_request,
    read_prompt_request,
    vector,
    vectors,
)
from cairn.http.ollama.errors import ADDRESS
from cairn.http.ollama.models import (
    API_VERSION,
    all_models,
    at,
    loaded_models,
    model_facts,
    named,
    served_name,
)
from cairn.http.ollama.objects import OllamaVersion, Piece
from cairn.http.ollama.request import Preload, read_chat_request, read_generate_request
from cairn.http.service import Server, Service
from cairn.http.wire.checks import JsonObject
from cairn.http.wire.errors import request_header
from cairn.http.wire.json import decode_object
from cairn.http.wire.parameters import Ignored, ReadRequest
from cairn.http.wire.warned import warning_of

Reader = Callable[[JsonObject, Mapping[str, str], Ignored, ServerFacts], ReadRequest | Preload]
EmbedReader = Callable[[JsonObject, Ignored, Sequence[ListedModel]], EmbeddingsRequest]
Answered = Callable[
    [
        ReadRequest,
        Callable[[ReadRequest], AnswerBuilder],
        Callable[[ReadRequest], StreamBuilder],
    ],
    Awaitable[Response],
]


def add_ollama_routes(
    app: Quart,
    server: Server,
    service: Callable[[], Service],
    ignored: Ignored,
    *,
    body_of: Callable[[], Awaitable[tuple[bytes, Mapping[str, str]]]],
    check_model: Callable[[str], None],
    operators_model: Callable[[str], ListedModel],
    answered: Answered,
) -> None:
    """
    Add the routes of Ollama's API.

    Args:
        service: the server as the caller sees it.
        body_of: reads the body of the current request, with its headers.
        check_model: refuses names of models that are not served.
        operators_model: a model by its name, which the caller may have loaded and unloaded.
        answered: serves a request and returns its answer, whole or as a stream.
    """

    async def asked_of(read: Reader) -> tuple[JsonObject, ReadRequest | Preload]:
        fields, headers = await fields_of()
        name = fields.get("model")
        facts = service().facts_of(name if isinstance(name, str) else "")
        return fields, read(fields, headers, ignored, facts)

    async def fields_of() -> tuple[JsonObject, Mapping[str, str]]:
        """The fields of a body, with the name of the model as it is served."""
        body, headers = await body_of()
        fields = decode_object(body)
        if isinstance(name := fields.get("model"), str):
            fields["model"] = served_name(name, server.models)
        return fields, headers

    async def embedded(read: EmbedReader) -> tuple[Embedded, EmbeddingsRequest, dict[str, str]]:
        """The vectors of a request, with the headers of its answer."""
        fields, _ = await fields_of()
        asked = read(fields, ignored, server.models)
        found = await service().embed(asked.command)
        return found, asked, {**request_header(found.request), **warning_of(asked.ignored)}

    def preloaded(fields: JsonObject, asked: Preload, piece: Callable[..., Piece]) -> Response:
        """Have a model loaded in its turn, or unloaded."""
        model = named(fields, server.models)
        if asked.unload != (model.state == "not_loaded"):
            operators_model(model.facts.model)
            if asked.unload:
                server.unload_model()
            else:
                server.load_model(model.facts.model)
        sent = piece(
            (),
            model=model.facts.model,
            created_at=at(model.facts.started_s),
            done=True,
            done_reason="unload" if asked.unload else "load",
        )
        return json_response(sent)

    async def generated(
        read: Reader,
        piece: Callable[..., Piece],
        whole: Callable[[ReadRequest], AnswerBuilder],
        stream: Callable[[ReadRequest], StreamBuilder],
    ) -> Response:
        """An answer, or what a request without a prompt gets."""
        fields, asked = await asked_of(read)
        if isinstance(asked, Preload):
            return preloaded(fields, asked, piece)
        check_model(asked.command.requested_model)
        return await answered(asked, whole, stream)

    @app.post(f"{ADDRESS}/chat")
    async def ollama_chat() -> Response:
        return await generated(read_chat_request, chat_piece, ChatAnswer, ChatStream)

    @app.post(f"{ADDRESS}/generate")
    async def ollama_generate() -> Response:
        return await generated(read_generate_request, text_piece, TextAnswer, TextStream)

    @app.post(f"{ADDRESS}/embed")
    async def ollama_embed() -> Response:
        found, asked, headers = await embedded(read_embed_request)
        return json_response(await vectors(found, asked), headers=headers)

    @app.post(f"{ADDRESS}/embeddings")
    async def ollama_embeddings() -> Response:
        found, asked, headers = await embedded(read_prompt_request)
        return json_response(await vector(found, asked), headers=headers)

    @app.post(f"{ADDRESS}/show")
    async def ollama_show() -> Response:
        body, _ = await body_of()
        return json_response(model_facts(named(decode_object(body), server.models)))

    @app.get(f"{ADDRESS}/tags")
    async def ollama_tags() -> Response:
        return json_response(all_models(server.models, await server.model_sizes()))

    @app.get(f"{ADDRESS}/ps")
    async def ollama_ps() -> Response:
        return json_response(loaded_models(server.models, await server.model_sizes()))

    @app.get(f"{ADDRESS}/version")
    async def ollama_version() -> Response:
        return json_response(OllamaVersion(version=API_VERSION, cairn=version("cairn-server")))
