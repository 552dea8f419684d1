"""A server on devices whose memory is stated: what fits, what does not, and what is compiled to know."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.config import EngineConfig, SchedulerOptions, StartupOptions
from jpaged.device.aot import deployment as planned
from jpaged.device.aot.deployment import Models, PlannedDeployment, StartEstimate, compile_deployment
from jpaged.device.compilation.aot_bundle import AOTBundle
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.program_registry import NUM_BACKGROUND_THREADS, NUM_THREADS
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import build_mesh
from jpaged.errors import InvalidArgument
from jpaged.models.eagle import mtp_config
from jpaged.models.hf_config import from_hf, head_from_hf
from jpaged.models.model import Model
from tests.device import tiny_model
from tests.models.eagle_heads import HeadSizes
from tests.models.tiny import tiny_case

MIB = 1 << 20


def deployment(
    hbm_bytes: int,
    *,
    all_programs: bool = False,
    num_devices: int = 1,
    save: Path | None = None,
    scheduler: SchedulerOptions = tiny_model.OPTIONS.scheduler,
    draft: Model | None = None,
    model: Model | None = None,
    **cache: Any,
) -> PlannedDeployment:
    cache = {"num_blocks": None, "memory_utilization": 1.0, "swap_space": 0.0, **cache}
    options: EngineConfig = dataclasses.replace(
        tiny_model.OPTIONS, cache=dataclasses.replace(tiny_model.OPTIONS.cache, **cache), scheduler=scheduler
    )
    mesh = build_mesh(jax.devices()[:num_devices])
    return compile_deployment(
        Models(model or tiny_model.model(), draft),
        options,
        mesh,
        hbm_bytes,
        all_programs=all_programs,
        progress=tiny_model.quiet,
        save=save,
    )


def test_a_start_waits_for_its_first_programs_and_for_the_slowest_of_them() -> None:
    forwards = [ProgramSpec("forward", size) for size in (8, 16, 512)]
    samples = [ProgramSpec("sample", size) for size in (8, 64)]
    timed = {forwards[0]: 2.0, forwards[2]: 4.0, samples[1]: 100.0}
    found = StartEstimate.of([*forwards, *samples], [forwards[2], samples[1]], timed)
    assert found is not None
    assert (found.num_first, found.num_later, found.num_timed) == (2, 3, 3)
    assert found.first_s == max(104.0 / NUM_THREADS, 100.0)
    assert found.later_s == max((2.0 + 3.0 + 100.0) / NUM_BACKGROUND_THREADS, 100.0)
    everything = StartEstimate.of(forwards, forwards, {samples[0]: 1.5})
    assert everything == StartEstimate(3, max(4.5 / NUM_THREADS, 1.5), 0, 0.0, 1)
    assert StartEstimate.of(forwards, forwards, {}) is None


@pytest.mark.long
def test_the_pool_takes_what_is_left_to_the_last_block() -> None:
    found = deployment(64 * MIB)
    memory = found.memory
    assert found.fits
    assert memory.free_bytes is not None
    assert memory.used_bytes <= 64 * MIB
    assert memory.free_bytes < 2 * memory.request.bytes_per_block
    assert {program.name for program in found.programs} == {
        *("forward[16]", "forward[8]", "sample[8, top]", "copy[512]"),
        *("edited[8]", "count[256]", "tell[64, logprobs]", "tell[8, all-logprobs]", "tell[64, hidden]"),
    }
    assert found.num_programs == 2 + 3 + 3 + 1 + 5


@pytest.mark.long
def test_every_program_is_compiled_where_that_is_asked() -> None:
    found = deployment(64 * MIB, all_programs=True)
    assert len(found.programs) == found.num_programs == 14
    assert found.memory.free_bytes is not None
    assert found.memory.free_bytes >= 0


@pytest.mark.long
def test_a_chosen_pool_that_is_too_large_is_a_result_with_one_that_fits() -> None:
    found = deployment(64 * MIB, num_blocks=100_000)
    assert not found.fits
    assert found.problem is not None
    assert "num_blocks: 100000 blocks do not fit: 1 of 0.06 GiB" in found.problem
    assert f"lower num_blocks to {found.most_blocks}" in found.problem
    assert deployment(64 * MIB, num_blocks=found.most_blocks).fits
    assert not deployment(64 * MIB, num_blocks=found.most_blocks + 1).fits


@pytest.mark.long
def test_saved_programs_are_all_there_and_say_what_they_are_for(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    found = deployment(64 * MIB, save=folder)
    saved = AOTBundle.open(folder)
    assert set(saved.names) == {program.name for program in found.programs}
    assert len(saved.names) == found.num_programs
    assert saved.target.num_blocks == found.memory.num_blocks
    with pytest.raises(InvalidArgument, match=r"^save: .* is not empty"):
        deployment(64 * MIB, save=folder)


@pytest.mark.long
def test_a_server_starts_with_what_a_plan_saved_and_compiles_nothing(tmp_path: Path) -> None:
    found = deployment(64 * MIB, save=tmp_path / "programs")
    startup = StartupOptions(wait_for_all_programs=True, compiled=str(tmp_path / "programs"))
    cache = dataclasses.replace(tiny_model.OPTIONS.cache, num_blocks=None, swap_space=0.0)
    options = dataclasses.replace(tiny_model.OPTIONS, cache=cache, startup=startup)
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), options)
    executor.warm_up(tiny_model.quiet)
    assert {program.origin for program in executor._programs.ready.values()} == {"saved"}
    assert executor.memory_plan.num_blocks == found.memory.num_blocks
    assert executor.memory_plan.programs is not None
    executor.shutdown()


@pytest.mark.long
def test_a_head_is_planned_and_saved_with_its_model(tmp_path: Path) -> None:
    """Its keys, and the states that it keeps of each block, are in the pool's size."""
    config = HeadSizes(97, 32, inner=48, num_heads=4, num_kv_heads=2, head_dim=16, target_hidden_size=32).config(
        eagle_aux_hidden_state_layer_ids=[0, 1, 3], draft_vocab_size=50
    )
    head = Model(head_from_hf(config).stored_as([]), tiny_model.model().dtype)
    speculation = {"method": "eagle3", "model": "head", "num_speculative_tokens": 1}
    scheduler = EngineConfig.load({"speculative_config": speculation}).scheduler
    scheduler = dataclasses.replace(scheduler, max_num_seqs=4, max_num_batched_tokens=16)
    found = deployment(64 * MIB, scheduler=scheduler, draft=head, save=tmp_path / "programs")
    names = {program.name for program in found.programs}
    assert {"speculate[8]", "draft[16]", "draft_copy[8]", "forward[16]"} <= names
    assert not any(name.startswith("decode") for name in names)
    plain = deployment(64 * MIB).memory.request
    state_bytes, key_bytes = 4 * 32, 8 * 2 * 2 * 16 * 4
    assert found.memory.request.bytes_per_block == plain.bytes_per_block + key_bytes + state_bytes
    head_bytes = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(head.abstract_params("loop")))
    padding = found.memory.request.weight_bytes - plain.weight_bytes - head_bytes
    assert 0 <= padding < 4 * 97 * 32, "the model's embedding is there once"

    startup = StartupOptions(wait_for_all_programs=True, compiled=str(tmp_path / "programs"))
    cache = dataclasses.replace(tiny_model.OPTIONS.cache, num_blocks=None, swap_space=0.0)
    options = dataclasses.replace(tiny_model.OPTIONS, cache=cache, startup=startup, scheduler=scheduler)
    params = head.init_params(jax.random.key(1), "loop")
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), options, draft=(head, params))
    executor.warm_up(tiny_model.quiet)
    assert {program.origin for program in executor._programs.ready.values()} == {"saved"}
    executor.shutdown()


