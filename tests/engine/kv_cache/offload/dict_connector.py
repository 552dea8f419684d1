"""A KV connector in one file: values in a dict of this process, which outlives engines, as a server would."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import ClassVar

from jpaged.engine.kv_cache.connector import KVConnectorConfig


class DictConnector:
    """Values in memory, by name, identity and key."""

    stores: ClassVar[dict[tuple[str, bytes], dict[bytes, bytes]]] = {}

    def __init__(self, config: KVConnectorConfig) -> None:
        self.config = config
        self.values = self.stores.setdefault((config.extra_config["name"], config.identity), {})
        self.is_closed = False

    @property
    def num_blocks(self) -> int:
        return len(self.values)

    def lookup(self, key: bytes) -> bool:
        return key in self.values

    def load(self, key: bytes, into: memoryview) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        into[:] = value
        return True

    def save(self, key: bytes, value: memoryview) -> bool:
        assert len(value) == self.config.value_bytes
        self.values[key] = bytes(value)
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (value := self.values.pop(key, None)) is not None:
                self.values[key] = value

    def remove(self, key: bytes) -> None:
        self.values.pop(key, None)

    def reset(self) -> None:
        self.values.clear()

    def close(self) -> None:
        self.is_closed = True

    def evict(self, key: bytes) -> None:
        """Remove a key as if there were no room."""
        self.remove(key)
        self.config.on_removed(key)


class Hanging(DictConnector):
    """Every call that may block waits for `goes_on`."""

    goes_on: ClassVar[threading.Event] = threading.Event()

    def remove(self, key: bytes) -> None:
        self.goes_on.wait(5)
        super().remove(key)

    def reset(self) -> None:
        self.goes_on.wait(5)
        super().reset()

    def close(self) -> None:
        self.goes_on.wait(5)
        super().close()
