"""A call that has come in at a port, while it is answered.

A port makes one for each call and sets it as the current one of the call's task; whatever answers asks `current()`, so
that no face has to hand it on, and none can forget it. Work that nobody asked for over a port has none.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from jpaged.access.keys import Key, Role
from jpaged.errors import PermissionDenied


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One call. The port makes it, the gate opens it, the service notes in it what the call took.

    Attributes:
        face: by which way it came: "grpc", "oip", "vllm", "http".
        method: what was called: "/jpaged.v1.InferenceService/Generate", "POST /v1/completions".
        peer: the address that it came from.
        takes_control: whether its port is one for acts of control.
        key: what it was let in with; None where no key is needed.
        tenant: whose call it is.
        act: what was done by name: "PinPrefix system".
        began_s: when it came, on the system's clock.
        error: the name of what a request of it ended with; "" of success.
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
        """Note with which key, and whose call it is."""
        self.key, self.tenant = key, tenant

    def began(self, began_s: float) -> None:
        """Note that it came earlier than it was made."""
        self.began_s = began_s

    def close(self) -> None:
        """Note that it has been answered: what goes on is not this call's."""
        self.is_closed = True

    def note_request(self, request_id: str, model: str, adapter: str) -> None:
        """Note what was asked for; a call of several requests has the last one's id."""
        self.request_id, self.model, self.adapter = request_id, model, adapter

    def note_use(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Add what a request took."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def note_error(self, name: str) -> None:
        """Note what the call, or a request of it, ended with; the first counts."""
        self.error = self.error or name

    def note_act(self, act: str) -> None:
        """Note an act of control, and on what."""
        self.act = act

    def require(self, role: Role, what: str, *, on_control_port: bool = False) -> None:
        """Refuse an act that the key, or the port, is not for.

        Args:
            on_control_port: if there is a control port, only that port answers it.

        Raises:
            PermissionDenied: names the role or the port.
        """
        if on_control_port and not self.takes_control:
            raise PermissionDenied(f"{what} is answered on the control port alone (control_port)")
        if self.key is not None and self.key.role < role:
            wanted, has = role.name.lower(), self.key.role.name.lower()
            raise PermissionDenied(f"{what} needs a key of the role {wanted}; this one's is {has}")


_ENTRY: ContextVar[Entry | None] = ContextVar("jpaged-entry", default=None)


def current() -> Entry | None:
    """Return the call that is being answered; None of work that came by no port."""
    return _ENTRY.get()


def enter(entry: Entry) -> None:
    """Make a call the current one of this task, and of those that it starts."""
    _ENTRY.set(entry)


def background(key: Key | None, tenant: str) -> Entry:
    """Return a call that has been answered, for work that continues with the permissions of its key."""
    entry = Entry(face="background", method="", peer="", key=key, tenant=tenant, takes_control=False)
    entry.close()
    return entry


def owner(named: str) -> str:
    """Return whose call is being answered: its key's tenant, else the one that it names."""
    entry = _ENTRY.get()
    return named if entry is None or entry.key is None else entry.key.tenant


def key_id() -> str:
    """Return the name of the key that the current call was let in with; "" where none was needed."""
    entry = _ENTRY.get()
    return "" if entry is None or entry.key is None else entry.key.id


def note_act(act: str) -> None:
    """Note what the current call does by name."""
    entry = _ENTRY.get()
    if entry is not None:
        entry.note_act(act)


def require(role: Role, what: str) -> None:
    """Refuse the current call what its key is not for; raises PermissionDenied."""
    entry = _ENTRY.get()
    if entry is not None:
        entry.require(role, what)


def require_control(what: str) -> None:
    """Refuse the current call an act of control that its key or its port is not for; raises PermissionDenied."""
    entry = _ENTRY.get()
    if entry is not None:
        entry.require(Role.CONTROL, what, on_control_port=True)
