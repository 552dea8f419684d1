"""Operator endpoints: health, version, metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jpaged.http.errors import JSON
from jpaged.service.service import Service
from jpaged.telemetry.metrics import EngineCollector
from jpaged.version import __version__


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

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(EngineCollector(state.loaded()))
        text = await service.work(lambda: generate_latest(registry), 1 << 20)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
