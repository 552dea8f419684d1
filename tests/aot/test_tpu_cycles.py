"""The TPU kernels take the cycles that were recorded, and the counter of cycles counts a program made by hand."""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.record import PAGE
from benchmarks.tpu_cycles import experts, recorded
from benchmarks.tpu_cycles.cases import TOPOLOGIES, Case, few, gate, narrow, table
from benchmarks.tpu_cycles.counting import CountingFailed, counted, version
from benchmarks.tpu_cycles.experts import ExpertsCase, experts_table
from benchmarks.tpu_cycles.machine import LostTrack, Machine, Memory, Run
from benchmarks.tpu_cycles.program import Program, UnreadableProgram, parse
from benchmarks.tpu_cycles.regions import regions
from benchmarks.tpu_cycles.table import page_tables
from jpaged.errors import InvalidArgument

PINNED = Path(os.environ.get("TPU_LIBRARY_PATH", Path(sys.prefix) / "aot/libtpu/libtpu.so"))
NEWEST = Path(sys.prefix) / "aot-newest/libtpu/libtpu.so"


FEW, ALL = [*few()], [*gate()]
NARROW = [case for case in narrow() if case not in ALL]


@pytest.mark.parametrize(
    ("libtpu", "cases"),
    [
        pytest.param(PINNED, FEW, marks=pytest.mark.long, id="pinned"),
        pytest.param(PINNED, [case for case in ALL if case not in FEW], marks=pytest.mark.deep, id="pinned-rest"),
        pytest.param(PINNED, NARROW, marks=pytest.mark.deep, id="pinned-narrow"),
        pytest.param(NEWEST, ALL, marks=pytest.mark.deep, id="newest"),
    ],
)
def test_kernels_take_the_recorded_cycles(libtpu: Path, cases: list[Case]) -> None:
    assert libtpu.exists(), f"{libtpu} is missing: make aot"
    cycles, ours = recorded.read(), version(libtpu)
    assert version(PINNED) in cycles, "nothing was recorded with the pinned libtpu: " + _command(PINNED)
    now = list(counted(cases, libtpu))
    if ours in cycles:
        found = list(recorded.differences(cycles[ours], now, recorded.MARGIN, says_better=True))
    else:
        pinned = cycles[version(PINNED)]
        found = list(recorded.differences(pinned, now, recorded.NEW_MARGIN, says_better=False))
    assert not found, "\n".join((f"with libtpu {ours}:", *found, "if that is meant, record it: " + _command(libtpu)))


