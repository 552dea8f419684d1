"""The paths under /v1/batches."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.access.call_context import current
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.http.batching.files import file_routes
from jpaged.http.batching.pages import page_of
from jpaged.http.batching.runner import Runner
from jpaged.http.batching.values import Batch, metadata_of, new_id, window_s_of
from jpaged.http.errors import JSON
from jpaged.http.exchange import answer_of, body_in
from jpaged.http.requests import owner_of, tenant_of
from jpaged.openai.lines import URLS
from jpaged.service.service import Service

MAX_BATCHES_OF_LIST = 100
_DEFAULT_OF_LIST = 20
_CHARS_OF_BATCH = 1000
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


def batch_routes(service: Service, runner: Runner | None) -> list[Route]:
    """Return the routes of batches and files; without a configured folder they return an error that explains it."""
    if runner is None:
        return [
            Route(path, _refuse, methods=["GET", "POST", "DELETE"])
            for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
        ]
    return [*file_routes(service, runner), *_routes(service, runner)]


async def _refuse(request: Request) -> Response:
    raise Unsupported("batches and their files need a folder on the server's disk: start the server with --batch-dir")


def _routes(service: Service, runner: Runner) -> list[Route]:
    store, read = runner.store, runner.threads.read

    async def create(request: Request) -> Response:
        body, _ = await body_in(service, request)
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - set(_FIELDS):
            raise InvalidArgument(f"body.{name[:80]}", f"is not supported: must be one of {', '.join(_FIELDS)}")
        owner, tenant = owner_of(service, request), tenant_of(request)
        endpoint, input_id, window = given.get("endpoint"), given.get("input_file_id"), given.get("completion_window")
        if endpoint not in URLS:
            raise InvalidArgument("body.endpoint", f"{str(endpoint)[:80]!r} is not one of {', '.join(URLS)}")
        if not isinstance(input_id, str):
            raise InvalidArgument("body.input_file_id", f"{str(input_id)[:80]!r} is not a file id")
        window_s = window_s_of(window)
        metadata = metadata_of(given.get("metadata"))
        file = await read(lambda: store.file(owner, input_id))
        if file.purpose != "batch":
            raise InvalidArgument(
                "body.input_file_id", f"{input_id} is the output of a batch: its purpose is not batch"
            )
        entry, now_s = current(), int(time.time())
        key = None if entry is None else entry.key
        batch = Batch(
            id=new_id("batch_"),
            owner=owner,
            tenant=tenant,
            endpoint=str(endpoint),
            input_id=input_id,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            completion_window=str(window),
            created_at=now_s,
            expires_at=now_s + window_s,
            metadata=metadata,
            key_id=None if key is None else key.id,
            role=None if key is None else key.role.name.lower(),
        )
        await runner.add(batch)
        return JSON(batch.shown())

    async def listed(request: Request) -> Response:
        owner = owner_of(service, request)
        page = await read(
            lambda: page_of(store.batches(owner), request, max_limit=MAX_BATCHES_OF_LIST, default=_DEFAULT_OF_LIST)
        )
        return await answer_of(service, lambda: page, _CHARS_OF_BATCH * len(page["data"]))

    async def retrieve(request: Request) -> Response:
        owner, batch_id = owner_of(service, request), request.path_params["batch_id"]
        batch = await read(lambda: store.batch(owner, batch_id))
        return JSON(batch.shown())

    async def cancel(request: Request) -> Response:
        batch = await runner.cancel(owner_of(service, request), request.path_params["batch_id"])
        return JSON(batch.shown())

    return [
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", listed, methods=["GET"]),
        Route("/v1/batches/{batch_id}", retrieve, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]
