"""The CPU kernels' library, loaded once, and its functions, registered with XLA once each."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import jax
import numpy as np

from jpaged.kernels.cpu import build

NAME = "jpaged"
"""Prefix of the functions' names, in the library and in XLA's table."""
MAX_WIDTH = 16
"""Floats of the widest vectors that a core has."""


ISAS = ("baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "dotprod", "i8mm")
"""Instruction sets in the order in which a limit excludes them, as in processor.h."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the package's library, or the reason why there is none."""
    if not build.LIBRARY.exists():
        return (
            f"{build.LIBRARY.name} was not built: it requires a C++ compiler ({', '.join(build.COMPILERS)}) when "
            f"jpaged is installed; `python -m {build.__name__}` builds it now or reports what is missing"
        )
    try:
        found = ctypes.cdll.LoadLibrary(str(build.LIBRARY))
    except OSError as error:
        return _cannot_be_loaded(error)
    if read_symbol(found, build.DIGEST) != build.digest_sources(build.list_sources()):
        return _cannot_be_loaded(OTHER_SOURCES)
    return found


OTHER_SOURCES = "it was built from other sources than the ones that are installed"


def read_symbol(library: ctypes.CDLL, symbol: str) -> str | None:
    """Return the text of a symbol that `build.define_symbol` defined, or None if the library does not have it."""
    try:
        address = ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    except ValueError:
        return None
    return ctypes.string_at(address).decode()


def limit_isa(found: ctypes.CDLL, isa: str) -> None:
    """Let the kernels of a library use no instruction set after this one in `ISAS`."""
    found.jpaged_limit_isa(ctypes.c_int64(ISAS.index(isa)))


def register(*verbs: str) -> ctypes.CDLL | str:
    """Register each function `jpaged_<verb>` with XLA under that name; return the library, or an error text."""
    found = library()
    if isinstance(found, str):
        return found
    try:
        for verb in verbs:
            name = f"{NAME}_{verb}"
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(found, name)), platform="cpu")
    except (AttributeError, RuntimeError) as error:  # an older library, or one built for another jaxlib
        return _cannot_be_loaded(error)
    return found


def find_merges(tokens: Sequence[str], order: np.ndarray) -> np.ndarray | None:
    """Return all pairs of tokens that form a token, int32 `[pairs, 2]`; None if there is no library.

    Pairs are sorted by the token that they form, as `order` lists these, then by their ids. A vocabulary of 262144
    tokens has 515,000 pairs, which take Python eight times as long.

    Args:
        order: ids of the tokens to form, int64.
    """
    found = library()
    if isinstance(found, str) or not hasattr(found, "jpaged_find_merges"):
        return None
    encoded = [token.encode() for token in tokens]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    pairs = np.empty((max(1, sum(map(len, tokens))), 2), np.int32)
    found.jpaged_find_merges.restype = ctypes.c_int64
    order = np.ascontiguousarray(order, np.int64)
    sizes = ctypes.c_int64(len(encoded)), ctypes.c_int64(len(order))
    arrays = [ctypes.c_void_p(array.ctypes.data) for array in (ends, order, pairs)]
    count = found.jpaged_find_merges(b"".join(encoded), arrays[0], sizes[0], arrays[1], sizes[1], arrays[2])
    return pairs[:count]


def _cannot_be_loaded(error: Exception | str) -> str:
    return f"{build.LIBRARY.name} cannot be loaded: {error}; rebuild it with `python -m {build.__name__}`"
