"""jpaged as a Ray Serve application: every replica is one engine, and Ray's gRPC proxy streams from all of them.

    serve run serve.yaml                               from this folder; or
    serve.run(build({"engine": {"model": "demo"}, "num_replicas": 2}))

                 ┌─> JpagedReplica: engine, pool, programs
    clients ─> Ray's gRPC proxy (jpaged.v1.InferenceService, grpc.health.v1): router.py says which replica
                 └─> JpagedReplica: engine, pool, programs

`jpaged.Client` and every other client of `jpaged serve` works unchanged. What asks one certain engine (Abort, GetLoad,
PinPrefix) is not offered, for the proxy picks a replica by itself: a client ends a request by closing its stream, and
prefixes are pinned by the option `pin_prefix`. Refusals have their code and message; Ray drops their details.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.grpc_util import RayServegRPCContext
from router import PrefixRouter

from jpaged._proto.v1 import inference_pb2
from jpaged.config import PROCESS_OPTIONS, EngineConfig, platform_default, server_field_names
from jpaged.errors import JpagedError
from jpaged.server.replica import Refused, Replica

_LOG = logging.getLogger("ray.serve")  # what goes into a replica's log

GRPC_SERVICER_FUNCTIONS = [
    "jpaged._proto.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
"""What Ray's proxy offers: `gRPCOptions(grpc_servicer_functions=...)`."""

PIN_NAME = "pin-prefix"
_KEPT_SERVER_OPTIONS = (
    "served_model_name",
    "isolate_tenants",
    "max_messages_per_second",
    "stream_interval",
    "max_pinned_blocks",
    "pin_prefix",
    "shutdown_timeout",
)
_WATCH_INTERVAL_S = 1.0


class Settings(BaseModel):
    """The arguments of the application.

    Attributes:
        engine: options of the engine, named as in `jpaged.LLM` (`model`, `tensor_parallel_size`, `num_blocks`, ...),
            and `served_model_name`, `isolate_tenants`, `max_messages_per_second`, `stream_interval`,
            `max_pinned_blocks`, `pin_prefix`, `shutdown_timeout`.
        num_replicas: how many engines; leave it out for autoscaling.
        min_replicas: with `max_replicas`: autoscaling on requests that run or wait in a replica.
        max_replicas: see `min_replicas`.
        target_ongoing_requests: of a replica, for autoscaling; three quarters of its rows when left out.
        max_ongoing_requests: sent to one replica at a time; twice its rows when left out. What is above its rows waits
            in the engine's own queue, which knows priorities and tenants.
        max_queued_requests: that wait in a proxy before new ones are refused; -1 is no limit.
        num_cpus: of Ray's, for each replica.
        num_gpus: of Ray's, for each replica: tensor_parallel_size of them on a GPU machine.
        resources: of Ray's, for each replica: `{"TPU": 4}`.
        max_known_prefixes: hashes of beginnings of prompts that a proxy keeps, about 200 bytes each, to send what
            begins alike to one replica; 0 leaves calls to Ray, which takes the less busy of two.
        metrics_port: where a replica answers Prometheus, on every interface; 0 picks a free one. Replicas that share a
            machine need 0, which the replica's log tells.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: dict[str, Any] = Field(default_factory=dict)
    num_replicas: int | None = Field(None, ge=1)
    min_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=1)
    target_ongoing_requests: float | None = Field(None, gt=0)
    max_ongoing_requests: int | None = Field(None, ge=1)
    max_queued_requests: int = Field(-1, ge=-1)
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    max_known_prefixes: int = Field(131_072, ge=0)
    metrics_port: int | None = Field(None, ge=0, le=65535)

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        for name in sorted({*server_field_names(), *PROCESS_OPTIONS} - set(_KEPT_SERVER_OPTIONS)):
            if name in self.engine:
                raise ValueError(
                    f"engine.{name} is an option of `jpaged serve`; here Ray has the port and the processes"
                )
        self.config()
        if self.max_replicas is None and (self.min_replicas, self.target_ongoing_requests) != (None, None):
            raise ValueError("min_replicas and target_ongoing_requests go with max_replicas")
        if self.max_replicas is not None and self.num_replicas is not None:
            raise ValueError("num_replicas and max_replicas are both given: a fixed number, or autoscaling")
        if self.max_replicas is not None and (self.min_replicas or 0) > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, above max_replicas ({self.max_replicas})")
        return self

    def config(self) -> EngineConfig:
        """The engine's options, checked; `InvalidArgument` is a ValueError, and names the field."""
        return EngineConfig.load(self.engine)

    def deployment_options(self) -> dict[str, Any]:
        """What Ray is told of the deployment."""
        config = self.config()
        platform = "tpu" if "TPU" in self.resources else "gpu" if self.num_gpus else "cpu"
        num_rows = config.scheduler.max_num_seqs or platform_default("max_num_seqs", platform)
        options: dict[str, Any] = {
            "max_ongoing_requests": self.max_ongoing_requests or 2 * num_rows,
            "max_queued_requests": self.max_queued_requests,
            # Ray lets requests finish for so long, and then calls __del__; the server's own option says how long.
            "graceful_shutdown_timeout_s": config.server.shutdown_timeout + 10.0,
            "ray_actor_options": {
                "num_cpus": self.num_cpus,
                "num_gpus": self.num_gpus,
                "resources": self.resources,
            },
        }
        if self.max_known_prefixes:
            options["request_router_config"] = RequestRouterConfig(
                request_router_class=PrefixRouter,
                request_router_kwargs={"max_known_prefixes": self.max_known_prefixes},
            )
        if self.max_replicas is None:
            options["num_replicas"] = self.num_replicas or 1
        else:
            options["autoscaling_config"] = AutoscalingConfig(
                min_replicas=1 if self.min_replicas is None else self.min_replicas,
                max_replicas=self.max_replicas,
                target_ongoing_requests=self.target_ongoing_requests or 0.75 * num_rows,
            )
        return options


