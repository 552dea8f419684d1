"""Authenticator of every port of one server: keys, quotas, audit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jpaged.access.audit import AuditLog
from jpaged.access.certificates import CertificateFiles
from jpaged.access.entry import Entry
from jpaged.access.keys import Keys, Limits, read_keys
from jpaged.access.quotas import Quotas
from jpaged.access.watching import BackgroundLook, FileWatch, is_pipe
from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, PermissionDenied

_LOG = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
"""Interval of checks for changed files."""
_MAX_TENANT_CHARS = 128


def default_limits(options: AccessOptions) -> Limits:
    """Return the limits of tenants that the file of keys does not name."""
    return Limits(
        requests_per_minute=options.tenant_requests_per_minute,
        tokens_per_minute=options.tenant_tokens_per_minute,
        max_streams=options.tenant_max_streams,
        max_n=options.tenant_max_n,
        max_prompt_tokens=options.tenant_max_prompt_tokens,
    )


class Gate:
    """Keys and quotas of one server; keys are reloaded when they change. Bound to the server's event loop.

    Attributes:
        quotas: quotas of the tenants.
        certificates: TLS certificates of the ports; None without TLS.
    """

    def __init__(self, options: AccessOptions) -> None:
        self.options = options
        self.quotas = Quotas(self._limits_of)
        self.certificates: CertificateFiles | None = None
        self._defaults = default_limits(options)
        self._keys: Keys | None = None
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

    def _limits_of(self, tenant: str) -> Limits:
        return self._defaults if self._keys is None else self._keys.limits_of(tenant).over(self._defaults)

    def open(self, entry: Entry, authorization: Sequence[str], tenants: Sequence[str]) -> None:
        """Authenticate a call by its headers `authorization` and `x-jpaged-tenant`.

        Raises:
            Unauthenticated: it has no valid key.
            PermissionDenied: it names a tenant that is not its key's.
        """
        if self._keys is None:
            # The frontend validates the tenant's name, with errors in its protocol's terms.
            entry.let_in(None, tenants[0][:_MAX_TENANT_CHARS] if len(tenants) == 1 else "")
            return
        key = self._keys.key_of(list(authorization))
        entry.let_in(key, key.tenant)
        for named in tenants:
            if named != key.tenant:
                raise PermissionDenied(f"x-jpaged-tenant: {named[:_MAX_TENANT_CHARS]!r} is not the tenant of this key")

    def close(self, entry: Entry, status: str | int) -> None:
        """Write the audit line of a call that has ended, whether it was accepted or not.

        Args:
            status: its response status: a gRPC name, or an HTTP number.
        """
        entry.close()
        if self._audit is not None:
            self._audit.write(_line_of(entry, status))

    def end(self, timeout_s: float) -> None:
        """Flush the audit log within the timeout; no call may be closed afterwards."""
        if self._audit is not None:
            self._audit.close(timeout_s)

    def look_again(self) -> None:
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


def _line_of(entry: Entry, status: str | int) -> dict[str, Any]:
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
