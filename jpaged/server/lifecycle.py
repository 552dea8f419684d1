"""Lifecycle of a server: first the port, then the model, then requests; at the end a drain and an exit code.

    STARTING ──loaded──> SERVING ──SIGTERM, SIGINT──> DRAINING ──> exit 0
       │                   │  ^ └──engine died──────> FAILED ────> exit 1
       │                   v  │
       │                 STALLED ──a step hangs─────> FAILED ────> exit 3
       │                    └──a process is lost────> FAILED ────> exit 4
       └──could not load──> FAILED ──────────────────────────────> exit 1

For "", "readiness" and each service, grpc.health.v1 answers SERVING only in that state, otherwise NOT_SERVING; for
"liveness" it answers NOT_SERVING only in FAILED. Requests outside of SERVING and STALLED get UNAVAILABLE; the port is
open in all states. docs/health.md has the recommended probes.

`Watchdog` is the watchdog of the engine: stalled after --stall-timeout, hung after --step-timeout.

    seconds without a step    0 ...... stall_timeout ...... step_timeout
                              serving  stalled: not ready   hung: the server ends, with all threads' stacks

A stall is reported as observed, and may pass. A hang ends the process, so it counts only time in which this process was
awake: after a stop of the process or its machine, a step looks long.
"""

from __future__ import annotations

import asyncio
import enum
import faulthandler
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jpaged._proto.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2_grpc,
    prefixes_pb2,
    prefixes_pb2_grpc,
)
from jpaged.access.authenticator import Authenticator
from jpaged.config import EngineConfig, TimeoutOptions, shows_traces
from jpaged.engine.core import PauseMode
from jpaged.engine.executor import COMPILER_THREAD, Progress
from jpaged.errors import EngineHung, InternalError, InvalidArgument, JpagedError, Unavailable, describe_error
from jpaged.http.port import HttpPort
from jpaged.server.compat.faces import Faces, descriptors
from jpaged.server.grpc_server import (
    AuthInterceptor,
    MessagesInHand,
    ServicerContext,
    bind,
    make_server,
    status_on_error,
)
from jpaged.server.health import LIVENESS, READINESS, Health, HealthServicer, ProbeServer
from jpaged.server.kv_transfer import SERVICE_NAME as PREFILL_NAME
from jpaged.server.kv_transfer import PeerServers, PrefillServicer, PrefixServicer
from jpaged.server.servicer import (
    InferenceServicer,
    build_load,
    build_message,
    build_model_info,
    build_server_info,
    get_tenant,
    prompt_from,
)
from jpaged.service.handoff import PrefillServers
from jpaged.service.kv_transfer import PrefixTransferService
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.roles import DecodeRole, PrefillRole
from jpaged.service.service import AuditObserver, Service, ServiceState, Stage
from jpaged.telemetry.logs import Observers
from jpaged.telemetry.metrics import serve_metrics
from jpaged.telemetry.scrapes import ScrapeServer
from jpaged.types import Prompt

_MAX_LOOK_S = 2.0
"""Maximum time counted between two looks, of which there are five a second."""


class EngineState(enum.Enum):
    """Result of a look."""

    GOES_ON = "goes on"
    STALLS = "stalls"
    HANGS = "hangs"


