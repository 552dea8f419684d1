"""Whole models, compiled by libtpu for TPUs that are not here: they fit, in place, without a copy of pool or weights,
and their devices exchange two sums a layer and a few numbers a row.

Every test compiles in a process of its own, for jax must not take this one for a TPU's. `make aot` installs libtpu.
A program takes half a minute: of each kind one is long, and the others are deep.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.record import PAGE, RESULTS
from benchmarks.tpu_programs import (
    Exchange,
    ProgramResult,
    compile_cells,
    exchange_table,
    library,
    plan_model,
    recorded_steps,
)
from jpaged.device.aot.deployment import Collective, CompiledSum
from jpaged.models.config import ModelConfig
from jpaged.models.layer_kinds import count_state_bytes, get_states
from jpaged.plan.cost import StepLoad
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.plan.step_times import layer_matrices

MIB = 1 << 20


def long(*cases: Any) -> list[Any]:
    return [_marked(case, pytest.mark.long) for case in cases]


def deep(*cases: Any) -> list[Any]:
    return [_marked(case, pytest.mark.deep) for case in cases]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


def check(result: ProgramResult, work_mib: int, padding: float = 0.01) -> None:
    """One program of a step: what it is given and nothing else, the pool in place, bounded working memory.

    Args:
        padding: the share that is more than the numbers that it is given.
    """
    report = result.report
    assert report is not None, result.out_of_memory
    assert result.made == ()
    assert report.temp_bytes < work_mib * MIB
    is_step = not result.program.startswith("sample")
    assert report.alias_bytes == (result.pool_bytes if is_step else 0)
    # Padding of what the program is given: an arrangement that TPU tiles do not fit costs from 5 % up.
    given = result.weight_bytes + (result.pool_bytes if is_step else 0)
    assert report.argument_bytes < (1 + padding) * given + MIB


def check_exchanges(result: ProgramResult) -> None:
    """Two sums a layer, one for the embedding, and for a sample some numbers a row; none between blocks or one device.

    A sum is an array: an all-reduce into which the compiler combined two counts as two.
    """
    rows = int(result.program.partition("[")[2].partition("]")[0].partition(",")[0])
    if result.num_devices == 1 or result.program.startswith(("copy", "swap")):
        assert result.collectives == ()
    elif result.program.startswith("forward"):
        config = KNOWN_MODELS[result.cell.partition("@")[0]].config
        assert {one.opcode for one in result.collectives} == {"all-reduce"}
        sums = [(one.loop_trips, dims) for one in result.collectives for dims in one.dims]
        of_layer, outside = ((config.num_layers,), (rows, config.hidden_size)), ((), (rows, config.hidden_size))
        assert sorted(sums) == sorted([outside, of_layer, of_layer])
    else:
        check_sample(result, rows, has_top="top" in result.program)


def check_sample(result: ProgramResult, rows: int, *, has_top: bool) -> None:
    """A number a row for each sum; a search, of top-k and of top-p, has 8 of 15 numbers; the best 32 of each device."""
    sums = [one for one in result.collectives if one.opcode == "all-reduce"]
    gathered = [one for one in result.collectives if one.opcode != "all-reduce"]
    assert all(math.prod(dims) == rows * (15 if one.loop_trips else 1) for one in sums for dims in one.dims)
    assert sorted(len(one.dims) for one in sums if one.loop_trips) == [1, 1]
    assert {one.loop_trips for one in sums} == {(), (8,)}
    assert sum(len(one.dims) for one in sums if not one.loop_trips) <= 12
    assert {one.opcode for one in gathered} == ({"all-gather"} if has_top else set())
    best = [dims for one in gathered for dims in one.dims]
    assert [math.prod(dims) for dims in best] == [rows * 32 * result.num_devices] * len(best)
    assert len(best) == (2 if has_top else 0)  # values and tokens
    num_bytes = sum(one.num_bytes * math.prod(trips or 0 for trips in one.loop_trips) for one in result.collectives)
    assert num_bytes < rows * 4 * (260 + (64 * result.num_devices if has_top else 0))


# Every generation, number of devices and model; and each kind of sample once for one device, for some, and for hosts.
@pytest.mark.parametrize(
    ("cell", "num_devices"),
    long(
        ("llama-3-8b@v6e:1x1#forward[64],forward[512],sample[64],decode[64],copy[8]", 1),
        ("llama-3-8b@v6e:2x2#forward[64],sample[64, top],copy[8]", 4),
        ("llama-3-8b@v5e:2x4#forward[64],sample[64]", 8),
        ("llama-3-8b@tpu7x:1x1x1#forward[64]", 2),
        ("mixtral-8x7b@v6e:2x2#forward[64]", 4),
        ("opt-13b@v5p:2x2x2#forward[64]", 8),
    )
    + deep(("llama-3-8b@tpu7x:2x2x2#forward[64],sample[64]", 16), ("llama-3-70b@v6e:2x4#forward[64]", 8)),
)
def test_a_model_is_served_in_place(cell: str, num_devices: int) -> None:
    results = compile_cells(cell)
    assert len(results) == cell.count("[")
    for result in results:
        assert (result.num_devices, result.backend) == (num_devices, "pallas-tpu")
        # A sample has its logits three times: as they are, divided by the temperature, and with what is forbidden.
        is_sample = result.program.startswith(("sample", "decode"))
        check(result, work_mib=256 if "512" in result.program else 112 if is_sample else 80)
        check_exchanges(result)


@pytest.mark.parametrize(
    ("cell", "num_contexts", "num_sharing"),
    long(
        ("llama-3-8b@v6e:2x2*2#forward[64],decode[64],copy[8],swap_out[8],swap_in[8]", 2, 2),
        ("llama-3-8b@v6e:2x2*4#forward[512]", 4, 1),
    )
    + deep(
        ("llama-3-8b@v5e:2x4*2#forward[64],forward[512],sample[64]", 2, 4),
        ("llama-3-8b@v5p:2x2x1*2#forward[512]", 2, 2),
        ("llama-3-8b@tpu7x:2x2x1*2#forward[64]", 2, 4),
        ("gpt-oss-20b@v6e:2x2*2#forward[64]", 2, 2),
        ("deepseek-v2-lite@v6e:2x2*2#forward[64]", 2, 2),
    ),
)
def test_contexts_in_parts_are_served_in_place(cell: str, num_contexts: int, num_sharing: int) -> None:
    """Each device has its slots of the pool; of a layer log-sum-exps are gathered and outputs summed, besides."""
    results = compile_cells(cell)
    assert len(results) == cell.count("[")
    for result in results:
        assert (result.num_devices, result.backend) == (num_contexts * num_sharing, "pallas-tpu")
        if result.program.startswith("swap"):  # beside the pool there are blocks that it reads or makes
            assert (result.collectives, result.made) == ((), ())
            continue
        has_experts = not result.cell.startswith("llama")  # whose widths a device pads
        check(result, work_mib=256 if "512" in result.program else 112, padding=0.025 if has_experts else 0.01)
        if result.program.startswith("forward"):
            config = KNOWN_MODELS[result.cell.partition("@")[0]].config
            check_merges(result, config, num_contexts, num_sharing)
        elif result.program.startswith("copy"):
            assert result.collectives == ()


def check_merges(result: ProgramResult, config: ModelConfig, num_contexts: int, num_sharing: int) -> None:
    """The exchanges of the model's own parts, and two more in each layer, whose numbers are as many as documented."""
    rows, heads = int(result.program.partition("[")[2].partition("]")[0]), config.num_heads // num_sharing
    numbers = Counter[tuple[str, int]]()
    for one in result.collectives:
        for dims in one.dims:
            numbers[one.opcode, math.prod(dims)] += math.prod(trips or 0 for trips in one.loop_trips)
    assert numbers["all-gather", num_contexts * rows * heads] == config.num_layers
    sums_of_model, outputs = rows * config.hidden_size, rows * heads * (config.value_dim or config.head_dim)
    wanted = Counter({("all-reduce", outputs): config.num_layers})
    if num_sharing > 1:
        wanted["all-reduce", sums_of_model] += 2 * config.num_layers + 1
    assert {key: num for key, num in numbers.items() if key[0] == "all-reduce"} == wanted
    assert {opcode for opcode, _ in numbers} == {"all-gather", "all-reduce"}


