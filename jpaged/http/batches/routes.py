"""The paths under /v1/files and /v1/batches.

Files hold requests that callers upload, or what batches write. Lists are paginated as in OpenAI's API: `limit` entries
after the one named by `after`.
"""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jpaged.access.authenticator import current
from jpaged.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QueueFull,
    RequestTooLong,
    StorageError,
    Unsupported,
)
from jpaged.http.batches.job import BatchJobRunner
from jpaged.http.batches.store import Batch, Store, StoredFile, get_metadata, get_window_s, new_id
from jpaged.http.exchange import JSON, body_in, build_answer, get_owner, get_tenant
from jpaged.openai.lines import URLS
from jpaged.service.service import Service


class Shown(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...

    def shown(self) -> dict[str, Any]:
        """Return the entry in OpenAI's format."""


def get_page(values: Sequence[Shown], request: Request, *, max_limit: int, default: int) -> dict[str, Any]:
    """Return a page of values, by default the newest first.

    Raises:
        InvalidArgument: limit or order is invalid.
        NotFound: no entry has the id `after`.
    """
    given = request.query_params
    order, text, after = given.get("order", "desc"), given.get("limit", str(default)), given.get("after")
    if order not in ("asc", "desc"):
        raise InvalidArgument("order", f"{order[:80]!r} is neither 'asc' nor 'desc'")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= max_limit):
        raise InvalidArgument("limit", f"{text[:80]!r} is not an integer from 1 to {max_limit}")
    ordered = list(reversed(values)) if order == "asc" else list(values)
    begin = 0
    if after is not None:
        begin = 1 + next((i for i, one in enumerate(ordered) if one.id == after), len(ordered))
        if begin > len(ordered):
            raise NotFound(f"after: there is no {after[:80]!r}")
    some = ordered[begin : begin + int(text)]
    return {
        "object": "list",
        "data": [one.shown() for one in some],
        "first_id": some[0].id if some else None,
        "last_id": some[-1].id if some else None,
        "has_more": begin + len(some) < len(ordered),
    }


MAX_FILENAME_CHARS = 255
MAX_FILES_OF_LIST = 10_000
_MAX_UPLOADS = 16
"""Maximum concurrent uploads of all tenants: each file is on disk twice until complete."""
MIN_UPLOAD_BYTES_PER_S = 16 << 10
"""An upload with a lower average rate is aborted after `UPLOAD_GRACE_S`."""
UPLOAD_GRACE_S = 10.0
_CHARS_OF_FILE = 200
_MAX_FRAME_BYTES = 64 << 10
"""Maximum size of the other fields of a form."""
_GZIP_MAGIC = b"\x1f\x8b"
_PURPOSES = ("batch", "batch_output")


