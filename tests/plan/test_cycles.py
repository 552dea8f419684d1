"""Steps of TPUs by cycles that were counted: the nearest case, and numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jpaged.errors import InternalError
from jpaged.hardware import HARDWARE
from jpaged.plan.cost import ModelShape, StepLoad
from jpaged.plan.cycles import (
    SAMPLED,
    SAMPLED_IN_PARTS,
    ChunkCycles,
    CountedCycles,
    CountedTimes,
    DecodeCycles,
    HeadShape,
    SamplingCycles,
    counted_cycles,
)
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.plan.step_times import GLUE_SHARE, PlannedModel, exposed_s, find_target, layer_matrices

MIB = 1 << 20
HEADS = HeadShape(8, 4, 128, "bfloat16", 64)
V6E = HARDWARE["tpu-v6e"]
DECODE = DecodeCycles(
    generation="v6e",
    num_kv_heads=8,
    group=4,
    head_dim=128,
    kv_dtype="bfloat16",
    block_size=64,
    chunk_bytes=MIB,
    compute_per_mib=2000,
    issue_per_block=10,
    wait_per_chunk=100,
    per_row=50,
)
CHUNKS = ChunkCycles("v6e", 8, 4, 128, "bfloat16", 64, per_256x256_head=700)
SAMPLING = SamplingCycles("v6e", vocab=100_000, rows=64, what=SAMPLED, cycles=6_400_000)
COUNTED = CountedCycles((DECODE,), (CHUNKS,), (SAMPLING,))


def times(counted: CountedCycles = COUNTED, heads: HeadShape = HEADS) -> CountedTimes:
    """Two layers; a token's keys and values are 4 KiB, a block of 64 a quarter of a MiB."""
    found = CountedTimes.find(counted, V6E, heads, (None, None), 4096, 100_000)
    assert found is not None
    return found


def with_decode(**changes: Any) -> CountedCycles:
    return dataclasses.replace(COUNTED, decode=(dataclasses.replace(DECODE, **changes),))


def test_rows_that_decode_take_the_kernels_cycles() -> None:
    """3 rows of 300 tokens: 1.17 MiB each in 5 blocks and 2 chunks, in two layers at 1.75 GHz."""
    cycles = 3 * (300 / 256 * 2000 + 5 * 10 + 2 * 100 + 50)
    assert times().attention_s(StepLoad.decoding(3, 300)) == pytest.approx(2 * cycles / 1.75e9)


def test_rows_that_decode_take_no_less_than_the_memory() -> None:
    """300 tokens of 4 KiB at nine tenths of 1638 GB/s."""
    quick = times(with_decode(compute_per_mib=100))
    assert quick.attention_s(StepLoad.decoding(3, 300)) == pytest.approx(2 * 3 * 300 * 4096 / (0.9 * 1638e9))


def test_chunks_take_the_cycles_of_their_tiles_and_half_a_tile_a_query() -> None:
    """One prompt of 512 tokens: 512 * 256 pairs and 128 keys more for each, of 32 heads."""
    tiles = (512 * 256 + 512 * 128) / 65536 * 32
    assert times().attention_s(StepLoad.prompts(512, 512)) == pytest.approx(2 * tiles * 700 / 1.75e9)


def test_rows_that_decode_and_chunks_add_up() -> None:
    decoding, prompts = StepLoad.decoding(3, 300), StepLoad.prompts(512, 512)
    both = StepLoad(4, 515, 900 + 256, 900 + 512 * 256, 3, 900)
    expected = times().attention_s(decoding) + times().attention_s(prompts)
    assert times().attention_s(both) == pytest.approx(expected)


def test_layers_with_a_window_take_what_they_see_of_contexts() -> None:
    """One layer sees 100 of 300 tokens, and 100 keys a query of a prompt, the other everything."""
    whole = times()
    found = dataclasses.replace(whole, windows=(None, 100))
    decoding = whole.attention_s(StepLoad.decoding(3, 300)) + whole.attention_s(StepLoad.decoding(3, 100))
    assert found.attention_s(StepLoad.decoding(3, 300)) == pytest.approx(decoding / 2)
    tiles = (512 * 256 + 512 * 100 + 2 * 512 * 128) / 65536 * 32
    assert found.attention_s(StepLoad.prompts(512, 512)) == pytest.approx(tiles * 700 / 1.75e9)


def test_a_sampler_is_as_the_nearest_by_its_logits() -> None:
    more = SamplingCycles("v6e", vocab=100_000, rows=256, what=SAMPLED, cycles=12_800_000)
    other = SamplingCycles("v6e", vocab=100_000, rows=16, what="greedy", cycles=1)
    found = times(dataclasses.replace(COUNTED, sampling=(SAMPLING, more, other)))
    assert found.sampling_s(32) == pytest.approx(3_200_000 / 1.75e9)
    assert found.sampling_s(200) == pytest.approx(10_000_000 / 1.75e9)
    assert found.sampling_s(0) == 0
    unknown = times(dataclasses.replace(COUNTED, sampling=(other,)))
    assert unknown.sampling_s(64) == 0
    assert unknown.lines(64)[-1] == "sampling is not included: its cycles were not counted"