@pytest.mark.parametrize("parallel", long("dp") + deep("ep"))
def test_devices_with_their_own_sequences_exchange_rows_with_experts(parallel: str) -> None:
    """Two messages of any length a layer, and the routes of all rows, instead of two sums of all rows."""
    forward, copy = compile_cells(f"deepseek-v2-lite+{parallel}@v6e:2x2#forward[64],copy[8]")
    check(forward, work_mib=24, padding=0.01)
    check(copy, work_mib=1, padding=0.01)
    assert copy.collectives == (), "a block is copied where it is"
    config = KNOWN_MODELS["deepseek-v2-lite"].config
    num_sparse, states = sum(kind.is_sparse for kind in config.layer_kinds), 64 * config.hidden_size
    numbers = Counter[tuple[str, int]]()
    for one in forward.collectives:
        for dims in one.dims:
            numbers[one.opcode, math.prod(dims)] += math.prod(trips or 0 for trips in one.loop_trips)
    check_recorded(Exchange.count(forward))
    if parallel == "ep":
        assert numbers == {("all-reduce", states): 2 * config.num_layers + 1}
        return
    assert config.mixture is not None
    assert numbers["ragged-all-to-all", states] == 2 * num_sparse
    assert numbers["all-gather", 64 * 2 * config.mixture.routing.top_k] == num_sparse
    assert sum(num for (_, size), num in numbers.items() if size == states) <= 2 * num_sparse + 5
    assert numbers["all-reduce", states] + numbers["all-gather", states] <= 5, "none of them in a layer with experts"
    assert forward.num_blocks * forward.num_devices > 3.5 * 16_796, "blocks of a pool that every device repeats"


