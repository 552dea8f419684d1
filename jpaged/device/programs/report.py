"""Memory of a compiled program, as its compiler reports it."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import jax


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """A program's memory as the compiler reports it, in bytes of one device.

    Attributes:
        argument_bytes: of all arguments, padded as the device lays them out.
        output_bytes: of all results, including arguments updated in place.
        alias_bytes: of the results that are arguments updated in place.
        temp_bytes: additional working memory.
        code_bytes: of the program itself.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @classmethod
    def of(cls, executable: jax.stages.Compiled) -> ProgramReport:
        """Read the compiler's report and cache it, because reading takes some milliseconds.

        All numbers are zero if the backend gives no report.
        """
        known = _KNOWN.get(executable)
        if known is None:
            known = _KNOWN[executable] = cls._read(executable)
        return known

    @classmethod
    def _read(cls, executable: jax.stages.Compiled) -> ProgramReport:
        memory = executable.memory_analysis()
        if memory is None:
            return cls(0, 0, 0, 0, 0)
        return cls(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """Device memory that must be free for one call, including arguments."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


_KNOWN: WeakKeyDictionary[jax.stages.Compiled, ProgramReport] = WeakKeyDictionary()