def file_routes(service: Service, runner: BatchJobRunner) -> list[Route]:
    """Return the routes of /v1/files."""
    store, read = runner.store, runner.threads.read
    max_bytes = int(service.state.config.http.max_batch_file_size * 2**20)
    share = service.state.config.http.tenant_batch_share if service.state.config.server.isolate_tenants else 1.0
    uploads = _Uploads(share)

    async def upload(request: Request) -> Response:
        owner = get_owner(service, request)
        with uploads.slot(owner):
            form = await _build_form(request, max_bytes)
            try:
                content, filename = _file_in(form, max_bytes)
                file = await read(lambda: _kept(store, owner, content, filename, max_bytes))
            finally:
                await form.close()
        return JSON(file.shown())

    async def listed(request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        if purpose is not None and purpose not in _PURPOSES:
            raise InvalidArgument("purpose", f"{purpose[:80]!r} is not one of {', '.join(_PURPOSES)}")
        owner = get_owner(service, request)

        def page() -> dict[str, Any]:
            files = [one for one in store.files(owner) if purpose in (None, one.purpose)]
            return get_page(files, request, max_limit=MAX_FILES_OF_LIST, default=MAX_FILES_OF_LIST)

        found = await read(page)
        return await build_answer(service, lambda: found, _CHARS_OF_FILE * len(found["data"]))

    async def found(request: Request) -> StoredFile:
        owner, file_id = get_owner(service, request), request.path_params["file_id"]
        return await read(lambda: store.file(owner, file_id))

    async def retrieve(request: Request) -> Response:
        return JSON((await found(request)).shown())

    async def content(request: Request) -> Response:
        file = await found(request)
        return FileResponse(store.path(get_owner(service, request), file.id), media_type="application/octet-stream")

    async def delete(request: Request) -> Response:
        owner, file_id = get_owner(service, request), request.path_params["file_id"]
        await read(lambda: store.delete_file(owner, file_id))
        return JSON({"id": file_id, "object": "file", "deleted": True})

    return [
        Route("/v1/files", upload, methods=["POST"]),
        Route("/v1/files", listed, methods=["GET"]),
        Route("/v1/files/{file_id}", retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", content, methods=["GET"]),
    ]


def _kept(store: Store, owner: str, content: IO[bytes], filename: str, max_bytes: int) -> StoredFile:
    """Keep the lines of an upload, which gzip may have compressed; its name loses its `.gz` then."""
    is_compressed = content.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    content.seek(0)
    if not is_compressed:
        return store.add_file(owner, content, filename)
    return store.add_file(owner, _Decompressed(content, max_bytes), filename.removesuffix(".gz"))


class _Decompressed:
    """Reader of a file that gzip compressed, bounded in what it decompresses to.

    Raises:
        InvalidArgument: the file is damaged.
        RequestTooLong: its lines exceed `max_bytes`; nothing beyond is decompressed.
    """

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def read(self, size: int, /) -> bytes:
        """See `Source.read`."""
        try:
            part = self._file.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InvalidArgument("body.file", f"cannot be decompressed: {error}") from error
        self._num_bytes += len(part)
        if self._num_bytes > self._max_bytes:
            limit = f"{self._max_bytes} bytes (max_batch_file_size)"
            raise RequestTooLong("body.file", f"its decompressed lines are over the limit of {limit}")
        return part


class _Uploads:
    """Uploads in progress. One tenant may use a share of the slots that others leave free."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def slot(self, owner: str) -> Iterator[None]:
        """Hold a slot for one upload; raise QueueFull if there is none."""
        num_mine = self._num_open[owner]
        num_left = _MAX_UPLOADS - self._num_open.total() + num_mine
        most = min(num_left, max(1, int(num_left * self._share)))
        if num_mine >= most:
            raise QueueFull(f"{num_mine} uploads are in progress, the limit is {most}", retry_after_s=1.0)
        self._num_open[owner] += 1
        try:
            yield
        finally:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]


async def _build_form(request: Request, max_bytes: int) -> FormData:
    """Read a form with a file of bounded size; large parts are spooled to disk."""
    limit = max_bytes + _MAX_FRAME_BYTES
    too_long = RequestTooLong("body.file", f"is over the limit of {max_bytes} bytes (max_batch_file_size)")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidArgument("body", "must be multipart/form-data, with a file and its purpose")
    problem: Exception | None = None

    async def bounded() -> AsyncGenerator[bytes, None]:
        nonlocal problem
        size, parts = 0, request.stream()
        began_s = time.monotonic()
        try:
            while True:
                late_s = began_s + UPLOAD_GRACE_S + size / MIN_UPLOAD_BYTES_PER_S
                async with asyncio.timeout(max(0.0, late_s - time.monotonic())):
                    part = await anext(parts, None)
                if part is None:
                    return
                size += len(part)
                if size > limit:
                    problem = too_long
                    raise MultiPartException("too long")
                yield part
        except TimeoutError:
            problem = DeadlineExceeded(f"the upload is slower than {MIN_UPLOAD_BYTES_PER_S} bytes per second")
            raise MultiPartException("slow") from None
        except ClientDisconnect:
            problem = Cancelled("the client has disconnected")
            raise MultiPartException("gone") from None

    parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=8, max_part_size=_MAX_FRAME_BYTES)
    try:
        return await parser.parse()
    except MultiPartException as error:  # the parser has closed its files
        raise problem or InvalidArgument("body", f"is not a valid form: {error.message}") from error
    except OSError as error:
        raise StorageError(f"the file cannot be written: {error.strerror or error}") from error
    except KeyError as error:
        raise InvalidArgument("body", "is not a valid form: content-type has no boundary") from error


def _file_in(form: FormData, max_bytes: int) -> tuple[IO[bytes], str]:
    for name in form.keys() - {"file", "purpose"}:
        raise InvalidArgument(f"body.{name[:80]}", "is not supported: must be one of file, purpose")
    purpose, file = form.get("purpose"), form.get("file")
    if purpose != "batch":
        raise InvalidArgument("body.purpose", f"{str(purpose)[:80]!r} is not supported: only 'batch' is")
    if not isinstance(file, UploadFile):
        raise InvalidArgument("body.file", "is missing or not a file")
    if (file.size or 0) > max_bytes:
        raise RequestTooLong("body.file", f"{file.size} bytes are over the limit of {max_bytes} (max_batch_file_size)")
    return file.file, (file.filename or "file")[:MAX_FILENAME_CHARS]


MAX_BATCHES_OF_LIST = 100
_DEFAULT_OF_LIST = 20
_CHARS_OF_BATCH = 1000
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


def batch_routes(service: Service, runner: BatchJobRunner | None) -> list[Route]:
    """Return the routes of batches and files; without a configured folder they return an error that explains it."""
    if runner is None:
        return [
            Route(path, _refuse, methods=["GET", "POST", "DELETE"])
            for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
        ]
    return [*file_routes(service, runner), *_routes(service, runner)]


async def _refuse(request: Request) -> Response:
    raise Unsupported("batches and their files need a folder on the server's disk: start the server with --batch-dir")


def _routes(service: Service, runner: BatchJobRunner) -> list[Route]:
    store, read = runner.store, runner.threads.read

    async def create(request: Request) -> Response:
        body, _ = await body_in(service, request)
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - set(_FIELDS):
            raise InvalidArgument(f"body.{name[:80]}", f"is not supported: must be one of {', '.join(_FIELDS)}")
        owner, tenant = get_owner(service, request), get_tenant(request)
        endpoint, input_id, window = given.get("endpoint"), given.get("input_file_id"), given.get("completion_window")
        if endpoint not in URLS:
            raise InvalidArgument("body.endpoint", f"{str(endpoint)[:80]!r} is not one of {', '.join(URLS)}")
        if not isinstance(input_id, str):
            raise InvalidArgument("body.input_file_id", f"{str(input_id)[:80]!r} is not a file id")
        window_s = get_window_s(window)
        metadata = get_metadata(given.get("metadata"))
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
        owner = get_owner(service, request)
        page = await read(
            lambda: get_page(store.batches(owner), request, max_limit=MAX_BATCHES_OF_LIST, default=_DEFAULT_OF_LIST)
        )
        return await build_answer(service, lambda: page, _CHARS_OF_BATCH * len(page["data"]))

    async def retrieve(request: Request) -> Response:
        owner, batch_id = get_owner(service, request), request.path_params["batch_id"]
        batch = await read(lambda: store.batch(owner, batch_id))
        return JSON(batch.shown())

    async def cancel(request: Request) -> Response:
        batch = await runner.cancel(get_owner(service, request), request.path_params["batch_id"])
        return JSON(batch.shown())

    return [
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches", listed, methods=["GET"]),
        Route("/v1/batches/{batch_id}", retrieve, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]