@serve.deployment(health_check_period_s=5.0, health_check_timeout_s=30.0)
class JpagedReplica:
    """One engine. Method names are those of the RPCs: that is how Ray's proxy finds them."""

    def __init__(self, settings: Settings) -> None:
        from jpaged import build as build_module  # imports jax, which the process that deploys does not need

        config = settings.config()
        serving = build_module.build(config)
        self._replica = Replica(serving)
        if config.server.pin_prefix is not None:
            text = Path(config.server.pin_prefix).read_text(encoding="utf-8")
            serving.engine.pin_prefix(PIN_NAME, serving.tokenizer.encode(text)).result()
        if settings.metrics_port is not None:
            port = self._replica.serve_metrics("0.0.0.0", settings.metrics_port)
            _LOG.info("metrics on port %d", port)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """InferenceService.Generate. Ray closes the generator when the client goes away."""
        try:
            async with aclosing(self._replica.generate(request, _metadata(grpc_context))) as stream:
                async for message in stream:
                    yield message
        except Refused as refusal:
            _tell(grpc_context, refusal)
            raise

    async def Score(
        self, request: inference_pb2.ScoreRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.ScoreResponse:
        """InferenceService.Score."""
        try:
            return await self._replica.score(request, _metadata(grpc_context))
        except Refused as refusal:
            _tell(grpc_context, refusal)
            raise

    async def Embed(
        self, request: inference_pb2.EmbedRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.EmbedResponse:
        """InferenceService.Embed."""
        try:
            return await self._replica.embed(request, _metadata(grpc_context))
        except Refused as refusal:
            _tell(grpc_context, refusal)
            raise

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.TokenizeResponse:
        """InferenceService.Tokenize."""
        try:
            return await self._replica.tokenize(request)
        except Refused as refusal:
            _tell(grpc_context, refusal)
            raise

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.DetokenizeResponse:
        """InferenceService.Detokenize."""
        try:
            return await self._replica.detokenize(request)
        except Refused as refusal:
            _tell(grpc_context, refusal)
            raise

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """grpc.health.v1: a replica that answers serves, for Ray asks none that is not healthy."""
        return health_pb2.HealthCheckResponse(status=self._health())

    async def Watch(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """grpc.health.v1: the state now, and whenever it changes."""
        told: int | None = None
        while True:
            if (now := self._health()) != told:
                told = now
                yield health_pb2.HealthCheckResponse(status=now)
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def load(self) -> tuple[str, bytes]:
        """This replica's name and its jpaged.v1.GetLoadResponse, serialised; for deployment handles."""
        return serve.get_replica_context().replica_id.unique_id, self._replica.load().SerializeToString()

    def check_health(self) -> None:
        """Ray asks it; a replica that raises is replaced."""
        self._replica.serving()

    async def __del__(self) -> None:
        """Ray calls it once, after requests have ended or the time for them has."""
        await self._replica.drain(0.0)
        await asyncio.to_thread(self._replica.stop)

    def _health(self) -> int:
        try:
            self._replica.serving()
        except JpagedError:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING


def build(args: dict[str, Any]) -> serve.Application:
    """The application of Settings(**args): for `serve.run`, and the `import_path` of serve.yaml."""
    settings = Settings.model_validate(args)
    return JpagedReplica.options(**settings.deployment_options()).bind(settings)


def _metadata(context: RayServegRPCContext) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(context.invocation_metadata())


def _tell(context: RayServegRPCContext, refusal: Refused) -> None:
    context.set_code(refusal.code)
    context.set_details(refusal.details)
