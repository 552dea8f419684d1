"""Where each byte of a device goes: the plan adds up, stays within its limit, and is held to what was compiled."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.device.compilation import memory_plan
from jpaged.device.compilation.compile import COUNT, TELLS, ProgramSpec
from jpaged.device.compilation.lowering import ServerPrograms, sized_step
from jpaged.device.compilation.memory_plan import (
    DeviceMemory,
    MemoryPlan,
    PoolRequest,
    ProgramMemory,
    ProgramReport,
    plan_memory,
)
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import serving_mesh
from jpaged.engine.executor import TOP_WIDTH
from jpaged.engine.executor.aux_io import AUX_IDS
from jpaged.engine.executor.io import EDIT_FIELDS, NUM_SINGLES, num_mask_words
from jpaged.errors import InternalError, InvalidArgument
from tests.device import tiny_model

GIB, MIB = 1 << 30, 1 << 20
MESH = serving_mesh(1)
REQUEST = PoolRequest(
    bytes_per_block=MIB, blocks_per_seq=63, max_num_seqs=8, max_model_len=1000, memory_utilization=0.5, weight_bytes=GIB
)
HOST = DeviceMemory(6 * GIB, is_own=False)
OWN = DeviceMemory(8 * GIB)


class Device:
    """Reports the memory that it is told."""

    def __init__(self, platform: str, stats: dict[str, int] | None = None) -> None:
        self.platform = platform
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


class Reported:
    """A program of which the compiler says this."""

    def __init__(self, report: ProgramReport) -> None:
        self._report = report

    def memory_analysis(self) -> SimpleNamespace:
        report = self._report
        return SimpleNamespace(
            argument_size_in_bytes=report.argument_bytes,
            output_size_in_bytes=report.output_bytes,
            alias_size_in_bytes=report.alias_bytes,
            temp_size_in_bytes=report.temp_bytes,
            generated_code_size_in_bytes=report.code_bytes,
        )


def plan(memory: DeviceMemory, programs: ProgramMemory, **changes: Any) -> MemoryPlan:
    request = dataclasses.replace(REQUEST, **changes)
    return plan_memory(request, memory, lambda: programs)


def unexpected_compile() -> ProgramMemory:
    raise AssertionError("compiled, although memory was no limit")


@st.composite
def requests(sample: st.DrawFn) -> tuple[PoolRequest, DeviceMemory, ProgramMemory]:
    sizes = st.integers(0, 1 << 36)
    request = PoolRequest(
        bytes_per_block=sample(st.integers(1, 1 << 26)),
        blocks_per_seq=sample(st.integers(1, 1 << 17)),
        max_num_seqs=sample(st.integers(1, 256)),
        max_model_len=sample(st.integers(2, 1 << 17)),
        memory_utilization=sample(st.floats(0.01, 1.0)),
        weight_bytes=sample(sizes),
        num_blocks=sample(st.none() | st.integers(1, 1 << 16)),
    )
    programs = ProgramMemory(*(sample(st.integers(0, 1 << 30)) for _ in range(3)))
    return request, DeviceMemory(sample(sizes), is_own=sample(st.booleans())), programs


@given(requests())
def test_no_plan_is_over_its_limit_and_all_rows_add_up(case: tuple[PoolRequest, DeviceMemory, ProgramMemory]) -> None:
    request, memory, programs = case
    try:
        found = plan_memory(request, memory, lambda: programs)
    except InvalidArgument:
        return
    assert memory.total_bytes is not None
    limit = int(memory.total_bytes * request.memory_utilization)
    assert found.fits
    assert found.used_bytes <= limit
    assert sum(num_bytes for _, num_bytes in found.rows()) == memory.total_bytes
    if request.num_blocks is not None:
        assert found.num_blocks == request.num_blocks
    elif memory.is_own:
        assert found.used_bytes + request.bytes_per_block > limit  # not one block more would fit
    if found.programs is not None:
        assert found.verified(programs) == found


def test_a_cpu_gets_what_its_rows_can_use_and_compiles_nothing_for_it() -> None:
    found = plan_memory(REQUEST, HOST, unexpected_compile)
    assert (found.num_blocks, found.programs) == (8 * 63, None)


def test_a_cpu_with_little_memory_gets_what_fits() -> None:
    """Half of 6 GiB, less weights, half a GiB of programs and the null block."""
    assert plan(HOST, ProgramMemory(GIB // 4, GIB // 8, GIB // 8), max_num_seqs=64).num_blocks == 1535


def test_by_default_a_cpu_gets_at_most_4_gib_or_a_quarter_of_what_is_free() -> None:
    """Two servers fit onto one machine; what the user chose keeps its meaning."""
    many = dataclasses.replace(REQUEST, max_num_seqs=64, memory_utilization=0.9, has_default_share=True)
    assert (
        plan_memory(many, DeviceMemory(101 * GIB, is_own=False), unexpected_compile).pool_bytes == 63 * 64 * MIB + MIB
    )
    more = dataclasses.replace(many, max_num_seqs=256)
    assert plan_memory(more, DeviceMemory(101 * GIB, is_own=False), unexpected_compile).pool_bytes == 4 * GIB
    first = plan_memory(more, DeviceMemory(9 * GIB, is_own=False), unexpected_compile)
    assert first.pool_bytes == 2 * GIB
    second = plan_memory(more, DeviceMemory(9 * GIB - GIB - first.pool_bytes, is_own=False), unexpected_compile)
    assert second.pool_bytes == 5 * GIB // 4
    # A longest sequence has to fit, however little that leaves to others.
    assert plan_memory(more, DeviceMemory(GIB + 200 * MIB, is_own=False), ProgramMemory).num_blocks == 63
    chosen = dataclasses.replace(more, has_default_share=False)
    assert plan_memory(chosen, DeviceMemory(101 * GIB, is_own=False), unexpected_compile).num_blocks == 256 * 63
    assert (
        plan_memory(
            dataclasses.replace(more, num_blocks=9000), DeviceMemory(101 * GIB, is_own=False), unexpected_compile
        ).num_blocks
        == 9000
    )
    assert plan_memory(more, DeviceMemory(101 * GIB), ProgramMemory).num_blocks > 80_000  # an accelerator's own


def test_a_default_pool_keeps_its_size_if_free_memory_differs_a_little() -> None:
    """Programs contain the size, so that a start with another one would compile them again."""
    many = dataclasses.replace(REQUEST, max_num_seqs=256, memory_utilization=0.9, has_default_share=True)
    pools = [
        plan_memory(many, DeviceMemory(GIB + part * GIB // 8, is_own=False), ProgramMemory) for part in range(49, 56)
    ]
    assert {pool.pool_bytes for pool in pools} == {3 * GIB // 2}


def test_an_accelerator_gets_its_share_less_every_consumer() -> None:
    found = plan(OWN, ProgramMemory(temp_bytes=100 * MIB, kept_bytes=20 * MIB, code_bytes=8 * MIB))
    assert found.num_blocks == 4096 - 1024 - 128 - 1
    assert [num_bytes // MIB for _, num_bytes in found.rows()] == [1024, 2944, 100, 20, 8, 0, 4096]


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    message = (
        r"memory_utilization: 0.3 of 6.00 GiB, minus 1.00 GiB for weights and 0.75 GiB for programs, leaves 50 blocks "
        r"of 1048576 bytes; one sequence of max_model_len \(1000\) needs 63: raise "
        r"memory_utilization or tensor_parallel_size, lower max_model_len"
    )
    with pytest.raises(InvalidArgument, match=message):
        plan(HOST, ProgramMemory(GIB * 3 // 4), memory_utilization=0.3, max_num_seqs=64)


def test_a_chosen_number_that_does_not_fit_is_refused_with_one_that_does() -> None:
    message = (
        r"^num_blocks: 3000 blocks do not fit: 0.5 of 8.00 GiB, minus 1.00 GiB for weights and 0.12 GiB for "
        r"programs, leaves 2943 blocks of 1048576 bytes; lower num_blocks to 2943, or raise "
        r"tensor_parallel_size or memory_utilization"
    )
    with pytest.raises(InvalidArgument, match=message):
        plan(OWN, ProgramMemory(128 * MIB), num_blocks=3000)
    assert plan(OWN, ProgramMemory(128 * MIB), num_blocks=2943).free_bytes == 0


def test_a_pool_of_so_many_bytes_has_the_blocks_that_they_hold_less_the_null_block() -> None:
    for pool_bytes, num_blocks in ((2 * MIB, 1), (100 * MIB, 99), (100 * MIB + 5, 99), (101 * MIB - 1, 99)):
        found = plan(HOST, ProgramMemory(), pool_bytes=pool_bytes)
        assert found.num_blocks == num_blocks
        assert found.pool_bytes <= pool_bytes < found.pool_bytes + MIB
    with pytest.raises(InvalidArgument, match=r"^kv_cache_memory_bytes: 2097151 is below the limit of 2097152"):
        plan(HOST, ProgramMemory(), pool_bytes=2 * MIB - 1)


def test_a_pool_of_too_many_bytes_is_refused_with_a_number_that_fits() -> None:
    message = rf"^kv_cache_memory_bytes: {4 * GIB} bytes do not fit: 0.5 of 8.00 GiB, .* lower it to {2944 * MIB}, or"
    with pytest.raises(InvalidArgument, match=message):
        plan(OWN, ProgramMemory(128 * MIB), pool_bytes=4 * GIB)
    assert plan(OWN, ProgramMemory(128 * MIB), pool_bytes=2944 * MIB).free_bytes == 0


def test_what_a_total_is_made_of_is_told_in_tables_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 4 * GIB)
    host, shared = (DeviceMemory.of(Device("cpu"), GIB, count) for count in (1, 4))
    own = DeviceMemory.of(Device("gpu", {"bytes_limit": 10 * GIB, "bytes_in_use": 3 * GIB}), GIB)
    alone = DeviceMemory.of(Device("gpu", {"bytes_limit": 10 * GIB, "bytes_in_use": GIB}), GIB)
    free = "which is the weights, and 4.000 GiB of free memory of this machine or its container"
    assert plan(host, ProgramMemory()).lines()[-1].strip() == free
    assert plan(shared, ProgramMemory(), memory_utilization=0.8).lines()[-1].strip() == f"{free}, shared by 4 devices"
    held = "all that the device's allocator may use, minus 2.000 GiB used by others"
    assert plan(own, ProgramMemory()).lines()[-2].strip() == f"which is {held}"
    assert plan(alone, ProgramMemory()).lines()[-2].strip() == "which is all that the device's allocator may use"
    with pytest.raises(InvalidArgument, match=r"0\.5 of 8\.00 GiB \(all that .* used by others\), minus 1\.00 GiB for"):
        plan(own, ProgramMemory(), num_blocks=1 << 20)
    with pytest.raises(InvalidArgument, match=r"0\.1 of 5\.00 GiB \(the weights, and 4\.0.*\) may be used"):
        plan(host, ProgramMemory(), memory_utilization=0.1)


def test_weights_beyond_all_memory_are_refused_before_anything_is_compiled() -> None:
    with pytest.raises(
        InvalidArgument, match=r"^tensor_parallel_size: the weights alone are 5\.00 GiB per device, but only 0\.5"
    ):
        plan_memory(dataclasses.replace(REQUEST, weight_bytes=5 * GIB), OWN, unexpected_compile)


def test_a_device_that_hides_its_memory_needs_a_number_and_is_believed() -> None:
    hidden = DeviceMemory.of(Device("gpu"), 0)
    with pytest.raises(InvalidArgument, match="num_blocks: this device does not report its memory"):
        plan_memory(REQUEST, hidden, unexpected_compile)
    found = plan_memory(dataclasses.replace(REQUEST, num_blocks=1 << 20), hidden, unexpected_compile)
    assert (found.num_blocks, found.fits, found.free_bytes) == (1 << 20, True, None)
    assert found.lines()[-1].endswith("unknown")


def test_programs_are_probed_with_a_pool_that_fits_and_is_too_large_for_memory_on_the_chip() -> None:
    assert REQUEST.probe_blocks(DeviceMemory(64 * GIB)) == 1024  # a GiB
    assert REQUEST.probe_blocks(DeviceMemory(6 * GIB)) == 512  # a quarter of what weights leave
    assert REQUEST.probe_blocks(DeviceMemory(GIB)) == 1
    assert dataclasses.replace(REQUEST, num_blocks=40).probe_blocks(DeviceMemory(64 * GIB)) == 40
    assert dataclasses.replace(REQUEST, num_blocks=4000).probe_blocks(DeviceMemory(64 * GIB)) == 1024


def test_what_others_hold_of_a_device_is_not_ours() -> None:
    stats = {"bytes_limit": 10 * GIB, "bytes_in_use": 3 * GIB}
    device = Device("gpu", stats)
    assert DeviceMemory.of(device, GIB) == DeviceMemory(8 * GIB)
    assert DeviceMemory.of(device, 4 * GIB) == DeviceMemory(10 * GIB)


def test_virtual_devices_share_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 8 * GIB)
    assert DeviceMemory.of(Device("cpu"), GIB, 4) == DeviceMemory(3 * GIB, is_own=False)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's allocator has 0.95 of a GPU."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.95")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")


@pytest.mark.usefixtures("share")
def test_a_gpu_holds_code_and_graphs_outside_the_allocator() -> None:
    memory = DeviceMemory.of(Device("gpu", {"bytes_limit": 19 * GIB, "bytes_in_use": GIB}), GIB)
    assert memory.outside_bytes == pytest.approx(GIB, abs=1)
    programs = ProgramMemory(temp_bytes=100 * MIB, kept_bytes=20 * MIB, code_bytes=200 * MIB, graph_bytes=90 * MIB)
    found = plan(memory, programs, memory_utilization=1.0)
    assert found.program_bytes == 120 * MIB
    assert found.num_blocks == 18 * 1024 - 120 - 1  # neither code nor graphs take blocks
    assert sum(num_bytes for _, num_bytes in found.rows()) == 19 * GIB
    assert found.lines()[-1] == (
        "  outside of it 1.000 GiB: about 512.00 MiB for CUDA, 200.00 MiB for code and 90.00 MiB for graphs"
    )
    more = found.verified(dataclasses.replace(programs, graph_bytes=400 * MIB))
    assert more.fits
    assert more.lines()[-1] == "  which may not suffice: set XLA_CLIENT_MEM_FRACTION=0.94 in the environment"
    assert not any("outside of it" in line for line in plan(OWN, programs).lines())
    assert ("code of programs", 290 * MIB) in plan(OWN, programs).rows()


@pytest.mark.usefixtures("share")
def test_a_gpu_that_another_process_uses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_limit": 19 * GIB, "bytes_in_use": GIB, "pool_bytes": 12 * GIB}
    said = "it could reserve only 12.000 GiB of 19.000 GiB: another process uses this GPU"
    assert said in DeviceMemory.of(Device("gpu", stats), GIB).what
    assert said not in DeviceMemory.of(Device("gpu", stats | {"pool_bytes": 19 * GIB}), GIB).what
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert said not in DeviceMemory.of(Device("gpu", stats), GIB).what


GPU_PROGRAM = """
%fused_add (p: f32[8]) -> f32[8] {
  ROOT %add.1 = f32[8]{0} add(%p, %p)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %copy.1 = f32[8]{0} copy(%p)
  %fusion.1 = f32[8]{0} fusion(%copy.1), kind=kLoop, calls=%fused_add
  %gemm.1 = (f32[8]{0}, s8[64]{0}) custom-call(%fusion.1), custom_call_target="__cublas$gemm"
  ROOT %get-tuple-element.1 = f32[8]{0} get-tuple-element(%gemm.1), index=0
}
"""


class GpuProgram(Reported):
    """A program for a GPU, whose memory report has no code."""

    output_shardings = (SimpleNamespace(device_set=[SimpleNamespace(platform="gpu")]),)

    def as_text(self) -> str:
        return GPU_PROGRAM

    def runtime_executable(self) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: b"x" * 1000)


def test_code_and_launches_of_a_gpu_program_are_counted() -> None:
    program: Any = GpuProgram(ProgramReport(1, 2, 3, 4, 0))
    assert ProgramReport.of(program).code_bytes == 1000
    assert memory_plan.count_launches(program) == 3
    loaded: Any = GpuProgram(ProgramReport(1, 2, 3, 4, 0))
    loaded.runtime_executable = lambda: SimpleNamespace(size_of_generated_code_in_bytes=lambda: 700)
    assert ProgramReport.of(loaded).code_bytes == 700
    told: Any = GpuProgram(ProgramReport(1, 2, 3, 4, 5))
    assert ProgramReport.of(told).code_bytes == 5


def test_programs_that_take_more_than_there_is_end_the_start() -> None:
    found = plan(OWN, ProgramMemory(temp_bytes=100 * MIB))
    assert found.verified(ProgramMemory(temp_bytes=90 * MIB)).free_bytes == 10 * MIB
    with pytest.raises(InternalError, match=r"need more memory than planned: weights: 1073741824; pool of"):
        found.verified(ProgramMemory(temp_bytes=5 * GIB))


def test_the_table_has_a_line_for_each_row_and_their_sum() -> None:
    lines = plan(OWN, ProgramMemory(MIB, MIB, MIB)).lines()
    assert lines[0].split() == ["weights", "1.000", "GiB"]
    assert lines[-1].split() == ["memory", "of", "one", "device", "8.000", "GiB"]
    assert len({len(line) for line in lines}) == 1


def options(**cache: Any) -> EngineConfig:
    return dataclasses.replace(tiny_model.OPTIONS, cache=dataclasses.replace(tiny_model.OPTIONS.cache, **cache))


@pytest.mark.long
def test_a_server_on_little_memory_plans_with_the_compilers_numbers_and_keeps_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, chosen = 160 * MIB, options(num_blocks=20_600, memory_utilization=1.0)  # more than three quarters of it
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: free)
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), chosen)
    before = executor.memory_plan
    executor.warm_up(tiny_model.quiet)
    after = executor.memory_plan
    executor.shutdown()
    assert before.programs is not None
    assert after.programs is not None
    assert 0 < after.programs.temp_bytes <= before.programs.temp_bytes
    weight_bytes = after.request.weight_bytes
    assert weight_bytes + after.pool_bytes < after.used_bytes <= weight_bytes + free


@pytest.mark.long
def test_a_server_says_what_to_change_where_its_pool_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 96 * MIB)
    with pytest.raises(InvalidArgument, match=r"num_blocks: 1000000 blocks do not fit: .*lower num_blocks to \d+"):
        JaxExecutor.create(tiny_model.model(), tiny_model.params(), options(num_blocks=1_000_000))


@pytest.mark.long
def test_what_edits_and_tells_keep_is_planned() -> None:
    """Counts of every slot and token, what changes the rows of two steps, and what two steps were told."""
    served = ServerPrograms.of(*sized_step(tiny_model.model(), options(), "loop", 56, MESH), tiny_model.params())
    compiled = served.compile(served.decisive_specs)
    assert {*TELLS.values(), COUNT, ProgramSpec("edited", 8)} <= set(compiled)
    found = served.memory(compiled)
    num_slots, vocab_size = served.geometry.max_num_seqs + 1, tiny_model.CONFIG.vocab_size
    counts = num_slots * (2 * vocab_size + 4)
    edits = 3 * 4 * 8 * (len(EDIT_FIELDS) + 3 * NUM_SINGLES + num_mask_words(vocab_size))
    num_hidden = served.step.max_sample_rows + served.step.num_aux
    columns = 2 + AUX_IDS + 2 * TOP_WIDTH
    told = 2 * 4 * max(-(-num_hidden // 8) * 8 * vocab_size, -(-num_hidden // 64) * 64 * columns)
    assert served._edit_bytes({"count": ProgramReport.of(compiled[COUNT].executable)}) == counts + edits
    assert served._aux_bytes({spec: ProgramReport.of(one.executable) for spec, one in compiled.items()}) == told
    outputs = ProgramReport.of(compiled[ProgramSpec("forward", 16)].executable)
    assert found.kept_bytes > counts + edits + told + 2 * (outputs.output_bytes - outputs.alias_bytes)


@pytest.mark.long
def test_the_analysis_of_programs_that_edit_and_tell_counts() -> None:
    """Each of them where it is the hungriest, its code, and what it gives back beside a forward."""
    served = ServerPrograms.of(*sized_step(tiny_model.model(), options(), "loop", 56, MESH), tiny_model.params())
    compiled = dict(served.compile(served.decisive_specs))
    before = served.memory(compiled)
    for spec in (ProgramSpec("edited", 8), COUNT, *TELLS.values()):
        report = ProgramReport.of(compiled[spec].executable)
        more = dataclasses.replace(report, temp_bytes=report.temp_bytes + GIB, code_bytes=report.code_bytes + MIB)
        fake = dataclasses.replace(compiled[spec], executable=cast(jax.stages.Compiled, Reported(more)))
        found = served.memory({**compiled, spec: fake})
        assert found.temp_bytes > before.temp_bytes + GIB - MIB, spec
        assert found.code_bytes > before.code_bytes + MIB - 1, spec


def test_recurrent_state_is_a_row_of_the_plan_and_leaves_fewer_blocks() -> None:
    def programs() -> ProgramMemory:
        return ProgramMemory(100 * MIB, 10 * MIB, MIB)

    plain = plan_memory(REQUEST, OWN, programs)
    plan = plan_memory(dataclasses.replace(REQUEST, state_bytes=512 * MIB), OWN, programs)
    assert plan.num_blocks == plain.num_blocks - 512
    assert ("recurrent state", 512 * MIB) in plan.rows()
    assert sum(num_bytes for _, num_bytes in plan.rows()) == plan.total_bytes
    assert "recurrent state" not in dict(plain.rows())
    with pytest.raises(InvalidArgument, match=r"3\.00 GiB for recurrent state"):
        plan_memory(dataclasses.replace(REQUEST, state_bytes=3 * GIB), OWN, programs)


def test_checkpoints_of_recurrent_state_grow_with_the_pool() -> None:
    def programs() -> ProgramMemory:
        return ProgramMemory(100 * MIB, 10 * MIB, MIB)

    plain = plan_memory(REQUEST, OWN, programs)
    for checkpoint_bytes in (MIB // 2, 3 * MIB, 9 * MIB):
        request = dataclasses.replace(REQUEST, checkpoint_bytes=checkpoint_bytes, blocks_per_checkpoint=4)
        plan = plan_memory(request, OWN, programs)
        assert plan.num_checkpoints == plan.num_blocks // 4 > 0
        assert plan.fits and plan.most_blocks == plan.num_blocks < plain.num_blocks
        assert not dataclasses.replace(plan, num_blocks=plan.num_blocks + 1).fits
        assert (f"{plan.num_checkpoints} checkpoints of it", plan.num_checkpoints * checkpoint_bytes) in plan.rows()
        assert sum(num_bytes for _, num_bytes in plan.rows()) == plan.total_bytes
