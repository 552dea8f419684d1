"""What the assembler made of a kernel is read rightly, and a kernel that got worse is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.aot_gpu import cuda_kernels
from benchmarks.aot_gpu.compile_case import calls, host_waits, pool_writes
from benchmarks.aot_gpu.copies import made_of_weights
from benchmarks.aot_gpu.gate import regressions
from benchmarks.aot_gpu.judge import judge
from benchmarks.aot_gpu.models import MODEL_CASES
from benchmarks.aot_gpu.sass import kernels
from benchmarks.record import RESULTS
from jpaged.device.compilation.compile import program_specs
from jpaged.engine.executor import BucketTable
from jpaged.kernels.kv_layout import MAX_NUMBER
from jpaged.kernels.matmul.triton.grouped import STORED

# As Mosaic and nvdisasm print them: an outer loop, an inner one with two products, a third product behind both.
OUTPUT = """
.maxntid 128, 1, 1
ptxas info    : Used 154 registers, used 2 barriers, 1 bytes smem
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   SYNCS.EXCH.64 URZ, [UR40+0x14808], UR8 ;
        /*0020*/                   SYNCS.EXCH.64 URZ, [UR40+0x14800], UR8 ;
.L_x_7:
        /*0030*/              @!P1 BRA `(.L_x_1) ;
.L_x_8:
.L_x_9:
        /*0040*/                   LDS.64 R2, [R4] ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT ;
        /*0060*/                   F2FP.BF16.F32.PACK_AB R4, R5, R4 ;
        /*0070*/                   MUFU.EX2 R4, R4 ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88 ;
        /*0090*/              @!P1 BRA `(.L_x_9) ;
        /*00a0*/                   LDL R4, [R1] ;
        /*00b0*/                   BRA `(.L_x_7) ;
.L_x_1:
        /*00c0*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT ;
        /*00d0*/                   NOP ;
"""


LOOP = {"instructions": 5, "products": 3, "conversions": 1, "powers": 1, "shared_accesses": 1, "barriers": 0}


def test_the_loop_over_keys_is_found_and_counted() -> None:
    (kernel,) = kernels(OUTPUT)
    assert kernel == {
        "instructions": 13,
        "tensor_products": 3,
        "local_accesses": 1,
        "shared_bytes": 0x14810,
        "loops": [LOOP],
        "registers": 154,
        "threads": 128,
        "blocks_per_processor": 2,
    }
    assert kernels("") == []


# As XLA and nvdisasm print Triton's: two loops, the second left and entered again; a kernel without products.
TRITON_OUTPUT = """
001: kCustomKernel [source | sink] paged_attention grid: [8, 128, 1] threads: [128, 1, 1]  shared_memory: 57344 bytes
.reqntid 128, 1, 1
ptxas info    : Used 255 registers, used 1 barriers, 440 bytes cmem[0]
.L_x_1:
        /*0000*/                   HMMA.16816.F32.BF16 R88, R4, R8, RZ ;
        /*0010*/                   LDSM.16.M88.4 R12, [R4] ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   HMMA.16816.F32.BF16 R88, R4, R8, RZ ;
.L_x_3:
        /*0040*/                   HMMA.1688.F32.TF32 R88, R4, R8, RZ ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   BRA `(.L_x_3) ;
002: kCustomKernel [source | sink] paged_attention_merge grid: [8, 16, 1] threads: [128, 1, 1]  shared_memory: 64 bytes
.reqntid 128, 1, 1
ptxas info    : Used 64 registers, used 1 barriers, 416 bytes cmem[0]
        /*0000*/                   EXIT ;
