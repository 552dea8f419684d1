"""Context of a call while it is answered.

A port creates one per call and sets it as the current one of the call's task (a context variable). Code below reads
`current()`, so that it is never passed along and cannot be forgotten. Work that did not come by a port has none.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from jpaged.access.keys import Key, Role
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
