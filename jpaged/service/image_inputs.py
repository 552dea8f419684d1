"""Images of requests: read, prepared, put into the prompt, and encoded.

    GivenImage ──sources──> bytes ──decoder──> pixels ──processor──> PreparedImage      threads, for each image
    tokens + PreparedImages ──place──> tokens and positions of the encoder's rows       checked like any prompt
    PreparedImages ──encoder──> rows ──attach──> Request                                one thread, for many requests

A request that is refused for any other reason is never encoded. The rows stay with their request, so that preemption
encodes nothing again.

Tenants share threads, calls of the encoder and memory. A call starts when the previous one has ended, so that a device,
which runs programs in the order of their dispatch, computes a step between two calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged.chat import GivenImage
from jpaged.config import MediaOptions
from jpaged.engine.executor import Geometry
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong, TryLater
from jpaged.server_load import ImageLoad
from jpaged.service.image_sources import ImageSources, read_base64
from jpaged.service.images import MAX_FILE_BYTES, MAX_PIXELS, PictureDecoder, read_pixels
from jpaged.service.prompt_embeds import with_digests
from jpaged.types import EmbeddedSpan, PreparedImage, Prompt, PromptEmbeds, Request

DEFAULT_MAX_IMAGES = 64
IMAGES_REQUEST_MIB = 16.0
"""Default of max_request_size with a model that reads images, for HTTP: photos of 12 MB in base64."""
MAX_CALL_PATCHES = 1024
"""Maximum patches of several images in one call of the encoder; a larger image has a call to itself."""
TENANT_BYTES = 4 << 30
"""Host memory for images of a tenant's requests, in addition to the cache; twice as much for all tenants together."""
_RETRY_AFTER_S = 1.0
_NUM_THREADS, _NUM_OF_TENANT = 4, 3
"""Threads that decode and prepare, and how many of them a tenant may take."""
_NUM_FETCHES, _NUM_FETCHES_OF_TENANT = 16, 8
"""Threads that fetch URLs, and how many of them a tenant may take."""
_JPEG = "/9j/"
"""Beginning of a JPEG in base64."""
_Rows = NDArray[np.float32]
_Result = TypeVar("_Result")
_Made = TypeVar("_Made", bound=tuple[Any, ...])


class ImageProcessor(Protocol):
    """Preparation of images for one model, on the host."""

    @property
    def placeholder_id(self) -> int:
        """Token that stands for an image in the text of a chat, in order."""

    def join(self, first: int, second: int) -> int | None:
        """Return the token of two adjacent ones at an image's edge, if the tokenizer has one token for their text."""

    def count_tokens(self, width: int, height: int) -> int:
        """Return the number of prompt tokens of an image of this size in pixels.

        Raises:
            InvalidArgument: the model takes no image of this shape.
        """

    def prepare(self, pixels_hwc: NDArray[np.uint8]) -> PreparedImage:
        """Return an RGB image `[height, width, 3]` as the encoder takes it.

        Raises:
            InvalidArgument: the model takes no image of this shape.
        """


class VisionEncoder(Protocol):
    """Vision encoder of one model, on a device. Thread-safe."""

    def encode(self, images: Sequence[PreparedImage]) -> list[NDArray[np.float32]]:
        """Return the input embeddings `[rows, hidden_size]` of each image. Blocks until the device is done."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of the images of a request, as clients see them."""

    max_images: int
    max_pixels: int = MAX_PIXELS
    max_file_bytes: int = MAX_FILE_BYTES


