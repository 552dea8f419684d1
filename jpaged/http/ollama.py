"""Ollama's API: /api/chat, /api/generate, /api/embed, and what clients ask about the model.

Answers are those of /v1/chat/completions and /v1/completions in another format. A stream is a line of JSON for each
event; a space keeps the connection open, because clients reject empty lines.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.errors import ModelNotFound, RequestTooLong
from jpaged.http.completions import EventStream, TokenTexts, fit_turns, iter_events, parse_job, run_job
from jpaged.http.embeddings import evaluate_job
from jpaged.http.exchange import CHARS_OF_NUMBER, JSON, build_answer, error_text, read_body, while_there
from jpaged.ollama import (
    API_VERSION,
    CHAT_URL,
    EMBED_URL,
    EMBEDDINGS_URL,
    GENERATE_URL,
    OllamaEmbedRequest,
    OllamaLines,
    OllamaRequest,
    build_ollama_answer,
    embeddings_body,
    hex_digest,
    line,
    load_body,
    parse_chat_request,
    parse_embed_request,
    parse_embeddings_request,
    parse_generate_request,
    parse_pull_request,
    parse_show_request,
    timestamp,
    with_tag,
    without_tag,
)
from jpaged.openai.request import Job
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service
from jpaged.types import OutputEvent

_CONTENT_TYPE = b"application/x-ndjson"
_KEEP_ALIVE = b" "
_NEVER = datetime(9999, 12, 31, tzinfo=UTC)
"""Time at which the model is unloaded."""


def ollama_routes(service: Service) -> list[Route]:
    """Return the routes of Ollama's API."""
    texts = TokenTexts()
    readers = {CHAT_URL: _read_chat, GENERATE_URL: _read_prompt}
    embedders = {EMBED_URL: parse_embed_request, EMBEDDINGS_URL: parse_embeddings_request}

    def answering(path: str) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Response | EventStream:
            return await _answer(service, request, texts, readers[path])

        return answer

    def embedding(path: str) -> Callable[[Request], Awaitable[Response]]:
        async def embed(request: Request) -> Response:
            return await _embed(service, request, embedders[path])

        return embed

    async def tags(request: Request) -> Response:
        return JSON({"models": [_describe(service, name) for name in _names(service.state.loaded())]})

    async def ps(request: Request) -> Response:
        model = service.state.loaded()
        more = {"expires_at": timestamp(_NEVER), "size_vram": 0, "context_length": model.model.max_model_len}
        return JSON({"models": [_describe(service, model.model.name) | more]})

    async def show(request: Request) -> Response:
        model = service.state.loaded()
        _check_name(model, await read_body(service, request, parse_show_request))
        body = await service.run_blocking(lambda: _show(service, model), 1 << 20)
        return JSON(body)

    async def pull(request: Request) -> Response:
        name, is_streamed = await read_body(service, request, parse_pull_request)
        _check_name(service.state.loaded(), name)
        done = {"status": "success"}
        return Response(line(done), media_type=_CONTENT_TYPE.decode()) if is_streamed else JSON(done)

    async def version(request: Request) -> Response:
        return JSON({"version": API_VERSION})

    return [
        *(Route(path, answering(path), methods=["POST"]) for path in readers),
        *(Route(path, embedding(path), methods=["POST"]) for path in embedders),
        Route("/api/tags", tags, methods=["GET"]),
        Route("/api/ps", ps, methods=["GET"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/pull", pull, methods=["POST"]),
        Route("/api/version", version, methods=["GET"]),
    ]


def _names(model: LoadedModel) -> tuple[str, ...]:
    """Return the names that `model` of a body may have, without tags."""
    return (*model.names, *(one.name for one in model.adapters.loaded()))


def _check_name(model: LoadedModel, name: str) -> None:
    """Raise ModelNotFound if the server has no model or adapter of this name."""
    names = _names(model)
    if without_tag(name, names) not in names:
        raise ModelNotFound(f"model {name[:80]!r} not found; this server has {', '.join(names)}")


_Reader = Callable[[LoadedModel, Mapping[str, Any], Mapping[str, Any]], OllamaRequest]
"""Reads a body, given the model and its sampling defaults."""


def _read_chat(model: LoadedModel, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> OllamaRequest:
    can_think = bool(model.model.reasoning_parser)
    return parse_chat_request(body, defaults, served=_names(model), can_think=can_think)


def _read_prompt(model: LoadedModel, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> OllamaRequest:
    facts = model.model
    return parse_generate_request(
        body,
        defaults,
        served=_names(model),
        can_think=bool(facts.reasoning_parser),
        has_template=facts.has_chat_template,
    )


async def _answer(service: Service, request: Request, texts: TokenTexts, read: _Reader) -> Response | EventStream:
    began_s = time.monotonic()
    parsed: list[OllamaRequest] = []

    def read_job(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
        parsed.append(read(service.state.loaded(), body, defaults))
        return parsed[-1].job

    asked = await parse_job(service, request, read_job)
    if parsed[-1].loads:
        return JSON(load_body(parsed[-1]))
    if parsed[-1].truncates:
        asked = replace(asked, job=await fit_turns(service, asked.job))
    token_text = partial(texts.of, asked.model)
    if asked.job.streaming is None:

        async def whole() -> Response:
            (output,) = await run_job(service, asked)
            (one,) = output.outputs
            calls = sum(len(tool.arguments) for tool in one.tool_calls)
            num_logprobs = len(one.logprobs) * (1 + len(one.logprobs[0].top)) if one.logprobs else 0
            size = len(one.text) + len(one.reasoning_content) + calls + 10 * num_logprobs
            body = partial(build_ollama_answer, parsed[-1], output, token_text, began_s)
            return await build_answer(service, body, size)

        return await while_there(request, whole(), asked.left_s())

    async def lines() -> AsyncGenerator[bytes, None]:
        made = OllamaLines(parsed[-1], token_text, began_s)
        async with aclosing(iter_events(service, asked)) as events:
            async for _, _, event in events:
                if encoded := await service.run_blocking(partial(made.of, event), _num_logprobs(event)):
                    yield encoded

    return EventStream(
        lines(),
        service.state.config.http.http_keep_alive,
        asked.left_s(),
        keep_alive=_KEEP_ALIVE,
        failed=lambda error: line({"error": error_text(error)}),
        content_type=_CONTENT_TYPE,
    )


def _num_logprobs(event: OutputEvent) -> int:
    return 10 * len(event.logprobs) * (1 + len(event.logprobs[0].top)) if event.logprobs else 0


async def _embed(service: Service, request: Request, read: Callable[..., OllamaEmbedRequest]) -> Response:
    began_s = time.monotonic()
    names = _names(service.state.serving())
    parsed = await read_body(service, request, lambda body: read(body, served=names))
    if parsed.job is None:
        return JSON(embeddings_body(parsed, [], num_tokens=0, began_s=began_s))
    try:
        found = await evaluate_job(service, request, parsed.job)
    except RequestTooLong as error:
        raise RequestTooLong("prompt" if parsed.is_one else error.field, error.problem) from error

    def body() -> dict[str, Any]:
        vectors = [one["embedding"] for one in found.body()["data"]]
        return embeddings_body(parsed, vectors, num_tokens=found.prompt_tokens, began_s=began_s)

    return await build_answer(service, body, CHARS_OF_NUMBER * found.size)


def _describe(service: Service, name: str) -> dict[str, Any]:
    """Return an entry of a list of models."""
    model = service.state.loaded()
    return {
        "name": with_tag(name),
        "model": with_tag(name),
        "modified_at": timestamp(service.state.start_time),
        "size": 0,
        "digest": hex_digest(f"{model.checkpoint} {name}"),
        "details": _details(model),
    }


def _details(model: LoadedModel) -> dict[str, Any]:
    family = model.model.architecture
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": model.model.dtype,
    }


def _show(service: Service, model: LoadedModel) -> dict[str, Any]:
    """Return the response of /api/show; sizes have the names of GGUF's metadata."""
    facts, kind = model.model, model.model.architecture
    capabilities = {
        "completion": True,
        "embedding": True,
        "tools": bool(facts.has_chat_template and facts.tool_call_parser),
        "thinking": bool(facts.reasoning_parser),
        "vision": facts.max_images > 0,
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.default_sampling.items()),
        "template": str(model.tokenizer.describe().get("chat_template") or ""),
        "details": _details(model),
        "model_info": {
            "general.architecture": kind,
            "general.basename": facts.name,
            f"{kind}.context_length": facts.max_model_len,
            f"{kind}.embedding_length": model.hidden_size,
            f"{kind}.block_count": facts.num_layers,
            f"{kind}.attention.head_count": facts.num_query_heads,
            f"{kind}.attention.head_count_kv": facts.num_kv_heads,
            f"{kind}.attention.key_length": facts.head_dim,
            f"{kind}.vocab_size": facts.vocab_size,
        },
        "capabilities": [name for name, has_it in capabilities.items() if has_it],
        "modified_at": timestamp(service.state.start_time),
    }