@pytest.mark.long
def test_experts_move_in_place_one_after_another() -> None:
    """Each device has room for the new experts of one layer in addition, and receives no more than those."""
    load, *moves = compile_cells("deepseek-v2-lite+eplb@v6e:2x2#expert_load[1],exchange_experts[1],exchange_experts[2]")
    config, num_physical = KNOWN_MODELS["deepseek-v2-lite"].config, 68
    assert [(one.opcode, one.dims) for one in load.collectives] == [
        ("all-reduce", ((1, config.num_layers, num_physical),))
    ]
    assert config.mixture is not None
    expert_bytes = 2 * config.hidden_size * config.mixture.width
    num_sparse = sum(kind.is_sparse for kind in config.layer_kinds)
    for move in moves:
        assert move.report is not None and move.made == ()
        assert move.report.alias_bytes == num_sparse * (num_physical // 4) * expert_bytes
        assert move.report.temp_bytes <= (num_physical // 4 + 3) * expert_bytes
        (message,) = move.collectives
        assert (message.opcode, message.num_bytes) == ("ragged-all-to-all", expert_bytes)
        assert message.loop_trips == (num_physical // 4,)


@pytest.mark.deep
def test_counting_the_load_of_experts_adds_no_message() -> None:
    """A step with balanced experts has the messages of one without; results have room for each expert of a row."""
    config = KNOWN_MODELS["deepseek-v2-lite"].config
    assert config.mixture is not None
    plain, balanced = (
        compile_cells(f"deepseek-v2-lite+{parallel}@v6e:2x2#forward[64]")[0] for parallel in ("dp", "eplb")
    )
    assert balanced.report is not None and balanced.made == ()
    assert balanced.report.temp_bytes < 24 * MIB
    assert balanced.report.alias_bytes == balanced.pool_bytes + 4 * config.num_layers * 128, "the load, in whole tiles"
    messages = [[(one.opcode, one.loop_trips) for one in step.collectives] for step in (plain, balanced)]
    assert messages[0] == messages[1]
    rooms = [
        [
            math.prod(dims) // config.hidden_size
            for one in step.collectives
            if "ragged" in one.opcode
            for dims in one.dims
        ]
        for step in (plain, balanced)
    ]
    assert rooms == [[64, 64], [64, 64 * config.mixture.routing.top_k // 4]]


EDITING = "edited[64],count[256],tell[64, logprobs],tell[8, all-logprobs],tell[64, hidden]"
COUNTS_BYTES = 65 * (2 * 128256 + 4)
"""The counts of 64 rows and slot 0, for all tokens of the vocabulary."""


@pytest.mark.parametrize(
    ("topology", "num_devices", "programs"),
    long(("v6e:2x2", 4, EDITING), ("v5e:1x1", 1, "edited[64],count[256]"))
    + deep(("v6e:1x1", 1, EDITING), ("tpu7x:1x1x1", 2, EDITING), ("v5e:2x4", 8, EDITING)),
)
def test_edits_and_tells_are_of_each_devices_own_tokens(topology: str, num_devices: int, programs: str) -> None:
    """Counts are updated in place, and what is exchanged is as little as a sample's."""
    results = compile_cells(f"llama-3-8b@{topology}#{programs}")
    assert len(results) == programs.count("[")
    for result in results:
        report, (kind, _, sizes) = result.report, result.program.partition("[")
        assert report is not None and result.made == ()
        assert result.num_devices == num_devices
        counts = COUNTS_BYTES // num_devices if kind in ("edited", "count") else 0
        assert counts <= report.alias_bytes <= counts * 5 / 4  # a TPU has 8 rows or 16 in a tile
        # Logits as they are and as they are changed; a TPU7x keeps those of the branches, too.
        logits_bytes = 64 * 128256 * 4 // num_devices
        assert report.temp_bytes < (5 * logits_bytes + 16 * MIB if kind == "edited" else logits_bytes + 4 * MIB)
        check_told(result, int(sizes.partition(",")[0].strip("]")))


def check_told(result: ProgramResult, rows: int) -> None:
    """Numbers of rows: one, a search's fifteen, one for each token that is asked of; and the best 32 of each device."""
    if result.num_devices == 1 or result.program.startswith("count") or "hidden" in result.program:
        assert result.collectives == ()
        return
    most = {1, 15} if result.program.startswith("edited") else {1, 33} if ", logprobs" in result.program else {1}
    sums = [math.prod(dims) for one in result.collectives if one.opcode == "all-reduce" for dims in one.dims]
    assert {size / rows for size in sums} == most
    gathered = [one for one in result.collectives if one.opcode != "all-reduce"]
    assert {one.opcode for one in gathered} <= {"all-gather"}
    best = [math.prod(dims) for one in gathered for dims in one.dims]
    assert best == ([] if "all-logprobs" in result.program else [rows * 32 * result.num_devices] * 2)


# One of every architecture that is not above, whose widths divide badly: heads, embeddings, routers and parts of gates
# that are no multiple of 128 numbers. Experts 192 or 352 wide a device are padded to 256 and 384.
ARCHITECTURES = {
    "one-chip": ("gpt2-xl@v6e:1x1", "falcon-7b@v6e:1x1", "phi-3-mini-4k@v6e:1x1", "qwen2.5-0.5b@v6e:1x1"),
    "wide": ("gpt-neox-20b@v6e:2x2", "starcoder2-15b@v6e:2x2", "llama-2-7b@v6e:2x2", "mistral-7b-v0.3@v6e:1x1"),
    "kinds-of-layers": ("gemma-2-2b@v6e:1x1", "gemma-3-1b@v6e:1x1", "qwen3-0.6b@v6e:1x1", "gpt-oss-20b@v6e:2x2"),
    "shared-keys": ("gemma-3n-e4b@v6e:1x1", "gemma-4-e2b@v6e:1x1"),
    "variants": ("smollm3-3b@v6e:1x1", "olmo-2-7b@v6e:1x1", "command-r7b@v6e:1x1", "granite-3.1-1b-a400m@v6e:1x1"),
    "experts": ("qwen1.5-moe-a2.7b@v6e:2x2", "deepseek-v2-lite@v6e:2x2", "qwen3-30b-a3b@v6e:2x2"),
}


@pytest.mark.parametrize(
    "which", long("kinds-of-layers") + deep("one-chip", "wide", "shared-keys", "variants", "experts")
)
def test_every_architecture_is_served_in_place(which: str) -> None:
    results = compile_cells(*(f"{model}#forward[64]" for model in ARCHITECTURES[which]))
    assert len(results) == len(ARCHITECTURES[which])
    for result in results:
        assert result.backend == "pallas-tpu", result.cell
        check(result, work_mib=80, padding=0.12 if which == "experts" else 0.01)


RECURRENT = ("lfm2-350m@v6e:1x1", "lfm2-8b-a1b@v6e:1x1")
KIMI_LINEAR = "kimi-linear-48b-a3b@v6e:2x4"


@pytest.mark.long
def test_recurrent_state_is_updated_in_place() -> None:
    """The states of 64 rows, of padding and of checkpoints are aliased next to the pool; a TPU pads slots to eights."""
    for result in compile_cells(*(f"{model}#forward[64]" for model in RECURRENT)):
        config = KNOWN_MODELS[result.cell.partition("@")[0]].config
        assert result.report is not None, result.out_of_memory
        assert (result.made, result.backend) == ((), "pallas-tpu")
        state_bytes = count_state_bytes(config.layer_kinds, jnp.dtype("bfloat16"))
        num_slots = 65 + result.num_blocks // 4  # a checkpoint for 128 tokens
        assert result.report.alias_bytes == result.pool_bytes + -(-num_slots // 8) * 8 * state_bytes
        assert result.report.temp_bytes < 80 * MIB


@pytest.mark.deep
def test_kimi_linear_shares_its_states_and_repeats_its_latents() -> None:
    """On eight chips; a TPU pads the slots of windows to eights. A layer has two sums."""
    (result,) = compile_cells(f"{KIMI_LINEAR}#forward[64]")
    config = KNOWN_MODELS["kimi-linear-48b-a3b"].config
    assert result.report is not None, result.out_of_memory
    assert (result.made, result.backend, result.num_devices) == ((), "pallas-tpu", 8)
    num_layers, (windows, matrices) = get_states(config.layer_kinds)
    num_slots = 65 + result.num_blocks * 32 // 512  # a checkpoint for 512 tokens
    bytes_of = [num_layers * states.num_bytes(np.dtype(jnp.bfloat16)) // 8 for states in (windows, matrices)]
    state_bytes = -(-num_slots // 8) * 8 * bytes_of[0] + num_slots * bytes_of[1]
    assert result.report.alias_bytes == result.pool_bytes + state_bytes
    assert result.report.temp_bytes < 80 * MIB
    sums = [
        (math.prod(trips or 0 for trips in one.loop_trips), dims) for one in result.collectives for dims in one.dims
    ]
    assert {one.opcode for one in result.collectives} == {"all-reduce"}
    assert {dims for _, dims in sums} == {(64, config.hidden_size)}
    assert sum(trips for trips, _ in sums) == 2 * config.num_layers + 1


def test_no_architecture_is_left_out() -> None:
    cells = [cell for cells in (*ARCHITECTURES.values(), RECURRENT, (KIMI_LINEAR,)) for cell in cells]
    names = [cell.partition("@")[0] for cell in cells]
    compiled = {KNOWN_MODELS[name].config.architecture for name in (*names, "opt-13b", "mixtral-8x7b")}
    too_large = {"DeepseekV3ForCausalLM"}  # larger than eight chips, and a DeepSeek-V2 but for how experts are chosen
    # Some of the states of a step's rows in a layer, 48 MiB each for Granite 4.0 H 350M.
    copies = {"GraniteMoeHybridForCausalLM", "Qwen3_5ForCausalLM"}
    as_others = {
        "Qwen3_5MoeForCausalLM",
        "NemotronHForCausalLM",
        "Mamba2ForCausalLM",
    }  # their layers and experts are those of others
    assert compiled | too_large | copies | as_others == {model.config.architecture for model in KNOWN_MODELS.values()}


@pytest.mark.parametrize(
    ("cells", "products"),
    long((("int8-int4@v5e:1x1", "int8-rows@v5p:1x1x1"), ("s8*s8=s32",)))
    + deep(
        (("int8-rows@v6e:1x1", "int8-rows@tpu7x:1x1x1"), ("s8*s8=s32",)),
        (("fp8-rows@tpu7x:1x1x1",), ("f8e4m3fn*f8e4m3fn=f32",)),
    ),
    ids=["integers", "integers-newer", "fp8"],
)
def test_quantized_matrices_are_multiplied_as_they_lie(cells: tuple[str, ...], products: tuple[str, ...]) -> None:
    results = compile_cells(*(f"llama-3-8b+{cell}#forward[64]" for cell in cells))
    assert len(results) == len(cells)
    for result in results:
        check(result, work_mib=80)
        assert set(products) <= set(result.products), result.cell


# Of each layer both matrices of 8 adapters of rank 16, in bfloat16: queries, keys and values; output; gates and ups;
# downs. Of four devices each has all of A where columns are split, and all of B where rows are.
ADAPTERS_OF_LAYER = 8 * 16 * 2 * (3 * 4096 + 6144 + 4096 + 4096 + 2 * 4096 + 28672 + 14336 + 4096)
OF_FOUR = 8 * 16 * 2 * (3 * 4096 + 6144 // 4 + 4096 // 4 + 4096 + 2 * 4096 + 28672 // 4 + 14336 // 4 + 4096)


@pytest.mark.parametrize(
    ("cell", "of_layer"),
    long(
        ("llama-3-8b+int8+lora@v6e:1x1#forward[64]", ADAPTERS_OF_LAYER),
        ("llama-3-8b+lora@v6e:2x2#forward[64],load_adapter[1]", OF_FOUR),
    )
    + deep(("llama-3-8b+lora@v6e:1x1#forward[64],forward[512],decode[64],load_adapter[1]", ADAPTERS_OF_LAYER)),
    ids=["int8", "four-devices", "bfloat16"],
)
def test_adapters_are_read_once_a_step_and_written_in_place(cell: str, of_layer: int) -> None:
    results = compile_cells(cell)
    assert len(results) == cell.count("[")
    for result in results:
        num_bytes = 32 * of_layer
        assert result.adapter_bytes == num_bytes
        if result.program.startswith("load_adapter"):
            report = result.report
            assert report is not None and result.made == () and result.collectives == ()
            assert report.alias_bytes == num_bytes
            assert report.argument_bytes < num_bytes * 9 / 8 + MIB, "one adapter comes, as large as a slot"
            assert report.temp_bytes < MIB
            continue
        # 8 MiB without adapters; what they add is sums of ranks and what B makes of them.
        check(result, work_mib=24 if "512" in result.program else 12)
        assert result.adapter_bytes_read == num_bytes, "all slots', and each once"
        if result.num_devices > 1:
            check_adapted_exchanges(result)


def check_adapted_exchanges(result: ProgramResult) -> None:
    """As many exchanges as without adapters: sums of ranks of matrices whose rows are split go with the layer's own."""
    exchanged = sorted((one.loop_trips, *sorted(one.dims)) for one in result.collectives)
    assert {one.opcode for one in result.collectives} == {"all-reduce"}
    of_layer = ((32,), (64, 8, 16), (64, 4096))
    assert exchanged == [((), (64, 4096)), of_layer, of_layer]


# Products of groups are the kernel's, which reads a layer's matrices where they lie.
@pytest.mark.parametrize(
    "cell",
    long("llama-3-8b+int4@v6e:1x1", "llama-3-8b+fp8-groups@v6e:1x1")
    + deep("llama-3-8b+int4@v5p:1x1x1", "gpt-oss-20b+mxfp4-experts@v6e:1x1"),
)
def test_groups_of_numbers_are_read_where_they_lie(cell: str) -> None:
    (result,) = compile_cells(f"{cell}#forward[64]")
    check(result, work_mib=80)


@pytest.mark.deep
def test_attention_of_xla_is_in_place_too() -> None:
    (result,) = compile_cells("llama-3-8b@v6e:1x1/xla#forward[64]")
    assert result.backend == "xla"
    check(result, work_mib=80)


@pytest.mark.long
def test_a_model_that_is_too_large_is_refused_by_the_compiler() -> None:
    (result,) = compile_cells("llama-3-70b@v5e:2x4#forward[64]")
    assert result.report is None
    assert result.out_of_memory is not None
    assert "RESOURCE_EXHAUSTED" in result.out_of_memory
    assert "15.75G" in result.out_of_memory


def test_without_libtpu_the_error_names_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"libtpu\.so is missing: run `make aot`"):
        library()


RECORDED: list[dict[str, Any]] = json.loads((RESULTS / "tpu_exchange.json").read_text())["programs"]
"""The counts of recorded steps, which may fall."""


PARTS = {
    ("llama-3-70b@v6e:2x4", "forward[64]"): 2,
    ("llama-3-70b@v5p:2x2x2", "forward[64]"): 2,
    ("llama-3-70b@tpu7x:2x2x2", "forward[64]"): 2,
    ("llama-3-8b@tpu7x:1x1x1", "forward[512]"): 2,
    ("llama-3-70b@v6e:2x4", "forward[256]"): 2,
    ("llama-3-70b@v6e:2x4", "forward[512]"): 4,
    ("llama-3-70b@v6e:2x4", "forward[2048]"): 2 * 4,
}
"""Parts of the hidden states that are summed one after another, unless combined; other steps have one."""


def test_a_plan_exposes_as_much_of_sums_as_its_compiled_steps() -> None:
    """Those that overlap with products; other steps of the model are estimated."""
    config, steps = KNOWN_MODELS["llama-3-70b"].config, 0
    for result in recorded_steps():
        if not any(one.is_async for one in result.collectives) or not result.cell.startswith("llama-3-70b@"):
            continue
        counted = Exchange.count(result)
        num_tokens = int(result.program.removeprefix("forward[").removesuffix("]"))
        sums = CompiledSum.from_collectives(result.collectives)
        model = dataclasses.replace(plan_model(result), overlaps_sums=True)
        times = dataclasses.replace(model, compiled_sums={num_tokens: sums}).step_times()
        assert times.parts(StepLoad.decoding(num_tokens, 1024)).sums_s == pytest.approx(counted.exposed_s)
        estimated = model.step_times()
        assert estimated.matrices == layer_matrices(config)
        assert times.parts(StepLoad.decoding(96, 1024)).sums_s == estimated.parts(StepLoad.decoding(96, 1024)).sums_s
        steps += 1
    assert steps >= 4


def test_exchanges_are_counted_over_each_link_with_the_trips_of_loops() -> None:
    sums = (
        Collective("all-reduce", ((64, 4096),), 524_288, (), "a"),
        Collective("all-reduce", ((64, 4096),), 524_288, (32,), "b"),
        Collective("all-gather", ((64, 4096),), 524_288, (32,), "c", is_async=True, hidden_cycles=10**6),
        Collective("reduce-scatter", ((8, 4096),), 65_536, (32,), "d", is_async=True, hidden_cycles=10**6),
    )
    cell = ("llama-3-8b@v6e:2x4", "forward[64]", 8, "pallas-tpu", 1000, 2 * 10**9, 0, 10**9)
    result = ProgramResult(*cell, (), 0, (), sums, None, None, 0.0, 0.0, 0.0)
    found = Exchange.count(result)
    assert found.num_collectives == {"all-gather": 32, "all-reduce": 33, "reduce-scatter": 32}
    ring = 524_288 * 7 // 8  # of a reduce-scatter or an all-gather
    assert (found.link_bytes, found.exposed_bytes) == (2 * 33 * ring + 64 * ring, 2 * 33 * ring)
    assert 0 < found.exposed_share < 1
    # 459 kB at 200 GB/s and 8 hops take 10.3 us; 8750 cycles of 1.75 GHz hide 5 of them.
    half = dataclasses.replace(result, collectives=(dataclasses.replace(sums[2], hidden_cycles=8750),))
    seconds = ring / 200e9 + 8e-6
    assert Exchange.count(half).exposed_s == pytest.approx(32 * (seconds - 5e-6))
    assert Exchange.count(half).exposed_bytes == round(32 * ring * (1 - 5e-6 / seconds))
    none = Exchange.count(dataclasses.replace(result, collectives=()))
    assert (none.link_bytes, none.exposed_s, none.exposed_share) == (0, 0.0, 0.0)
    unknown = dataclasses.replace(sums[1], loop_trips=(None,))
    with pytest.raises(ValueError, match="b of llama-3-8b@v6e:2x4 is in a loop of unknown trip count"):
        Exchange.count(dataclasses.replace(result, collectives=(unknown,)))


def test_recorded_exchanges_are_two_sums_a_layer_and_one_of_the_embedding() -> None:
    """Sums of large steps have parts, and most of their bytes are hidden."""
    found = [Exchange.count(result) for result in recorded_steps()]
    assert [{**dataclasses.asdict(one), "exposed_share": one.exposed_share} for one in found] == RECORDED
    assert exchange_table(RECORDED) in PAGE.read_text()
    assert {"llama-3-70b@v6e:2x4", "llama-3-8b@v6e:2x4"} < {one.cell for one in found}
    of_rows, of_sums = (
        next(one for one in found if one.cell == f"deepseek-v2-lite+{parallel}@v6e:2x2") for parallel in ("dp", "ep")
    )
    assert 2.5 * of_rows.link_bytes < of_sums.link_bytes, "rows go to the devices of their experts alone"
    for one in found:
        name, _, parallel = one.cell.partition("@")[0].partition("+")
        config, devices = KNOWN_MODELS[name].config, one.num_devices
        if parallel == "dp":
            assert one.num_collectives["ragged-all-to-all"] == 2 * sum(kind.is_sparse for kind in config.layer_kinds)
            continue
        tokens, parts = int(one.program[8:-1]), PARTS.get((one.cell, one.program), 1)
        num_sums = 2 * config.num_layers + 1
        itemsize = 4 if one.cell.startswith("opt") else 2  # OPT's sums are in float32
        assert set(one.num_collectives) == {"all-reduce"}
        assert num_sums <= one.num_collectives["all-reduce"] <= 2 * parts * config.num_layers + 1
        assert one.link_bytes <= num_sums * tokens * config.hidden_size * itemsize * 2 * (devices - 1) // devices
        assert one.exposed_bytes <= one.link_bytes * (1 if parts == 1 else 0.55)


def test_sums_of_llama_70b_are_mostly_hidden() -> None:
    """On v6e:2x4 at most 10 % of decode steps is exposed, and at most 12 % of the default prefill step."""
    exposed = {one["program"]: one["exposed_share"] for one in RECORDED if one["cell"] == "llama-3-70b@v6e:2x4"}
    assert max(exposed["forward[64]"], exposed["forward[256]"]) <= 0.10
    assert exposed["forward[2048]"] <= 0.12


@pytest.mark.parametrize(
    "cell",
    [
        *long("llama-3-8b@v6e:2x4#forward[64]", "llama-3-70b@v6e:2x4#forward[64]"),
        *deep(
            "llama-3-70b@v6e:2x4#forward[512]",
            "llama-3-70b@v6e:2x4#forward[2048]",
            "llama-3-70b@v6e:2x4#forward[256]",
            "llama-3-8b@tpu7x:1x1x1#forward[512]",
        ),
    ],
)
def test_programs_exchange_no_more_than_recorded(cell: str) -> None:
    (result,) = compile_cells(cell)
    check_recorded(Exchange.count(result))


def check_recorded(found: Exchange) -> None:
    """Fail if a program exchanges or exposes more than its record."""
    (recorded,) = (one for one in RECORDED if (one["cell"], one["program"]) == (found.cell, found.program))
    assert found.link_bytes <= recorded["link_bytes"]
    assert found.exposed_bytes <= recorded["exposed_bytes"]
    assert found.exposed_s <= recorded["exposed_s"] * (1 + 1e-9)
