"""A loaded model without a port: for a host that brings its own server, such as Ray Serve.

    host's server ──request──> Replica.generate ──> InferenceServicer.Generate ──> engine
                  <──message──       Call       <────────── write ──────────┘

The servicers run as they do behind gRPC, over a Call that carries messages to the host instead of to a socket: what is
refused, how a status looks and what becomes of a request whose reader leaves are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import NoReturn

import grpc
from google.protobuf.message import Message

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.errors import Unavailable
from jpaged.server import wire
from jpaged.server.metrics import MetricsServer, serve_metrics
from jpaged.server.servicer import InferenceServicer
from jpaged.server.status import Trailers
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.stream import Bridge
from jpaged.version import __version__

Metadata = Iterable[tuple[str, str | bytes]]


class Refused(Exception):
    """How a call ends that does not succeed: the status that a gRPC server would answer with.

    Attributes:
        code: the status code.
        details: its message.
        trailing_metadata: the same with google.rpc details, in binary.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Trailers) -> None:
        super().__init__(code, details, trailing_metadata)  # all of them in args, which is what pickle keeps
        self.code, self.details, self.trailing_metadata = code, details, trailing_metadata

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


class Replica:
    """One engine that runs, and its servicer. Lives on one event loop; `serving.engine` is started and stopped here.

    Args:
        serving: a loaded model whose engine is not started.
    """

    def __init__(self, serving: LoadedModel) -> None:
        self._serving = serving
        self._inference: InferenceServicer | None = None
        self._is_draining = False
        self._metrics: MetricsServer | None = None
        serving.engine.start()

    # --- what the servicer asks ---------------------------------------------------------------------------------------

    def serving(self) -> LoadedModel:
        """The loaded model, to run requests on; raises Unavailable when it drains or its engine has died."""
        failure = self._serving.engine.failure
        if failure is not None:
            raise Unavailable(f"the engine has died: {failure}")
        if self._is_draining:
            raise Unavailable("the server is draining: it takes no new requests")
        return self._serving

    def loaded(self) -> LoadedModel:
        return self._serving

    def describe(self) -> control_pb2.GetServerInfoResponse:
        """What GetServerInfo answers."""
        return control_pb2.GetServerInfoResponse(
            server_version=__version__,
            state=self._state(),
            backend=wire.backend_of(self._serving.backend),
            options=wire.options_of(self._serving.config),
        )

    # --- what the host asks -------------------------------------------------------------------------------------------

    async def generate(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata = ()
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams one request. Closing the iterator cancels it: its blocks are free within a step.

        Raises:
            Refused: the request cannot run, or has failed.
        """
        call = _Call(metadata)
        task = asyncio.create_task(call.answer(self._servicer().Generate(request, call)))
        try:
            while (message := await call.messages.get()) is not None:
                assert isinstance(message, inference_pb2.GenerateResponse)
                yield message
            await task  # has ended: raises what it raised
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """Answers InferenceService.Tokenize; raises Refused."""
        return await self._servicer().Tokenize(request, _Call(()))

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
        """Answers InferenceService.Detokenize; raises Refused."""
        return await self._servicer().Detokenize(request, _Call(()))

    def load(self) -> control_pb2.GetLoadResponse:
        """How busy the engine is."""
        engine = self._serving.engine
        return wire.load_of(engine.load(), engine.replica_loads())

    def serve_metrics(self, host: str, port: int) -> int:
        """Answers Prometheus until `stop`; returns the port. Port 0 picks a free one."""
        self._metrics = serve_metrics(self._serving, host=host, port=port)
        return self._metrics.port

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for those that run; whether all ended in time."""
        self._is_draining = True
        inference = self._servicer()
        try:
            async with asyncio.timeout(timeout_s):
                return await inference.is_idle.wait()
        except TimeoutError:
            inference.end_open_calls(Unavailable("the server shut down before the request finished"))
            return False

    def stop(self) -> None:
        """Ends the engine and gives the device's memory back; the replica is spent."""
        self._is_draining = True
        self._serving.engine.stop()
        if self._metrics is not None:
            self._metrics.stop()

    def _servicer(self) -> InferenceServicer:
        if self._inference is None:  # on the loop that the first call comes on: hosts load models elsewhere
            self._inference = InferenceServicer(self, Bridge(asyncio.get_running_loop()))
        return self._inference

    def _state(self) -> control_pb2.ServerState:
        if self._serving.engine.failure is not None:
            return control_pb2.SERVER_STATE_FAILED
        return control_pb2.SERVER_STATE_DRAINING if self._is_draining else control_pb2.SERVER_STATE_SERVING


class _Call:
    """One call: holds one message that its reader has not taken, and makes the servicer wait with the next."""

    def __init__(self, metadata: Metadata) -> None:
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=1)
        self._metadata = tuple(metadata)

    async def answer(self, work: Awaitable[None]) -> None:
        """Runs the servicer's method; None in the queue says that it has ended."""
        try:
            await work
        except Exception:
            await self.messages.put(None)
            raise
        await self.messages.put(None)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None  # hosts cancel a call that is past its deadline

    async def write(self, message: Message) -> None:
        await self.messages.put(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Trailers = ()) -> NoReturn:
        raise Refused(code, details, trailing_metadata)
