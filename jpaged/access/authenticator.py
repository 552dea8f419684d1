"""Authenticator of every port of one server: the context of each call, its permission, and its audit line.

A port creates an `CallContext` per call and sets it as the current one of the call's task (a context variable). Code
below reads `current()`, so that it is never passed along and cannot be forgotten. Work that did not come by a port has
none.

One table, enforced by both ports, has the role that every HTTP route and every gRPC method requires. A route or a
method that is missing there requires the role control, so that new ones are closed until listed. docs/access.md
describes the roles; tests call all routes and methods with all roles.

`AuditLog` writes a line of JSON per call with caller, time, method, outcome and usage. It never has a prompt or an
answer. A thread writes the lines, so that calls never wait for a disk. The file is appended to, and reopened if it was
moved, so that log rotation needs no signal. Lines that cannot be written are counted and lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from jpaged import json_text
from jpaged.access.keys import ApiKey, ApiKeys, Role, TenantLimits, make_keys, read_keys
from jpaged.access.quotas import Quotas
from jpaged.access.tls import BackgroundLook, CertificateFiles, FileWatch, is_pipe
from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, PermissionDenied, describe_error


@dataclass(slots=True, eq=False, kw_only=True)
class CallContext:
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
        is_part: it is one of several requests of a call, each of which gets its own audit line.
    """

    face: str
    method: str
    peer: str
    takes_control: bool = True
    key: ApiKey | None = None
    tenant: str = ""
    request_id: str = ""
    model: str = ""
    adapter: str = ""
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    act: str = ""
    is_closed: bool = False
    is_part: bool = False
    began_s: float = field(default_factory=time.time)

    def authenticated(self, key: ApiKey | None, tenant: str) -> None:
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

    def record_operation(self, act: str) -> None:
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


_ENTRY: ContextVar[CallContext | None] = ContextVar("jpaged-entry", default=None)


def current() -> CallContext | None:
    """Return the current call; None for work that did not come by a port."""
    return _ENTRY.get()


def enter(entry: CallContext) -> None:
    """Set the current call of this task, and of tasks that it starts."""
    _ENTRY.set(entry)


def enter_part() -> None:
    """Set the current call of this task to a part of it: one request of several."""
    entry = _ENTRY.get()
    if entry is not None:
        _ENTRY.set(replace(entry, is_part=True))


def background(key: ApiKey | None, tenant: str) -> CallContext:
    """Return a closed call for work that continues with the permissions of a key."""
    entry = CallContext(face="background", method="", peer="", key=key, tenant=tenant, takes_control=False)
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
        entry.record_operation(act)


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

    def check(self, entry: CallContext | None, name: str) -> None:
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
    ("GET", "/load"): _OBSERVE,
    ("GET", "/server_info"): _OBSERVE,
    ("GET", "/tokenizer_info"): _OBSERVE,
    ("POST", "/v1/load_lora_adapter"): CONTROL,
    ("POST", "/v1/unload_lora_adapter"): CONTROL,
    ("POST", "/reset_prefix_cache"): CONTROL,
    ("POST", "/sleep"): CONTROL,
    ("POST", "/wake_up"): CONTROL,
    ("GET", "/is_sleeping"): _OBSERVE,
    ("POST", "/pause"): CONTROL,
    ("POST", "/resume"): CONTROL,
    ("GET", "/is_paused"): _OBSERVE,
    ("POST", "/update_weights"): CONTROL,
    ("POST", "/update_weights_from_disk"): CONTROL,
    ("GET", "/weight_version"): _OBSERVE,
    ("POST", "/tokenize"): _OBSERVE,
    ("POST", "/detokenize"): _OBSERVE,
    ("POST", "/v1/completions"): _INFERENCE,
    ("POST", "/v1/chat/completions"): _INFERENCE,
    ("POST", "/v1/responses"): _INFERENCE,
    ("POST", "/v1/responses/input_tokens"): _OBSERVE,
    ("POST", "/v1/messages"): _INFERENCE,
    ("POST", "/v1/messages/count_tokens"): _OBSERVE,
    ("GET", "/v1/responses/{response_id:path}"): _INFERENCE,
    ("DELETE", "/v1/responses/{response_id:path}"): _INFERENCE,
    ("POST", "/v1/responses/{response_id:path}/cancel"): _INFERENCE,
    ("GET", "/v1/responses/{response_id:path}/input_items"): _INFERENCE,
    ("POST", "/v1/embeddings"): _INFERENCE,
    ("POST", "/pooling"): _INFERENCE,
    ("POST", "/classify"): _INFERENCE,
    ("POST", "/v1/score"): _INFERENCE,
    ("POST", "/score"): _INFERENCE,
    ("POST", "/v1/rerank"): _INFERENCE,
    ("POST", "/v2/rerank"): _INFERENCE,
    ("POST", "/rerank"): _INFERENCE,
    ("POST", "/invocations"): _INFERENCE,
    ("POST", "/api/chat"): _INFERENCE,
    ("POST", "/api/generate"): _INFERENCE,
    ("POST", "/api/embed"): _INFERENCE,
    ("POST", "/api/embeddings"): _INFERENCE,
    ("GET", "/api/tags"): _OBSERVE,
    ("GET", "/api/ps"): _OBSERVE,
    ("POST", "/api/show"): _OBSERVE,
    ("POST", "/api/pull"): _OBSERVE,
    ("GET", "/api/version"): _FACTS,
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
        "GenerateMultiplexed": _INFERENCE,
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
        "UpdateWeights": CONTROL,
        "SendWeights": CONTROL,
    },
    "jpaged.v1.PrefixService": {"SavePrefix": CONTROL, "LoadPrefix": CONTROL, "FetchPrefix": CONTROL},
    "jpaged.v1.PrefillService": {"Prefill": _PEER, "FinishPull": _PEER},
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


