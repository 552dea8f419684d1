"""Serves requests on a loaded model, independent of the protocol: a frontend decodes, calls this, and encodes.

    face ──Call──> Service.generate ──Request──> engine
        <─event── Generation       <──event───┘

Admission is decided here (tenants, request ids, limits of open calls), and so is the fate of a request whose reader
disconnects. Work that grows with a request runs on a thread.

`ServerRole` is the interface of a role other than "both"; `roles.py` implements it. `BlockingPools` are the threads for
work that grows with a request.

`ServiceState` holds the model, or the reason why no request can run:

STARTING ──loaded──> SERVING ──no step ends──> STALLED          is live      is ready
  │                  │  └────steps end again────┘               not FAILED   only SERVING
  │                  ├──drained──> DRAINING
  └──────────────────┴───failed──> FAILED

`AuditObserver` copies the record of a request to the call's audit entry. A request gets a separate audit line if its
call was answered before it ended (as in a batch), if it is one of several of a call, or if there is no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from jpaged.access import authenticator as access
from jpaged.access.authenticator import Authenticator, CallContext, current
from jpaged.access.keys import Role
from jpaged.access.quotas import QuotaLease, Quotas
from jpaged.config import EngineConfig
from jpaged.engine.core import PauseMode
from jpaged.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    JpagedError,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    QueueFull,
    Unavailable,
    Unsupported,
)
from jpaged.outputs import Completions
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.service.calls import (
    Call,
    OutputDispatcher,
    OutputStream,
    Records,
    RemotePrefillRequest,
    RequestHandle,
    RequestObserver,
    RequestRecord,
    require_name,
    require_salt,
)
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.service.input_processor import move_grammars
from jpaged.service.loaded_model import LoadedModel, WeightUpload
from jpaged.types import (
    FinishReason,
    LoadedAdapter,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    SequenceFinish,
    require_whole_characters,
)


class AdmittedCall(Protocol):
    """An admitted call as a role sees it: `jpaged.service.calls.RequestHandle`."""

    @property
    def engine_id(self) -> str:
        """Request id inside the engine."""

    @property
    def stream(self) -> OutputStream:
        """Stream of the request's events."""

    def end(self, finish: SequenceFinish | None = None, error: JpagedError | None = None) -> None:
        """End the stream for its reader."""

    def set_task(self, task: asyncio.Task[Any] | None, *, is_done: bool = False) -> None:
        """Attach the task that prepares the engine's request; None cancels it."""


class ServerRole(Protocol):
    """Submits requests to the engine in a role's own way. Runs on the service's event loop."""

    async def prepare(self, model: LoadedModel) -> None:
        """Prepare before the first request; raise Unsupported if the model cannot be served in this role."""

    def begin(
        self, model: LoadedModel, request: Request, generation: AdmittedCall, asked: RemotePrefillRequest | None
    ) -> None:
        """Submit an admitted request; raise as `Engine.submit` does, and InvalidArgument for what the role refuses."""

    def submit_now(self, model: LoadedModel, generation: AdmittedCall) -> bool:
        """Submit the rest of a request to the engine now; return False if nothing is left to submit."""

    def end(self, model: LoadedModel, generation: AdmittedCall) -> None:
        """Handle the end of a call, for any reason: release what the role holds for it."""


_T = TypeVar("_T")
_MadeRequest = tuple[Request, ChatOutputParser | None, AbstractContextManager[None]]

SMALL = 2000
"""Characters or token ids that are processed inline: about 1 ms."""
_NUM_THREADS = 4


class BlockingPools:
    """Thread pools for work that grows with a request, so that the event loop and its streams never wait for it.

    Texts and token ids have one pool; conversations have another, because a chat template may be slow.
    """

    def __init__(self) -> None:
        self._plain = ThreadPoolExecutor(_NUM_THREADS, "jpaged-text")
        self._chat = ThreadPoolExecutor(_NUM_THREADS, "jpaged-chat")
        self._files = ThreadPoolExecutor(1, "jpaged-files")

    async def run(self, work: Callable[[], _T], size: int | None) -> _T:
        """Run work on `size` characters or ids: inline if few, otherwise on a thread.

        None stands for a conversation, whose cost its size does not show. If the caller is cancelled while the work
        waits for a thread, the work is cancelled too.
        """
        if size is not None and size < SMALL:
            return work()
        pool = self._chat if size is None else self._plain
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def start(self, work: Callable[[], _T]) -> Future[_T]:
        """Start work on a thread and return its future."""
        return self._plain.submit(work)

    async def read(self, work: Callable[[], _T]) -> _T:
        """Run work that reads files, one at a time; it completes even if the caller is cancelled."""
        return await detached(asyncio.get_running_loop().run_in_executor(self._files, work))


