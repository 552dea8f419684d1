"""The reader of compiled programs, on programs small enough to know what they do and on lines of TPU programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.made_arrays import MadeArray, made_arrays, made_arrays_in
from jpaged.device.aot.deployment import Collective, collectives, collectives_in
from jpaged.device.compilation.memory_plan import ProgramReport

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


EXCHANGES = """HloModule step, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %s = bf16[] add(%x, %y)
}

%on_the_side (p: bf16[64,4096], t: token[]) -> bf16[64,4096] {
  %p = bf16[64,4096]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %a.1 = bf16[64,4096]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}, execution_thread="sparsecore"

%body (p: (s32[], bf16[64,4096])) -> (s32[], bf16[64,4096]) {
  %c = ((bf16[64,4096]{1,0}, token[]), bf16[64,4096]{1,0}) call-start(%p), to_apply=%on_the_side
  %a.2 = (bf16[64,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[8]{0:T(128)}) all-reduce(%c, %d), to_apply=%add
}

%condition (p: (s32[], bf16[64,4096])) -> pred[] {
  %n = s32[]{:T(128)} constant(80), backend_config={"flag_configs":[]}
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%unknown (p: s32[]) -> pred[] {
  ROOT %never = pred[] custom-call(%p)
}

%passes (p: s32[]) -> s32[] {
  %g = (f32[8,32]{1,0}, f32[8,128]{1,0}) all-gather-start(%best), dimensions={1}
  %h = (s32[4]{0}, s32[4]{0}, u32[], u32[]) collective-permute-start(%q), source_target_pairs={{0,1}}
}

%taken (p: pred[3]) -> pred[3] {
  %r = pred[3]{0} reduce-scatter(%p), to_apply=%add
}

ENTRY %main (a: s32[]) -> s32[] {
  %w.1 = (s32[], bf16[64,4096]) while(%t), condition=%condition, body=%body
  %w.2 = s32[] while(%a), condition=%unknown, body=%passes
  %w.3 = s32[] while(%a), condition=%unknown, body=%passes, backend_config={"known_trip_count":{"n":"7"}}
  %b = pred[3] conditional(%a, %x, %x), branch_computations={%add, %taken}
}
"""


def test_exchanges_are_found_in_loops_branches_and_beside_the_program() -> None:
    found = list(collectives_in(EXCHANGES))
    assert found == [
        Collective("all-reduce", ((64, 4096),), 2 * 64 * 4096, (80,), "a.1", is_async=True),
        Collective("all-reduce", ((64, 4096), (8,)), 2 * (64 * 4096 + 8), (80,), "a.2"),
        *(
            Collective(opcode, (dims,), num_bytes, trips, name, is_async=True)
            for trips in ((None,), (7,))
            for opcode, dims, num_bytes, name in (
                ("all-gather", (8, 128), 4096, "g"),
                ("collective-permute", (4,), 16, "h"),
            )
        ),
        Collective("reduce-scatter", ((3,),), 3, (), "r"),
    ]


OVERLAPPED = """HloModule step, is_scheduled=true

%start_in (p: bf16[64,4096]) -> (bf16[64,4096], u32[]) {
  %p = bf16[64,4096]{1,0} parameter(0)
  %a.1 = bf16[64,4096]{1,0} all-reduce(%p), to_apply=%add, frontend_attributes={chain_id="7"}
  ROOT %s = (bf16[64,4096]{1,0}, u32[]{:S(2)}) custom-call(%a.1), custom_call_target="AsyncCollectiveStart"
}

%beside (p: bf16[64,4096], q: bf16[64,1024]) -> (f32[64,512], bf16[64,4096]) {
  %p = bf16[64,4096]{1,0} parameter(0)
  %d = f32[64,512]{1,0} convolution(%q, %w), dim_labels=bf_io->bf
  %a.2 = bf16[64,4096]{1,0} all-reduce(%p), to_apply=%add, frontend_attributes={chain_id="7"}
  ROOT %t = (f32[64,512]{1,0}, bf16[64,4096]{1,0}) tuple(%d, %a.2)
}

%done_in (p: bf16[64,4096]) -> bf16[64,4096] {
  %p = bf16[64,4096]{1,0} parameter(0)
  %a.3 = bf16[64,4096]{1,0} all-reduce(%p), to_apply=%add, frontend_attributes={chain_id="7"}
  ROOT %r = bf16[64,4096]{1,0} custom-call(%p, %a.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[64,4096]) -> bf16[64,4096] {
  %before = bf16[64,4096]{1,0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1000"}
  %begin = (bf16[64,4096]{1,0}, u32[]{:S(2)}) fusion(%before), kind=kCustom, calls=%start_in
  %dot = (f32[64,512]{1,0}, bf16[64,4096]{1,0}) fusion(%b, %q), calls=%beside, backend_config={"estimated_cycles":"300"}
  %c = f32[64]{0} fusion(%y), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"20"}
  %end = bf16[64,4096]{1,0} fusion(%g), kind=kCustom, calls=%done_in
  %h = (s32[4]{0}, s32[4]{0}, u32[], u32[]) collective-permute-start(%end), source_target_pairs={{0,1}}
  %i = (s32[4]{0}, s32[4]{0}, u32[], u32[]) collective-permute-start(%end), source_target_pairs={{1,0}}
  %e = f32[64]{0} fusion(%y), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"5"}
  %j = s32[4]{0} collective-permute-done(%h)
  %k = f32[64]{0} fusion(%y), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"9"}
  %l = s32[4]{0} collective-permute-done(%i)
  %after = f32[64]{0} fusion(%y), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"2000"}
  ROOT %m = bf16[64,4096]{1,0} all-reduce(%end), to_apply=%add
}
"""


def test_cycles_between_start_and_done_of_an_exchange_are_counted_once() -> None:
    """An exchange within fusions is one; of two in flight the first has the cycles."""
    assert list(collectives_in(OVERLAPPED)) == [
        Collective("all-reduce", ((64, 4096),), 2 * 64 * 4096, (), "a.1", is_async=True, hidden_cycles=320),
        Collective("collective-permute", ((4,),), 16, (), "h", is_async=True, hidden_cycles=5),
        Collective("collective-permute", ((4,),), 16, (), "i", is_async=True, hidden_cycles=9),
        Collective("all-reduce", ((64, 4096),), 2 * 64 * 4096, (), "m"),
    ]


def test_a_real_program_says_what_its_devices_exchange() -> None:
    """Each of two devices has half of the columns; a loop of five sums them."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("model",))
    spec = jax.sharding.PartitionSpec

    def sums(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, total: total + jax.lax.psum(x * total, "model"), x)

    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=spec(None, "model"), out_specs=spec(None, "model"), check_vma=False
    )
    executable = jax.jit(mapped).lower(jax.ShapeDtypeStruct((3, 8), jnp.float32)).compile()
    (found,) = collectives(executable)
    assert (found.opcode, found.dims, found.num_bytes, found.loop_trips) == ("all-reduce", ((3, 4),), 48, (5,))
    assert collectives(jax.jit(write).lower(POOL).compile()) == []
