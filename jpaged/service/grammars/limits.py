"""Resource limits of grammars, at compile time and per step."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of the compiler.

    Attributes:
        cpu_s: processor time of one compile; a schema of 100 properties takes 10 ms.
        memory_bytes: memory of one compile.
        compile_stack_bytes: stack of a trial's compile, half of the stack of the compiler's threads.
        mask_stack_bytes: stack of a trial's mask, half of the stack of the library's threads, which fill masks later.
        max_depth: nesting of a schema; the library's own reader stops at 128.
        max_waiting: compiles that wait or run; more are refused.
        num_threads: concurrent compiles, each with a trial process.
        max_entries: grammars and refusals in the cache.
        max_bytes: memory of the cached grammars, as measured by trials.
    """

    cpu_s: float = 3.0
    memory_bytes: int = 256 << 20
    compile_stack_bytes: int = 8 << 20
    mask_stack_bytes: int = 1 << 20
    max_depth: int = 64
    max_waiting: int = 256
    num_threads: int = 2
    max_entries: int = 1024
    max_bytes: int = 512 << 20


def library_limits() -> LLParserLimits:
    """Return the library's own limits, including those of a step: 200,000 units of lexing take about 15 ms.

    The library's default of 250,000 lexer states takes up to 0.5 GB for one request.
    """
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
