"""The reader of compiled programs, on programs small enough to know what they do and on lines of TPU programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jpaged.device.program_report import MadeArray, ProgramReport, made_arrays, made_arrays_in

POOL = jax.ShapeDtypeStruct((100, 8), jnp.float32)


def write(pool: jax.Array) -> jax.Array:
    return pool.at[3].set(1.0)


def test_bytes_are_the_compilers() -> None:
    report = ProgramReport.of(jax.jit(write, donate_argnums=0).lower(POOL).compile())
    assert (report.argument_bytes, report.output_bytes, report.alias_bytes) == (3200, 3200, 3200)
    assert report.total_bytes == 3200 + report.temp_bytes + report.code_bytes
    kept = ProgramReport.of(jax.jit(write).lower(POOL).compile())
    assert kept.alias_bytes == 0
    assert kept.total_bytes - kept.temp_bytes - kept.code_bytes == 6400


def test_a_donated_array_is_written_in_place_and_a_kept_one_is_copied() -> None:
    donated = jax.jit(write, donate_argnums=0).lower(POOL).compile()
    kept = jax.jit(write).lower(POOL).compile()
    assert made_arrays(donated, {800}) == []
    assert [(made.opcode, made.dims) for made in made_arrays(kept, {800})] == [("copy", (100, 8))]
    assert made_arrays(kept, {801}) == []


def tpu_program(instruction: str, fused: str) -> str:
    return f"""HloModule step, is_scheduled=true

%fused.1 (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0:T(8,128)}} parameter(0)
  {fused}
}}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {{
  %a = f32[8,4]{{1,0:T(8,128)}} parameter(0)
  {instruction}
}}
"""


@pytest.mark.parametrize(
    ("instruction", "fused", "opcode"),
    [
        ("%c = f32[8,4]{0,1:T(8,128)} copy(%a)", "", "copy"),
        ("%c = f32[1,8,4]{2,1,0} fusion(%a), kind=kLoop, calls=%fused.1", "%r = f32[8,4] add(%p, %p)", "fusion"),
        ("%c = f32[8,4]{1,0} fusion(%a), kind=kLoop, calls=%fused.1", "ROOT %r = f32[8,4] negate(%p)", "negate"),
        (
            "%c = f32[8,4]{1,0} fusion(%a), kind=kLoop, calls=%fused.1",
            "%s = f32[8,4] convert(%p)\n  ROOT %r = f32[8,4] bitcast(%s)",
            "convert",
        ),
        (
            "%c = (f32[2], f32[8,4]{1,0}) fusion(%a), kind=kLoop, calls=%fused.1",
            "%s = f32[8,4] copy(%p)\n  ROOT %r = (f32[2], f32[8,4]) tuple(%o, %s)",
            "copy",
        ),
        ('%c = f32[8,4]{1,0} custom-call(%a), custom_call_target="tpu_custom_call"', "", "custom-call"),
        ("%c = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%a)", "", "copy-start"),
    ],
)
def test_what_makes_an_array_is_found(instruction: str, fused: str, opcode: str) -> None:
    assert [made.opcode for made in made_arrays_in(tpu_program(instruction, fused), {32})] == [opcode]


@pytest.mark.parametrize(
    ("instruction", "fused"),
    [
        ("ROOT %c = f32[8,4]{1,0} bitcast(%a)", "ROOT %r = f32[8,4] copy(%p)"),
        ("%c = f32[8,4]{1,0} fusion(%a), kind=kLoop, calls=%fused.1", "ROOT %r = f32[8,4] scatter(%p, %i, %u)"),
        ("%c = f32[2]{0} fusion(%a), kind=kOutput, calls=%fused.1", "%s = f32[8,4] dynamic-slice(%p, %i)"),
        ("%c = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%a)", ""),
        ("%c = f32[8,4]{1,0:T(8,128)S(1)} fusion(%a), calls=%fused.1", "ROOT %r = f32[8,4] dynamic-slice(%p, %i)"),
        ("%c = (f32[2], f32[8,4]{1,0}) custom-call(%a), output_to_operand_aliasing={{1}: (0, {})}", ""),
    ],
)
def test_what_works_in_place_or_on_the_chip_is_not(instruction: str, fused: str) -> None:
    text = tpu_program(instruction, fused).replace(
        "ENTRY", "%other (x: f32[2]) -> f32[2] {\n  %f = f32[2] fusion(%x), calls=%fused.1\n}\n\nENTRY"
    )
    assert list(made_arrays_in(text, {32})) == []


def test_only_the_output_that_is_not_aliased_is_found() -> None:
    line = "%c = (f32[8,4]{1,0}, f32[8,4]{1,0}) custom-call(%a), output_to_operand_aliasing={{1}: (0, {})}"
    assert list(made_arrays_in(tpu_program(line, ""), {32})) == [MadeArray("custom-call", (8, 4), "c")]
