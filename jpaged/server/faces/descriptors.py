"""Descriptors for reflection of services whose messages are in several descriptor pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


class Pools:
    """Combines pools for gRPC's reflection: each lookup returns the first pool's match.

    The methods are named as in `google.protobuf.descriptor_pool.DescriptorPool`, and raise KeyError likewise.
    """

    def __init__(self, pools: Sequence[Any]) -> None:
        self._pools = pools

    def FindFileByName(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindFileContainingSymbol(name))

    def FindMessageTypeByName(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return message.file.pool.FindAllExtensions(message)

    def _first(self, find: Callable[[Any], _T]) -> _T:
        for pool in self._pools[:-1]:
            try:
                return find(pool)
            except KeyError:
                continue
        return find(self._pools[-1])