"""

LOOPS_OF_TRITON = {"products": 1 / 8, "shared_accesses": 1}, {"products": 3 / 16, "shared_accesses": 0}


@pytest.mark.parametrize(("gpu", "blocks"), [("a100", 2), ("l4", 1), ("h200", 2)])
def test_kernels_of_triton_are_counted_as_their_gpu_runs_them(gpu: str, blocks: int) -> None:
    kernel, merge = kernels(TRITON_OUTPUT, gpu)
    assert (kernel["registers"], kernel["threads"], kernel["shared_bytes"]) == (255, 128, 57_344)
    assert kernel["blocks_per_processor"] == blocks
    # Products of 1/8 and 1/16; that with fewer instructions a product comes first.
    second, first = (LOOP | {"instructions": 2, "conversions": 0, "powers": 0} | found for found in LOOPS_OF_TRITON)
    assert kernel["loops"] == [first, second]
    assert kernel["tensor_products"] == 3
    assert (merge["registers"], merge["blocks_per_processor"], merge["loops"]) == (64, 8, [])
    assert regressions([kernel, merge], [kernel, merge]) == []
    (failure,) = regressions([kernel, merge | {"registers": 80, "blocks_per_processor": 6}], [kernel, merge])
    assert failure == "kernel 1: 24 warps fit a processor; 32 are recorded"


@pytest.mark.parametrize(("registers", "blocks"), [(128, 2), (224, 2), (255, 2), (160, 2)])
def test_shared_memory_bounds_how_many_blocks_fit(registers: int, blocks: int) -> None:
    (kernel,) = kernels(OUTPUT.replace("154", str(registers)))
    assert kernel["blocks_per_processor"] == blocks


def test_registers_bound_how_many_blocks_fit() -> None:
    (kernel,) = kernels(OUTPUT.replace("Used 154", "Used 168").replace("maxntid 128", "maxntid 384"))
    assert kernel["blocks_per_processor"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_accesses": 2}, "local_accesses 2; 1 are recorded"),
        ({"shared_bytes": 100_000}, "shared_bytes 100000; 83984 are recorded"),
        ({"blocks_per_processor": 1}, "4 warps fit a processor; 8 are recorded"),
        (
            {"loops": [LOOP | {"instructions": 6}]},
            "2.00 instructions for a product of 64 x 64 x 16 in loop 0; 1.67 are recorded",
        ),
        ({"loops": [LOOP | {"conversions": 2}]}, "0.67 conversions for"),
        ({"loops": []}, "no loop with products of the tensor core"),
    ],
)
def test_what_got_worse_is_named(change: dict[str, Any], message: str) -> None:
    before = kernels(OUTPUT)
    (failure,) = regressions([before[0] | change], before)
    assert failure.startswith(f"kernel 0: {message}")


def test_what_is_as_good_passes() -> None:
    before = kernels(OUTPUT)
    twice = {name: number * 2 for name, number in LOOP.items()}
    assert regressions([before[0] | {"loops": [twice], "registers": 160}], before) == []
    assert regressions(before, []) == []


def test_a_kernel_that_cannot_be_read_is_an_error() -> None:
    (failure,) = regressions([], kernels(OUTPUT))
    assert failure == "0 kernels could be read; 1 are recorded: is nvdisasm there?"


PROGRAM = """
%fused_scatter (param_0: s8[8,16,4,32], param_1: bf16[64,2,32]) -> s8[8,16,4,32] {
  %param_0 = s8[8,16,4,32]{3,2,1,0} parameter(0)
  ROOT %scatter.1 = s8[8,16,4,32]{3,2,1,0} scatter(%param_0, %concatenate.1, %bitcast.1)
}

ENTRY %main (pool.1: s8[8,16,4,32]) -> s8[8,16,4,32] {
  %pool.1 = s8[8,16,4,32]{3,2,1,0} parameter(0)
  %first = s8[8,16,4,32]{3,2,1,0} fusion(%pool.1, %rest.1), kind=kInput, calls=%fused_scatter
  %second = s8[8,16,4,32]{3,2,1,0} scatter(%first, %a, %b)
  %bitcast.2 = s8[8,16,2,64]{3,2,1,0} bitcast(%second)
  %other = s8[8,16,4]{2,1,0} fusion(%second), kind=kLoop
  ROOT %tuple = (s8[8,16,4,32]{3,2,1,0}) tuple(%second)
}
"""


def test_writes_of_the_pool_are_counted_once_each() -> None:
    assert pool_writes(PROGRAM, (8, 16, 4, 32)) == 2


# A step's text: a product that reads a weight, a fusion that pads one, a look-up, and a copy of one of eight experts.
STEP = """HloModule jit_step