class Watchdog:
    """Judges the engine's progress in repeated looks."""

    def __init__(self, options: TimeoutOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s, self._hang_s = options.stall_timeout, options.step_timeout
        self._clock = clock
        self._looked_s = clock()
        self._waited_s = 0.0

    def look(self, seconds: float) -> EngineState:
        """Return the state of an engine that has had work for `seconds` without completing a step."""
        now_s = self._clock()
        since_look_s, self._looked_s = min(now_s - self._looked_s, _MAX_LOOK_S), now_s
        self._waited_s = min(seconds, self._waited_s + since_look_s)
        if self._hang_s and self._waited_s >= self._hang_s:
            return EngineState.HANGS
        return EngineState.STALLS if seconds >= self._stall_s else EngineState.GOES_ON

    def why(self) -> EngineHung:
        """Return the error of a hang."""
        return EngineHung(
            f"no step has completed for {self._hang_s:g} s (step_timeout): the engine hangs, so the server exits"
        )


def show_stacks() -> None:
    """Write the stack of every thread to stderr, including threads inside C code."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


_LOG = logging.getLogger(__name__)

PIN_NAME = "pin-prefix"
"""Name under which UnpinPrefix finds the prefix of the option `pin_prefix`."""
SERVICE_NAMES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
    prefixes_pb2.DESCRIPTOR.services_by_name["PrefixService"].full_name,
)

_WATCH_INTERVAL_S = 0.2
_FLUSH_TIMEOUT_S = 2.0
"""Maximum time at the end to flush statuses to clients."""


_UPDATE_MODES: tuple[PauseMode, ...] = ("keep", "keep", "wait", "abort")
"""Modes by the numbers of UpdateMode."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """jpaged.v1.ControlService."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> control_pb2.GetServerInfoResponse:
        """Return the server's properties and state; works in every state."""
        async with status_on_error(context):
            return build_server_info(self._service.state)

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: ServicerContext
    ) -> control_pb2.GetModelInfoResponse:
        """Return the model's properties, fixed at startup except for the version of the weights."""
        async with status_on_error(context):
            loaded = self._service.state.loaded()
            return build_model_info(replace(loaded.model, weight_version=loaded.engine.weight_version))

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: ServicerContext
    ) -> control_pb2.GetLoadResponse:
        """Return a snapshot of the load."""
        async with status_on_error(context):
            engine = self._service.state.loaded().engine
            return build_load(engine.load(), engine.replica_loads())

    async def Abort(self, request: control_pb2.AbortRequest, context: ServicerContext) -> control_pb2.AbortResponse:
        """Abort a request; its stream, not this call, returns the tokens generated."""
        async with status_on_error(context):
            self._service.abort(request.request_id, get_tenant(context))
            return control_pb2.AbortResponse()

    async def PinPrefix(
        self, request: control_pb2.PinPrefixRequest, context: ServicerContext
    ) -> control_pb2.PinPrefixResponse:
        """Pin a prefix, even if the client disconnects."""
        async with status_on_error(context):
            prefix, tenant = prompt_from(request), get_tenant(context)
            num_tokens = await self._service.pin_prefix(
                request.name, prefix, request.cache_salt, tenant, request.adapter
            )
            return control_pb2.PinPrefixResponse(num_pinned_tokens=num_tokens)

    async def UnpinPrefix(
        self, request: control_pb2.UnpinPrefixRequest, context: ServicerContext
    ) -> control_pb2.UnpinPrefixResponse:
        """Unpin a prefix; requests that share it continue."""
        async with status_on_error(context):
            self._service.unpin_prefix(request.name, get_tenant(context))
            return control_pb2.UnpinPrefixResponse()

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: ServicerContext
    ) -> control_pb2.LoadAdapterResponse:
        """Load an adapter, even if the client disconnects."""
        async with status_on_error(context):
            adapter = await self._service.load_adapter(request.name, request.path)
            return control_pb2.LoadAdapterResponse(num_bytes=adapter.num_bytes)

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: ServicerContext
    ) -> control_pb2.UnloadAdapterResponse:
        """Unload an adapter; requests that use it continue."""
        async with status_on_error(context):
            self._service.unload_adapter(request.name)
            return control_pb2.UnloadAdapterResponse()

    async def UpdateWeights(
        self, request: control_pb2.UpdateWeightsRequest, context: ServicerContext
    ) -> control_pb2.UpdateWeightsResponse:
        """Replace the weights, even if the client disconnects."""
        async with status_on_error(context):
            if not 0 <= request.mode < len(_UPDATE_MODES):
                raise InvalidArgument("mode", f"{request.mode} is not a value of UpdateMode")
            mode, named = _UPDATE_MODES[request.mode], request.version or None
            if request.path and request.upload:
                raise InvalidArgument("upload", "conflicts with path: give only one of them")
            if request.upload:
                version = await self._service.update_sent_weights(request.upload, mode, named)
            else:
                version = await self._service.update_weights(request.path, mode, named)
            return control_pb2.UpdateWeightsResponse(weight_version=version)

    async def SendWeights(
        self, request: control_pb2.SendWeightsRequest, context: ServicerContext
    ) -> control_pb2.SendWeightsResponse:
        """Receive a part of new weights."""
        async with status_on_error(context):
            num_bytes = await self._service.send_weights(request.upload, request.offset, request.data)
            return control_pb2.SendWeightsResponse(num_bytes=num_bytes)

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: ServicerContext
    ) -> control_pb2.ListAdaptersResponse:
        """Return the adapters that requests can use."""
        async with status_on_error(context):
            loaded = self._service.state.loaded().adapters.loaded()
            return control_pb2.ListAdaptersResponse(
                adapters=[build_message(control_pb2.Adapter, adapter) for adapter in loaded]
            )


