"""Plans Llama 3.1 and Qwen3 on TPU slices, and writes the tables into docs/performance.md.

    make aot && python -m benchmarks.plans [--only TOPOLOGY] [--all-programs]
    python -m benchmarks.plans --estimate

Each plan is a call of `jpaged plan`, which compiles the programs that decide; with `--all-programs` every one.
`--estimate` compiles nothing: it takes the memory that was recorded, and estimates again with the cycles of today, for
all tables. The second has published figures of other engines on TPUs beside what the formula says of ours there: with
the same lengths, rows and tokens a step, and the memory of the plan that was recorded for the slice. The third has
figures for devices and formats that no plan was recorded for: sizes follow from the config, and programs take
`PROGRAM_BYTES`. It also states how fast steps have to be for `GOAL` times the figure. The fourth has DeepSeek-V3 with
tensor-parallel and with data-parallel attention, and published figures per device. All tables are printed, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.record import RESULTS, put_on_page, save
from jpaged.checkpoints.names import weight_bytes
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.device.aot.deployment import CompiledSum
from jpaged.device.aot.topology import TOPOLOGIES
from jpaged.device.sharded_matmul import hides_sums
from jpaged.models.config import ModelConfig
from jpaged.models.model import Model
from jpaged.models.sharding import with_dp_attention, with_parallel_experts
from jpaged.plan.cost import StepLoad
from jpaged.plan.estimate import ConcurrencyLimits, Estimate, SequenceLengths, estimate
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.plan.step_times import PlannedModel, PlannedStepTimes, PlanTarget, find_target

_ROOT = Path(__file__).resolve().parents[1]
_GIB = 1 << 30
_LENGTHS = SequenceLengths(1024, 256)
_OPTIONS = ("--max-model-len", "8192", "--input-len", "1024", "--output-len", "256")
GOOD_SHARE = 0.86
"""The share of the bandwidth that ragged paged attention of tpu-inference is published to decode at."""
CELLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("llama-3.1-8b", topology, ()) for topology in ("v5e:2x2", "v6e:1x1", "v6e:2x4", "v5p:2x2x1", "tpu7x:2x2x1")),
    ("llama-3.1-70b", "v6e:2x4", ()),
    ("qwen3-32b", "v6e:2x4", ()),
    ("llama-3.1-70b", "v6e:2x4", ("--num-blocks", "10000")),
)
"""Model, topology, and options besides."""


_RECIPES = "AI-Hypercomputer/tpu-recipes, inference/trillium/vLLM/Llama3.x (c8cfe2f)"


@dataclass(frozen=True, slots=True)
class Published:
    """One figure; all weights and KV caches are bfloat16.

    Attributes:
        num_rows: that run at once at most: the server's limit, or the clients.
        num_tokens: of a step at most; None where it is not said.
        requests_per_s: as published.
        source: where; of Llama 3.3 70B, whose shape is 3.1's, too.
    """

    model: str
    topology: str
    lengths: SequenceLengths
    num_rows: int
    num_tokens: int | None
    requests_per_s: float
    source: str


PUBLISHED = (
    Published("llama-3.1-8b", "v6e:1x1", SequenceLengths(1199, 123), 128, None, 11.5, "vLLM; its page was not noted"),
    Published(
        "llama-3.1-8b", "v6e:1x1", SequenceLengths(1800, 128), 512, 512, 8.37, "vllm-project/vllm, pull request 16458"
    ),
    Published("llama-3.1-70b", "v6e:2x4", SequenceLengths(999, 1000), 64, 512, 2.49, f"{_RECIPES}, 64 clients"),
    Published("llama-3.1-70b", "v6e:2x4", SequenceLengths(999, 1000), 128, 512, 3.54, f"{_RECIPES}, 128 clients"),
)


def overlaps_sums(config: ModelConfig, target: PlanTarget, num_devices: int) -> bool:
    """Return True if a server of a bfloat16 model sums hidden states in parts on these devices."""
    topology = TOPOLOGIES.get(target.name)
    model = Model(config, np.dtype(jnp.bfloat16))
    return topology is not None and hides_sums(model, num_devices, topology.generation.device_kind)


PROGRAM_BYTES = 1.5 * _GIB
"""Assumed memory of the programs of a device; those of the recorded plans take 0.5 to 1.0 GiB."""
MEMORY_SHARE = 0.95
GOAL = 1.1
_IRONWOOD = "AI-Hypercomputer/tpu-recipes, inference/ironwood/vLLM/Qwen3-32B (6374419)"
_SGLANG_JAX = "sgl-project/sglang-jax 0.1.0, docs/cookbook"
_RED_HAT = "MLPerf Inference 5.1, Red Hat, vLLM 0.10.0 on one H100"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published figure for devices or formats without a recorded plan.

    Attributes:
        lengths: means, as far as the source states them.
        num_rows: that run at once at most.
        num_tokens: of a step at most; ours where the source states none.
        tokens_per_s: output tokens of all devices, as published.
        quantization: of the weights, as the option of jpaged.
        kv_dtype: of the keys and values.
        block_size: ours on these devices.
    """

    model: str
    topology: str
    lengths: SequenceLengths
    num_rows: int
    num_tokens: int
    tokens_per_s: float
    source: str
    quantization: str = "auto"
    kv_dtype: str = "bfloat16"
    block_size: int = 128

    @property
    def planned(self) -> PlannedModel:
        """The model on all devices of the target, with sizes from the config."""
        config, target = quantized_here(KNOWN_MODELS[self.model].config, self.quantization), find_target(self.topology)
        token_bytes = config.num_layers * config.kv_width * np.dtype(jnp.dtype(self.kv_dtype)).itemsize
        return PlannedModel(
            config=config,
            kv_dtype=self.kv_dtype,
            itemsize=2,
            target=target,
            num_devices=target.num_devices,
            weight_bytes=int(weight_bytes(config, 2) / target.num_devices),
            bytes_per_block=self.block_size * token_bytes // target.num_devices,
            block_size=self.block_size,
            number_bytes=2,
            overlaps_sums=overlaps_sums(config, target, target.num_devices),
        )

    def estimate(self) -> tuple[Estimate, PlannedStepTimes]:
        """Return the estimate of ours, and the times behind it."""
        planned = self.planned
        free = MEMORY_SHARE * planned.target.hardware.usable_bytes - planned.weight_bytes - PROGRAM_BYTES
        num_blocks = int(free // planned.bytes_per_block)
        sizes = ConcurrencyLimits(num_blocks, self.block_size, self.num_rows, self.num_tokens)
        times = planned.step_times()
        return estimate(self.lengths, sizes, times), times


def _ironwood(input_len: int, output_len: int, tokens_per_s: float) -> Anchor:
    """Return a figure of the recipe: lengths are uniform from 0.8 to 1 of the nominal ones; rows are its limit."""
    lengths = SequenceLengths(round(0.9 * input_len), round(0.9 * output_len))
    fp8 = ("fp8", "float8_e4m3fn")
    return Anchor("qwen3-32b", "tpu7x:1x1x1", lengths, 135, 4096, tokens_per_s, _IRONWOOD, *fp8)


ANCHORS = (
    _ironwood(1024, 1024, 6556.72),
    _ironwood(1024, 8192, 3959.56),
    _ironwood(8192, 1024, 1382.18),
    Anchor("llama-3.1-8b", "v6e:2x2", SequenceLengths(265, 258), 16, 2048, 1448.91, f"{_SGLANG_JAX}, 16 clients"),
    Anchor("qwen3-8b", "v6e:2x2", SequenceLengths(1024, 1024), 64, 2048, 5296.60, f"{_SGLANG_JAX}, 64 clients"),
    Anchor("qwen3-8b", "v6e:2x2", SequenceLengths(1024, 1024), 256, 2048, 7571.84, f"{_SGLANG_JAX}, 256 clients"),
    Anchor("qwen3-32b", "v6e:2x2", SequenceLengths(1024, 1024), 256, 2048, 2123.0, f"{_SGLANG_JAX}, 256 clients"),
    Anchor("llama-3.1-70b", "v6e:4x4", SequenceLengths(506, 524), 16, 2048, 882.17, f"{_SGLANG_JAX}, 16 clients"),
    *(
        Anchor(
            *("llama-3.1-8b", "h100", SequenceLengths(778, 73), 512, 2048, tokens_per_s, f"{_RED_HAT}, {scenario}"),
            quantization="fp8",
            block_size=32,
        )
        for scenario, tokens_per_s in (("offline", 5777.0), ("server", 5103.0))
    ),
)
"""The H100's lengths are about the means of CNN-DailyMail in Llama's tokens; the source states no limits of a step."""


_LANES = 128
_INFINIBAND_BYTES_PER_S = 50e9
"""Bandwidth of one GPU to other machines: 400 Gbit/s."""
_OF_MACHINE = 8


@dataclass(frozen=True, slots=True)
class Wide:
    """DeepSeek-V3 with fp8 weights and whole experts on each of many devices.

    Attributes:
        devices: a target's name, or `h200:16`, two machines of 8 over InfiniBand.
        num_rows: that run at once at most, on all devices.
        num_tokens: of a step at most, on all devices.
        has_dp_attention: each device has the latents of its own sequences; otherwise those of all.
        published: output tokens/s of a device.
        source: of the figure; both are empty without one.
    """

    devices: str
    lengths: SequenceLengths
    num_rows: int
    num_tokens: int
    has_dp_attention: bool
    published: float | None = None
    source: str = ""

    @property
    def target(self) -> PlanTarget:
        """The devices. A GPU's messages to another machine take longest, and are a share of all its messages."""
        family, _, count = self.devices.partition(":")
        num_devices = int(count) if count.isdigit() else 0
        if num_devices <= _OF_MACHINE:
            return find_target(self.devices)
        found = find_target(f"{family}:{_OF_MACHINE}")
        share = (num_devices - _OF_MACHINE) / (num_devices - 1)
        hardware = dataclasses.replace(found.hardware, link_bytes_per_s=_INFINIBAND_BYTES_PER_S / share)
        sizes: dict[str, Any] = {"num_devices": num_devices, "num_chips": num_devices, "shape": (num_devices,)}
        return dataclasses.replace(found, name=self.devices, hardware=hardware, **sizes)

    @property
    def planned(self) -> PlannedModel:
        """The model on all devices, with sizes from the config."""
        config, target = with_parallel_experts(quantized_here(KNOWN_MODELS["deepseek-v3"].config, "fp8")), self.target
        config = with_dp_attention(config) if self.has_dp_attention else config
        width = -(-config.kv_width // _LANES) * _LANES if target.platform == "tpu" else config.kv_width
        block_size = 64
        return PlannedModel(
            config=config,
            kv_dtype="bfloat16",
            itemsize=2,
            target=target,
            num_devices=target.num_devices,
            weight_bytes=int(weight_bytes(config, 2, target.num_devices)),
            bytes_per_block=2 * block_size * config.num_layers * width,
            block_size=block_size,
            number_bytes=2,
        )

    def record(self) -> dict[str, Any]:
        """Return the plan with its estimates."""
        planned = self.planned
        config, num_devices = planned.config, planned.num_devices
        assert config.mixture is not None
        # A device has room for all rows of a step, once for each expert: in bfloat16, and sums in float32.
        numbers = 6 * config.hidden_size + 2 * 4 * config.mixture.width
        program_bytes = PROGRAM_BYTES + self.num_tokens * config.mixture.routing.top_k * numbers
        free = MEMORY_SHARE * planned.target.hardware.usable_bytes - planned.weight_bytes - program_bytes
        num_blocks = int(free // planned.bytes_per_block) * (num_devices if self.has_dp_attention else 1)
        sizes = ConcurrencyLimits(num_blocks, planned.block_size, self.num_rows, self.num_tokens)
        times = planned.step_times()
        one = estimate(self.lengths, sizes, times)
        link_bytes = 2 * (num_devices - 1) / num_devices * one.num_running * planned.config.hidden_size * 2
        sent_bytes = link_bytes * (2 * planned.config.num_layers + 1)
        if (messages := times.messages) is not None:
            num_sums = planned.config.num_layers - messages.num_layers + 2
            of_layer = 2 * messages.sent_bytes(one.num_running, planned.config.hidden_size, num_devices)
            sent_bytes = link_bytes * num_sums + of_layer * messages.num_layers
        return {
            **dataclasses.asdict(self),
            "num_devices": num_devices,
            "weight_bytes": planned.weight_bytes,
            "pool_tokens": num_blocks * planned.block_size,
            "num_running": one.num_running,
            "decode": dataclasses.asdict(one.decode) | {"seconds": one.decode.seconds},
            "sent_bytes": round(sent_bytes),
            "tokens_per_s_of_device": one.tokens_per_s / num_devices,
            "decode_tokens_per_s_of_device": one.num_running / one.decode.seconds / num_devices,
        }


_GPUSTACK = "gpustack/gpustack, docs/performance-lab/deepseek-r1/h200.md (a5c9faf): SGLang 0.5.3 with dp-attention"
_VLLM_WIDE = "vLLM blog, 2025-12-17: 2.2k tokens/s per H200, wide EP over InfiniBand, prefill apart"
_V6E_64 = "sgl-project/sglang-jax 0.1.0, docs/cookbook (047fbd7): 249 tokens/s of 64 chips, 16 clients"
_SHARE_GPT, _CHAT, _RANDOM = SequenceLengths(219, 201), SequenceLengths(1024, 1024), SequenceLengths(465, 479)
WIDE = (
    Wide("h200:8", _SHARE_GPT, 1000, 2048, False),
    Wide("h200:8", _SHARE_GPT, 1000, 2048, True, 3414.99 / 8, _GPUSTACK),
    Wide("h200:8", _CHAT, 2048, 2048, False),
    Wide("h200:8", _CHAT, 2048, 2048, True),
    Wide("h200:16", _CHAT, 4096, 4096, False),
    Wide("h200:16", _CHAT, 4096, 4096, True, 2200.0, _VLLM_WIDE),
    Wide("v6e:8x8", _CHAT, 4096, 4096, False),
    Wide("v6e:8x8", _CHAT, 4096, 4096, True),
    Wide("v6e:8x8", _RANDOM, 16, 1024, False),
    Wide("v6e:8x8", _RANDOM, 16, 1024, True, 249.24 / 64, _V6E_64),
)
"""The first figure is of a burst of 1000 requests, its beginning and end included; the second of decoding alone."""


def wide_table(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: one row per plan."""
    rows = [
        "| devices | attention | prompt + output | weights of a device | pool, tokens | rows (run) | decode step "
        "| of it sums and exchanges | sent by a device per step | decoding, tokens/s of a device "
        "| with prefill | published | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in plans:
        published = one["published"]
        cells = [
            one["devices"],
            "data-parallel" if one["has_dp_attention"] else "tensor-parallel",
            f"{one['lengths']['input_len']} + {one['lengths']['output_len']}",
            f"{one['weight_bytes'] / _GIB:.1f} GiB",
            f"{one['pool_tokens'] / 1e6:.2f} M",
            f"{one['num_rows']} ({one['num_running']})",
            f"{one['decode']['seconds'] * 1e3:.1f} ms",
            f"{one['decode']['sums_s'] * 1e3:.1f} ms",
            f"{one['sent_bytes'] / 2**20:.0f} MiB",
            f"{one['decode_tokens_per_s_of_device']:.0f}",
            f"{one['tokens_per_s_of_device']:.0f}",
            "-" if published is None else f"{published:.{0 if published >= 10 else 1}f}",
            one["source"] or "-",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def command(model: str, topology: str, more: Sequence[str]) -> list[str]:
    return ["jpaged", "plan", model, "--topology", topology, *_OPTIONS, *more, "--json"]


def plan(model: str, topology: str, more: Sequence[str]) -> dict[str, Any]:
    """What `jpaged plan` says; what does not fit is a plan too."""
    words = command(model, topology, more)
    print(" ".join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", *words], cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}")
    (found,) = json.loads(done.stdout)["plans"]
    return {"command": " ".join(words), **found}


def estimated(found: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded plan with the estimates of today, and what they are beside a kernel at 86 % of the bandwidth."""
    if not found["fits"]:
        return dict(found)
    times, sizes = (
        planned(found).step_times(),
        ConcurrencyLimits(*(found[name.name] for name in dataclasses.fields(ConcurrencyLimits) if name.name in found)),
    )
    one = estimate(_LENGTHS, sizes, times)
    parts = {name: dataclasses.asdict(getattr(one, name)) for name in ("decode", "prefill")}
    numbers = {"decode_s": one.decode.seconds, "prefill_s": one.prefill.seconds, "tokens_per_s": one.tokens_per_s}
    again = {
        "estimates": [{**dataclasses.asdict(_LENGTHS), "num_fitting": one.num_fitting, "num_running": one.num_running}
                      | parts | numbers],
        "assumptions": times.assumptions(sizes.max_num_seqs),
        "slice_tokens_per_s": one.tokens_per_s * found["num_copies"],
        "decode_beside_good_attention": beside_good_attention(one, times),
        "prefill_flops_share": flops_share(one, times, sizes.max_num_batched_tokens),
    }  # fmt: skip
    return {**found, **again}


def beside_good_attention(one: Estimate, times: PlannedStepTimes) -> float:
    """How much longer a decode step takes than one whose attention reads at 86 % of the bandwidth."""
    roofline = times.roofline
    context = one.lengths.input_len + one.lengths.output_len / 2
    num_bytes = max(1, one.num_running) * context * roofline.shape.kv_bytes_per_token
    good_s = num_bytes / (roofline.num_devices * roofline.hardware.hbm_bytes_per_s * GOOD_SHARE)
    return one.decode.seconds / dataclasses.replace(one.decode, attention_s=good_s).seconds


def flops_share(one: Estimate, times: PlannedStepTimes, num_tokens: int) -> float:
    """The share of the peak that a prefill step's products and attention are, its masked half left out."""
    roofline, load = times.roofline, StepLoad.prompts(num_tokens, one.lengths.input_len)
    return roofline.flops_s(load) * roofline.assumptions.flops_efficiency / one.prefill.seconds


def table(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with one row per plan."""
    rows = [
        "| model | topology | devices per replica | rows, tokens, block | weights | pool | programs | blocks "
        "| sequences of 1024 + 256 | decode step | attention's share | at 86 % | prefill step | share of peak "
        "| output tokens/s | compiled | compile time |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(_row(found) for found in plans)])


def _row(found: Mapping[str, Any]) -> str:
    memory = found["memory_of_one_device"]
    programs = memory["programs"]
    taken = "-" if programs is None else f"{sum(programs.values()) / _GIB:.2f} GiB"
    cells = [
        found["model"],
        found["topology"],
        str(found["tensor_parallel_size"]),
        f"{found['max_num_seqs']}, {found['max_num_batched_tokens']}, {found['block_size']}",
        f"{memory['weight_bytes'] / _GIB:.2f} GiB",
        f"{memory['pool_bytes'] / _GIB:.2f} GiB",
        taken,
        str(found["num_blocks"]),
    ]
    if found["fits"]:
        one = found["estimates"][0]
        attention_s = one["decode"]["attention_s"]
        cells += [
            f"{one['num_fitting']} ({one['num_running']} run)",
            f"{one['decode_s'] * 1e3:.2f} ms",
            f"{attention_s * 1e3:.2f} ms" if attention_s else "not counted",
            f"{found['decode_beside_good_attention']:.2f}" if attention_s else "-",
            f"{one['prefill_s'] * 1e3:.2f} ms",
            f"{found['prefill_flops_share']:.0%}",
            f"{found['slice_tokens_per_s']:.0f}",
        ]
    else:
        over = f"{-memory['free_bytes'] / _GIB:.2f} GiB over"
        cells += [f"does not fit: {over}, {found['most_blocks']} blocks would", *"------"]
    cells.append(f"{len(found['compiled_programs'])} of {found['num_programs']}")
    cells.append(f"{found['compile_seconds']:.0f} s")
    return f"| {' | '.join(cells)} |"


def planned(found: Mapping[str, Any]) -> PlannedModel:
    """The model of a recorded plan."""
    memory = found["memory_of_one_device"]
    itemsize = np.dtype("float32").itemsize if found["dtype"] == "float32" else 2
    config, target = KNOWN_MODELS[found["model"]].config, find_target(found["topology"])
    return PlannedModel(
        config=config,
        kv_dtype=found["kv_cache_dtype"],
        itemsize=itemsize,
        target=target,
        num_devices=found["tensor_parallel_size"],
        weight_bytes=memory["weight_bytes"],
        bytes_per_block=memory["bytes_per_block"],
        block_size=found["block_size"],
        number_bytes=found["bytes_of_a_summed_number"] or itemsize,
        overlaps_sums=itemsize == 2 and overlaps_sums(config, target, found["tensor_parallel_size"]),
        compiled_sums={
            int(num_tokens): [CompiledSum(**one) for one in sums]
            for num_tokens, sums in found.get("overlapped_sums", {}).items()
        },
    )


def published_table(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: one row per published figure, with our plan for the same model and slice."""
    rows = [
        "| model | slice | prompt + output | rows, tokens per step | published, requests/s "
        "| jpaged, estimated | ratio | decode step, ms | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for figure in PUBLISHED:
        found = next(
            one for one in plans if one["fits"] and (one["model"], one["topology"]) == (figure.model, figure.topology)
        )
        num_tokens = figure.num_tokens or found["max_num_batched_tokens"]
        sizes = ConcurrencyLimits(found["num_blocks"], found["block_size"], figure.num_rows, num_tokens)
        one = estimate(figure.lengths, sizes, planned(found).step_times())
        ours = one.tokens_per_s / figure.lengths.output_len
        cells = [
            figure.model,
            figure.topology,
            f"{figure.lengths.input_len} + {figure.lengths.output_len}",
            f"{figure.num_rows} ({one.num_running} fit), {num_tokens}",
            f"{figure.requests_per_s:.2f}",
            f"{ours:.2f}",
            f"{ours / figure.requests_per_s:.2f}",
            str(one.decode),
            figure.source,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def anchor_record(anchor: Anchor) -> dict[str, Any]:
    """An anchor with our estimate, and what has to hold for `GOAL` times the published figure.

    `slowdown` is how much longer steps may take than estimated. The shares are those of the peak bandwidth in a decode
    step and of the peak FLOP/s in a prefill step, if all steps take so much longer.
    """
    one, times = anchor.estimate()
    slowdown = one.tokens_per_s / (GOAL * anchor.tokens_per_s)
    roofline, assumed = times.roofline, times.roofline.assumptions
    context = anchor.lengths.input_len + anchor.lengths.output_len / 2
    ideal_decode_s = roofline.bytes_s(one.num_running * context, one.num_running) * assumed.bandwidth_efficiency
    prompts = StepLoad.prompts(anchor.num_tokens, anchor.lengths.input_len)
    ideal_prefill_s = roofline.flops_s(prompts) * assumed.flops_efficiency
    return {
        **dataclasses.asdict(anchor),
        "num_running": one.num_running,
        "estimated_tokens_per_s": one.tokens_per_s,
        "ratio": one.tokens_per_s / anchor.tokens_per_s,
        "decode": dataclasses.asdict(one.decode) | {"seconds": one.decode.seconds},
        "prefill": dataclasses.asdict(one.prefill) | {"seconds": one.prefill.seconds},
        "goal": GOAL,
        "slowdown": slowdown,
        "decode_bandwidth_share": ideal_decode_s / (slowdown * one.decode.seconds),
        "prefill_flops_share": ideal_prefill_s / (slowdown * one.prefill.seconds),
        "estimated_decode_bandwidth_share": ideal_decode_s / one.decode.seconds,
        "estimated_prefill_flops_share": ideal_prefill_s / one.prefill.seconds,
    }


def anchors_table(anchors: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: one row per anchor."""
    rows = [
        "| model | devices | weights, KV | prompt + output | rows, tokens per step | published, tokens/s "
        "| jpaged, estimated | ratio | decode step, ms | bandwidth in decode | peak in prefill "
        f"| for {GOAL:g} times: steps take | bandwidth | peak | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in anchors:
        weights = "bfloat16" if one["quantization"] == "auto" else one["quantization"]
        kv = "fp8" if one["kv_dtype"].startswith("float8") else one["kv_dtype"]
        cells = [
            one["model"],
            one["topology"],
            f"{weights}, {kv}",
            f"{one['lengths']['input_len']} + {one['lengths']['output_len']}",
            f"{one['num_rows']} ({one['num_running']} run), {one['num_tokens']}",
            f"{one['tokens_per_s']:.0f}",
            f"{one['estimated_tokens_per_s']:.0f}",
            f"{one['ratio']:.2f}",
            f"{one['decode']['seconds'] * 1e3:.2f}",
            f"{one['estimated_decode_bandwidth_share']:.0%}",
            f"{one['estimated_prefill_flops_share']:.0%}",
            f"up to {one['slowdown']:.2f} times the estimate",
            f"{one['decode_bandwidth_share']:.0%}",
            f"{one['prefill_flops_share']:.0%}",
            one["source"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def write(plans: Sequence[Mapping[str, Any]]) -> None:
    """Record plans and anchors; write the tables between their marks on the page, and print them."""
    anchors, wide = [anchor_record(anchor) for anchor in ANCHORS], [one.record() for one in WIDE]
    save("plans", "python -m benchmarks.plans", {"plans": plans, "anchors": anchors, "wide": wide})
    tables = {"plans": table(plans), "published": published_table(plans), "anchors": anchors_table(anchors)}
    tables["wide"] = wide_table(wide)
    put_on_page(tables)
    print("\n\n".join(tables.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plan Llama 3.1 and Qwen3 on TPU slices, and write the tables into docs/performance.md."
    )
    parser.add_argument("--only", default="", help="plan for this topology, and record nothing")
    parser.add_argument("--estimate", action="store_true", help="estimate again from the record, and compile nothing")
    parser.add_argument("--all-programs", action="store_true", help="compile every program of each plan")
    chosen = parser.parse_args()
    if chosen.estimate:
        write([estimated(found) for found in json.loads((RESULTS / "plans.json").read_text())["plans"]])
        return
    plans = []
    for model, topology, more in CELLS:
        if chosen.only in topology:
            found = plan(model, topology, (*more, *(["--all-programs"] if chosen.all_programs else [])))
            plans.append(estimated(found))
    if chosen.only:
        print(table(plans))
    else:
        write(plans)


if __name__ == "__main__":
    main()