class EncoderCache:
    """Encoded images in host memory. Entries of the tenant with the most bytes are evicted first.

    The class is not thread-safe.

    Args:
        max_bytes: limit over all tenants.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: dict[str, OrderedDict[bytes, _Rows]] = {}
        self._num_bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        return sum(self._num_bytes.values())

    def find(self, tenant: str, key: bytes) -> _Rows | None:
        """Return the rows of an image, which count as used last."""
        images = self._rows.get(tenant)
        if images is None or key not in images:
            return None
        images.move_to_end(key)
        return images[key]

    def add(self, tenant: str, key: bytes, rows: _Rows) -> None:
        """Keep the rows of an image, unless they alone exceed the limit."""
        if rows.nbytes > self._max_bytes or self.find(tenant, key) is not None:
            return
        self._rows.setdefault(tenant, OrderedDict())[key] = rows
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + rows.nbytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            _, evicted = self._rows[largest].popitem(last=False)
            self._num_bytes[largest] -= evicted.nbytes
            if not self._rows[largest]:
                del self._rows[largest], self._num_bytes[largest]


class TenantThreads:
    """Threads that work for tenants in turn. Thread-safe.

    Args:
        num_of_tenant: maximum number of threads that work for one tenant at a time, so that others find some.
    """

    def __init__(self, num_threads: int, num_of_tenant: int, name: str) -> None:
        self._num_of_tenant = num_of_tenant
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._num_running: dict[str, int] = {}

    def submit(self, tenant: str, work: Callable[[], _Result]) -> Future[_Result]:
        """Start work of a tenant as soon as a thread may do it."""
        done: Future[_Result] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((done, work))
        self._threads.submit(self._work)
        return done

    def _work(self) -> None:
        """Do the work that waits, until there is none, or none that a thread may do."""
        while (found := self._take()) is not None:
            tenant, done, work = found
            try:
                if done.set_running_or_notify_cancel():
                    done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            finally:
                with self._lock:
                    self._num_running[tenant] -= 1
                    if not self._num_running[tenant]:
                        del self._num_running[tenant]
                del found, done, work

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        """Return the next work, of the tenant whose turn it is."""
        with self._lock:
            free = (name for name in self._waiting if self._num_running.get(name, 0) < self._num_of_tenant)
            if (tenant := next(free, None)) is None:
                return None
            works = self._waiting.pop(tenant)
            done, work = works.popleft()
            if works:
                self._waiting[tenant] = works
            self._num_running[tenant] = self._num_running.get(tenant, 0) + 1
            return tenant, done, work


class ImageMemory:
    """Host memory of the arrays of images, until they are garbage. Thread-safe.

    Args:
        tenant_bytes: limit of one tenant; twice as much for all together.
    """

    def __init__(self, tenant_bytes: int) -> None:
        self.tenant_bytes = tenant_bytes
        self._num_bytes: dict[str, int] = {}
        self._freed: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants."""
        with self._lock:
            self._count_freed()
            return sum(self._num_bytes.values())

    def check(self, tenant: str) -> None:
        """Raise TryLater if the images of a tenant, or of all, take all of their memory."""
        with self._lock:
            self._count_freed()
            own, total = self._num_bytes.get(tenant, 0), sum(self._num_bytes.values())
        most = self.tenant_bytes
        for num_bytes, limit, whose in ((own, most, "this tenant's"), (total, 2 * most, "all")):
            if num_bytes >= limit:
                problem = f"images of {whose} requests take {num_bytes} bytes of host memory"
                raise TryLater(f"{problem}, over the limit of {limit}", retry_after_s=_RETRY_AFTER_S)

    def add(self, tenant: str, array: NDArray[Any]) -> None:
        """Count an array until it is garbage."""
        with self._lock:
            self._count_freed()
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + array.nbytes
        ended = weakref.finalize(array, self._freed.append, (tenant, array.nbytes))  # takes no lock: at any time
        ended.atexit = False

    def _count_freed(self) -> None:
        while self._freed:
            tenant, num_bytes = self._freed.popleft()
            self._num_bytes[tenant] -= num_bytes
            if not self._num_bytes[tenant]:
                del self._num_bytes[tenant]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    image: PreparedImage
    key: bytes
    done: Future[_Rows]


class _ImageBudget:
    """Tokens and host memory that the images of one request may still take. Thread-safe.

    Args:
        is_bounded: False if the request may take any memory.
    """

    def __init__(self, limit: int, memory: ImageMemory, tenant: str, *, is_bounded: bool) -> None:
        self._limit = limit
        self._memory = memory
        self._tenant = tenant
        self._is_bounded = is_bounded
        self._num_tokens = self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self, field: str, num_tokens: int, size: str) -> None:
        """Count the tokens of an image before it is decoded; raise if there are too many, or no memory."""
        with self._lock:
            self._num_tokens += num_tokens
            total, num_bytes = self._num_tokens, self._num_bytes
        if total > self._limit:
            what = f"an image of {size} pixels takes {num_tokens} tokens, with those before it {total}"
            raise RequestTooLong(field, f"{what}, over max_model_len ({self._limit})")
        if not self._is_bounded:
            return
        if num_bytes >= (most := self._memory.tenant_bytes):  # TryLater would be wrong: it never fits
            problem = f"images of this request take {num_bytes} bytes of host memory without this one"
            raise RequestTooLong(field, f"{problem}, over the limit of {most} for a tenant")
        self._memory.check(self._tenant)

    def add(self, array: NDArray[Any]) -> None:
        """Count the memory of a prepared image."""
        with self._lock:
            self._num_bytes += array.nbytes
        self._memory.add(self._tenant, array)


