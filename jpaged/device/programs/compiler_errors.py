"""The compiler's refusal of a program that does not fit into a device's memory, parsed from its error.

Ran out of memory on HBM, the total memory required for HLO temporaries (15.99G) exceeds available HBM (15.75G).
Ran out of memory in memory space hbm. Used 32.02G of 31.25G hbm. Exceeded hbm capacity by 788.55M.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from jpaged.errors import InvalidArgument

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"(?P<needs>[\d.]+)(?P<unit>[KMGT]?)i?B?"
_SIZES = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \("),
    re.compile(rf"Used {_SIZE} of \S+ hbm"),
)


@dataclass(frozen=True, slots=True)
class CompilerOutOfMemory:
    """An out-of-memory error of the compiler.

    Attributes:
        needs_bytes: of the program; None if the message has no known number.
        message: its first line.
    """

    needs_bytes: int | None
    message: str

    @classmethod
    def of(cls, error: jax.errors.JaxRuntimeError) -> CompilerOutOfMemory | None:
        """Parse the error; return None if it is not about memory."""
        text = str(error)
        if _OUT_OF_MEMORY not in text:
            return None
        message = text.splitlines()[0]
        for sizes in _SIZES:
            if found := sizes.search(text):
                return cls(int(float(found["needs"]) * _UNITS[found["unit"]]), message)
        return cls(None, message)

    @property
    def problem(self) -> str:
        """The problem, and what to change."""
        return (
            f"the compiler found too little device memory: {self.message}: lower num_blocks, memory_utilization or "
            "max_num_batched_tokens, or raise tensor_parallel_size"
        )


@contextmanager
def memory_refusals() -> Iterator[None]:
    """Convert a compiler's out-of-memory error inside the context to an InvalidArgument with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        refusal = CompilerOutOfMemory.of(error)
        if refusal is None:
            raise
        raise InvalidArgument("num_blocks", refusal.problem) from error