_LOG = logging.getLogger(__name__)

_MAX_WAITING = 10_000
"""Maximum queued lines; further ones are lost."""
_MAX_BATCH = 500
_MODE = 0o640
Line = Mapping[str, Any]


class AuditLog:
    """The audit file, and the thread that writes it.

    Attributes:
        num_written: lines written.
        num_lost: lines not written because the disk was full, or too slow.

    Raises:
        InvalidArgument: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.num_written = 0
        self.num_lost = 0
        self._path = path
        self._is_failing = False
        self._is_cut = False
        try:
            self._file = self._opened()
        except OSError as error:
            raise InvalidArgument("audit_log", f"cannot be written: {describe_error(error)}") from error
        self._waiting: queue.Queue[Line | None] = queue.Queue(_MAX_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="jpaged-audit", daemon=True)
        self._writer.start()

    def write(self, line: Line) -> None:
        """Queue a line; never blocks."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose(1, "the disk is too slow")

    def close(self, timeout_s: float) -> None:
        """Write the queued lines within the timeout, and close the file."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._writer.join(timeout_s)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            lines = [self._waiting.get()]
            while len(lines) < _MAX_BATCH and lines[-1] is not None:
                try:
                    lines.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            if lines[-1] is None:
                lines.pop()
                is_open = False
            if lines:
                self._write([line for line in lines if line is not None])
        os.close(self._file)

    def _write(self, lines: list[Line]) -> None:
        content = "".join(json_text.dumps(line) + "\n" for line in lines).encode()
        try:
            self._follow()
            self._append(b"\n" + content if self._is_cut else content)
        except OSError as error:
            self._lose(len(lines), describe_error(error))
            return
        self.num_written += len(lines)
        if self._is_failing:
            self._is_failing = False
            _LOG.warning("audit_log: %s is writable again; %d lines were lost", self._path, self.num_lost)

    def _append(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            written = os.write(self._file, left)
            self._is_cut = left[:written].tobytes()[-1:] != b"\n"
            left = left[written:]

    def _follow(self) -> None:
        """Reopen the file if its path now has another file, or none."""
        mine = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            file = self._opened()
            os.close(self._file)
            self._file, self._is_cut = file, False

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _lose(self, num_lines: int, why: str) -> None:
        self.num_lost += num_lines
        if not self._is_failing:
            self._is_failing = True
            _LOG.error("audit_log: cannot write %s, lines are lost: %s", self._path, why)


RELOAD_INTERVAL_S = 1.0
"""Interval of checks for changed files."""
_MAX_TENANT_CHARS = 128


def default_limits(options: AccessOptions) -> TenantLimits:
    """Return the limits of tenants that the file of keys does not name."""
    return TenantLimits(
        requests_per_minute=options.tenant_requests_per_minute,
        tokens_per_minute=options.tenant_tokens_per_minute,
        max_streams=options.tenant_max_streams,
        max_n=options.tenant_max_n,
        max_prompt_tokens=options.tenant_max_prompt_tokens,
    )


class Authenticator:
    """Keys and quotas of one server; keys are reloaded when they change. Bound to the server's event loop.

    Attributes:
        quotas: quotas of the tenants; None if no option and no file of keys can limit one.
        certificates: TLS certificates of the ports; None without TLS.
    """

    def __init__(self, options: AccessOptions) -> None:
        self.options = options
        self.certificates: CertificateFiles | None = None
        self._defaults = default_limits(options)
        has_limits = options.has_keys or self._defaults != TenantLimits()
        self.quotas = Quotas(self._get_limits) if has_limits else None
        self._keys: ApiKeys | None = None
        self._watch: FileWatch | None = None
        self._audit: AuditLog | None = None
        self._is_due = asyncio.Event()

    def read(self) -> None:
        """Read the files for the first time.

        Raises:
            InvalidArgument: one is missing, cannot be read or parsed, or the audit log cannot be written.
        """
        self.options.check()
        if self.options.audit_log is not None:
            self._audit = AuditLog(self.options.audit_log)
        if self.options.tls_cert is not None:
            self.certificates = CertificateFiles(self.options)
        if self.options.api_keys is not None:
            self._watch = FileWatch([self.options.api_keys])
            self._keys = read_keys(self.options.api_keys)
        elif self.options.api_key:
            self._keys = make_keys(self.options.api_key)

    def _get_limits(self, tenant: str) -> TenantLimits:
        return self._defaults if self._keys is None else self._keys.get_limits(tenant).over(self._defaults)

    def open(self, entry: CallContext, authorization: Sequence[str], tenants: Sequence[str]) -> None:
        """Authenticate a call by its headers `authorization` and `x-jpaged-tenant`.

        Raises:
            Unauthenticated: it has no valid key.
            PermissionDenied: it names a tenant that is not its key's.
        """
        if self._keys is None:
            # The frontend validates the tenant's name, with errors in its protocol's terms.
            entry.authenticated(None, tenants[0][:_MAX_TENANT_CHARS] if len(tenants) == 1 else "")
            return
        key = self._keys.get_key(list(authorization))
        entry.authenticated(key, key.tenant)
        for named in tenants:
            if named != key.tenant:
                raise PermissionDenied(f"x-jpaged-tenant: {named[:_MAX_TENANT_CHARS]!r} is not the tenant of this key")

    def close(self, entry: CallContext, status: str | int) -> None:
        """Write the audit line of a call that has ended, whether it was accepted or not.

        Args:
            status: its response status: a gRPC name, or an HTTP number.
        """
        entry.close()
        if self._audit is not None:
            self._audit.write(_build_line(entry, status))

    def end(self, timeout_s: float) -> None:
        """Flush the audit log within the timeout; no call may be closed afterwards."""
        if self._audit is not None:
            self._audit.close(timeout_s)

    def reload_files(self) -> None:
        """Reload changed files; an invalid file changes nothing, and is logged."""
        self._look_at_certificates()
        self._look_at_keys()

    def _look_at_certificates(self) -> None:
        if self.certificates is not None:
            self.certificates.look_again()

    def _look_at_keys(self) -> None:
        path = self.options.api_keys
        if path is None or self._watch is None or not self._watch.has_changed():
            return
        try:
            if is_pipe(path):
                raise InvalidArgument("api_keys", f"{path} is a pipe, which is read only at startup")
            self._keys = read_keys(path)
        except InvalidArgument as error:
            _LOG.error("the API keys were not reloaded: %s", error)
        else:
            _LOG.warning("api_keys: reloaded %s: %d keys", path, len(self._keys.digests))

    def reload(self) -> None:
        """Make the next look, which starts at once, reload all files."""
        if self._watch is not None:
            self._watch.expire()
        if self.certificates is not None:
            self.certificates.expire()
        self._is_due.set()

    async def watch(self) -> None:
        """Look periodically, until cancelled; a file that blocks delays neither other looks nor shutdown."""
        looks = (
            BackgroundLook("tls_cert", self._look_at_certificates),
            BackgroundLook("api_keys", self._look_at_keys),
        )
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELOAD_INTERVAL_S):
                    await self._is_due.wait()
            self._is_due.clear()
            await asyncio.gather(*(look.run(RELOAD_INTERVAL_S) for look in looks))


def _build_line(entry: CallContext, status: str | int) -> dict[str, Any]:
    return {
        "time": datetime.fromtimestamp(entry.began_s, UTC).isoformat(timespec="milliseconds"),
        "face": entry.face,
        "method": entry.method,
        "peer": entry.peer,
        "tenant": entry.tenant,
        "key": "" if entry.key is None else entry.key.id,
        "status": status,
        "error": entry.error,
        "duration_s": round(max(0.0, time.time() - entry.began_s), 6),
        "request_id": entry.request_id,
        "model": entry.model,
        "adapter": entry.adapter,
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "act": entry.act,
    }
