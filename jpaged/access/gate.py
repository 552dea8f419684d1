"""The door of every port of one server: who is let in, and what is written down of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from jpaged.access.entry import Entry
from jpaged.access.keys import Keys, read_keys
from jpaged.access.watching import FileWatch
from jpaged.config import AccessOptions
from jpaged.errors import InvalidArgument, PermissionDenied

_LOG = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
"""How often the files are looked at."""
_MAX_TENANT_CHARS = 128


class Gate:
    """Keys of one server, read again when they change. Lives on the server's event loop.

    Raises:
        InvalidArgument: the file of keys cannot be read or understood.
    """

    def __init__(self, options: AccessOptions) -> None:
        self.options = options
        self._keys: Keys | None = None
        self._watch: FileWatch | None = None
        if options.api_keys is not None:
            self._watch = FileWatch([options.api_keys])
            self._keys = read_keys(options.api_keys)

    @property
    def wants_keys(self) -> bool:
        """Whether a call needs a key."""
        return self._keys is not None

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