async def detached(done: asyncio.Future[_T]) -> _T:
    """Wait for a future that continues if the caller is cancelled; asyncio then does not report its error."""
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return await asyncio.shield(done)


_RETRY_S = 1.0
"""Retry delay for callers that need not wait for the end of a request."""
_DECODINGS_OF_TOKEN = 5
"""Calls of a tokenizer for the bytes of one token."""


class Stage(enum.Enum):
    """Stage of a service; SERVING and STALLED accept requests."""

    STARTING = "starting"
    SERVING = "serving"
    STALLED = "stalled"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Startup:
    """Progress of the startup: `done` of `total` parts, at least one."""

    what: str
    done: int
    total: int


class ServiceState:
    """The loaded model, or why no request can run. The code that loads the model updates it.

    Args:
        config: the options as given; the model has the resolved ones.
        model: a model that is already loaded.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel | None = None) -> None:
        self.stage = Stage.STARTING if model is None else Stage.SERVING
        self.startup = Startup("starting", 0, 1)
        self.start_time = datetime.now(UTC)
        self.model = model
        self.failure: Exception | None = None
        self._config = config

    @property
    def config(self) -> EngineConfig:
        """The options, resolved once the model is loaded."""
        return self._config if self.model is None else self.model.config

    @property
    def is_live(self) -> bool:
        """True unless the process has failed; restarting a live process gains nothing."""
        return self.stage is not Stage.FAILED and self.failure is None

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted and make progress."""
        return self.stage is Stage.SERVING

    def serving(self) -> LoadedModel:
        """Return the loaded model, to run requests on.

        Raises:
            Unavailable: the model is loading, or the service drains or has failed.
        """
        model = self.loaded()
        if self.stage is Stage.DRAINING:
            raise Unavailable("the server is draining: it takes no new requests")
        if self.stage is Stage.FAILED:
            raise Unavailable(f"the engine has died: {self.failure}")
        return model

    def loaded(self) -> LoadedModel:
        """Return the loaded model for queries; raise Unavailable while it loads."""
        if self.model is None:
            startup = self.startup
            raise Unavailable(f"the server is starting: {startup.what}, {startup.done} of {startup.total}")
        return self.model

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """The model's sampling defaults, by fields of SamplingParams; empty while it loads."""
        return NO_DEFAULTS if self.model is None else self.model.model.default_sampling

    def enter(self, stage: Stage) -> None:
        """Enter a stage."""
        self.stage = stage

    def note_progress(self, what: str, done: int, total: int) -> None:
        """Record the progress of the startup. Thread-safe."""
        self.startup = Startup(what, done, max(total, 1))

    def note_loaded(self, model: LoadedModel) -> None:
        """Set the loaded model."""
        self.model = model

    def note_failure(self, error: Exception | None = None) -> None:
        """Record the given error or the engine's failure, unless one is recorded already."""
        if self.failure is None:
            self.failure = error or (None if self.model is None else self.model.engine.failure)


_UPLOAD_TIMEOUT_S = 60.0
"""Time without a part after which the weights that a client has sent are dropped."""


@contextlib.contextmanager
def _naming_weights(field: str) -> Iterator[None]:
    """Name the weights in errors as the caller's field."""
    try:
        yield
    except InvalidArgument as error:
        if error.field != "weights":
            raise
        raise InvalidArgument(field, error.problem) from error