@pytest.mark.long
def test_an_mtp_layer_is_planned_with_its_model() -> None:
    """The embedding and the output matrix are there once."""
    config = dataclasses.replace(tiny_model.CONFIG, architecture="MiMoForCausalLM", attention_bias=True)
    model = Model(config, tiny_model.model().dtype)
    mtp = Model(mtp_config(config), model.dtype)
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    scheduler = EngineConfig.load({"speculative_config": speculation}).scheduler
    scheduler = dataclasses.replace(scheduler, max_num_seqs=4, max_num_batched_tokens=16)
    found = deployment(64 * MIB, scheduler=scheduler, model=model, draft=mtp)
    names = {program.name for program in found.programs}
    assert {"speculate[8]", "draft[16]", "forward[16]"} <= names
    assert any(name.startswith("draft_copy") for name in names)
    plain = deployment(64 * MIB, model=model).memory.request
    state_bytes, key_bytes = 4 * 32, 8 * 2 * 2 * 16 * 4
    assert found.memory.request.bytes_per_block == plain.bytes_per_block + key_bytes + state_bytes
    layer_bytes = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(mtp.abstract_params("loop")))
    padding = found.memory.request.weight_bytes - plain.weight_bytes - layer_bytes
    assert 0 <= padding < 4 * 97 * 32


