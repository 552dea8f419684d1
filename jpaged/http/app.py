"""The application: routes, and common handling of every request.

X-Request-Id    the caller's id, or a generated one, in the response
an error        one status, and the error object of OpenAI's, Anthropic's or Ollama's API, in one place

Requests are authorized by the table of permissions; unknown paths require a key too. Routes that need no body are here:
health, version, metrics, and /v1/models with the served model and the adapters that a request can name.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send

from jpaged.access.authenticator import HTTP, Authenticator, CallContext, current, enter, permission_of_route
from jpaged.config import AccessOptions
from jpaged.engine.core import PauseMode
from jpaged.engine.engine import check_mode, check_version
from jpaged.errors import (
    AlreadyExists,
    InvalidArgument,
    JpagedError,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    Unsupported,
)
from jpaged.http.batches.job import BatchJobRunner
from jpaged.http.batches.routes import batch_routes
from jpaged.http.completions import EventStream, TokenTexts, answer_job, completion_routes, parse_job
from jpaged.http.embeddings import answer_scoring, scoring_routes, token_routes
from jpaged.http.exchange import (
    IGNORED_FIELDS_HEADER,
    JSON,
    REQUEST_ID_HEADER,
    WARNING_HEADER,
    body_in,
    build_response,
    error_for,
    is_anthropic,
    is_ollama,
    iter_content,
    read_body,
)
from jpaged.http.ollama import ollama_routes
from jpaged.http.responses import message_routes, response_routes
from jpaged.openai.embeddings import ScoringJob, classify_job, embed_job, rerank_job, score_job
from jpaged.openai.request import chat_job, completion_job, flag_in, name_in, own_fields, shown
from jpaged.service.calls import is_name
from jpaged.service.loaded_model import EngineClient, LoadedModel
from jpaged.service.service import Service
from jpaged.telemetry.metrics import EngineCollector
from jpaged.version import __version__


class Guarded:
    """Middleware that authenticates requests; their tasks have the call in their context."""

    def __init__(self, app: App, gate: Authenticator) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["method"], scope["path"], self._gate.options):
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        entry = CallContext(
            face="http",
            method=f"{scope['method']} {scope['path'][:200]}",
            peer="" if client is None else f"{client[0]}:{client[1]}",
            takes_control=self._gate.options.control_port is None,
        )
        status, is_in = 499, False  # nginx's status for a client that disconnected before the response

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if is_in:
                    message["headers"] = [*message.get("headers", ()), *self._left(entry.tenant)]
            await send(message)

        try:
            try:
                self._gate.open(entry, _authorization(scope), _values(scope, b"x-jpaged-tenant"))
            except JpagedError as error:
                await build_response(error, scope)(scope, receive, told)
                return
            enter(entry)
            is_in = True
            await self._app(scope, receive, told)
        finally:
            self._gate.close(entry, status)

    def _left(self, tenant: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the remaining quotas of a tenant as OpenAI's rate-limit headers."""
        quotas = self._gate.quotas
        for name, left in () if quotas is None else quotas.left(tenant).items():
            yield f"x-ratelimit-limit-{name}".encode(), str(left.limit).encode()
            yield f"x-ratelimit-remaining-{name}".encode(), str(left.remaining).encode()
            yield f"x-ratelimit-reset-{name}".encode(), duration(left.reset_s).encode()


def duration(seconds: float) -> str:
    """Format a time as in OpenAI's headers: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


def is_open(method: str, path: str, options: AccessOptions) -> bool:
    """Return True if a request never needs a key."""
    return permission_of_route(method, path).is_public(options)


def with_permission(route: Route) -> Route:
    """Wrap a route so that it rejects requests without permission before reading them."""
    inner = route.app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        method: str = scope["method"]
        try:
            permission_of_route(method, route.path).check(current(), f"{method} {route.path}")
        except PermissionDenied as error:
            await build_response(error, scope)(scope, receive, send)
            return
        await inner(scope, receive, send)

    route.app = guarded
    return route


def _authorization(scope: Scope) -> list[str]:
    """Return the authorization headers; without one, the keys in `x-api-key` as Anthropic's clients send them."""
    given = _values(scope, b"authorization")
    return given or [f"Bearer {key}" for key in _values(scope, b"x-api-key")]


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for header, value in scope["headers"] if header == name]


