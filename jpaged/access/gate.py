"""The door of every port of one server: who is let in, and what is written down of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from jpaged.access.entry import Entry
from jpaged.access.keys import Keys, Limits, read_keys
from jpaged.access.quotas import Quotas
from jpaged.access.watching import FileWatch
from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, PermissionDenied

_LOG = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
"""How often the files are looked at."""
_MAX_TENANT_CHARS = 128


def default_limits(options: AccessOptions) -> Limits:
    """Return the limits of tenants of which the file of keys says nothing."""
    return Limits(
        requests_per_minute=options.tenant_requests_per_minute,
        tokens_per_minute=options.tenant_tokens_per_minute,
        max_streams=options.tenant_max_streams,
        max_n=options.tenant_max_n,
        max_prompt_tokens=options.tenant_max_prompt_tokens,
    )


class Gate:
    """Keys and quotas of one server; keys are read again when they change. Lives on the server's event loop.

    Attributes:
        quotas: what each tenant has left.
    """

    def __init__(self, options: AccessOptions) -> None:
        self.options = options
        self.quotas = Quotas(self._limits_of)
        self._defaults = default_limits(options)
        self._keys: Keys | None = None
        self._watch: FileWatch | None = None

    def read(self) -> None:
        """Read the files for the first time.

        Raises:
            InvalidArgument: one cannot be read or understood.
        """
        if self.options.api_keys is not None:
            self._watch = FileWatch([self.options.api_keys])
            self._keys = read_keys(self.options.api_keys)

    def _limits_of(self, tenant: str) -> Limits:
        return self._defaults if self._keys is None else self._keys.limits_of(tenant).over(self._defaults)

    def open(self, entry: Entry, authorization: Sequence[str], tenants: Sequence[str]) -> None:
        """Let a call in, by its headers `authorization` and `x-jpaged-tenant`.

        Raises:
            Unauthenticated: it has no key of this server's.
            PermissionDenied: it names a tenant that is not its key's.
        """
        if self._keys is None:
            # Whom it names is for the face to check, which refuses a name that is none in its own words.
            entry.let_in(None, tenants[0][:_MAX_TENANT_CHARS] if len(tenants) == 1 else "")
            return
        key = self._keys.key_of(list(authorization))
        entry.let_in(key, key.tenant)
        for named in tenants:
            if named != key.tenant:
                raise PermissionDenied(f"x-jpaged-tenant: {named[:_MAX_TENANT_CHARS]!r} is not the tenant of this key")

    def look_again(self) -> None:
        """Read what has changed; a file that cannot be understood changes nothing, and is logged."""
        path = self.options.api_keys
        if path is None or self._watch is None or not self._watch.has_changed():
            return
        try:
            self._keys = read_keys(path)
        except InvalidArgument as error:
            _LOG.error("the keys stay as they were: %s", error)
        else:
            _LOG.warning("api_keys: %s was read again: %d keys", path, len(self._keys.digests))

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await asyncio.to_thread(self.look_again)