@pytest.mark.long
def test_what_does_not_fit_is_not_saved(tmp_path: Path) -> None:
    assert not deployment(64 * MIB, save=tmp_path / "programs", num_blocks=100_000).fits
    assert not (tmp_path / "programs").exists()


def test_programs_that_no_server_would_load_are_not_compiled(tmp_path: Path) -> None:
    stateful = Model(from_hf(tiny_case("lfm2").config), np.dtype(np.float32))
    with pytest.raises(
        InvalidArgument, match=r"--save: .* Lfm2ForCausalLM has recurrent state, whose programs no server"
    ):
        deployment(64 * MIB, save=tmp_path / "programs", model=stateful)


def test_weights_that_are_too_large_are_known_before_anything_is_compiled() -> None:
    found = deployment(MIB // 16)
    assert (found.fits, found.programs, found.most_blocks) == (False, (), 0)
    assert found.problem is not None
    assert found.problem.startswith("tensor_parallel_size: the weights alone are ")


@pytest.mark.long
def test_two_devices_hold_half_of_each_block() -> None:
    one, two = (deployment(64 * MIB, num_devices=count).memory.request for count in (1, 2))
    assert two.bytes_per_block * 2 == one.bytes_per_block


@pytest.mark.long
def test_what_devices_exchange_is_read_off_the_compiled_step() -> None:
    """XLA for CPUs sums the float32 that the programs ask for; one device exchanges nothing."""
    assert deployment(64 * MIB, num_devices=2).number_bytes == 4
    assert deployment(64 * MIB).number_bytes is None


@pytest.mark.long
def test_sizes_that_nobody_chose_are_the_platforms() -> None:
    scheduler = dataclasses.replace(tiny_model.OPTIONS.scheduler, max_num_seqs=None, max_num_batched_tokens=12)
    found = deployment(64 * MIB, block_size=None, scheduler=scheduler)
    sizes = found.geometry
    assert (sizes.block_size, sizes.max_num_seqs, sizes.max_num_batched_tokens) == (16, 12, 12)


def test_what_memory_has_no_part_in_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="tensor_parallel_size: 3 does not divide 4 query heads"):
        deployment(64 * MIB, num_devices=3)


@pytest.mark.parametrize(("platform", "outside_bytes"), [("gpu", 5 * MIB), ("tpu", None), ("cpu", None)])
def test_the_memory_of_a_gpu_is_the_share_of_jaxs_allocator(platform: str, outside_bytes: int | None) -> None:
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    memory = planned._memory_of_one_device(mesh, 95 * MIB)
    assert (memory.total_bytes, memory.outside_bytes) == (95 * MIB, outside_bytes)


def test_numbers_of_all_reduces_are_weighted_by_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    reduces = [
        SimpleNamespace(opcode="all-reduce", loop_trips=(2, None), num_bytes=12, dims=((2,), (1,))),
        SimpleNamespace(opcode="all-reduce", loop_trips=(), num_bytes=16, dims=((2, 2),)),
        SimpleNamespace(opcode="all-gather", loop_trips=(), num_bytes=1000, dims=((1,),)),
    ]
    monkeypatch.setattr(planned, "collectives", lambda executable: reduces[executable:])
    programs: list[Any] = [
        SimpleNamespace(spec=ProgramSpec("forward", size), executable=executable)
        for size, executable in ((8, 2), (64, 0), (16, 1))
    ]
    assert planned._number_bytes(programs) == (2 * 12 + 16) / (2 * 3 + 4)
    assert planned._number_bytes([programs[2]]) == 16 / 4
    assert planned._number_bytes([programs[0]]) is None and planned._number_bytes([]) is None
