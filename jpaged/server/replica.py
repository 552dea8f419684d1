"""A loaded model without a port, for a host with its own server that uses jpaged's messages, such as Ray Serve.

    host's server ──request──> Replica.generate ──> Service.generate ──> engine
                 <──message───                <────event────┘

Validation, statuses and the handling of disconnects are the same as over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager

import grpc

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.errors import Unavailable, Unsupported
from jpaged.server.grpc_server import Trailers, error_for, get_status, get_trailers
from jpaged.server.servicer import (
    build_load,
    call_from,
    detokenized,
    embedded,
    parse_caller_options,
    responses,
    scored,
    tenant_from,
    tokenized,
)
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service, ServiceState, Stage
from jpaged.telemetry.metrics import serve_metrics
from jpaged.telemetry.scrapes import ScrapeServer

Metadata = Iterable[tuple[str, str | bytes]]


class Refused(Exception):
    """Error of a call: the status that a gRPC server would answer with.

    Attributes:
        trailing_metadata: code and details again, with those of google.rpc, in binary.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Trailers) -> None:
        super().__init__(code, details, trailing_metadata)  # all of them in args, because pickle keeps only those
        self.code, self.details, self.trailing_metadata = code, details, trailing_metadata

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


class Replica:
    """A running engine and its service; this object starts and stops the engine."""

    def __init__(self, model: LoadedModel) -> None:
        if (role := model.config.roles.role) != "both":
            raise Unsupported(f"role: {role} requires a port, which an embedded replica does not have")
        self._model = model
        self._state = ServiceState(model.config, model)
        self._service = Service(self._state)
        self._metrics: ScrapeServer | None = None
        model.engine.start()

    def serving(self) -> LoadedModel:
        """Return the loaded model; raise Unavailable if the replica drains or its engine has failed."""
        self._note_failure()
        return self._state.serving()

    async def generate(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata = ()
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream one request. Closing the iterator cancels it: its blocks are free within a step.

        Raises:
            Refused: the request is refused, or has failed.
        """
        # No deadline: hosts cancel overdue calls themselves.
        with self._answering():
            call = call_from(request, metadata, None, defaults=self._service.state.default_sampling)
            async with aclosing(responses(self._service, request, call)) as messages:
                async for message in messages:
                    yield message

    async def score(self, request: inference_pb2.ScoreRequest, metadata: Metadata = ()) -> inference_pb2.ScoreResponse:
        """Answer InferenceService.Score; raise Refused on errors."""
        with self._answering():
            return await scored(self._service, parse_caller_options(request, tenant_from(metadata), None), request)

    async def embed(self, request: inference_pb2.EmbedRequest, metadata: Metadata = ()) -> inference_pb2.EmbedResponse:
        """Answer InferenceService.Embed; raise Refused on errors."""
        with self._answering():
            return await embedded(self._service, parse_caller_options(request, tenant_from(metadata), None), request)

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """Answer InferenceService.Tokenize; raise Refused on errors."""
        with self._answering():
            return await tokenized(self._service, request)

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
        """Answer InferenceService.Detokenize; raise Refused on errors."""
        with self._answering():
            return await detokenized(self._service, request)

    def load(self) -> control_pb2.GetLoadResponse:
        """Return the load of the engine."""
        engine = self._model.engine
        return build_load(engine.load(), engine.replica_loads())

    def serve_metrics(self, host: str, port: int) -> int:
        """Serve Prometheus metrics until `stop`; return the port. Port 0 picks a free one."""
        self._metrics = serve_metrics(self._model, host=host, port=port)
        return self._metrics.server_port

    async def drain(self, timeout_s: float) -> bool:
        """Accept no new requests and wait for running ones; return True if all ended in time."""
        self._state.enter(Stage.DRAINING)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._service.is_idle.wait()
        except TimeoutError:
            self._service.end_open_calls(Unavailable("the server shut down before the request finished"))
            return False

    def stop(self) -> None:
        """Stop the engine and free the device's memory; the replica cannot be used again."""
        self._state.enter(Stage.DRAINING)
        self._model.engine.stop()
        if self._model.grammars is not None:
            self._model.grammars.close()
        if self._metrics is not None:
            self._metrics.stop()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self._note_failure()
        try:
            yield
        except Exception as error:
            told = error_for(error)
            raise Refused(grpc.StatusCode[told.grpc_status], get_status(told).message, get_trailers(told)) from error

    def _note_failure(self) -> None:
        self._state.note_failure()
        if self._state.failure is not None:
            self._state.enter(Stage.FAILED)
