"""What is asked of the server and not of the model: health, version, metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jpaged.http.errors import JSON
from jpaged.service.service import Service
from jpaged.telemetry.metrics import EngineCollector
from jpaged.version import __version__


def routes(service: Service) -> list[Route]:
    """The paths of this file."""
    state = service.state

    async def health(request: Request) -> Response:
        """Answers 200 while requests are taken and worked on, and 503 otherwise, as vLLM does."""
        return Response(status_code=200 if state.is_ready else 503)

    async def readyz(request: Request) -> Response:
        """Says the same as `health`, and in which state the server is."""
        return PlainTextResponse(f"{state.stage.value}\n", 200 if state.is_ready else 503)

    async def livez(request: Request) -> Response:
        """Answers 503 only where nothing but a restart helps."""
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