def model_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/models."""

    def listed() -> list[dict[str, Any]]:
        model = service.state.loaded()
        created = int(service.state.start_time.timestamp())
        shared = {"object": "model", "created": created, "owned_by": "jpaged"}
        base = {"id": model.model.name, **shared, "root": model.model.name, "parent": None}
        own = {**base, "max_model_len": model.model.max_model_len}
        adapters = [
            {"id": one.name, **shared, "root": one.path, "parent": model.model.name} for one in model.adapters.loaded()
        ]
        aliases = [{**own, "id": name} for name in model.names[1:]]
        return [own, *aliases, *adapters]

    def listed_for_anthropic() -> list[dict[str, Any]]:
        created, length = service.state.start_time.isoformat(), service.state.loaded().model.max_model_len
        limits = {"max_input_tokens": length, "max_tokens": length, "lifecycle": "active"}
        return [
            {"type": "model", "id": one["id"], "display_name": one["id"], "created_at": created, **limits}
            for one in listed()
        ]

    async def models(request: Request) -> Response:
        if not is_anthropic(request.scope):
            return JSON({"object": "list", "data": listed()})
        data = listed_for_anthropic()
        return JSON({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for one in listed_for_anthropic() if is_anthropic(request.scope) else listed():
            if one["id"] == name:
                return JSON(one)
        raise ModelNotFound(f"model: {name!r} is not served")

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
    ]


def control_routes(service: Service) -> list[Route]:
    """Return vLLM's routes that change the server: adapters, and the prefix cache."""

    async def load_lora_adapter(request: Request) -> Response:
        given = await read_body(service, request, lambda body: adapter_in("/v1/load_lora_adapter", body))
        name = given["lora_name"]
        with _naming_adapter():
            await service.load_adapter(name, given["lora_path"], replaces=given["load_inplace"])
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload_lora_adapter(request: Request) -> Response:
        given = await read_body(service, request, lambda body: adapter_in("/v1/unload_lora_adapter", body))
        service.unload_adapter(given["lora_name"])
        return PlainTextResponse(f"Success: LoRA adapter {given['lora_name']!r} removed successfully.")

    async def reset_prefix_cache(request: Request) -> Response:
        _require_no_foreign_page(request, service.state.config.http.http_cors_origins)
        for name, value in request.query_params.items():
            if value.lower() not in ("false", "0"):
                raise InvalidArgument(name[:80], f"{value[:80]!r} is not supported: blocks in use stay cached")
        model = service.controlled("ResetPrefixCache", "", service.state.serving())
        await asyncio.wrap_future(model.engine.reset_prefix_cache())
        return Response()

    routes = {
        "/v1/load_lora_adapter": load_lora_adapter,
        "/v1/unload_lora_adapter": unload_lora_adapter,
        "/reset_prefix_cache": reset_prefix_cache,
    }
    return [Route(path, answer, methods=["POST"]) for path, answer in routes.items()]