MOST_OF_BOUND = {"bfloat16": 1.1, "int8": 1.1, "fp8": 1.5, "int4-128": 2.1, "mxfp4": 2.2}
"""Cycles of the kernel of experts, of those that the memory or the products take, by the type of the weights."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(experts.few(), marks=pytest.mark.long, id="few"),
        pytest.param([case for case in experts.gate() if case not in experts.few()], marks=pytest.mark.deep, id="rest"),
    ],
)
def test_experts_take_the_recorded_cycles(cases: list[ExpertsCase]) -> None:
    assert PINNED.exists(), f"{PINNED} is missing: make aot"
    before = recorded.read(recorded.EXPERTS)[version(PINNED)]
    found = list(recorded.differences(before, [*counted(cases, PINNED)], recorded.MARGIN, says_better=True))
    command = "python -m benchmarks.tpu_cycles --experts --record"
    assert not found, "\n".join((*found, f"if that is meant, record it: {command}"))


def test_the_page_has_the_record_of_experts_close_to_their_bounds() -> None:
    numbers = recorded.read(recorded.EXPERTS)[min(recorded.read(recorded.EXPERTS))]
    assert set(numbers) == {str(case) for case in experts.gate()}
    assert f"<!-- experts: begin -->\n{experts_table(numbers)}\n<!-- experts: end -->" in PAGE.read_text()
    for one in numbers.values():
        bound = max(one["memory_cycles"], one["product_cycles"])
        assert bound <= one["kernel_cycles"] <= MOST_OF_BOUND[one["dtype"]] * bound, one["case"]


def test_a_case_of_experts_is_read_as_it_is_written() -> None:
    for case in experts.gate():
        assert ExpertsCase.parse(str(case)) == case
    for text in ("v6e/experts/8", "v4/experts/8of8x2x64x96/int8/8", "v6e/experts/8of8x2x64x96/int4/8"):
        with pytest.raises(InvalidArgument, match="case"):
            ExpertsCase.parse(text)


def _command(libtpu: Path) -> str:
    return f"python -m benchmarks.tpu_cycles --record{'' if libtpu == PINNED else f' --gate --libtpu {libtpu}'}"


def test_the_page_has_the_tables_of_the_record() -> None:
    versions = sorted(recorded.read())
    tables = page_tables(recorded.read(recorded.BEFORE), recorded.read(), versions[0])
    assert f"<!-- cycles: begin -->\n{tables}\n<!-- cycles: end -->" in PAGE.read_text()
    assert all(
        f"| {case.replace('/decode/', ' ')} |" in tables for case in recorded.read()[versions[0]] if "decode" in case
    )


def test_the_gate_meets_every_pair() -> None:
    decodes = [case for case in gate() if case.kind == "decode"]
    rows = [(case.generation, case.num_kv_heads, case.kv_dtype, case.block_size) for case in decodes]
    for a, b in combinations(range(4), 2):
        levels = len({row[a] for row in rows}), len({row[b] for row in rows})
        assert len(Counter((row[a], row[b]) for row in rows)) == levels[0] * levels[1]
    assert [len({row[i] for row in rows}) for i in range(4)] == [4, 4, 3, 3]
    assert {case.generation for case in gate() if case.kind == "prefill"} == set(TOPOLOGIES)
    assert set(gate()) | set(narrow()) <= set(table())
    assert Counter((case.generation, case.kind) for case in FEW) == dict.fromkeys(
        ((generation, kind) for generation in TOPOLOGIES for kind in ("decode", "prefill")), 1
    )
    assert {case.num_kv_heads for case in FEW if case.kind == "decode"} == {1, 2, 4, 8}
    assert {case.kv_dtype for case in FEW} == {case.kv_dtype for case in gate()}


def test_a_case_is_read_as_it_is_written() -> None:
    for case in table():
        assert Case.parse(str(case)) == case
    for text in ("v6e/decode", "v6e/decode/8x4/bfloat16/64", "v4/decode/8x4x128/bfloat16/64", "v6e/x/8x4x128/int8/64"):
        with pytest.raises(InvalidArgument, match="case"):
            Case.parse(text)


# A kernel that fetches operand 1 in chunks of 1024 bytes, as many as operand 0 says, and multiplies each; where a chunk
# is the last, an integer that came into scalar memory by a DMA decides whether two more bundles run.
HEAD = """\
%s1_s0 = inlined_call_operand.<no memory space> [shape: s32[], index: 0, kind: input, shape index: {}] ;; \
%s2_s1 = inlined_call_operand.hbm [shape: bf16[64,512], index: 1, kind: input, shape index: {}, may-alias: {1,3}] ;; \
%s3_s2 = inlined_call_operand.vmem [shape: s32[8], index: 2, kind: input, shape index: {}]
%s4_s3 = sshll.u32 %s3_s2, 4 ;; %s5_s3 = int_to_ptr.vmem [resolvable:$true] %s4_s3 ;; %s6_s4 = smov 0
%90 = dma.vmem_to_smem /*vmem=*/%s5_s3, /*size_in_granules=*/16, /*smem=*/[#allocation5], \
/*dst_syncflagno=*/[#allocation9]
%91 = dma.done.wait [#allocation9], 16 ;; %s7_s5 = smov 0
> %s8_s4 = sphi %s6_s4, %s11_s4 ;; %s9_s6 = sshll.u32 %s8_s4, 5 # 1
> %s10_s7 = scalar_lea.hbm %s2_s1, %s9_s6 ;; %s11_s4 = sadd.s32 1, %s8_s4 ;; %s12_s8 = sadd.s32 4294967295, %s1_s0
> %92 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s10_s7, /*size_in_granules=*/32, /*vmem=*/[#allocation2], \
/*dst_syncflagno=*/[#allocation3 + $0x1]
> %p13_p0 = scmp.ge.s32.totalorder %s11_s4, %s1_s0
> %93 = sbr.rel (!%p13_p0) target = $region1

> %94 = dma.done.wait [#allocation3 + $0x1], 32 ;; %s14_s5 = sphi %s7_s5, %s19_s5 # 2
> %s15_s9 = sld [smem:[#allocation5 + $0x2]] ;; %p16_p1 = scmp.ne.s32.totalorder %s14_s5, %s12_s8
> %p17_p2 = scmp.le.s32.totalorder %s15_s9, 0
> %p18_p3 = por %p17_p2, %p16_p1
> %95 = sbr.rel (%p18_p3) target = $region3

> %96 = vst [vmem:[#allocation2] sm:$0xff] %v1_v0 # 4
> %97 = vst [vmem:[#allocation2 + $0x8] sm:$0xff] %v1_v0
"""
PRODUCT = "> %98 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v0\n"
TAIL = """\
> %s19_s5 = sadd.s32 1, %s14_s5
> %p20_p4 = scmp.lt.s32.totalorder %s19_s5, %s1_s0
> %99 = sbr.rel (%p20_p4) target = $region2

%100 = vsyncmov [#allocation3] # 5
"""


def _program(num_products: int = 3, head: str = HEAD) -> Program:
    """The kernel as libtpu would write it, its products with their first bundle's mark, and the use of its units."""
    lines = (head + PRODUCT.rstrip() + " # 3\n" + (num_products - 1) * PRODUCT + TAIL).splitlines()
    text, uses = "= control target key start\nLB: loop body\n= control target key end\n\n", []
    for i, line in enumerate(lines):
        body, _, region = line.removeprefix("> ").partition(" # ")
        address = f"{i:#x}" if i else "0"
        text += f"{address:>6} {'LB' if region else '  '}: {'> ' if line.startswith('>') else ''}{{ {body} }}"
        text += f" /* Start region {region} */\n" if region else "\n"
        uses.append(f"{int('vmatmul' in line)} {int('vst' in line)} 0 0")
    head = "== CAPACITY:\nMXU, VSTORE, VLOAD:FILL, VSTORE:SPILL\n 2 1 3 1\n== UTILIZATION:\n"
    return parse("handmade", text, head + "\n".join(uses) + "\n")


def _run(program: Program, num_chunks: int, *, last: int = 0, memory: Memory | None = None) -> Run:
    operands = {0: np.array(num_chunks, np.int32), 2: np.array([7, 7, last, 7, 7, 7, 7, 7], np.int32)}
    return Machine(program, operands, 1, memory or Memory(1e9, 0)).run()


def _cycles(program: Program, run: Run) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for region, block, times in zip(regions(program), program.blocks, run.counts, strict=True):
        sums[region] += times * (block.end - block.begin)
    return dict(sums)


def test_a_program_made_by_hand_is_counted() -> None:
    program = _program()
    run = _run(program, 5)
    assert (run.pool_bytes, run.num_fetches, run.num_turns) == (5 * 1024, 5, 5)
    assert _cycles(program, run) == {"issue": 4 + 5 * 6, "wait": 5 * 6, "compute": 5 * 7, "other": 1}
    assert run.num_cycles == sum(_cycles(program, run).values())
    assert _run(program, 5, last=1).num_cycles == run.num_cycles + 2


def test_a_wait_takes_until_the_memory_has_delivered() -> None:
    slow = _run(_program(), 5, memory=Memory(8, 100))
    # The integers are asked for in cycle 2 and are there 100 later; 3 bundles behind the first fetch starts; 5 chunks
    # take 128 cycles each. Behind the last come the rest of the wait's bundles, the products and the end.
    assert slow.num_cycles == 2 + 100 + 3 + 100 + 5 * 128 + 6 + 7 + 1
    assert slow.num_stalled > 0
    assert _run(_program(), 5).num_stalled == 0


def test_a_planted_regression_is_told_with_its_case() -> None:
    def numbers(num_products: int) -> dict[str, Any]:
        program = _program(num_products)
        compute = _cycles(program, _run(program, 8))["compute"]
        return {"case": "made/by/hand", "compute_per_mib": float(compute), "issue_per_block": 6.0, "num_spills": 0}

    before = {"made/by/hand": numbers(100)}
    assert list(recorded.differences(before, [numbers(102)], 0.03, says_better=True)) == []
    worse = list(recorded.differences(before, [numbers(110)], 0.03, says_better=False))
    assert worse == ["made/by/hand: compute_per_mib is worse: 832 before, 912 now"]
    assert list(recorded.differences(before, [numbers(90)], 0.03, says_better=False)) == []
    better = list(recorded.differences(before, [numbers(90)], 0.03, says_better=True))
    assert better == ["made/by/hand: compute_per_mib is better: 832 before, 752 now"]
    spilled = [numbers(100) | {"num_spills": 9}]
    assert list(recorded.differences(before, spilled, 0.03, says_better=True)) == [
        "made/by/hand: num_spills is worse: 0 before, 9 now"
    ]
    assert list(recorded.differences({}, spilled, 0.03, says_better=True)) == ["made/by/hand: never recorded"]


def test_what_is_not_understood_is_an_error() -> None:
    with pytest.raises(UnreadableProgram, match=r"the jump `sbr\.ind %s1` is not understood"):
        _program(head=HEAD.replace("sbr.rel (!%p13_p0) target = $region1", "sbr.ind %s1"))
    with pytest.raises(UnreadableProgram, match="no bundle"):
        parse("empty", "", "== UTILIZATION:\n")
    unknown = _program(head=HEAD.replace("sld [smem:[#allocation5 + $0x2]]", "spop.sfrf %42"))
    with pytest.raises(LostTrack, match="from bundle 0xa: a branch, predicate or address is not known"):
        _run(unknown, 5)
    starved = _program(head=HEAD.replace("[#allocation3 + $0x1], 32", "[#allocation3 + $0x1], 33"))
    with pytest.raises(LostTrack, match="a wait for 32 bytes more than were started waits for is not known"):
        _run(starved, 1)


def test_a_libtpu_that_is_not_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "libtpu.so").write_text("")
    with pytest.raises(CountingFailed, match=r"v5e/decode/8x4x128/bfloat16/64 was not counted with .*libtpu\.so"):
        list(counted(list(gate())[:1], tmp_path / "libtpu.so"))