def test_where_devices_share_a_vocabulary_it_is_xla_that_samples() -> None:
    parts = SamplingCycles("v6e", vocab=100_000, rows=64, what=SAMPLED_IN_PARTS, cycles=9_600_000)
    counted = dataclasses.replace(COUNTED, sampling=(SAMPLING, parts))
    one, eight = planned("v6e:1x1").step_times(counted).counted, planned("v6e:2x4", 8).step_times(counted).counted
    assert one is not None
    assert eight is not None
    assert one.sampling_s(64) == pytest.approx(6_400_000 * 1.28256 / 1.75e9)
    assert eight.sampling_s(64) == pytest.approx(9_600_000 * 0.16032 / 1.75e9)


def test_the_nearest_case_is_of_the_generation_and_the_type_before_the_heads() -> None:
    one = dataclasses.replace(DECODE, num_kv_heads=1, group=8)
    int8 = dataclasses.replace(DECODE, kv_dtype="int8")
    narrow = dataclasses.replace(DECODE, head_dim=64)
    v5e = dataclasses.replace(DECODE, generation="v5e", num_kv_heads=2)
    counted = dataclasses.replace(COUNTED, decode=(DECODE, one, int8, narrow, v5e))

    def nearest(generation: str, **changes: Any) -> DecodeCycles | None:
        return counted.get_decode(generation, dataclasses.replace(HEADS, **changes))

    assert nearest("v6e") == nearest("v6e", num_kv_heads=4, block_size=16) == DECODE
    assert nearest("v6e", num_kv_heads=2, group=8) == one
    assert nearest("v6e", num_kv_heads=1, kv_dtype="int8") == int8
    assert nearest("v6e", num_kv_heads=1, head_dim=64) == narrow
    assert nearest("v5e") == v5e
    assert nearest("v5p") is None


def test_what_was_counted_for_another_shape_is_told() -> None:
    assert "(counted for" not in "".join(times().lines(64))
    lines = times(heads=dataclasses.replace(HEADS, num_kv_heads=1, block_size=128)).lines(64)
    assert (
        "(counted for 8 x 4 heads of 128, bfloat16, blocks of 64; here 1 x 4 heads of 128, bfloat16, blocks of 128)"
        in (lines[1])
    )
    assert lines[0].startswith("cycles at 1.75 GHz")


def planned(target: str, num_devices: int = 1, name: str = "llama-3.1-8b") -> PlannedModel:
    found = KNOWN_MODELS[name]
    return PlannedModel(
        config=found.config,
        kv_dtype="bfloat16",
        itemsize=2,
        target=find_target(target),
        num_devices=num_devices,
        weight_bytes=2 * found.num_params // num_devices,
        bytes_per_block=64 * (128 << 10) // num_devices,
        block_size=64,
        number_bytes=2,
    )


def test_a_step_is_products_attention_sampling_glue_and_sums() -> None:
    model = planned("v6e:1x1")
    found, load = model.step_times(COUNTED), StepLoad.decoding(64, 1000)
    parts, counted = found.parts(load), found.counted
    assert counted is not None
    embedding = 128256 * 4096
    assert parts.products_s == pytest.approx((2 * 8_030_261_248 - 2 * embedding) / (0.9 * 1638e9))
    assert parts.attention_s == counted.attention_s(load)
    assert parts.sampling_s == counted.sampling_s(64) == pytest.approx(6_400_000 * 1.28256 / 1.75e9)
    assert parts.glue_s == pytest.approx(GLUE_SHARE * (parts.products_s + parts.attention_s))
    assert parts.sums_s == 0
    assert found.step_s(load) == parts.seconds == pytest.approx(sum(dataclasses.astuple(parts)[:5]))


def test_sums_in_parts_take_what_products_do_not_hide() -> None:
    def exposed(out_s: float, up_s: float, sum_s: float, parts: int) -> float:
        """Sums after `out`; those after `down` are hidden by long products."""
        return exposed_s({"out": out_s, "up": up_s, "down": 100.0, "qkv": 100.0}, sum_s, parts)

    assert exposed(1.0, 1.0, 0.0, 4) == 0
    assert exposed(1.0, 5.0, 1.0, 4) == 0  # part 0 is summed before the last part is multiplied
    assert exposed(1.0, 1.0, 1.5, 1) == pytest.approx(1.5 * 2)
    # Sums end at 11, 21, 31 and 41, and the products take 8 of the 42.
    assert exposed(1.0, 1.0, 10.0, 4) == 34
    # The sum after `down` takes 4 more than `qkv`, with one chunk. With two, only that of the second is not hidden.
    times = {"out": 1.0, "up": 8.0, "down": 2.0, "qkv": 1.0}
    assert exposed_s(times, 4.0, 1) == 4 + 4
    assert exposed_s({name: one_s / 2 for name, one_s in times.items()}, 2.0, 1, 2) == pytest.approx(1.5 + 1.5)
    config = KNOWN_MODELS["llama-3-70b"].config
    mlp = 8192 * 28672
    assert layer_matrices(config) == {"out": 8192**2, "up": 2 * mlp, "down": mlp, "qkv": 8192 * 10240}
    whole = planned("v6e:2x4", 8, "llama-3-70b")
    parts = dataclasses.replace(whole, overlaps_sums=True)
    for num_rows in (32, 64):
        load = StepLoad.decoding(num_rows, 1000)
        sums_s = [one.step_times(COUNTED).parts(load).sums_s for one in (whole, parts)]
        assert (sums_s[1] < sums_s[0] / 2) == (num_rows == 64)
        assert (sums_s[1] == sums_s[0]) == (num_rows == 32)
        uncounted = [dataclasses.replace(one.step_times(COUNTED), counted=None) for one in (whole, parts)]
        assert uncounted[0].parts(load).sums_s == uncounted[1].parts(load).sums_s


