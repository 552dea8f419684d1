"""Context of a call while it is answered.

A port creates one per call and sets it as the current one of the call's task (a context variable). Code below reads
`current()`, so that it is never passed along and cannot be forgotten. Work that did not come by a port has none.

One table, enforced by both ports, has the role that every HTTP route and every gRPC method requires.

A route or a method that is missing there requires the role control, so that new ones are closed until listed.
docs/access.md describes the roles; tests call all routes and methods with all roles.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from jpaged.access.keys import Key, Role
from jpaged.config import AccessOptions
from jpaged.errors import PermissionDenied


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """Context of one call. The port creates it, the gate authenticates it, the service records usage in it.

    Attributes:
        face: the frontend: "grpc", "oip", "vllm", "http".
        method: the method: "/jpaged.v1.InferenceService/Generate", "POST /v1/completions".
        peer: the client's address.
        takes_control: its port accepts control operations.
        key: the API key; None if none is required.
        tenant: tenant of the call.
        act: control operation with its subject: "PinPrefix system".
        began_s: arrival time on the system clock.
        error: error name of the requests; "" on success.
        is_closed: it has been answered.
    """

    face: str
    method: str
    peer: str
    takes_control: bool = True
    key: Key | None = None
    tenant: str = ""
    request_id: str = ""
    model: str = ""
    adapter: str = ""
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    act: str = ""
    is_closed: bool = False
    began_s: float = field(default_factory=time.time)

    def let_in(self, key: Key | None, tenant: str) -> None:
        """Set the key and the tenant."""
        self.key, self.tenant = key, tenant

    def began(self, began_s: float) -> None:
        """Set an arrival time before the creation of this object."""
        self.began_s = began_s

    def close(self) -> None:
        """Mark it as answered: later work does not belong to this call."""
        self.is_closed = True

    def note_request(self, request_id: str, model: str, adapter: str) -> None:
        """Record the request; a call of several requests keeps the last one's id."""
        self.request_id, self.model, self.adapter = request_id, model, adapter

    def note_use(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Add the usage of a request."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def note_error(self, name: str) -> None:
        """Record the error of the call or of a request; only the first counts."""
        self.error = self.error or name

    def note_act(self, act: str) -> None:
        """Record a control operation with its subject."""
        self.act = act

    def require(self, role: Role, what: str, *, on_control_port: bool = False) -> None:
        """Reject an operation for which the key or the port is not sufficient.

        Args:
            on_control_port: if there is a control port, only that port accepts it.

        Raises:
            PermissionDenied: names the role or the port.
        """
        if on_control_port and not self.takes_control:
            raise PermissionDenied(f"{what} is served only on the control port (control_port)")
        if self.key is not None and self.key.role < role:
            wanted, has = role.name.lower(), self.key.role.name.lower()
            raise PermissionDenied(f"{what} needs a key of the role {wanted}; the role of this key is {has}")


_ENTRY: ContextVar[Entry | None] = ContextVar("jpaged-entry", default=None)


def current() -> Entry | None:
    """Return the current call; None for work that did not come by a port."""
    return _ENTRY.get()


def enter(entry: Entry) -> None:
    """Set the current call of this task, and of tasks that it starts."""
    _ENTRY.set(entry)


def background(key: Key | None, tenant: str) -> Entry:
    """Return a closed call for work that continues with the permissions of a key."""
    entry = Entry(face="background", method="", peer="", key=key, tenant=tenant, takes_control=False)
    entry.close()
    return entry


def owner(named: str) -> str:
    """Return the tenant of the current call: its key's, else the named one."""
    entry = _ENTRY.get()
    return named if entry is None or entry.key is None else entry.key.tenant


def key_id() -> str:
    """Return the id of the current call's key; "" if none is required."""
    entry = _ENTRY.get()
    return "" if entry is None or entry.key is None else entry.key.id


def note_act(act: str) -> None:
    """Record the control operation of the current call."""
    entry = _ENTRY.get()
    if entry is not None:
        entry.note_act(act)


def require(role: Role, what: str) -> None:
    """Raise PermissionDenied if the current call's key lacks the role."""
    entry = _ENTRY.get()
    if entry is not None:
        entry.require(role, what)


def require_control(what: str) -> None:
    """Raise PermissionDenied if the current call's key or port does not allow control operations."""
    entry = _ENTRY.get()
    if entry is not None:
        entry.require(Role.CONTROL, what, on_control_port=True)


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
