"""The role that every HTTP route and every gRPC method requires: one table, enforced by both ports.

A route or a method that is missing here requires the role control, so that new ones are closed until listed.
docs/access.md describes the roles; tests call all routes and methods with all roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from jpaged.access.entry import Entry
from jpaged.access.keys import Role
from jpaged.config import AccessOptions


class Public(Enum):
    """Conditions under which a call needs no key although the server has keys."""

    NEVER = "never"
    ALWAYS = "always"
    METRICS = "with public_metrics"
    PAGE = "with public_page"


@dataclass(frozen=True, slots=True)
class Permission:
    """Permission that a call requires.

    Attributes:
        role: minimum role of the key.
        public: condition under which it needs no key.
        on_control_port: if there is a control port, only that port accepts it.
    """

    role: Role = Role.OBSERVE
    public: Public = Public.NEVER
    on_control_port: bool = False

    def is_public(self, options: AccessOptions) -> bool:
        """Return True if the call needs no key on a server with these options."""
        match self.public:
            case Public.METRICS:
                return options.public_metrics
            case Public.PAGE:
                return options.public_page
        return self.public is Public.ALWAYS

    def check(self, entry: Entry | None, name: str) -> None:
        """Raise PermissionDenied unless the key and the port of a call suffice."""
        if entry is not None:
            entry.require(self.role, name, on_control_port=self.on_control_port)


_HEALTH: Final = Permission(public=Public.ALWAYS)
_FACTS: Final = Permission(public=Public.METRICS)
_PAGE: Final = Permission(public=Public.PAGE)
_OBSERVE: Final = Permission()
_INFERENCE: Final = Permission(Role.INFERENCE)
_PEER: Final = Permission(Role.CONTROL)
CONTROL: Final = Permission(Role.CONTROL, on_control_port=True)
"""Also the permission of routes and methods that are missing in the table."""

HTTP: Final[dict[tuple[str, str], Permission]] = {
    ("GET", "/health"): _HEALTH,
    ("GET", "/livez"): _HEALTH,
    ("GET", "/readyz"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): _HEALTH,
    ("GET", "/version"): _FACTS,
    ("GET", "/metrics"): _FACTS,
    ("GET", "/"): _PAGE,
    ("GET", "/page/{path}"): _PAGE,
    ("POST", "/page/limit"): CONTROL,
    ("GET", "/v1/models"): _OBSERVE,
    ("GET", "/v1/models/{name:path}"): _OBSERVE,
    ("POST", "/tokenize"): _OBSERVE,
    ("POST", "/detokenize"): _OBSERVE,
    ("POST", "/v1/completions"): _INFERENCE,
    ("POST", "/v1/chat/completions"): _INFERENCE,
    ("POST", "/v1/responses"): _INFERENCE,
    ("POST", "/v1/responses/input_tokens"): _OBSERVE,
    ("GET", "/v1/responses/{rest:path}"): _INFERENCE,
    ("POST", "/v1/responses/{rest:path}"): _INFERENCE,
    ("DELETE", "/v1/responses/{rest:path}"): _INFERENCE,
    ("POST", "/v1/embeddings"): _INFERENCE,
    ("POST", "/v1/score"): _INFERENCE,
    ("POST", "/score"): _INFERENCE,
    ("GET", "/v1/files"): _INFERENCE,
    ("POST", "/v1/files"): _INFERENCE,
    ("DELETE", "/v1/files"): _INFERENCE,
    ("GET", "/v1/files/{rest:path}"): _INFERENCE,
    ("POST", "/v1/files/{rest:path}"): _INFERENCE,
    ("DELETE", "/v1/files/{rest:path}"): _INFERENCE,
    ("GET", "/v1/files/{file_id}"): _INFERENCE,
    ("DELETE", "/v1/files/{file_id}"): _INFERENCE,
    ("GET", "/v1/files/{file_id}/content"): _INFERENCE,
    ("GET", "/v1/batches"): _INFERENCE,
    ("POST", "/v1/batches"): _INFERENCE,
    ("DELETE", "/v1/batches"): _INFERENCE,
    ("GET", "/v1/batches/{rest:path}"): _INFERENCE,
    ("POST", "/v1/batches/{rest:path}"): _INFERENCE,
    ("DELETE", "/v1/batches/{rest:path}"): _INFERENCE,
    ("GET", "/v1/batches/{batch_id}"): _INFERENCE,
    ("POST", "/v1/batches/{batch_id}/cancel"): _INFERENCE,
}
"""By method and declared route. HEAD requires the same as GET."""

_METHODS: Final[dict[str, dict[str, Permission]]] = {
    "grpc.health.v1.Health": {"Check": _HEALTH, "Watch": _HEALTH, "List": _HEALTH},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _OBSERVE},
    "jpaged.v1.InferenceService": {
        "Generate": _INFERENCE,
        "Score": _INFERENCE,
        "Embed": _INFERENCE,
        "Tokenize": _OBSERVE,
        "Detokenize": _OBSERVE,
    },
    "jpaged.v1.ControlService": {
        "GetServerInfo": _OBSERVE,
        "GetModelInfo": _OBSERVE,
        "GetLoad": _OBSERVE,
        "ListAdapters": _OBSERVE,
        "Abort": _INFERENCE,
        "PinPrefix": CONTROL,
        "UnpinPrefix": CONTROL,
        "LoadAdapter": CONTROL,
        "UnloadAdapter": CONTROL,
    },
    "jpaged.v1.PrefixService": {"SavePrefix": CONTROL, "LoadPrefix": CONTROL, "FetchPrefix": CONTROL},
    "jpaged.v1.PrefillService": {"Prefill": _PEER},
    "inference.GRPCInferenceService": {
        "ServerLive": _HEALTH,
        "ServerReady": _HEALTH,
        "ModelReady": _OBSERVE,
        "ServerMetadata": _OBSERVE,
        "ModelMetadata": _OBSERVE,
        "ModelConfig": _OBSERVE,
        "RepositoryIndex": _OBSERVE,
        "ModelInfer": _INFERENCE,
        "ModelStreamInfer": _INFERENCE,
        "ModelStatistics": _OBSERVE,
        "SystemSharedMemoryStatus": _OBSERVE,
        "SystemSharedMemoryRegister": _OBSERVE,
        "SystemSharedMemoryUnregister": _OBSERVE,
        "CudaSharedMemoryStatus": _OBSERVE,
        "CudaSharedMemoryRegister": _OBSERVE,
        "CudaSharedMemoryUnregister": _OBSERVE,
        "RepositoryModelLoad": _OBSERVE,
        "RepositoryModelUnload": _OBSERVE,
        "TraceSetting": _OBSERVE,
        "LogSettings": _OBSERVE,
    },
    "vllm.grpc.engine.VllmEngine": {
        "HealthCheck": _HEALTH,
        "GetModelInfo": _OBSERVE,
        "GetServerInfo": _OBSERVE,
        "GetLoads": _OBSERVE,
        "GetTokenizer": _OBSERVE,
        "SubscribeKvEvents": _OBSERVE,
        "Generate": _INFERENCE,
        "Embed": _INFERENCE,
        "Abort": _INFERENCE,
        "FlushCache": CONTROL,
        "StartProfile": CONTROL,
        "StopProfile": CONTROL,
    },
}
GRPC: Final[dict[str, Permission]] = {
    f"/{service}/{name}": permission for service, methods in _METHODS.items() for name, permission in methods.items()
}
"""By the full name of the method."""


def permission_of_route(method: str, route: str) -> Permission:
    """Return the permission of a declared HTTP route; the dashboard's files count as one route."""
    method = "GET" if method == "HEAD" else method
    if method == "GET" and route.startswith("/page/"):
        route = "/page/{path}"
    return HTTP.get((method, route), CONTROL)