class Server:
    """One gRPC server around one model. Bound to one event loop: `start`, then `run`.

    Args:
        config: the options as given; `load` returns the resolved ones.
        load: builds the model; the server starts and stops its engine. Called once, on a thread.
        on_progress: receives the progress of `load`, on that thread.
        on_serving: called with the port once requests are accepted.
        on_hang: called first when a step hangs.
        prefills: prefill servers, required by the decode role; closed at the end.

    Raises:
        InvalidArgument: options of roles conflict.

    Attributes:
        state: stage of the lifecycle.
        control_port: the separate port for control operations; None if there is none.
        leaves_threads: the loading or engine thread was abandoned and may hang, or a thread compiles, which would block
            the process's exit.
    """

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[Progress], LoadedModel],
        *,
        on_progress: Progress = lambda what, done, total: None,
        on_serving: Callable[[int, LoadedModel], None] = lambda port, serving: None,
        on_hang: Callable[[], None] = show_stacks,
        prefills: PrefillServers | None = None,
    ) -> None:
        self.state = ServiceState(config)
        self._prefills = prefills
        self._role = _get_role(config, prefills)
        self._gate = Authenticator(config.access)
        config.kv_events.check()
        self._observers = Observers(config.telemetry)
        audits = [] if config.access.audit_log is None else [AuditObserver(self._gate)]
        self._service = Service(self.state, [*audits, *self._observers.all], self._gate.quotas, self._role)
        self._config = config
        self._load = load
        self._on_progress = on_progress
        self._on_serving = on_serving
        self._on_hang = on_hang
        self._publishing = asyncio.Lock()
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self.leaves_threads = False
        self._port = 0
        self._prefix: str | None = None
        self._metrics: ScrapeServer | None = None
        self._http: HttpPort | None = None
        self._control: aio.Server | None = None
        self.control_port: int | None = None
        self._probes: ProbeServer | None = None

    @property
    def metrics_port(self) -> int | None:
        """The port of metrics; None before the model is loaded, or if not configured."""
        return None if self._metrics is None else self._metrics.server_port

    @property
    def http_port(self) -> int | None:
        """The port of the HTTP frontend; None if it is off."""
        return None if self._http is None else self._http.port

    @property
    def probe_port(self) -> int | None:
        """The port only for health; None if not configured."""
        return None if self._probes is None else self._probes.port

    async def start(self) -> int:
        """Open the port and start loading the model; return the port.

        Raises:
            InvalidArgument: the host or a port cannot be bound, or a file named by the options cannot be read.
        """
        self._prefix = _read_text(self._config.server.pin_prefix)
        max_bytes = int(self._config.server.max_request_size * 2**20)
        self._gate.read()
        with_control = self._config.access.control_port is None
        self._grpc = make_server(
            self._config.server, max_bytes, AuthInterceptor(self._gate, takes_control=with_control)
        )
        self._inference = InferenceServicer(self._service, MessagesInHand(max_bytes))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, self._grpc)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(self._service), self._grpc)
        self._peers = PeerServers(self._config.access)
        self._travelling = PrefixTransferService(self._service, self._peers)
        prefixes = PrefixServicer(self._travelling)
        prefixes_pb2_grpc.add_PrefixServiceServicer_to_server(prefixes, self._grpc)
        if isinstance(self._role, PrefillRole):
            servicer = PrefillServicer(self._service, self._role)
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, self._grpc)
        self._faces = Faces(self._service, self._config.server, max_bytes)
        self._faces.add_to(self._grpc)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if self._config.server.enable_reflection:
            own = (*SERVICE_NAMES, PREFILL_NAME) if isinstance(self._role, PrefillRole) else SERVICE_NAMES
            names = (*own, *self._faces.names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._grpc, descriptors())
        await self._enter(Stage.STARTING)
        options, certificates = self._config, self._gate.certificates
        self._port = bind(self._grpc, "port", options.server.host, options.server.port, certificates)
        if options.http.enable_http:
            self._http = HttpPort(self._service, self._gate, options)
            await self._http.start()
        await self._open_control(max_bytes, prefixes)
        if options.server.probe_port is not None:
            self._probes = ProbeServer(self._health_now, options.server.host, options.server.probe_port)
        await self._grpc.start()
        self._watching = asyncio.create_task(self._gate.watch())
        self._looking = asyncio.create_task(self._look_at_engine())
        self._loading = asyncio.create_task(self._load_model())
        return self._port

    async def _open_control(self, max_bytes: int, prefixes: PrefixServicer) -> None:
        """Open the separate port for control operations, if configured."""
        options = self._config.access
        if options.control_port is None:
            return
        server = make_server(self._config.server, max_bytes, AuthInterceptor(self._gate, takes_control=True))
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(self._service), server)
        prefixes_pb2_grpc.add_PrefixServiceServicer_to_server(prefixes, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.server.enable_reflection:
            names = (*SERVICE_NAMES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        host, port = options.control_host, options.control_port
        self.control_port = bind(server, "control_port", host, port, self._gate.certificates)
        await server.start()
        self._control = server

    async def run(self) -> int:
        """Serve until `request_stop` or until the engine fails; then shut down and return the exit code."""
        await self._loading
        while self.state.failure is None and not self._stop.is_set():
            await _wait(self._stop, _WATCH_INTERVAL_S)
            self.state.note_failure()
        code = await self._end()
        compilers = [one for one in threading.enumerate() if one.name.startswith(COMPILER_THREAD)]
        self.leaves_threads = self.leaves_threads or bool(compilers)
        return code

    def request_stop(self) -> None:
        """Begin a drain; a second call cuts it short. For signal handlers."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    def drain(self) -> None:
        """Begin a drain unless one has begun. For other callers."""
        self._stop.set()

    def fail(self, error: JpagedError) -> None:
        """End the server for an external reason, also while the model loads; every open call gets the error.

        Does not wait for the engine or the loading thread: see `leaves_threads`.
        """
        self.state.note_failure(error)
        self.leaves_threads = True
        if self.state.model is not None:
            self.state.model.engine.fail(error, hangs=True)
        self._stop.set()

    def stop_on_signals(self) -> None:
        """Map SIGTERM and SIGINT to `request_stop`; on SIGHUP reload keys and certificates."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        loop.add_signal_handler(signal.SIGHUP, self._gate.reload)

    def _health_now(self) -> Health:
        return Health(self.state.is_live, self.state.is_ready)

    async def _look_at_engine(self) -> None:
        """Track stalls, and end the server when a step hangs."""
        watch = Watchdog(self._config.timeouts)
        while self.state.failure is None:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if self.state.model is None:
                continue
            found, stage = watch.look(self.state.model.engine.load().seconds_since_progress), self.state.stage
            if found is EngineState.HANGS:
                self._on_hang()
                self.fail(watch.why())
            elif found is EngineState.STALLS and stage is Stage.SERVING:
                _LOG.warning(
                    "no step has completed for %g s: the server is not ready", self._config.timeouts.stall_timeout
                )
                await self._enter(Stage.STALLED)
            elif found is EngineState.GOES_ON and stage is Stage.STALLED:
                _LOG.warning("steps complete again: the server is ready")
                await self._enter(Stage.SERVING)

    async def _enter(self, stage: Stage) -> None:
        self.state.enter(stage)
        kinds = health_pb2.HealthCheckResponse
        async with self._publishing:  # serialized: the last caller sets the current status
            for name in ("", READINESS, LIVENESS, *SERVICE_NAMES, *self._faces.names):
                is_well = self.state.is_live if name == LIVENESS else self.state.is_ready
                await self._health.set(name, kinds.SERVING if is_well else kinds.NOT_SERVING)

    async def _load_model(self) -> None:
        loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jpaged-load")
        loading = asyncio.get_running_loop().run_in_executor(loader, self._load, self._note_progress)
        loader.shutdown(wait=False)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not loading.done():
            self.leaves_threads = True
            loading.cancel()
            return
        error = loading.exception()
        if error is not None:
            self.state.note_failure(error if isinstance(error, Exception) else InternalError(str(error)))
            return
        model = loading.result()
        self.state.note_loaded(model)
        model.engine.start()
        try:
            await self._prepare(model)
        except JpagedError as failure:
            self.state.note_failure(failure)
            return
        if not self._stop.is_set():
            await self._enter(Stage.SERVING)
            self._on_serving(self._port, model)

    async def _prepare(self, serving: LoadedModel) -> None:
        """Prepare what the options require before the first request: the role, a pinned prefix, metrics."""
        options = self._config.server
        if self._role is not None:
            self._note_progress(f"preparing the role {self._config.roles.role}", 0, 1)
            await self._role.prepare(serving)
        if self._prefix is not None:
            try:
                token_ids = await asyncio.to_thread(serving.input_processor.prefix, Prompt(text=self._prefix))
                num_tokens = await asyncio.wrap_future(serving.engine.pin_prefix(PIN_NAME, token_ids))
            except InvalidArgument as error:
                raise InvalidArgument("pin_prefix", f"{options.pin_prefix}: {error.problem}") from error
            self._note_progress(f"{num_tokens} tokens of {options.pin_prefix} pinned", 1, 1)
        if options.metrics_port is not None:
            self._metrics = serve_metrics(serving, host=options.host, port=options.metrics_port)

    def _note_progress(self, what: str, done: int, total: int) -> None:
        self.state.note_progress(what, done, total)
        self._on_progress(what, done, total)

    async def _end(self) -> int:
        if self.state.failure is None:
            await self._enter(Stage.DRAINING)
            await self._drain()
        if (failure := self.state.failure) is not None:
            await self._enter(Stage.FAILED)
            # Log the trace of unforeseen errors during loading; the engine has logged its own errors.
            is_told = self.state.model is not None or isinstance(failure, JpagedError)
            trace = None if is_told or not shows_traces() else failure
            _LOG.error("the server is shutting down: %s", describe_error(failure), exc_info=trace)
            died = InternalError(f"the engine has died: {failure}")
            self._service.end_open_calls(failure if isinstance(failure, Unavailable) else died)
        await self._close()
        last = self.state.failure
        return 0 if last is None else (last if isinstance(last, JpagedError) else JpagedError).exit_code

    async def _drain(self) -> None:
        """Wait until all requests have ended and been sent, up to the timeout or a second stop.

        The remaining ones get UNAVAILABLE.
        """
        if self.state.model is None:
            return
        until_s = time.monotonic() + self._config.server.shutdown_timeout
        while self.state.failure is None:
            remaining_s = until_s - time.monotonic()
            slice_s = max(0.0, min(_WATCH_INTERVAL_S, remaining_s))
            # A draining engine accepts nothing, so wait for open calls first: a call of several requests may submit
            # more.
            is_idle = await _wait(self._service.is_idle, slice_s)
            if is_idle and await asyncio.to_thread(self.state.model.engine.drain, slice_s):
                return
            if remaining_s <= 0 or self._hurry.is_set():
                self._service.end_open_calls(Unavailable("the server shut down before the request finished"))
                return
            self.state.note_failure()

    async def _close(self) -> None:
        self._watching.cancel()
        if not await _wait(self._service.is_idle, _FLUSH_TIMEOUT_S):
            _LOG.warning("closed the streams of clients that do not read them")
        await self._health.end_watches(_FLUSH_TIMEOUT_S)
        await self._inference.end(_FLUSH_TIMEOUT_S)
        await self._faces.end(_FLUSH_TIMEOUT_S)
        if self._http is not None:
            await self._http.stop(_FLUSH_TIMEOUT_S)
        if self._control is not None:
            await self._control.stop(grace=_FLUSH_TIMEOUT_S)
        await self._peers.close()
        await self._grpc.stop(grace=_FLUSH_TIMEOUT_S)
        if self._prefills is not None:
            await self._prefills.close()
        if self.state.model is not None:
            await asyncio.to_thread(self.state.model.engine.stop)
        self._looking.cancel()  # not before: the engine may hang in its last step
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        await asyncio.to_thread(self._gate.end, _FLUSH_TIMEOUT_S)
        await asyncio.to_thread(self._observers.stop)
        if self._probes is not None:
            await asyncio.to_thread(self._probes.stop)


def _get_role(config: EngineConfig, prefills: PrefillServers | None) -> DecodeRole | PrefillRole | None:
    config.roles.check(config.cache)
    if config.roles.role == "prefill":
        return PrefillRole()
    if config.roles.role == "both":
        return None
    if prefills is None:
        raise InternalError("a server of the role decode has no prefill servers")
    return DecodeRole(config.roles, prefills)


def _read_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("pin_prefix", f"{path} cannot be read: {error}") from error


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`; return False on timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
