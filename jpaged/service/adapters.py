"""The adapters (LoRA) of a loaded model, by name: read from disk, found for requests, let go.

    load("sql", path)      reads the files; the name is taken from then on, while they are read too
    find("sql")            what a request runs with; it keeps it, whatever becomes of the name
    unload("sql")          nobody finds it any more

Which of them the device has is the engine's to say. What is loaded again under a name is another adapter, with a number
of its own; what was cached of the former is found only where both have the same matrices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from jpaged.service.names import require_name
from jpaged.types import Adapter, LoadedAdapter, require_whole_characters


class Adapters:
    """Adapters by name. Any thread may call.

    Args:
        read: the matrices of a path; None where the model takes no adapters.
        max_num: adapters at one time.
        model_name: of the model, which no adapter can have: bodies name either by their `model`.
    """

    def __init__(
        self, read: Callable[[str], Adapter] | None = None, max_num: int = 0, model_name: str | None = None
    ) -> None:
        self._model_name = model_name
        self._read = read
        self._max_num = max_num
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._adapters: dict[str, LoadedAdapter | None] = {}  # None while it is read

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name.

        Raises:
            NotFound: none is loaded under it.
            Unsupported: the model takes no adapters.
        """
        self._require_on()
        with self._lock:
            return self._find(name, "adapter")

    def named(self, given: str | LoadedAdapter) -> LoadedAdapter | None:
        """Return the adapter of a name as `find` does, a load as it is, and None where the name is ""."""
        if isinstance(given, str):
            return self.find(given) if given else None
        return given

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter and give it a name; it takes as long as its files do.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: name or path cannot be, too many are loaded, or the files are not understood.
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
        """Let an adapter go; requests that were accepted with it go on.

        Raises:
            NotFound: none is loaded under the name.
        """
        self._require_on()
        with self._lock:
            self._find(name, "name")
            del self._adapters[name]

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests can have, in the order in which they were loaded."""
        with self._lock:
            return tuple(adapter for adapter in self._adapters.values() if adapter is not None)

    def names(self) -> frozenset[str]:
        """Return the names of the adapters that requests can have."""
        return frozenset(adapter.name for adapter in self.loaded())

    def _find(self, name: str, field: str) -> LoadedAdapter:
        adapter = self._adapters.get(name)
        if adapter is not None:
            return adapter
        if name in self._adapters:
            raise NotFound(f"{field}: adapter {name!r} is being loaded; try again when it is")
        raise NotFound(f"{field}: no adapter {name!r} is loaded")

    def _require_on(self) -> Callable[[str], Adapter]:
        if self._read is None:
            raise Unsupported("adapters are off on this server: start it with --enable-lora")
        return self._read
