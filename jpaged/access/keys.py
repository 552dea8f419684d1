"""The file of keys: TOML, read at the start and whenever it changes.

    [limits]                                  # for tenants without their own
    requests_per_minute = 600

    [tenants.acme]
    tokens_per_minute = 100_000
    max_streams = 8

    [[keys]]
    id = "acme-laptop"                        # in logs and the audit, which never contain the token
    tenant = "acme"
    token = "sha256:9f86d081884c7d65..."      # or the token itself
    role = "inference"                        # or "observe", "control"

A token's digest is compared with those of all keys, so that the duration reveals nothing about any key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

from jpaged.errors import InvalidArgument, Unauthenticated

_LOG = logging.getLogger(__name__)


class Role(IntEnum):
    """Role of a key; each role includes the previous ones."""

    OBSERVE = 0
    """Read the state of the server and the model's properties."""
    INFERENCE = 1
    """Generate, score, embed."""
    CONTROL = 2
    """Change shared state: pinned prefixes, adapters."""


_ROLES = {role.name.lower(): role for role in Role}
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_NAME = re.compile(r"[\x20-\x7e]{1,128}")
_WEAK_CHARS = 16
"""Shorter tokens can be guessed."""
_MAX_TOKEN_CHARS = 512
_MAX_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; None is no limit.

    Attributes:
        requests_per_minute: accepted calls.
        tokens_per_minute: tokens of prompts and generated tokens.
        max_streams: concurrent calls.
        max_n: sequences of a request: n, best_of or beams.
        max_prompt_tokens: tokens of a prompt.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_streams: int | None = None
    max_n: int | None = None
    max_prompt_tokens: int | None = None

    def over(self, defaults: TenantLimits) -> TenantLimits:
        """Return these limits, with missing ones taken from `defaults`."""
        merged = {}
        for spec in fields(self):
            mine = getattr(self, spec.name)
            merged[spec.name] = getattr(defaults, spec.name) if mine is None else mine
        return TenantLimits(**merged)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without its token.

    Attributes:
        id: public name of the key.
    """

    id: str
    tenant: str
    role: Role


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Contents of a file of keys.

    Attributes:
        digests: SHA-256 of each token, and its key.
        defaults: limits of tenants without specific ones.
        tenants: limits of tenants by name.
    """

    digests: tuple[tuple[bytes, ApiKey], ...] = ()
    defaults: TenantLimits = TenantLimits()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def find(self, token: str) -> ApiKey | None:
        """Return the key of a token, in constant time."""
        digest, found = hashlib.sha256(token.encode(errors="replace")).digest(), None
        for known, key in self.digests:
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def get_key(self, authorization: list[str]) -> ApiKey:
        """Return the key of a call by its `authorization` headers.

        Raises:
            Unauthenticated: there is not exactly one header, or the token is unknown.
        """
        if len(authorization) != 1:
            problem = "is missing" if not authorization else f"is given {len(authorization)} times"
            raise Unauthenticated(f"authorization: {problem}: this server requires one, `Bearer <key>`")
        scheme, _, token = authorization[0].partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("authorization: is not `Bearer <key>`")
        key = self.find(token.strip()) if len(token) <= _MAX_TOKEN_CHARS else None
        if key is None:
            raise Unauthenticated("authorization: the key is not one of this server's")
        return key

    def get_limits(self, tenant: str) -> TenantLimits:
        """Return the file's limits for a tenant."""
        own = self.tenants.get(tenant)
        return self.defaults if own is None else own.over(self.defaults)