%pad (param_0: bf16[2000,1024]) -> bf16[2048,1024] {
  %param_0 = bf16[2000,1024]{1,0} parameter(0)
  ROOT %pad.1 = bf16[2048,1024]{1,0} pad(%param_0, %zero), padding=0_48x0_0
}

%gemm (param_1: bf16[64,2000], param_2: bf16[2000,1024]) -> f32[64,1024] {
  ROOT %dot.1 = f32[64,1024]{1,0} dot(%param_1, %param_2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%one (param_3: bf16[8,1024,1024]) -> bf16[1,1024,1024] {
  ROOT %slice = bf16[1,1024,1024]{2,1,0} dynamic-slice(%param_3, %i, %zero, %zero), dynamic_slice_sizes={1,1024,1024}
}

ENTRY %main (w: bf16[2000,1024], experts: bf16[8,1024,1024], pool: bf16[2048,1024]) -> f32[64,1024] {
  %w = bf16[2000,1024]{1,0} parameter(0)
  %experts = bf16[8,1024,1024]{2,1,0} parameter(1)
  %pool = bf16[2048,1024]{1,0} parameter(2)
  %named = bf16[1024,2000]{0,1} bitcast(%w)
  %padded = bf16[2048,1024]{1,0} fusion(%named), kind=kLoop, calls=%pad
  %rows = bf16[64,1024]{1,0} gather(%w, %ids), slice_sizes={1,1024}
  %written = bf16[2048,1024]{1,0} scatter(%pool, %ids, %rows), to_apply=%add
  %expert = bf16[1,1024,1024]{2,1,0} fusion(%experts, %i), kind=kLoop, calls=%one
  ROOT %product = f32[64,1024]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
}
"""


def test_arrays_that_are_made_of_weights_are_found() -> None:
    assert made_of_weights(STEP, (2048, 1024)) == [
        "fusion padded makes (2048, 1024)",
        "fusion expert makes (1, 1024, 1024)",
    ]


CALLS = """
  %a = bf16[8,64]{1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/attend/mpmd_map"}
  %b = f32[1,8,64]{2,1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton",
  %c = f32[8,64]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/product/pallas_call"}
  %d = f32[8,64]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/product/pallas_call"}
  %e = (f32[8,64]{1,0}, s8[9]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul$f8"
"""  # noqa: E501


def test_a_step_without_its_kernels_fails() -> None:
    found = calls(CALLS)
    assert found == {"attend": 1, "__gpu$xla.gpu.triton": 1, "product": 2, "__cublas$lt$matmul$f8": 1}
    limits = {"pool_bytes": 0, "max_temp_bytes": 0, "num_kernels": 0, "num_writes": 0}
    of_nothing = {"alias_bytes": 0, "temp_bytes": 0, "big_copies": [], "pool_writes": 0, "kernels": 0, "host_waits": []}
    step = {**of_nothing, "spilled_bytes": 0, "calls": found}
    assert judge(step | {"limits": limits | {"calls": {"product": 2, "attend": 1}}}, "") == []
    (failure,) = judge(step | {"limits": limits | {"calls": {"product": 3}}}, "")
    assert failure.startswith("3 calls of product were to be there")


def test_a_case_asks_for_the_kernels_of_its_model() -> None:
    wanted = {(case.model, case.numbers): case.calls() for case in MODEL_CASES if case.program == "forward"}
    assert wanted["mixtral-8x7b", "bfloat16"] == {"paged_attention": 2, "grouped_product": 6}
    assert wanted["llama-3-8b", "int8"] == {"paged_attention": 2}
    assert wanted["llama-3-8b", "fp8"] == {"paged_attention": 2, "__cublas$lt$matmul$f8": 8}
    assert wanted["qwen3-30b-a3b", "int4"] == {"paged_attention": 2, "grouped_product": 10}


BRANCHES = """
%region_9 (arg: (s32[], u32[64])) -> pred[] {
  ROOT %compare.1 = pred[] compare(%get-tuple-element.1, %constant.1), direction=LT
}

ENTRY %main (words: s32[3136]) -> s32[64] {
  %while.2 = (s32[], u32[64]{0}) while(%tuple.1), condition=%region_9, body=%region_8, backend_config={"known_trip_count":{"n":"8"}}
  %while.3 = (s32[], f32[64,8]{1,0}) while(%tuple.2), condition=%region_6, body=%region_4, metadata={op_name="jit(f)/while"}
  %cond.13 = (s32[64]{0}) conditional(%p, %a, %b), true_computation=%region_11, false_computation=%region_12
  ROOT %cond.14 = s32[64]{0} conditional(%q, %a, %b), true_computation=%region_13, false_computation=%region_14
}
"""  # noqa: E501


def test_branches_and_loops_that_the_host_waits_for_are_found() -> None:
    assert host_waits(BRANCHES) == ["while while.3", "conditional cond.13", "conditional cond.14"]
    assert host_waits(PROGRAM) == []
    nothing = {"alias_bytes": 0, "temp_bytes": 0, "big_copies": [], "pool_writes": 0, "kernels": 0, "spilled_bytes": 0}
    limits = {"pool_bytes": 0, "max_temp_bytes": 0, "num_kernels": 0, "num_writes": 0, "calls": {}}
    (failure,) = judge(nothing | {"limits": limits, "host_waits": host_waits(BRANCHES), "calls": {}}, "")
    assert failure == "the host would wait for the device: while while.3, conditional cond.13, conditional cond.14"


def test_every_variant_of_a_sample_is_compiled_for_gpus() -> None:
    cases = [case for case in MODEL_CASES if case.program in ("sample", "edited")]
    specs = program_specs(BucketTable((64,), (64,)), (8,), has_host_blocks=False, has_branches=False)
    assert {str(case.spec()) for case in cases} == {str(spec) for spec in specs if spec.kind in ("sample", "edited")}
    assert {case.gpu for case in cases} >= {"a100", "h100", "h200"}


def test_no_recorded_sample_makes_the_host_wait() -> None:
    recorded = json.loads((RESULTS / "aot_gpu.json").read_text())["cases"]
    names = [case.name for case in MODEL_CASES if case.program in ("sample", "edited")]
    assert {name: recorded[name]["host_waits"] for name in names} == {name: [] for name in names}


def test_float16_and_two_devices_are_compiled_for_gpus() -> None:
    cases = [case for case in MODEL_CASES if case.model == "llama-3-8b" and case.numbers == "bfloat16"]
    for gpu in ("a100", "h100"):
        found = {(case.dtype, case.num_parts, str(case.spec())) for case in cases if case.gpu == gpu}
        assert found >= {("float16", 1, name) for name in ("forward[64]", "sample[64]", "edited[64]")}
        samples = ("sample[64, greedy]", "sample[64, random]", "sample[64]", "sample[64, logprobs]")
        assert found >= {("bfloat16", 2, name) for name in ("forward[64]", "edited[64]", *samples)}


# As nvcc has ptxas print it, for two architectures.
NVCC_OUTPUT = """
ptxas info    : Compiling entry function '_ZN6jpaged41_GLOBAL__N__f50d_9_kernel_cu_f53311merge_partsENS0_8CudaCallE' for 'sm_80'
ptxas info    : Function properties for _ZN6jpaged41_GLOBAL__N__f50d_9_kernel_cu_f53311merge_partsENS0_8CudaCallE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 44 registers, used 0 barriers, 528 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN6jpaged41_GLOBAL__N__f50d_9_kernel_cu_f53312attend_itemsINS0_4BF16ELNS_6NumberE4ELi128ELi128EEEvNS0_8CudaCallE' for 'sm_80'
ptxas info    : Function properties for _ZN6jpaged41_GLOBAL__N__f50d_9_kernel_cu_f53312attend_itemsINS0_4BF16ELNS_6NumberE4ELi128ELi128EEEvNS0_8CudaCallE
    8 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 235 registers, used 0 barriers, 8 bytes cumulative stack size, 32768 bytes smem, 528 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN6jpaged41_GLOBAL__N__f50d_9_kernel_cu_f53312attend_itemsINS0_3F32ELNS_6NumberE0ELi64ELi64EEEvNS0_8CudaCallE' for 'sm_90'
ptxas info    : Function properties for _ZN6jpaged41_GLOBAL__N__f50d_9_kernel_cu_f53312attend_itemsINS0_3F32ELNS_6NumberE0ELi64ELi64EEEvNS0_8CudaCallE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 148 registers, used 0 barriers, 32768 bytes smem
"""  # noqa: E501


def test_kernels_of_cuda_are_read_and_held_to_their_record() -> None:
    found = cuda_kernels.read_report(NVCC_OUTPUT)
    merge = {"registers": 44, "spilled_bytes": 0, "shared_bytes": 0}
    attention = {"registers": 235, "spilled_bytes": 20, "shared_bytes": 32_768}
    assert found["80"] == {"merge": merge, "bfloat16-float8_e4m3fn-128": attention}
    assert list(found["90"]) == ["float32-32bits-64"]
    assert cuda_kernels.regressions(found, found) == []
    worse = {"80": {"merge": merge | {"spilled_bytes": 4}}}
    assert cuda_kernels.regressions(worse, found) == [
        "sm_80 merge: spilled_bytes 4; 0 are recorded",
        "sm_80 bfloat16-float8_e4m3fn-128 was not compiled",
        "sm_90 float32-32bits-64 was not compiled",
    ]


def test_products_of_cuda_are_read_by_type_and_rows() -> None:
    symbol = "_ZN6jpaged9_kernel_cu_f53313multiply_tileINS0_3F16ELNS0_6StoredE{}ELi{}EEEvNS0_11ProductCallE"
    entry = (
        "ptxas info    : Compiling entry function '{0}' for 'sm_80'\nptxas info    : Function properties for {0}\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 100 registers, used 1 barriers, 16384 bytes smem\n"
    )
    found = cuda_kernels.read_report("".join(entry.format(symbol.format(*kind)) for kind in ((0, 1), (3, 2))))
    kernel = {"registers": 100, "spilled_bytes": 0, "shared_bytes": 16_384}
    assert found == {"80": {"product-float16-plain-16": kernel, "product-float16-int4-32": kernel}}


_DTYPES = ("bfloat16", "float16", "float32")


def test_every_kernel_of_cuda_is_recorded_for_every_gpu() -> None:
    """One for each type of the pool, with float32 queries for each of its sizes, and for four sizes of heads.

    Products have one for each type of rows and numbers, and two sizes of tiles.
    """
    recorded = cuda_kernels.recorded()
    assert set(recorded) == set(cuda_kernels.ARCHITECTURES)
    names = {
        *(f"{q}-{kv}-{dim}" for q in ("bfloat16", "float16") for kv in (q, *MAX_NUMBER) for dim in (64, 128, 256, 576)),
        *(f"float32-{size}bits-{dim}" for size in (8, 16, 32) for dim in (64, 128, 256, 576)),
        "merge",
        *(f"product-{dtype}-{kind or 'plain'}-{num}" for dtype in _DTYPES for kind in STORED for num in (16, 32)),
    }
    for kernels_of_gpu in recorded.values():
        assert set(kernels_of_gpu) == names
        assert all(kernel["registers"] <= 255 for kernel in kernels_of_gpu.values())
        assert all(kernel["shared_bytes"] <= 48 << 10 for kernel in kernels_of_gpu.values())
        assert all(kernel["spilled_bytes"] <= 32 for kernel in kernels_of_gpu.values())
