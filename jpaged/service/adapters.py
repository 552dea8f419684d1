"""The adapters (LoRA) of a loaded model, by name: loaded from disk, looked up for requests, unloaded.

    load("sql", path)      reads the files; the name is reserved from the start of the read
    find("sql")            returns the adapter; a request keeps it even if the name is unloaded later
    unload("sql")          removes the name from lookups

The engine decides which adapters are in device slots. Reloading a name creates a new adapter with a new number. Cached
prefixes of the old adapter match only if both have the same matrices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from jpaged.service.names import require_name
from jpaged.types import Adapter, LoadedAdapter, require_whole_characters


class Adapters:
    """Registry of adapters by name. Thread-safe.

    Args:
        read: reads the matrices of a path; None if the model takes no adapters.
        max_num: maximum number of loaded adapters.
        model_name: name of the model; no adapter may use it, because the `model` field of a body selects either.
    """

    def __init__(
        self, read: Callable[[str], Adapter] | None = None, max_num: int = 0, model_name: str | None = None
    ) -> None:
        self._model_name = model_name
        self._read = read
        self._max_num = max_num
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._adapters: dict[str, LoadedAdapter | None] = {}  # None while the files are being read

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter with this name.

        Raises:
            NotFound: no adapter with this name is loaded.
            Unsupported: the model takes no adapters.
        """
        self._require_on()
        with self._lock:
            return self._find(name, "adapter")

    def named(self, given: str | LoadedAdapter) -> LoadedAdapter | None:
        """Resolve a name with `find`; return a `LoadedAdapter` unchanged, and None for ""."""
        if isinstance(given, str):
            return self.find(given) if given else None
        return given

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter from disk and register it under a name. Blocks while the files are read.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: the name or path is invalid, too many adapters are loaded, or the files cannot be parsed.
            Unsupported: the model takes no adapters, or not this kind.
        """
        read = self._require_on()
        require_name("name", name)
        if name == self._model_name:
            raise InvalidArgument("name", f"{name!r} is the name of the model: choose another for the adapter")
        if not path:
            raise InvalidArgument("path", "is empty: name the folder of the adapter")
        require_whole_characters("path", path)
        with self._lock:
            if name in self._adapters:
                state = "being loaded; wait" if self._adapters[name] is None else "loaded; unload it"
                raise AlreadyExists(f"adapter {name!r} is {state}, or choose another name")
            if len(self._adapters) >= self._max_num:
                raise InvalidArgument(
                    "name", f"{len(self._adapters)} adapters are loaded, the limit is max_cpu_loras ({self._max_num})"
                )
            self._adapters[name] = None
        adapter: LoadedAdapter | None = None
        try:
            adapter = LoadedAdapter(name, path, next(self._numbers), read(path))
        except InvalidArgument as error:
            raise InvalidArgument("path", str(error) if error.field != "lora" else error.problem) from error
        except OSError as error:
            raise InvalidArgument("path", f"{path} cannot be read: {error}") from error
        finally:
            with self._lock:
                if adapter is None:
                    del self._adapters[name]
                else:
                    self._adapters[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that already use it continue.

        Raises:
            NotFound: no adapter with this name is loaded.
        """
        self._require_on()
        with self._lock:
            self._find(name, "name")
            del self._adapters[name]

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that requests can use, in the order of loading."""
        with self._lock:
            return tuple(adapter for adapter in self._adapters.values() if adapter is not None)

    def names(self) -> frozenset[str]:
        """Return the names of the adapters that requests can use."""
        return frozenset(adapter.name for adapter in self.loaded())

    def _find(self, name: str, field: str) -> LoadedAdapter:
        adapter = self._adapters.get(name)
        if adapter is not None:
            return adapter
        if name in self._adapters:
            raise NotFound(f"{field}: adapter {name!r} is being loaded; try again later")
        raise NotFound(f"{field}: no adapter {name!r} is loaded")

    def _require_on(self) -> Callable[[str], Adapter]:
        if self._read is None:
            raise Unsupported("adapters are off on this server: start it with --enable-lora")
        return self._read