def test_sums_are_those_of_the_program_that_a_step_is_padded_to() -> None:
    """33 rows run in the program of 64, which sums in parts."""
    whole = dataclasses.replace(planned("v6e:2x4", 8, "llama-3-70b"), token_sizes=(32, 64, 96))
    parts = dataclasses.replace(whole, overlaps_sums=True)
    for model in (whole, parts):
        found = model.step_times(COUNTED)
        sums_s = {n: found._sums_s(n, products_s=0.01) for n in (32, 33, 64, 65, 97, 98)}
        assert sums_s[32] != sums_s[33] == sums_s[64] != sums_s[65]
        assert sums_s[97] != sums_s[98]  # longer than all programs
    sums_s_of_both = [model.step_times(COUNTED).parts(StepLoad.decoding(33, 1000)).sums_s for model in (whole, parts)]
    assert sums_s_of_both[1] < sums_s_of_both[0] / 2


def test_products_of_a_long_step_take_seven_tenths_of_the_peak() -> None:
    parts = planned("v6e:1x1").step_times(COUNTED).parts(StepLoad.prompts(2048, 1024))
    head = 128256 * 4096
    flops = 2 * ((8_030_261_248 - 2 * head) * 2048 + head * 2)
    assert parts.products_s == pytest.approx(flops / (0.7 * 918e12))


def test_devices_share_heads_and_vocabulary() -> None:
    counted = planned("v6e:2x4", 8).step_times(COUNTED).counted
    assert counted is not None
    assert (counted.heads, counted.vocab) == (HeadShape(1, 4, 128, "bfloat16", 64), 16032)
    assert counted.layer_bytes == 512


def test_devices_without_cycles_have_the_roofline_and_say_so() -> None:
    found = planned("h200").step_times(COUNTED)
    assert found.counted is None
    (line,) = found.assumptions(64)
    assert line.startswith("no cycles were counted for h200: a roofline at 70% of the HBM's bandwidth")
    load = StepLoad.decoding(64, 1000)
    assert found.parts(load).products_s == found.roofline.step_s(load) == found.step_s(load)
    shape = found.roofline.shape
    assert isinstance(shape, ModelShape)
    assert shape.head_params == 128256 * 4096


def test_a_step_that_the_host_holds_up_is_as_long_as_its_part() -> None:
    parts = dataclasses.replace(planned("v6e:1x1").step_times(COUNTED).parts(StepLoad.decoding(1, 1)), host_s=1.0)
    assert parts.seconds == 1.0
    assert str(parts).endswith("host 1000.00")
    assert "host" not in str(dataclasses.replace(parts, host_s=0.0))


def test_the_cycles_of_the_package_are_read_and_name_what_a_plan_asks_for() -> None:
    counted = counted_cycles()
    assert {SAMPLED, SAMPLED_IN_PARTS} <= {case.what for case in counted.sampling if case.generation == "v6e"}
    for heads in (HEADS, dataclasses.replace(HEADS, num_kv_heads=1)):
        assert counted.get_decode("v6e", heads) is not None
        assert counted.get_chunks("v6e", heads) is not None
    generations = {case.generation for case in counted.decode} | {case.generation for case in counted.chunks}
    generations |= {case.generation for case in counted.sampling}
    assert generations <= {name.removeprefix("tpu-") for name in HARDWARE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"issue_per_block": None}, "a DecodeCycles lacks issue_per_block"),
        ({"per_row": -1}, "a DecodeCycles has per_row below 0"),
        ({"per_row": float("nan")}, "a DecodeCycles has per_row below 0"),
    ],
)
def test_a_case_that_misses_a_number_is_an_error(change: dict[str, float | None], message: str) -> None:
    entry = {name: value for name, value in (dataclasses.asdict(DECODE) | change).items() if value is not None}
    text = json.dumps({"decode": [entry], "chunks": [], "sampling": []})
    with pytest.raises(InternalError, match=message):
        CountedCycles.read(text)


def test_what_a_case_has_besides_is_left_to_who_counts() -> None:
    entry = dataclasses.asdict(DECODE) | {"spills": 0}
    text = json.dumps({"decode": [entry], "chunks": [], "sampling": [], "libtpu": "0.0.42"})
    assert CountedCycles.read(text) == CountedCycles((DECODE,), (), ())
