"""What the compiler says of programs that are too large, in numbers."""

from __future__ import annotations

import jax
import pytest

from jpaged.device.compilation.memory_plan import CompilerOutOfMemory, memory_refusals
from jpaged.errors import InvalidArgument

GIB = 1 << 30
TOTAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (15.99G) exceeds "
    "available HBM (15.75G)."
)
SPACE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 32.02G of 31.25G "
    "hbm. Exceeded hbm capacity by 788.55M.\n\nTotal hbm usage >= 32.27G:"
)


@pytest.mark.parametrize(("text", "needs"), [(TOTAL, 15.99), (SPACE, 32.02)])
def test_the_number_is_read(text: str, needs: float) -> None:
    refusal = CompilerOutOfMemory.of(jax.errors.JaxRuntimeError(text))
    assert refusal is not None
    assert refusal.needs_bytes == int(needs * GIB)
    assert refusal.message == text.splitlines()[0]


def test_a_message_in_other_words_is_passed_on() -> None:
    assert CompilerOutOfMemory.of(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")) == CompilerOutOfMemory(
        None, "RESOURCE_EXHAUSTED: no room"
    )


def test_other_errors_are_not_about_memory() -> None:
    assert CompilerOutOfMemory.of(jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed")) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic"), memory_refusals():
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed")


def test_a_start_that_the_compiler_refuses_says_what_to_change() -> None:
    message = r"^num_blocks: the compiler found too little device memory: .*\(15\.99G\).*: lower num_blocks"
    with pytest.raises(InvalidArgument, match=message), memory_refusals():
        raise jax.errors.JaxRuntimeError(TOTAL)
