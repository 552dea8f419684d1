"""/v1/models: the served model, and the adapters that a request can name."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.errors import ModelNotFound
from jpaged.http.errors import JSON
from jpaged.service.service import Service


def model_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/models."""

    def listed() -> list[dict[str, Any]]:
        model = service.state.loaded()
        created = int(service.state.start_time.timestamp())
        shared = {"object": "model", "created": created, "owned_by": "jpaged"}
        base = {"id": model.model.name, **shared, "root": model.model.name, "parent": None}
        own = {**base, "max_model_len": model.model.max_model_len}
        adapters = [
            {"id": one.name, **shared, "root": one.path, "parent": model.model.name} for one in model.adapters.loaded()
        ]
        return [own, *adapters]

    async def models(request: Request) -> Response:
        return JSON({"object": "list", "data": listed()})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for one in listed():
            if one["id"] == name:
                return JSON(one)
        raise ModelNotFound(f"model: {name!r} is not served")

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
    ]