class Service:
    """Operations of a server, independent of the protocol. Bound to the event loop of the first call.

    Args:
        observers: notified of every call.
        quotas: limits per tenant; none by default.
        role: submits requests for disaggregated prefill; None submits directly to the engine.

    Attributes:
        state: the loaded model, or why there is none.
        is_idle: set while no `generate` and no `open_batch_call` is open; a host may wait on it but must not set it.
    """

    def __init__(
        self,
        state: ServiceState,
        observers: Sequence[RequestObserver] = (),
        quotas: Quotas | None = None,
        role: ServerRole | None = None,
    ) -> None:
        self.state = state
        self._role = role
        self._quotas = quotas
        self._records = Records(observers)
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._bridge: OutputDispatcher | None = None
        self._workers = BlockingPools()
        self._counter = itertools.count()
        self._open: dict[tuple[str, str], RequestHandle] = {}
        self._num_calls = 0
        self._num_several = 0
        self._upload: WeightUpload | None = None
        self._upload_name = ""
        self._upload_timer: asyncio.TimerHandle | None = None
        self._sent_update: tuple[str, asyncio.Task[str]] | None = None

    @contextlib.asynccontextmanager
    async def generate(self, call: Call, model: LoadedModel | None = None) -> AsyncIterator[RequestHandle]:
        """Run a request while the context is open. Its blocks are free within a step of the exit, for any reason.

        Args:
            model: the model yielded by `open_batch_call`, if this request belongs to that call.

        Raises:
            JpagedError: the request is refused; or, during iteration, it has failed.
        """
        access.require(Role.INFERENCE, "a request")
        if (tenant := access.owner(call.tenant)) != call.tenant:
            call = dataclasses.replace(call, tenant=tenant)
        self._num_calls += 1
        self.is_idle.clear()
        try:
            with (
                self._records.observing(call.begins(), call.record) as record,
                self._stay(call.tenant, is_part=model is not None) as stay,
            ):
                model = model or self._model(call.model)
                generation = self._admit(model, call, record)
                try:
                    request = await self._prepare(model, generation, call)
                    if request is not None:
                        if stay is not None:
                            stay.reserve(len(request.prompt_token_ids), *_most_generated(request))
                        if self._role is None:
                            model.engine.submit(request, generation.stream.put)
                        else:
                            self._role.begin(model, request, generation, call.asked)
                        generation.prompt_token_ids, generation.seed = request.prompt_token_ids, request.sampling.seed
                    try:
                        yield generation
                    finally:
                        if stay is not None:
                            stay.settle(record.usage.prompt_tokens + record.usage.completion_tokens)
                        if self._role is not None:
                            self._role.end(model, generation)
                        if not generation.is_over:
                            model.engine.drop(generation.engine_id)
                finally:
                    self._forget(generation)
        finally:
            self._num_calls -= 1
            self._note_end()

    @contextlib.asynccontextmanager
    async def open_batch_call(
        self, name: str | None, record: RequestRecord | None = None
    ) -> AsyncIterator[LoadedModel]:
        """Admit a call that makes several requests, and yield the model for them. A drain waits for the whole call.

        Args:
            record: record of the call; its requests name it (`Call.record`).

        Raises:
            NotFound, Unavailable: as `generate`.
            QueueFull: the number of open calls of this kind has reached the limit of requests in flight.
            QuotaExceeded: the tenant's quota is used up for now.
        """
        access.require(Role.INFERENCE, "a request")
        tenant = access.owner("" if record is None else record.tenant)
        with (
            contextlib.nullcontext() if record is None else self._records.observing(record),
            self._stay(tenant),
        ):
            model = self._model(name)
            limit = model.engine.max_num_in_flight
            if self._num_several >= limit:
                what = f"{self._num_several} calls of several requests are open"
                raise QueueFull(f"{what}, the limit is {limit}", retry_after_s=_RETRY_S)
            if record is not None:
                record.admitted(uuid.uuid4().hex, model.model.name, model.engine.clock())
            self._num_several += 1
            self.is_idle.clear()
            try:
                yield model
            finally:
                self._num_several -= 1
                self._note_end()

    async def complete(self, call: Call, model: LoadedModel | None = None) -> RequestOutput:
        """Run a request to its end and return the complete output; accepts and raises what `generate` does."""
        completions = Completions(has_logprobs=False, has_prompt_logprobs=True)
        async with self.generate(call, model) as generation:
            async for event in generation:
                completions.add(event)
            return completions.output(generation.request_id, None, generation.prompt_token_ids)

    async def run_blocking(self, work: Callable[[], _T], size: int) -> _T:
        """Run work on `size` characters, ids or numbers; on a thread if `size` is large."""
        return await self._workers.run(work, size)

    async def tokenize(
        self,
        read: Callable[[], Prompt],
        size: int | None,
        *,
        add_special_tokens: bool = True,
        model: str | None = None,
    ) -> list[int]:
        """Return the ids of a text or a conversation, which may be longer than a prompt; see `Call` for arguments."""
        served = self._model(model)
        processor, images = served.input_processor, served.images
        tokenize = functools.partial(processor.tokenize, add_special_tokens=add_special_tokens)

        def start() -> list[int] | Prompt:
            prompt = read()
            return tokenize(prompt) if images is None or not processor.find_images(prompt) else prompt

        found = await self._workers.run(start, size)
        if isinstance(found, list) or images is None:
            assert isinstance(found, list)
            return found
        return (await images.prepare(processor.find_images(found), found, tokenize))[1]

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str | None = None
    ) -> str:
        """Return the text of token ids, which may be more than a sequence has."""
        processor = self._model(model).input_processor
        detokenize = functools.partial(processor.detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._workers.run(detokenize, len(token_ids))

    async def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str | None = None
    ) -> list[bytes]:
        """Return the bytes that each of several ids adds to a text."""
        processor = self._model(model).input_processor
        token_bytes = functools.partial(processor.token_bytes, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._workers.run(token_bytes, _DECODINGS_OF_TOKEN * len(token_ids))

    def abort(self, request_id: str, tenant: str = "") -> None:
        """Abort a request by its caller's id; its stream ends with the tokens generated so far.

        Raises:
            NotFound: the tenant has no request of that id in flight.
        """
        model = self.controlled("Abort", request_id, self.state.loaded())
        if not request_id:
            raise InvalidArgument("request_id", "is empty")
        generation = self._open.get((get_cache_tenant(model, tenant), request_id))
        is_known = generation is not None
        if generation is not None:
            is_made = generation.preparing is None or (
                self._role is not None and self._role.submit_now(model, generation)
            )
            if is_made:
                is_known = model.engine.abort(generation.engine_id)
            else:
                generation.end(SequenceFinish(FinishReason.ABORT))
        if not is_known:
            raise NotFound(f"request_id: no request {request_id!r} is in flight")

    async def pin_prefix(
        self, name: str, prefix: Prompt, cache_salt: str = "", tenant: str = "", adapter: str = ""
    ) -> int:
        """Compute a prefix and keep it cached under a name until it is unpinned; return the number of pinned tokens."""
        model = self.controlled("PinPrefix", name, self.state.serving())
        require_name("name", name)
        require_salt(cache_salt)
        loaded = model.adapters.named(adapter)
        # the current call is a context variable, which the thread does not see
        cache_tenant = get_cache_tenant(model, tenant)

        def pin() -> Future[int]:
            token_ids = model.input_processor.prefix(prefix)
            return model.engine.pin_prefix(name, token_ids, cache_salt, cache_tenant, loaded)

        return await detached(asyncio.wrap_future(await self._workers.run(pin, prefix.size)))

    def unpin_prefix(self, name: str, tenant: str = "") -> None:
        """Unpin a prefix; requests that share it continue.

        Raises:
            NotFound: the tenant has pinned none of that name.
        """
        model = self.controlled("UnpinPrefix", name, self.state.serving())
        require_name("name", name)
        if not model.engine.unpin_prefix(name, get_cache_tenant(model, tenant)):
            raise NotFound(f"name: no prefix {name!r} is pinned")

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> LoadedAdapter:
        """Load an adapter from a path of this machine, for requests that name it; see `Adapters.load`."""
        model = self.controlled("LoadAdapter", name, self.state.serving())
        return await self._workers.read(lambda: model.adapters.load(name, path, replaces=replaces))

    async def update_weights(
        self, source: str | WeightUpload, mode: PauseMode = "keep", version: str | int | None = None
    ) -> str:
        """Replace the model's weights by those of a path of this machine, or sent ones; return their version.

        The weights are replaced even if the caller disconnects.

        Raises:
            InvalidArgument: the weights are not of this model, or not complete; see `Engine.update_weights`.
            Unsupported: the server was started without --enable-sleep-mode, or the weights cannot be replaced.
        """
        field = "path" if isinstance(source, str) else "data"
        model = self._model_to_update(source if isinstance(source, str) else "")
        if isinstance(source, str):
            require_whole_characters("path", source)

        def begin() -> Future[str]:
            weights = source if isinstance(source, str) else source.arrays()
            return model.update_weights(weights, mode, version)

        with _naming_weights(field):
            begun = await self._workers.read(begin)
            return await detached(asyncio.wrap_future(begun))

    async def update_received_weights(
        self, parts: AsyncIterator[bytes], mode: PauseMode, version: str | int | None
    ) -> str:
        """Receive weights on one connection, of one client at a time, and replace the model's; see `update_weights`.

        Raises:
            DeadlineExceeded: the client sent nothing for a minute.
            Unavailable: another client sends weights.
        """
        upload, loop = self._open_upload(""), asyncio.get_running_loop()
        try:
            try:
                async with asyncio.timeout(_UPLOAD_TIMEOUT_S) as limit:
                    async for part in parts:
                        await self.write_weights(upload, part)
                        limit.reschedule(loop.time() + _UPLOAD_TIMEOUT_S)
            except TimeoutError as error:
                raise DeadlineExceeded(f"no part of the weights arrived for {_UPLOAD_TIMEOUT_S:g} seconds") from error
            return await self.update_weights(upload, mode, version)
        finally:
            self._close_upload(upload)

    async def send_weights(self, name: str, offset: int, part: bytes) -> int:
        """Add a part of the weights that a client sends under its upload id; return the bytes that have arrived.

        A name that is new begins them. They are dropped if nothing arrives for a minute.

        Raises:
            InvalidArgument: the name is empty, or as `WeightUpload.write`.
            Unavailable: another client sends weights.
            Unsupported: as for `update_weights`.
        """
        require_name("upload", name)
        self._model_to_update("")
        upload = self._upload
        if upload is None or name != self._upload_name:
            upload = self._open_upload(name)
        self._stop_upload_timer()
        try:
            await self.write_weights(upload, part, offset)
        except InvalidArgument:
            if not upload.has_header:
                self._close_upload(upload)
            raise
        finally:
            self._start_upload_timer(upload)
        return upload.num_bytes

    async def write_weights(self, upload: WeightUpload, part: bytes, offset: int | None = None) -> None:
        """Write a part; the header is checked on a thread. Raise as `WeightUpload.write`."""
        with _naming_weights("data"):
            if upload.has_header:
                upload.write(part, offset)
            else:
                await self._workers.read(lambda: upload.write(part, offset))

    async def update_sent_weights(self, name: str, mode: PauseMode, version: str | int | None) -> str:
        """Replace the weights by those that `send_weights` has received, and release them; see `update_weights`.

        Only one call of several with the same name does so; the others return its version.

        Raises:
            NotFound: no weights were sent under this name.
        """
        self._model_to_update("")
        if self._sent_update is None or self._sent_update[0] != name:
            upload = self._upload
            if upload is None or name != self._upload_name:
                raise NotFound(f"upload: no weights were sent as {name[:80]!r}")
            self._stop_upload_timer()
            self._sent_update = name, asyncio.create_task(self._use_upload(upload, mode, version))
        return await detached(self._sent_update[1])

    async def _use_upload(self, upload: WeightUpload, mode: PauseMode, version: str | int | None) -> str:
        try:
            return await self.update_weights(upload, mode, version)
        except BaseException:
            self._sent_update = None
            raise
        finally:
            self._close_upload(upload)

    def _open_upload(self, name: str) -> WeightUpload:
        model = self._model_to_update("")
        if self._upload is not None:
            raise Unavailable("another client sends weights: try again")
        if self._sent_update is not None and self._sent_update[0] == name:
            self._sent_update = None
        self._upload, self._upload_name = WeightUpload(model.check_weights), name
        return self._upload

    def _close_upload(self, upload: WeightUpload) -> None:
        if self._upload is upload:
            self._stop_upload_timer()
            self._upload, self._upload_name = None, ""

    def _start_upload_timer(self, upload: WeightUpload) -> None:
        self._stop_upload_timer()
        if self._upload is upload:
            loop = asyncio.get_running_loop()
            self._upload_timer = loop.call_later(_UPLOAD_TIMEOUT_S, self._close_upload, upload)

    def _stop_upload_timer(self) -> None:
        if self._upload_timer is not None:
            self._upload_timer.cancel()
            self._upload_timer = None

    def _model_to_update(self, path: str) -> LoadedModel:
        model = self.controlled("UpdateWeights", path, self.state.serving())
        if not model.config.scheduler.enable_sleep_mode:
            raise Unsupported("updating weights is off: start the server with --enable-sleep-mode")
        return model

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it continue.

        Raises:
            NotFound: no adapter has that name.
        """
        self.controlled("UnloadAdapter", name, self.state.serving()).adapters.unload(name)

    def end_open_calls(self, error: JpagedError) -> None:
        """End every open `generate` with an error, after the output that is ready."""
        for generation in self._open.values():
            generation.end(error=error)

    def _stay(self, tenant: str, *, is_part: bool = False) -> AbstractContextManager[QuotaLease | None]:
        """Return the context of a request that counts in its tenant's quotas; see `Quotas.acquire`."""
        return contextlib.nullcontext() if self._quotas is None else self._quotas.acquire(tenant, is_part=is_part)

    def _note_end(self) -> None:
        if self._num_calls + self._num_several == 0:
            self.is_idle.set()

    def _model(self, name: str | None) -> LoadedModel:
        model = self.state.serving()
        if name is not None and name not in model.names:
            raise ModelNotFound(f"model: {name!r} is not served here; {model.model.name!r} is")
        return model

    def controlled(self, method: str, name: str, model: LoadedModel) -> LoadedModel:
        """Authorize a control operation, note it in the audit and return the model.

        Aborting needs no control role: callers may abort their requests.
        """
        access.note_act(f"{method} {name[:128]}")
        if method == "Abort":
            access.require(Role.INFERENCE, method)
        else:
            access.require_control(method)
        if model.config.server.disable_control:
            raise PermissionDenied(f"{method} is turned off on this server (disable_control)")
        return model

    def _admit(self, model: LoadedModel, call: Call, record: RequestRecord) -> RequestHandle:
        if call.request_id is not None:
            require_name("request_id", call.request_id)
        cache_tenant = get_cache_tenant(model, call.tenant) if call.asked is None else call.asked.cache_tenant
        request_id = call.request_id or uuid.uuid4().hex
        other = self._open.get((cache_tenant, request_id))
        if other is not None and not other.stream.is_ended:  # an ended request may still have an unread stream
            raise AlreadyExists(f"request_id: a request {request_id!r} is in flight")
        self._require_readers(model)
        if self._bridge is None:
            rate = model.config.server.max_messages_per_second or math.inf
            self._bridge = OutputDispatcher(asyncio.get_running_loop(), rate)
        generation = RequestHandle(
            request_id=request_id,
            engine_id=f"{next(self._counter)}/{request_id}",
            cache_tenant=cache_tenant,
            stream=OutputStream(self._bridge, is_whole=call.is_whole, interval=model.config.server.stream_interval),
            forget=self._forget,
            record=record,
        )
        record.admitted(request_id, model.model.name, model.engine.clock())
        self._open[cache_tenant, request_id] = generation
        return generation

    def _require_readers(self, model: LoadedModel) -> None:
        """Limit the calls that are answered but not read, because their answers stay in memory.

        Raises:
            QueueFull: the open calls exceed twice the limit of requests in flight.
        """
        limit = 2 * model.engine.max_num_in_flight
        if self._num_calls > limit:
            raise QueueFull(
                f"{self._num_calls - 1} calls are open, the limit is {limit}; at least half are answered but unread",
                retry_after_s=_RETRY_S,
            )

    def _forget(self, generation: RequestHandle) -> None:
        """Free a request id, unless a newer request already uses it."""
        key = generation.cache_tenant, generation.request_id
        if self._open.get(key) is generation:
            del self._open[key]

    async def _prepare(self, model: LoadedModel, generation: RequestHandle, call: Call) -> Request | None:
        """Make the engine's request; return None if the stream has been ended in the meantime."""
        remaining_s = get_timeout(model, call.remaining_s)
        deadline_s = None if remaining_s is None else model.engine.clock() + remaining_s
        adapter = model.adapters.named(call.adapter) if call.adapter else None

        def make(prompt: Prompt, sampling: SamplingParams) -> _MadeRequest:
            request = model.input_processor.make_request(
                request_id=generation.engine_id,
                sampling=sampling,
                prompt=prompt,
                deadline_s=deadline_s,
                tenant=call.tenant,
                cache_tenant=generation.cache_tenant,
                is_whole=call.is_whole,
                adapter=adapter,
            )
            naming = model.input_processor.naming_errors(prompt, sampling, request)
            return request, model.input_processor.answers(prompt, sampling, request), naming

        def read() -> _MadeRequest | tuple[Prompt, SamplingParams]:
            given = call.read()
            return make(*given) if model.images is None or not model.input_processor.find_images(given[0]) else given

        async def prepare() -> tuple[Request, ChatOutputParser | None]:
            found = await self._workers.run(read, call.size)
            if len(found) == 2:  # a prompt with images
                (prompt, sampling), tenant = found, generation.cache_tenant
                assert model.images is not None
                given = model.input_processor.find_images(prompt)
                made = functools.partial(make, sampling=sampling)
                found = await model.images.complete(given, prompt, made, tenant, sampling.cache_salt)
            request, answers, naming = found
            if model.grammars is not None and request.sampling.structured_outputs is not None:
                with naming:
                    request = await model.grammars.bind(request)
            if request.continued:
                unmoved = request
                request = await self._workers.run(lambda: move_grammars(unmoved), call.size)
            return request, answers

        generation.preparing = asyncio.create_task(prepare())
        try:
            request, generation.answers = await generation.preparing
            generation.record.prepared(request.sampling, len(request.prompt_token_ids))
            return None if generation.stream.is_ended else request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not generation.stream.is_ended or (task is not None and task.cancelling()):
                raise  # the caller's task itself was cancelled
            return None
        finally:
            generation.preparing = None


def _most_generated(request: Request) -> tuple[str, int, int]:
    """Return the parameter that sets the number of sequences, that number, and the maximum tokens of each."""
    sampling = request.sampling
    name = "beam_width" if sampling.beam_width else "best_of" if sampling.best_of else "n"
    return name, sampling.beam_width or sampling.num_samples, sampling.max_num_tokens


def get_cache_tenant(model: LoadedModel, tenant: str) -> str:
    """Return the tenant that scopes ids, names and prefixes; "" (shared) if tenants are not isolated."""
    tenant = access.owner(tenant)
    return tenant if model.config.server.isolate_tenants else ""


def get_timeout(model: LoadedModel, asked_s: float | None) -> float | None:
    """Return the timeout of a request, from the caller's deadline and the configured limits; None for no limit."""
    limits = model.config.timeouts
    wanted = limits.default_deadline if asked_s is None else asked_s
    return min((seconds for seconds in (wanted, limits.max_deadline) if seconds is not None), default=None)


class AuditObserver:
    """Observer of the service that notes each request in the current call's audit entry."""

    def __init__(self, gate: Authenticator) -> None:
        self._gate = gate

    def begin(self, record: RequestRecord) -> None:
        """Do nothing: a new record holds nothing to note."""

    def end(self, record: RequestRecord) -> None:
        """Note the request's model and adapter, its token counts and its outcome."""
        entry = current()
        is_apart = entry is None or entry.is_closed or entry.is_part
        if entry is None or (entry.is_closed and not entry.is_part):
            key = None if entry is None else entry.key
            entry = CallContext(face="background", method=record.operation, peer="", key=key, tenant=record.tenant)
        entry.note_request(record.request_id, record.model, record.adapter)
        entry.note_use(record.usage.prompt_tokens, record.usage.completion_tokens)
        entry.note_error(record.reason)
        if is_apart:
            entry.began(record.began_s)
            self._gate.close(entry, record.status)
