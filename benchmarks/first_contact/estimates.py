"""Estimates of the plan for what the cells measure.

copy, product      peaks of the data sheet
decode, prefill    attention at the plan's shares of the peaks
steps              step times of the plan (`jpaged.plan.step_times`)
pinned_host        the host link at the plan's share of its peak
step, host         upper bound of the host's part of a step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.checkpoints.names import weight_bytes
from jpaged.hardware import HARDWARE, Hardware
from jpaged.models.config import ModelConfig
from jpaged.plan.cost import ASSUMED, StepLoad
from jpaged.plan.step_times import HOST_S, PlannedModel, PlannedStepTimes, PlanTarget

_FAMILIES = "tpu-"
_BFLOAT16_BYTES = 2


def step_times(config: ModelConfig, hardware: Hardware, block_size: int) -> PlannedStepTimes:
    """Return the plan's step times of a model in bfloat16 on one device, which need not be in a topology."""
    family = hardware.name.removeprefix(_FAMILIES)
    platform = "tpu" if hardware.name.startswith(("tpu",)) else "cuda"
    target = PlanTarget(family, family, platform, 1, 1, hardware, (1,))
    return PlannedModel(
        config=config,
        kv_dtype="bfloat16",
        itemsize=_BFLOAT16_BYTES,
        target=target,
        num_devices=1,
        weight_bytes=int(weight_bytes(config, _BFLOAT16_BYTES)),
        bytes_per_block=config.num_layers * config.kv_width * _BFLOAT16_BYTES * block_size,
        block_size=block_size,
        number_bytes=_BFLOAT16_BYTES,
    ).step_times()


def decode_step(times: PlannedStepTimes, num_rows: int, context: float) -> dict[str, float]:
    """Return the planned seconds of a step of decoding rows, and the bytes and FLOPs that it requires."""
    load = StepLoad.decoding(num_rows, context)
    return {"planned_s": times.step_s(load), **_needs(times, load)}


def prefill_step(times: PlannedStepTimes, num_tokens: int, prompt_len: int) -> dict[str, float]:
    """Return the planned seconds of a step of prompt tokens, and the bytes and FLOPs that it requires."""
    load = StepLoad.prompts(num_tokens, prompt_len)
    return {"planned_s": times.step_s(load), **_needs(times, load)}


def _needs(times: PlannedStepTimes, load: StepLoad) -> dict[str, float]:
    shape = times.roofline.shape
    flops = 2 * (shape.token_params * load.num_tokens + shape.head_params * load.num_rows)
    flops += 4 * shape.num_layers * shape.query_width * load.num_pairs
    num_bytes = shape.read_bytes(load.num_tokens) + load.num_kv_tokens * shape.kv_bytes_per_token
    return {"bytes": num_bytes, "flops": flops}


def estimate_of(cell: Mapping[str, Any], hardware: Hardware) -> list[tuple[str, float, float]]:
    """Return (name, measured, estimated) for the values of a cell that the plan estimates."""
    peak, flops, host = hardware.hbm_bytes_per_s, hardware.flops, hardware.host_bytes_per_s
    known = {
        "copy_bytes_per_s": peak,
        "product_flops_per_s": flops,
        "decode_bytes_per_s": peak * ASSUMED.bandwidth_efficiency,
        "prefill_flops_per_s": flops * ASSUMED.flops_efficiency,
        "out_bytes_per_s": host * ASSUMED.host_link_efficiency,
        "in_bytes_per_s": host * ASSUMED.host_link_efficiency,
        "step_dispatch_s": HOST_S,
    }
    found = [(name, float(cell[name]), value) for name, value in known.items() if cell.get(name) is not None]
    if cell.get("planned_s") and cell.get("step_s"):
        found.append(("step_s", float(cell["step_s"]), float(cell["planned_s"])))
    return found


def find(name: str | None) -> Hardware | None:
    """Return the hardware of a name in `jpaged plan`; None if there is none."""
    return HARDWARE.get(name or "")
