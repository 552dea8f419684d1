"""Times of steps and moves, against arithmetic done by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine.executor import BlockMoves, Move
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE, Hardware
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import Mixture
from jpaged.models.sharding import with_dp_attention, with_parallel_experts
from jpaged.plan.cost import Assumptions, ModelShape, StepLoad
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.plan.simulator.deployment import MODELS, SimulatedDeployment, SimulatedModel, deploy
from jpaged.plan.simulator.simulation import SimulatedExecutor, simulate
from jpaged.plan.simulator.trace import TraceRequest
from jpaged.plan.step_times import PlannedModel, PlannedStepTimes, RowMessages, find_target, mean_devices
from jpaged.testing.fake_steps import VirtualClock

CONFIG = replace(
    MODELS["llama-2-7b"].config, num_layers=10, num_heads=2, num_kv_heads=1, head_dim=50, max_position_embeddings=128
)
MODEL = SimulatedModel("toy", CONFIG, 1e9)
DEVICE = Hardware("toy", 8e9, 8_000_000_000, 1e12, 1e14, 1e10, 1e10)
EXACT = Assumptions(1.0, 1.0, 1.0, 0.001, 1e-5, 1e-6, 0.0, 1.0)


def toy(num_devices: int = 1, assumptions: Assumptions = EXACT) -> SimulatedDeployment:
    return deploy(MODEL, DEVICE, num_devices=num_devices, num_kv_slots=1600, assumptions=assumptions)


def test_a_small_step_takes_the_time_of_its_bytes():
    # Weights 2e9 bytes; a token's KV is 2 * 10 * 50 * 2 = 2000 bytes, 100 000 of them 2e8: 2.2e9 bytes at 1e12.
    assert toy().step_s(StepLoad(1, 1, 100_000, 100_000)) == pytest.approx(0.0022 + 0.001)


def test_a_large_step_takes_the_time_of_its_flops():
    # 2 * 1e9 * 1000 tokens = 2e12, and 4 * 10 * 100 * 500 500 pairs = 2.002e9, at 1e14.
    assert toy().step_s(StepLoad(1, 1000, 1000, 500_500)) == pytest.approx((2e12 + 2.002e9) / 1e14 + 0.001)


def test_devices_divide_a_step_and_add_their_all_reduces():
    two = toy(num_devices=2)
    assert two.step_s(StepLoad(1, 1, 100_000, 100_000)) == pytest.approx(0.0011 + 0.001 + 2 * 10 * 1e-5)


def test_short_runs_of_memory_are_gathered_slower():
    # 16 slots * 50 * 2 bytes = 1600 bytes; with 400 at half rate, 80 percent of the bandwidth are left.
    slow = toy(assumptions=replace(EXACT, half_rate_run_bytes=400.0))
    assert slow.roofline.gather_efficiency == pytest.approx(0.8)
    assert slow.step_s(StepLoad(1, 1, 100_000, 1)) == pytest.approx(0.002 + 0.0002 / 0.8 + 0.001)


def test_paged_attention_costs_what_the_paper_measured_and_contiguous_memory_nothing_more():
    paged = deploy_paper()
    assert 1 / paged.roofline.gather_efficiency == pytest.approx(1.23, abs=0.001)  # the paper: 20 to 26 percent
    assert paged.contiguous().roofline.gather_efficiency == 1.0
    assert 1 / deploy_paper(block_size=128).roofline.gather_efficiency < 1.03


def test_a_copy_reads_and_writes_and_a_swap_pays_for_every_transfer():
    # A block is 16 * 2000 = 32 000 bytes, in 2 * 10 transfers.
    assert toy().copy_s(5) == pytest.approx(2 * 5 * 32_000 / 1e12)
    assert toy().swap_s(5) == pytest.approx(5 * (20 * 1e-6 + 32_000 / 1e10))


def test_the_same_bytes_in_smaller_blocks_swap_slower():
    one, sixteen = deploy_paper(block_size=1), deploy_paper(block_size=16)
    assert one.swap_s(16) > 5 * sixteen.swap_s(1)


def deploy_paper(block_size: int = 16) -> SimulatedDeployment:
    return deploy(MODELS["opt-13b"], HARDWARE["a100-40gb"], block_size=block_size)


@pytest.mark.parametrize(
    ("model", "hardware", "kv_bytes", "gib", "tolerance"),
    [
        ("opt-13b", "a100-40gb", 819_200, 12, 0.002),
        ("opt-66b", "a100-40gb", 2_359_296, 21, 0.02),  # the paper's 21 GB are rounded down from 21.3
        ("opt-175b", "a100-80gb", 4_718_592, 264, 0.001),
    ],
)
def test_the_papers_pools_are_what_its_bytes_hold(model, hardware, kv_bytes, gib, tolerance):
    found = MODELS[model]
    assert found.shape.kv_bytes_per_token == kv_bytes
    assert deploy(found, HARDWARE[hardware]).num_kv_slots == pytest.approx(gib * 2**30 / kv_bytes, rel=tolerance)


def test_the_models_of_the_paper_weigh_what_it_says():
    weights = {name: MODELS[name].shape.weight_bytes / 1e9 for name in ("opt-13b", "opt-66b", "opt-175b")}
    assert weights == {"opt-13b": 26, "opt-66b": 132, "opt-175b": 346}
    assert MODELS["llama-13b"].config.max_model_len == 2048
    assert MODELS["llama-3.1-405b"].shape.weight_bytes == 2 * 405_853_388_800


def test_elsewhere_the_pool_is_what_the_weights_leave():
    deployment = deploy(MODELS["llama-3-8b"], HARDWARE["h200"])
    assert deployment.num_kv_slots == int((0.9 * 141e9 - 2 * 8_030_261_248) / (2 * 32 * 1024 * 2))


def test_a_model_that_does_not_fit_is_refused_with_the_sizes():
    with pytest.raises(InvalidArgument, match=r"num_devices: 1 x tpu-v5e leave 14\.4 GB for 26\.0 GB"):
        deploy(MODELS["opt-13b"], HARDWARE["tpu-v5e"])


def test_steps_of_tpus_are_a_plans() -> None:
    model = MODELS["llama-3.1-8b"]
    deployment = deploy(model, HARDWARE["tpu-v6e"], num_kv_slots=1 << 17, block_size=64)
    planned = PlannedModel(
        config=model.config,
        kv_dtype="bfloat16",
        itemsize=2,
        target=find_target("v6e:1x1"),
        num_devices=1,
        weight_bytes=int(model.shape.weight_bytes),
        bytes_per_block=64 * (128 << 10),
        block_size=64,
        number_bytes=2,
    ).step_times()
    for load in (StepLoad.decoding(64, 1000), StepLoad.prompts(2048, 500)):
        assert deployment.step_s(load) == planned.step_s(load)
    assert deploy(model, HARDWARE["h200"]).times is None


def test_stages_read_a_step_in_the_time_of_the_whole_model_and_share_the_work_of_prompts() -> None:
    """Two stages of Llama 3 8B: a decoding step passes through both, and a long prompt keeps both busy."""
    config, ends_bytes = KNOWN_MODELS["llama-3-8b"].config, 2 * 2 * 128_256 * 4096

    def times(num_stages: int) -> PlannedStepTimes:
        weight_bytes = (16_060_522_496 - ends_bytes) // num_stages + ends_bytes
        target = find_target("v6e:1x1")
        return PlannedModel(
            config, "bfloat16", 2, target, 1, weight_bytes, 1 << 17, 64, 2, num_stages=num_stages
        ).step_times()

    one, two = times(1), times(2)
    assert two.roofline.shape.weight_bytes == one.roofline.shape.weight_bytes
    decode, prefill = StepLoad.decoding(8, 100), StepLoad.prompts(4096, 1000)
    assert two.step_s(decode) == one.step_s(decode)
    assert 0.5 * one.step_s(prefill) < two.step_s(prefill) < 0.7 * one.step_s(prefill)


def test_experts_that_no_token_chooses_are_neither_read_nor_multiplied_with() -> None:
    shape = ModelShape(100.0, 1, 1, weight_bytes=200.0, kv_bytes_per_token=0.0, expert_params=80.0, expert_share=0.25)
    assert shape.token_params == 20 + 80 / 4
    assert shape.read_bytes(1) == pytest.approx(2 * (20 + 80 / 4))
    assert shape.read_bytes(2) == pytest.approx(2 * (20 + 80 * (1 - 0.75**2)))
    assert shape.read_bytes(1e4) == pytest.approx(200)


def test_a_token_of_a_planned_mixture_meets_two_of_eight_experts() -> None:
    """Mixtral 8x7B: 47e9 parameters, of which a token meets 13e9."""
    config = KNOWN_MODELS["mixtral-8x7b"].config
    planned = PlannedModel(config, "bfloat16", 2, find_target("h200"), 1, 93_405_585_408, 1 << 17, 64, 2)
    shape = planned.step_times().roofline.shape
    assert shape.token_params + shape.head_params == pytest.approx(12.75e9, rel=0.01)
    assert shape.read_bytes(1) < 0.28 * shape.weight_bytes < shape.read_bytes(100)


def test_adapters_are_read_with_the_weights_and_multiplied_with_every_token() -> None:
    """8 slots of rank 16 of Llama 3 8B: 671 MB, 4 % of the weights and of the products of a layer."""
    config, adapter_bytes = KNOWN_MODELS["llama-3-8b"].config, 671_088_640

    def times(weight_bytes: int, adapter_bytes: int) -> PlannedStepTimes:
        target = find_target("v6e:1x1")
        return PlannedModel(
            config, "bfloat16", 2, target, 1, weight_bytes, 1 << 17, 64, 2, adapter_bytes=adapter_bytes
        ).step_times()

    base_bytes = 16_060_522_496
    base, adapted = times(base_bytes, 0), times(base_bytes + adapter_bytes, adapter_bytes)
    decode, prefill = StepLoad.decoding(8, 100), StepLoad.prompts(4096, 1000)
    assert adapted.roofline.shape.read_bytes(8) - base.roofline.shape.read_bytes(8) == adapter_bytes
    more_s = adapted.roofline.products_s(decode) - base.roofline.products_s(decode)
    assert more_s == pytest.approx(adapter_bytes / (1638e9 * 0.9), rel=0.01)
    more_s = adapted.roofline.products_s(prefill) - base.roofline.products_s(prefill)
    assert more_s == pytest.approx(2 * (adapter_bytes / 2) * 4096 / (918e12 * 0.7), rel=0.01)


def test_a_simulated_step_knows_its_rows_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deploy(MODELS["llama-3.1-8b"], HARDWARE["tpu-v6e"], num_kv_slots=1 << 17, block_size=64)
    options = EngineConfig.load({"max_num_seqs": 8, "max_num_batched_tokens": 64})
    loads: list[StepLoad] = []

    def step_s(deployment: SimulatedDeployment, load: StepLoad) -> float:
        loads.append(load)
        return 1.0

    monkeypatch.setattr(SimulatedDeployment, "step_s", step_s)
    simulate([TraceRequest(0.0, 40, 3), TraceRequest(1.5, 50, 2)], deployment, options)
    steps = [(load.num_rows, load.num_tokens, load.num_decoding, load.num_decoding_kv_tokens) for load in loads]
    assert steps[-4:] == [(1, 40, 0, 0), (1, 1, 1, 41), (2, 51, 1, 42), (1, 1, 1, 51)]


def test_the_clock_moves_by_what_steps_and_moves_take():
    clock, deployment = VirtualClock(), toy()
    executor = SimulatedExecutor(deployment, clock, max_num_seqs=8, max_num_batched_tokens=64)
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [1, 2], [1, 2]))
    executor.move_blocks(BlockMoves(Move.COPY, [3], [4]))
    assert clock() == pytest.approx(deployment.swap_s(2) + deployment.copy_s(1))
    assert (executor.swap_s, executor.copy_s) == (deployment.swap_s(2), deployment.copy_s(1))


def test_alternatives_are_distributions_that_differ_by_row():
    executor = SimulatedExecutor(toy(), VirtualClock(), max_num_seqs=64, max_num_batched_tokens=64)
    top = executor._top_logprobs(np.arange(1, 65, dtype=np.int32)).top_logprobs_rnk
    assert top is not None
    top = top[:, 0]
    assert np.all(np.exp(top).sum(axis=1) <= 1 + 1e-6)
    assert np.all(np.diff(top, axis=1) < 0)
    first = np.exp(top[:, 0])
    assert 0.05 <= first.min() < 0.2
    assert 0.8 < first.max() <= 0.95


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2)])
def test_rows_are_sent_to_the_mean_number_of_devices_of_all_choices(
    num_devices: int, num_groups: int, top_groups: int
) -> None:
    mixture = Mixture(routing=Routing(8, 3, num_groups=num_groups, top_groups=top_groups), width=1)
    size, counts = 8 // num_groups, []
    for groups in itertools.combinations(range(num_groups), top_groups):
        eligible = [size * group + expert for group in groups for expert in range(size)]
        for experts in itertools.combinations(eligible, 3):
            counts.append(len({expert // (8 // num_devices) for expert in experts}))
    assert mean_devices(mixture, num_devices) == pytest.approx(sum(counts) / len(counts))


def test_a_device_sends_its_rows_to_the_other_devices_of_their_experts() -> None:
    config = with_dp_attention(with_parallel_experts(KNOWN_MODELS["deepseek-v3"].config))
    assert RowMessages.of(config, 1, 2) is None
    assert RowMessages.of(KNOWN_MODELS["deepseek-v3"].config, 8, 2) is None
    messages = RowMessages.of(config, 8, 2)
    assert messages is not None
    assert (messages.num_layers, messages.number_bytes) == (58, 2)
    assert messages.sent_bytes(128, 7168, 8) == pytest.approx(16 * messages.num_devices * 7 / 8 * 7168 * 2)


def test_a_step_reads_and_writes_the_recurrent_state_of_each_row():
    # A sequence has 1e6 bytes of state: 50 rows move 2 * 50 * 1e6 = 1e8 bytes.
    stateful = toy()
    stateful = replace(
        stateful, roofline=replace(stateful.roofline, shape=replace(stateful.roofline.shape, state_bytes=1e6))
    )
    load = StepLoad(50, 50, 100_000, 100_000)
    assert stateful.step_s(load) - toy().step_s(load) == pytest.approx(1e8 / 1e12)
    assert stateful.roofline.products_s(load) > toy().roofline.products_s(load)


def test_layers_with_state_cost_a_simulation_state_and_no_attention():
    # LFM2: 6 of 16 layers attend with 32 heads of 64 numbers, and 10 keep 2 inputs of 2048 channels.
    shape = MODELS["lfm2-1.2b"].shape
    assert (shape.query_width, shape.state_bytes) == (2048 * 6 // 16, 10 * 2 * 2048 * 2)