class ImageInputs:
    """Reads, prepares and encodes the images of requests. Thread-safe.

    Args:
        max_images: maximum images of a request.
        cache_bytes: bytes of encoded images to keep for later requests.
        weight_version: returns the version of the weights; those of another version encode an image again.

    Attributes:
        limits: as clients see them.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        encoder: VisionEncoder,
        sources: ImageSources,
        geometry: Geometry,
        *,
        max_images: int = DEFAULT_MAX_IMAGES,
        cache_bytes: int = 1 << 30,
        weight_version: Callable[[], str] = lambda: "",
    ) -> None:
        self.limits = ImageLimits(max_images)
        self._processor = processor
        self._encoder = encoder
        self._sources = sources
        self._max_model_len = geometry.max_model_len
        self._block_size = geometry.block_size
        self._width = geometry.embed_width
        self._weight_version = weight_version
        self._decoder = PictureDecoder()
        self._readers = TenantThreads(_NUM_THREADS, _NUM_OF_TENANT, "jpaged-images")
        self._fetchers = TenantThreads(_NUM_FETCHES, _NUM_FETCHES_OF_TENANT, "jpaged-fetches")
        self._making = ThreadPoolExecutor(1, "jpaged-prompts")
        self._encoding = ThreadPoolExecutor(1, "jpaged-encoder")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._num_patches = 0
        self._num_calls = 0  # submitted and not begun
        self._in_flight: dict[tuple[str, bytes], Future[_Rows]] = {}
        self._cache = EncoderCache(cache_bytes)
        self._memory = ImageMemory(TENANT_BYTES + cache_bytes)
        self._load = ImageLoad()

    @classmethod
    def from_options(
        cls,
        processor: ImageProcessor,
        encoder: VisionEncoder,
        options: MediaOptions,
        geometry: Geometry,
        weight_version: Callable[[], str] = lambda: "",
    ) -> ImageInputs:
        """Return the images of a model as its options allow them."""
        sources = ImageSources(options.allowed_media_domains, options.allowed_local_media_path)
        return cls(
            processor,
            encoder,
            sources,
            geometry,
            max_images=options.max_images,
            cache_bytes=int(options.mm_processor_cache_gb * 2**30),
            weight_version=weight_version,
        )

    def load(self) -> ImageLoad:
        """Return a snapshot of the counters."""
        with self._lock:
            return dataclasses.replace(self._load, cached_bytes=self._cache.num_bytes)

    def start_reading(
        self, images: Sequence[GivenImage], tenant: str = "", *, is_bounded: bool = False
    ) -> list[Future[PreparedImage]]:
        """Start to read and prepare the images of a request, each on a thread.

        Args:
            is_bounded: reading an image fails with TryLater if those of other requests take all memory, and with
                RequestTooLong if those of this one do.

        Raises:
            InvalidArgument: there are too many.
        """
        if len(images) > (most := self.limits.max_images):
            problem = f"is image {most + 1} of {len(images)}; limit_mm_per_prompt allows {most}"
            raise InvalidArgument(images[most].field, problem)
        budget = _ImageBudget(self._max_model_len, self._memory, tenant, is_bounded=is_bounded)
        return [self._start_reading(image, budget, tenant) for image in images]

    def _start_reading(self, image: GivenImage, budget: _ImageBudget, tenant: str) -> Future[PreparedImage]:
        field, source = image
        if not isinstance(source, str) or not _is_url(source):
            return self._readers.submit(tenant, lambda: self._read(image, budget))

        def fetch() -> PreparedImage:
            fetched = GivenImage(field, self._sources.read(field, source))
            return self._readers.submit(tenant, lambda: self._read(fetched, budget)).result()

        return self._fetchers.submit(tenant, fetch)

    async def complete(
        self, given: Sequence[GivenImage], prompt: Prompt, make: Callable[[Prompt], _Made], tenant: str, salt: str
    ) -> _Made:
        """Return what `make` does for a prompt with prepared images, with their rows in its request.

        The event loop is not delayed.

        Args:
            make: returns the request of a prompt, and what else belongs to it.
        """
        images, (request, *others) = await self.prepare(given, prompt, make, tenant)
        rows = await asyncio.gather(*map(asyncio.wrap_future, self.start_encoding(images, tenant, salt)))
        return self.attach(request, images, rows), *others  # type: ignore[return-value]

    async def prepare(
        self, given: Sequence[GivenImage], prompt: Prompt, make: Callable[[Prompt], _Result], tenant: str = ""
    ) -> tuple[Sequence[PreparedImage], _Result]:
        """Return the prepared images of a prompt, and what `make` returns for the prompt with them."""
        reads = self.start_reading(given, tenant, is_bounded=True)
        try:
            images = await asyncio.gather(*map(asyncio.wrap_future, reads))
        finally:
            _cancel(reads)
        prompt = dataclasses.replace(prompt, prepared=images)
        return images, await asyncio.get_running_loop().run_in_executor(self._making, make, prompt)

    def start_now(
        self, given: Sequence[GivenImage], prompt: Prompt, make: Callable[..., Request]
    ) -> Callable[[], Request]:
        """Start to encode the images of the request that `make` returns for a prompt with prepared images. Blocks.

        Returns:
            a function that waits, and returns the request with the images' rows.
        """
        reads = self.start_reading(given)
        try:
            images = [one.result() for one in reads]
        finally:
            _cancel(reads)
        request = make(prompt=dataclasses.replace(prompt, prepared=images))
        started = self.start_encoding(images, "", request.sampling.cache_salt, waits_for_more=True)

        def finish() -> Request:
            with self._lock:
                self._start_calls()
            return self.attach(request, images, [one.result() for one in started])

        return finish

    def _read(self, image: GivenImage, budget: _ImageBudget) -> PreparedImage:
        field, source = image

        def check_size(width: int, height: int) -> None:
            with _field(field):
                budget.take(field, self._processor.count_tokens(width, height), f"{width} x {height}")

        if isinstance(source, str):
            has_scheme = ":" in source[:32]
            source = self._sources.read(field, source) if has_scheme else read_base64(field, source)
        if isinstance(source, bytes | bytearray | memoryview):
            pixels_hwc = self._decoder.decode(field, bytes(source), check_size)
        else:
            pixels_hwc = read_pixels(field, source)
            check_size(pixels_hwc.shape[1], pixels_hwc.shape[0])
        with _field(field):
            prepared = self._processor.prepare(pixels_hwc)
        budget.add(prepared.patches_pe)
        return prepared

    def place(
        self, token_ids: Sequence[int], given: Sequence[GivenImage], images: Sequence[PreparedImage]
    ) -> tuple[list[int], PromptEmbeds]:
        """Return the tokens of a prompt, images included, and the positions of the encoder's rows.

        The rows are zeros until `attach` replaces them.

        Raises:
            InvalidArgument: the prompt has another number of placeholders than images.
        """
        mark, placed = self._processor.placeholder_id, list[int]()
        num_marks = sum(token_id == mark for token_id in token_ids)
        if num_marks != len(images):
            where = "in the prompt" if given[0].field.startswith("multi_modal_data") else "in the rendered chat"
            problem = f"{num_marks} placeholders of images (token {mark}) {where} do not match {len(images)} images"
            raise InvalidArgument(given[0].field, problem)
        spans, rest, end = list[EmbeddedSpan](), iter(images), 0
        for token_id in token_ids:
            if token_id != mark:
                self._append(placed, token_id, is_edge=0 < end == len(placed))
                continue
            image = next(rest)
            self._append(placed, image.token_ids[0], is_edge=bool(placed))
            begin = len(placed) - 1
            digest = hashlib.sha256(np.array(image.grid, "<i8").tobytes() + image.digest).digest()
            row = 0
            for start, stop in _runs(image.is_embed_t):
                zeros = np.broadcast_to(np.float32(0), (stop - start, self._width))
                spans.append(EmbeddedSpan(begin + start, zeros, digest, row, image.rope_grid))
                row += stop - start
            placed += image.token_ids[1:]
            end = len(placed)
        embeds = with_digests(spans, len(placed), self._block_size)
        num_tokens = sum(len(image.token_ids) for image in images)
        return placed, dataclasses.replace(embeds, num_image_tokens=num_tokens)

    def _append(self, placed: list[int], token_id: int, *, is_edge: bool) -> None:
        """Append a token, or join it with the last one at an image's edge, as the tokenizer would."""
        joined = self._processor.join(placed[-1], token_id) if is_edge else None
        if joined is None:
            placed.append(token_id)
        else:
            placed[-1] = joined

    def start_encoding(
        self, images: Sequence[PreparedImage], tenant: str, salt: str, *, waits_for_more: bool = False
    ) -> list[Future[_Rows]]:
        """Start to encode images; those of concurrent requests share calls of the encoder, tenants in turn.

        Args:
            tenant, salt: only requests with the same two share encoded images.
            waits_for_more: images that leave room in a call wait for others, until the calls are started.
        """
        others = f"{self._weight_version()}\0{salt}".encode()
        found, num_hits = list[Future[_Rows]](), 0
        with self._lock:
            for image in images:
                key = hashlib.sha256(np.array(image.grid, "<i8").tobytes() + image.digest + others).digest()
                done = self._in_flight.get((tenant, key))
                rows = None if done is not None else self._cache.find(tenant, key)
                num_hits += done is not None or rows is not None
                if done is None:
                    done = Future()
                    done.set_running_or_notify_cancel()  # others may wait for it, too
                    if rows is not None:
                        done.set_result(rows)
                    else:
                        self._in_flight[tenant, key] = done
                        self._waiting.setdefault(tenant, deque()).append(_Waiting(image, key, done))
                        self._num_patches += len(image.patches_pe)
                found.append(done)
            if not waits_for_more or self._num_patches >= MAX_CALL_PATCHES:
                self._start_calls()
            num_tokens = sum(len(image.token_ids) for image in images)
            self._count(num_queries=len(images), num_hits=num_hits, num_tokens=num_tokens)
        return found

    def _start_calls(self) -> None:
        """Start to encode all waiting images, with the lock held."""
        missing = sum(map(len, self._waiting.values())) - self._num_calls  # each takes at least one image
        for _ in range(missing):
            self._num_calls += 1
            self._encoding.submit(self._encode_waiting)

    def _count(self, **counts: int) -> None:
        """Add to counters, with the lock held."""
        added = {name: getattr(self._load, name) + count for name, count in counts.items()}
        self._load = dataclasses.replace(self._load, **added)

    def _encode_waiting(self) -> None:
        """Encode the waiting images that fit into one call, if another call has not taken them."""
        with self._lock:
            self._num_calls -= 1
            batch = self._take_batch()
        if not batch:
            return
        try:
            encoded = self._encoder.encode([waiting.image for _, waiting in batch])
            if len(encoded) != len(batch):
                raise InternalError(f"the encoder returned {len(encoded)} images for {len(batch)}")
        except Exception as error:
            with self._lock:
                for tenant, waiting in batch:
                    del self._in_flight[tenant, waiting.key]
            for _, waiting in batch:
                waiting.done.set_exception(error)
            return
        with self._lock:
            self._count(num_encoded=len(batch), num_calls=1)
            for (tenant, waiting), rows in zip(batch, encoded, strict=True):
                rows.setflags(write=False)
                self._memory.add(tenant, rows)
                self._cache.add(tenant, waiting.key, rows)
                del self._in_flight[tenant, waiting.key]
        for (_, waiting), rows in zip(batch, encoded, strict=True):
            waiting.done.set_result(rows)

    def _take_batch(self) -> list[tuple[str, _Waiting]]:
        """Return waiting images for one call, one of each tenant in turn: several small ones, or any one."""
        batch, num_patches = list[tuple[str, _Waiting]](), 0
        while self._waiting:
            tenant, images = next(iter(self._waiting.items()))
            num_patches += len(images[0].image.patches_pe)
            if batch and num_patches > MAX_CALL_PATCHES:
                break
            batch.append((tenant, images.popleft()))
            self._num_patches -= len(batch[-1][1].image.patches_pe)
            del self._waiting[tenant]
            if images:
                self._waiting[tenant] = images
        return batch

    def attach(self, request: Request, images: Sequence[PreparedImage], rows: Sequence[_Rows]) -> Request:
        """Return a request of placed images with the rows of their encodings."""
        assert request.embeds is not None
        spans, places = iter(request.embeds.spans), list[EmbeddedSpan]()
        for image, encoded in zip(images, rows, strict=True):
            expected = (int(image.is_embed_t.sum()), self._width)
            if encoded.shape != expected:
                raise InternalError(f"the encoder returned rows of the shape {encoded.shape}, not {expected}")
            for start, stop in _runs(image.is_embed_t):
                span = next(spans)
                values_te = encoded[span.first_row : span.first_row + stop - start]
                places.append(dataclasses.replace(span, values_te=values_te))
        return dataclasses.replace(request, embeds=dataclasses.replace(request.embeds, spans=tuple(places)))


class _field:
    """Context in which errors of a model's image processor name the field of the image."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidArgument) and error.field != self._field:
            raise InvalidArgument(self._field, error.problem) from error


def _is_url(source: str) -> bool:
    """Return True if a text names a file or a server, and is neither a data URI nor base64."""
    if source[:32].lstrip()[:5].lower() == "data:":
        return False
    return ":" in source[:16] or (source.startswith("/") and not source.startswith(_JPEG))


def _cancel(futures: Sequence[Future[Any]]) -> None:
    """Cancel what has not begun: the rest of a request that is refused or gone."""
    for future in futures:
        future.cancel()


def _runs(is_embed_t: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return start and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_embed_t.astype(np.int8), [0]))))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
