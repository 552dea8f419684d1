"""How much a grammar may take: when it is compiled, and in each step."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of the compiler.

    Attributes:
        cpu_s: processor time of one compile; a schema of 100 properties takes 10 ms.
        memory_bytes: what one compile may take.
        compile_stack_bytes: the stack of a trial's compile, half of what the compiler's own threads have.
        mask_stack_bytes: the stack of a trial's mask, half of what the library's threads have, which fill masks later.
        max_depth: values in values of a schema; the library's own reader stops at 128.
        max_waiting: compiles that wait or run; one more is refused.
        num_threads: compiles at a time, each with a process that tries first.
        max_entries: grammars and refusals that the cache keeps.
        max_bytes: memory of the grammars that it keeps, as trials measured it.
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
    """The library's own bounds, those of a step among them: 200,000 units of lexing are about 15 ms.

    Its default of 250,000 states of a lexer is up to 0.5 GB for one request.
    """
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