def sleep_routes(service: Service) -> list[Route]:
    """Return the routes that pause generation, release device memory and replace weights."""

    def engine_for(method: str, request: Request) -> EngineClient:
        _require_no_foreign_page(request, service.state.config.http.http_cors_origins)
        return _require_sleep_mode(service.controlled(method, "", service.state.serving())).engine

    async def sleep(request: Request) -> Response:
        engine, level = engine_for("Sleep", request), _query_int(request, "level", 1)
        await asyncio.wrap_future(engine.sleep(level, _query_mode(request)))
        return JSON({"status": "sleeping", "level": level})

    async def wake_up(request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        is_awake = await asyncio.wrap_future(engine_for("WakeUp", request).wake_up(tags))
        return JSON({"status": "awake" if is_awake else "sleeping", "tags": tags})

    async def pause(request: Request) -> Response:
        engine, mode = engine_for("Pause", request), _query_mode(request)
        clears_cache = _query_flag(request, "clear_cache", default=True)
        await asyncio.wrap_future(engine.pause(mode))
        if clears_cache and mode != "keep":
            await asyncio.wrap_future(engine.reset_prefix_cache())
        return JSON({"status": "paused"})

    async def resume(request: Request) -> Response:
        await asyncio.wrap_future(engine_for("Resume", request).resume())
        return JSON({"status": "resumed"})

    async def is_sleeping(request: Request) -> Response:
        return JSON({"is_sleeping": _require_sleep_mode(service.state.serving()).engine.is_paused})

    async def is_paused(request: Request) -> Response:
        return JSON({"is_paused": _require_sleep_mode(service.state.serving()).engine.is_paused})

    async def receive_weights(request: Request) -> Response:
        _require_no_foreign_page(request, service.state.config.http.http_cors_origins)
        mode: Any = request.query_params.get("mode", "keep")
        check_mode(mode)  # before a long body
        named = check_version(request.query_params.get("version"))
        with service.receive_weights() as upload:
            async for part in iter_content(request):
                await service.write_weights(upload, part)
            version = await service.update_weights(upload, mode, named)
        return JSON({"success": True, "message": "the weights were replaced", "weight_version": version})

    async def update_weights(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/octet-stream" and request.url.path == "/update_weights":
            return await receive_weights(request)
        given = await read_body(service, request, lambda body: weight_update_in(request.url.path, body))
        mode: Any = given.mode  # the engine checks it
        version = await service.update_weights(given.path, mode, given.version)
        return JSON({"success": True, "message": "the weights were replaced", "weight_version": version})

    async def weight_version(request: Request) -> Response:
        return JSON({"weight_version": service.state.serving().engine.weight_version})

    updates = ("/update_weights", "/update_weights_from_disk")
    posts = {"/sleep": sleep, "/wake_up": wake_up, "/pause": pause, "/resume": resume}
    posts |= dict.fromkeys(updates, update_weights)
    gets = {"/is_sleeping": is_sleeping, "/is_paused": is_paused, "/weight_version": weight_version}
    return [
        *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
        *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
    ]


class WeightUpdateFields(NamedTuple):
    """Fields of a body of /update_weights, or of SGLang's /update_weights_from_disk."""

    path: str
    mode: str
    version: str | int | None


_UPDATE_FIELDS = {
    "/update_weights": ("path", "mode", "version"),
    "/update_weights_from_disk": (
        *("model_path", "weight_version", "abort_all_requests", "load_format", "flush_cache"),
        *("is_async", "torch_empty_cache"),
    ),
}


def weight_update_in(path: str, given: Mapping[str, Any]) -> WeightUpdateFields:
    """Return the fields of a body that names new weights.

    Raises:
        InvalidArgument: the path is missing or empty, or a field cannot be honored.
    """
    names = _UPDATE_FIELDS[path]
    body = own_fields({}, given, names)
    found = name_in(body, names[0])
    if not found:
        raise InvalidArgument(names[0], "is missing or empty")
    if path == "/update_weights":
        return WeightUpdateFields(found, body.get("mode", "keep"), body.get("version"))
    if body.get("load_format", "auto") not in ("auto", "safetensors"):
        raise InvalidArgument("load_format", f"{shown(body['load_format'])} is not supported; must be auto")
    if not flag_in(body, "flush_cache", default=True):
        raise InvalidArgument("flush_cache", "must be true: cached prefixes belong to the former weights")
    mode = "abort" if flag_in(body, "abort_all_requests") else "keep"
    return WeightUpdateFields(found, mode, body.get("weight_version"))


def _require_sleep_mode(model: LoadedModel) -> LoadedModel:
    if not model.config.scheduler.enable_sleep_mode:
        raise Unsupported("pausing generation and releasing memory are off: start the server with --enable-sleep-mode")
    return model


def _query_int(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, str(default))
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise InvalidArgument(name, f"{value[:80]!r} is not a number")
    return int(value)


def _query_mode(request: Request) -> PauseMode:
    mode: Any = request.query_params.get("mode", "abort")  # the engine checks it
    found: PauseMode = mode
    return found


def _query_flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name, str(default)).lower()
    if value not in ("true", "1", "false", "0"):
        raise InvalidArgument(name, f"{value[:80]!r} is not true or false")
    return value in ("true", "1")


@contextlib.contextmanager
def _naming_adapter() -> Iterator[None]:
    """Rename the fields in errors of an adapter to those of vLLM's bodies, and give a taken name vLLM's status."""
    try:
        yield
    except AlreadyExists as error:
        problem = f"{error}; if it has already been loaded, load_inplace replaces it"
        raise InvalidArgument("lora_name", problem) from error
    except InvalidArgument as error:
        names = {"name": "lora_name", "path": "lora_path"}
        raise type(error)(names.get(error.field, error.field), error.problem) from error


def _require_no_foreign_page(request: Request, allowed: Sequence[str]) -> None:
    """Reject a request that a page of another site sends: without a body, browsers send it without asking first."""
    origin = request.headers.get("origin")
    if origin is not None and origin not in allowed and "*" not in allowed:
        raise PermissionDenied(f"origin: {origin[:80]!r} is not one of http_cors_origins")


def operator_routes(service: Service) -> list[Route]:
    """Return the routes of health, version and metrics."""
    state = service.state

    async def health(request: Request) -> Response:
        """Return 200 while requests are accepted and make progress, otherwise 503, as vLLM does."""
        return Response(status_code=200 if state.is_ready else 503)

    async def readyz(request: Request) -> Response:
        """Return the same status as `health`, and the state of the server."""
        return PlainTextResponse(f"{state.stage.value}\n", 200 if state.is_ready else 503)

    async def livez(request: Request) -> Response:
        """Return 503 only if a restart is necessary."""
        return PlainTextResponse(f"{state.stage.value}\n", 200 if state.is_live else 503)

    async def version(request: Request) -> Response:
        return JSON({"version": __version__})

    async def load(request: Request) -> Response:
        """Return the number of requests in the engine, as vLLM does."""
        now = state.loaded().engine.load()
        return JSON({"server_load": now.num_running + now.num_waiting})

    async def server_info(request: Request) -> Response:
        """Return every option with its value; keys are hidden."""
        options = {name: value for name, value, _ in state.config.explain() if value != "None"}
        return JSON({"version": __version__, "state": state.stage.value, "config": options})

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(EngineCollector(state.loaded()))
        text = await service.run_blocking(lambda: generate_latest(registry), 1 << 20)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/load", load, methods=["GET"]),
        Route("/server_info", server_info, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def invocation_routes(service: Service) -> list[Route]:
    """Return the route of SageMaker: one path for every kind of body."""
    texts = TokenTexts()

    async def invoke(request: Request) -> Response | EventStream:
        body, num_bytes = await body_in(service, request)
        given = {name for name, value in body.items() if value is not None}
        loaded = service.state.serving()
        is_classifier = loaded.pooler is not None and bool(loaded.pooler.labels)
        generates = not is_classifier and not loaded.engine.geometry.is_encoder
        if generates and given.isdisjoint({"input", "continuations"}) and given & {"messages", "prompt"}:
            read = chat_job if "messages" in given else completion_job
            return await answer_job(service, request, await parse_job(service, request, read, body=body), texts)
        read_scoring: Callable[[Mapping[str, Any]], ScoringJob] = rerank_job if "query" in given else score_job
        if given & {"input", "messages"}:
            read_scoring = classify_job if is_classifier else embed_job
        return await answer_scoring(service, request, read_scoring, body, num_bytes)

    return [Route("/invocations", invoke, methods=["POST"])]


_DASHBOARD = "jpaged.inspector.dashboard"
"""Module of an optional part that the core imports by name: its `page_routes(service)` are the dashboard's."""


def inspector_routes(service: Service) -> list[Route]:
    """Return the routes of the dashboard; none if the inspector is not installed."""
    try:
        dashboard = import_module(_DASHBOARD)
    except ModuleNotFoundError as error:
        if not f"{_DASHBOARD}.".startswith(f"{error.name}."):
            raise
        return []
    routes: list[Route] = dashboard.page_routes(service)
    return routes


_ROUTES = (
    *(operator_routes, control_routes, sleep_routes, model_routes, completion_routes, response_routes, message_routes),
    *(scoring_routes, token_routes, invocation_routes, ollama_routes, inspector_routes),
)
"""Functions that return the routes of a service, except those of batches."""


_OLLAMA_ROUTES = frozenset(route for _, route in HTTP if is_ollama({"path": route}))


def require_free_path(root_path: str | None) -> None:
    """Raise InvalidArgument if paths of the API begin with the path of a proxy, which would hide them."""
    root = (root_path or "").rstrip("/")
    for _, route in HTTP if root else ():
        if route in _OLLAMA_ROUTES:  # they keep their paths
            continue
        fixed, brace, _ = route.partition("{")
        if f"{fixed}/".startswith(f"{root}/") or (brace and f"{root}/".startswith(fixed)):
            problem = f"{root_path} is the start of the API's own path {route}, which it would hide: use another"
            raise InvalidArgument("root_path", problem)


def make_app(service: Service, gate: Authenticator, batches: BatchJobRunner | None = None) -> App:
    """Return the ASGI application for a service, with authentication by the gate."""
    app = Starlette(
        routes=[
            *(with_permission(route) for make in _ROUTES for route in make(service)),
            *map(with_permission, batch_routes(service, batches)),
        ],
        exception_handlers={JpagedError: _refuse, HTTPException: _refuse_path, Exception: _refuse},
    )
    guarded: App = Guarded(app, gate)
    if origins := service.state.config.http.http_cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=(
                *(REQUEST_ID_HEADER, "request-id", IGNORED_FIELDS_HEADER, WARNING_HEADER),
                *("retry-after", "retry-after-ms"),
            ),
        )
    return _Named(guarded, (service.state.config.http.root_path or "").rstrip("/"))


async def _refuse(request: Request, error: Exception) -> Response:
    return build_response(error_for(error), request.scope)


INSTEAD: Mapping[str, str] = {
    "/v1/responses/compact": "send a normal request for a summary",
    "/v1/conversations": "conversations are not stored: use `previous_response_id`, or send all items in `input`",
    "/v1/assistants /v1/threads /v1/vector_stores /v1/containers /v1/skills": "use `/v1/responses`",
    "/v1/audio/speech /v1/images /v1/videos /v1/moderations /v1/fine_tuning /v1/evals": "models take text and images, "
    "and answer with text",
    "/reset_mm_cache /reset_encoder_cache": "encoded images are found by their content, "
    "within `--mm-processor-cache-gb`",
    "/generative_scoring /v1/decisions /v1/systemone /v1/audio/transcriptions /v1/audio/translations "
    "/v1/realtime": "models take text and images, and have no such heads",
    "/release_kv_cache_memory": "use `/sleep`, which also releases the weights",
    "/start_profile /stop_profile": "profile with XLA's tools",
    "/v2/embed /cohere/v2/chat": "Cohere's API is not served: use `/v1/embeddings` and `/v1/chat/completions`",
    "/v1/chat/completions/batch": "use `/v1/batches`",
    "/v1/chat/completions/render /v1/completions/render /v1/responses/render /v1/messages/render "
    "/v1/chat/completions/derender /v1/completions/derender": "use `/tokenize` and `/detokenize`",
    "/inference/v1/generate": "gRPC `Generate` takes and returns token ids, as does `/v1/completions` with "
    "`return_token_ids`",
    "/inference/v1/abort_requests /abort_requests": "close the connection, or call gRPC `Abort`",
    "/kv_event_sources": "`GetServerInfo` has the endpoints",
    "/scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /fault_tolerance/status /collective_rpc "
    "/get_world_size": "the number of replicas is fixed: restart the server",
    "/init_weight_transfer_engine /start_weight_update /start_draft_weight_update /finish_weight_update "
    "/update_weight_version /shutdown_weight_transfer_engine /weight_checker /weight_info": "`/update_weights` reads "
    "a folder; tensors are sent over gRPC",
}
"""Paths of OpenAI's and vLLM's servers that this one lacks -> what to use."""
_ALTERNATIVES = {f"{path}/": text for paths, text in INSTEAD.items() for path in paths.split()}


async def _refuse_path(request: Request, error: Exception) -> Response:
    """Answer requests with an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path, url = f"{request.method} {request.url.path[:200]}", f"{request.url.path[:200]}/"
    told: JpagedError = (
        NotFound(f"path: there is no {path}") if status == 404 else Unsupported(f"path: {path}: {error}")
    )
    if (text := next((text for name, text in _ALTERNATIVES.items() if name in url), None)) is not None:
        told, status = NotFound(f"path: {path} is not served: {text}"), 404
    response = build_response(told, request.scope, status)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


class _Named:
    """Middleware that gives each request an id, and returns it in the response.

    Args:
        root_path: removed from the start of paths, except those of Ollama's API, which may begin with it; empty for
            none. Browsers are sent from the path to the one with a slash: the dashboard's links are relative.
    """

    def __init__(self, app: App, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = REQUEST_ID_HEADER.encode()
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == key), "")
        request_id = given if is_name(given) else uuid.uuid4().hex
        headers: dict[str, str] = {REQUEST_ID_HEADER: request_id}
        scope.setdefault("state", {}).update(request_id=request_id, answer_headers=headers)
        lacks_slash = self._root_path == scope["path"] != "" and scope["method"] in ("GET", "HEAD")
        is_below = f"{scope['path']}/".startswith(f"{self._root_path}/") and scope["path"] not in _OLLAMA_ROUTES
        if self._root_path and is_below:
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"

        has_begun = False

        async def named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", ()), *added]
                if is_anthropic(scope):
                    message["headers"] += [(b"request-id", headers[REQUEST_ID_HEADER].encode())]
            await send(message)

        if lacks_slash:
            query = scope["query_string"].decode("latin-1")
            url = f"{self._root_path}/{'?' if query else ''}{query}"
            await RedirectResponse(url)(scope, receive, named)
            return
        try:
            await self._app(scope, receive, named)
        except Exception as error:  # starlette raises it again after responding
            if not has_begun:
                await build_response(error_for(error), scope)(scope, receive, named)


def adapter_in(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body of /v1/load_lora_adapter, or of /v1/unload_lora_adapter.

    Raises:
        InvalidArgument: a field is missing, empty, or cannot be honored.
    """
    loads = path == "/v1/load_lora_adapter"
    names = ("lora_name", "lora_path") if loads else ("lora_name",)
    body = own_fields(path, given, (*names, "load_inplace") if loads else names)
    found: dict[str, Any] = {name: name_in(body, name) or "" for name in names}
    for name, value in found.items():
        if not value:
            raise InvalidArgument(name, "is missing or empty")
    return {**found, "load_inplace": flag_in(body, "load_inplace")} if loads else found