def read_keys(path: str) -> ApiKeys:
    """Read a file of keys.

    Raises:
        InvalidArgument: it cannot be read or parsed; names the place, and never includes a token.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument("api_keys", f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise InvalidArgument("api_keys", f"{path} is not TOML: {error}") from None
    try:
        return _get_keys(table)
    except InvalidArgument as error:
        raise InvalidArgument("api_keys", f"{path}: {error}") from None


def make_keys(tokens: Sequence[str]) -> ApiKeys:
    """Return keys of the role inference and the tenant "default", without a file.

    Raises:
        InvalidArgument: a token has the wrong form or is given twice; never includes it.
    """
    listed = [{"id": f"api-key-{i}", "tenant": "default", "token": token} for i, token in enumerate(tokens)]
    try:
        return _get_keys({"keys": listed})
    except InvalidArgument as error:
        raise InvalidArgument("api_key", f"{error}") from None


def _get_keys(table: Mapping[str, Any]) -> ApiKeys:
    _require_names("file", table, {"limits", "tenants", "keys"})
    tenants, listed = _table("tenants", table.get("tenants", {})), table.get("keys", [])
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument("keys", "is missing or empty: add [[keys]] with id, tenant and token")
    digests = [_get_key(f"keys[{i}]", one) for i, one in enumerate(listed)]
    columns: dict[str, list[Any]] = {"id": [key.id for _, key in digests], "token": [digest for digest, _ in digests]}
    for what, values in columns.items():
        seen = set[str | bytes]()
        for i, value in enumerate(values):
            if value in seen:
                raise InvalidArgument(f"keys[{i}].{what}", "is also that of another key")
            seen.add(value)
    for name in tenants:
        _require_tenant("tenants", name)
    return ApiKeys(
        tuple(digests),
        limits_of_table("limits", table.get("limits", {})),
        {name: limits_of_table(f"tenants.{name}", one) for name, one in tenants.items()},
    )


def limits_of_table(where: str, value: Any) -> TenantLimits:
    """Return the limits of a table; raise InvalidArgument for an unknown name or a value below 1."""
    table = _table(where, value)
    _require_names(where, table, {spec.name for spec in fields(TenantLimits)})
    for name, limit in table.items():
        if type(limit) is not int or not 1 <= limit <= _MAX_LIMIT:
            raise InvalidArgument(f"{where}.{name}", f"{limit!r} is not an integer of 1 or more")
    return TenantLimits(**table)


def _get_key(where: str, value: Any) -> tuple[bytes, ApiKey]:
    table = _table(where, value)
    _require_names(where, table, {"id", "tenant", "token", "role"})
    for name in ("id", "tenant", "token"):
        if not isinstance(table.get(name), str):
            raise InvalidArgument(f"{where}.{name}", "is missing or not a string")
    if not _NAME.fullmatch(table["id"]):
        raise InvalidArgument(f"{where}.id", f"{table['id']!r} is not 1 to 128 printable ASCII characters")
    _require_tenant(f"{where}.tenant", table["tenant"])
    role = table.get("role", "inference")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
    return _get_digest(f"{where}.token", table["token"]), ApiKey(table["id"], table["tenant"], _ROLES[role])


def _get_digest(where: str, token: str) -> bytes:
    digest = _DIGEST.fullmatch(token)
    if digest is not None:
        return bytes.fromhex(digest[1])
    if token.startswith("sha256:"):
        raise InvalidArgument(where, "sha256: is not followed by 64 hexadecimal digits")
    if len(token) > _MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
        limits = f"1 to {_MAX_TOKEN_CHARS}"
        raise InvalidArgument(
            where, f"must be {limits} of the characters A-Z a-z 0-9 . _ ~ + / -, with = only at the end"
        )
    if len(token) < _WEAK_CHARS:
        _LOG.warning("%s has %d characters: callers can guess it; use %d or more", where, len(token), _WEAK_CHARS)
    return hashlib.sha256(token.encode()).digest()


def _require_tenant(where: str, name: str) -> None:
    if not _NAME.fullmatch(name) or name.strip() != name:
        raise InvalidArgument(where, f"{name!r} is not 1 to 128 printable ASCII characters")


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(where, "is not a table")
    return value


def _require_names(where: str, table: Mapping[str, Any], known: set[str]) -> None:
    for name in table:
        if name not in known:
            raise InvalidArgument(f"{where}.{name}", f"is unknown: must be one of {', '.join(sorted(known))}")
