"""Simulated models, and a model on devices with a pool of blocks and its step times.

On TPUs, steps take the time of a plan (`jpaged.plan.step_times`). On GPUs the system is like the one that the paper
measured:

step   = the roofline's (`jpaged.plan.cost`) + overhead + all-reduces
copy   = 2 * bytes / (devices * bandwidth * eff)                                  a read and a write
swap   = blocks * 2 * layers * latency + bytes / (devices * link * eff)           small blocks swap badly

Models are the built-in configurations, and the paper's models as it served them, all in 16 bits:

KV bytes of a token = 2 (key, value) * num_layers * num_kv_heads * head_dim * 2 bytes
OPT-13B    2 * 40 *  5120 * 2 =   819 200      12 GiB hold 15 728 tokens      the paper's Table 1: 12 GB, 15.7K
OPT-66B    2 * 64 *  9216 * 2 = 2 359 296      21 GiB hold  9 557             21 GB, 9.7K (so 21.3 GiB)
OPT-175B   2 * 96 * 12288 * 2 = 4 718 592     264 GiB hold 60 074             264 GB, 60.1K
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jpaged.errors import InvalidArgument
from jpaged.hardware import Hardware
from jpaged.models.config import ModelConfig
from jpaged.models.layer_kinds import count_state_bytes
from jpaged.plan.cost import ASSUMED, Assumptions, ModelShape, Roofline, StepLoad
from jpaged.plan.known_models import KNOWN_MODELS


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One model.

    Attributes:
        num_params: all parameters; every one is read once per step.
        num_devices: default number of accelerators.
        num_kv_slots: tokens in the paper's pool on that number of `paper_hardware`; None if the pool is the memory that
            the weights leave.
        paper_hardware: hardware of num_kv_slots.
    """

    name: str
    config: ModelConfig
    num_params: float
    num_devices: int = 1
    num_kv_slots: int | None = None
    paper_hardware: str = ""

    @property
    def shape(self) -> ModelShape:
        """Size of the model's steps: bytes that they read, and FLOPs."""
        config = self.config
        return ModelShape(
            num_params=self.num_params,
            num_layers=config.num_layers,
            query_width=config.query_width * config.num_attention_layers // config.num_layers,
            weight_bytes=2 * self.num_params,
            kv_bytes_per_token=config.num_attention_layers * config.kv_width * 2,
            state_bytes=count_state_bytes(config.layer_kinds, np.dtype(np.float16)),
        )


_OPT_13B, _OPT_66B, _OPT_175B, _LLAMA_2_13B = (
    KNOWN_MODELS[name].config for name in ("opt-13b", "opt-66b", "opt-175b", "llama-2-13b")
)
_PAPER = (  # Table 1 of the paper gives 26, 132 and 346 GB of weights
    SimulatedModel("opt-13b", _OPT_13B, 13e9, 1, 15_700, "a100-40gb"),
    SimulatedModel("opt-66b", _OPT_66B, 66e9, 4, 9_700, "a100-40gb"),
    SimulatedModel("opt-175b", _OPT_175B, 173e9, 8, 60_100, "a100-80gb"),
    # The first LLaMA has the shape of the second and half the length.
    SimulatedModel("llama-13b", replace(_LLAMA_2_13B, max_position_embeddings=2048), 13e9, 1, 15_700, "a100-40gb"),
)

MODELS = {name: SimulatedModel(name, known.config, known.num_params) for name, known in KNOWN_MODELS.items()} | {
    model.name: model for model in _PAPER
}
"""Models by name; the paper's replace the built-in ones of the same names."""


class Times(Protocol):
    """Protocol of step durations."""

    def step_s(self, load: StepLoad) -> float:
        """Return the seconds of a step."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    """A model on devices, with a pool of KV blocks.

    Attributes:
        roofline: of the model on the devices.
        num_kv_slots: tokens that the pool holds.
        block_size: token slots in a block.
        num_host_blocks: blocks in host memory to swap out to.
        times: durations of steps, planned or measured; None for the paper's system.
        drawn: creates the times of a fleet replica from its clock, if they vary over time or randomly; called once per
            replica, at its start.
    """

    model: SimulatedModel
    roofline: Roofline
    num_kv_slots: int
    block_size: int
    num_host_blocks: int
    times: Times | None = None
    drawn: Callable[[Callable[[], float]], Times] | None = None

    @property
    def num_blocks(self) -> int:
        return self.num_kv_slots // self.block_size

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * int(self.roofline.shape.kv_bytes_per_token)

    def contiguous(self) -> SimulatedDeployment:
        """Return the deployment with contiguous KV per sequence, which needs no gathering."""
        return replace(self, roofline=replace(self.roofline, gather_efficiency=1.0))

    def step_s(self, load: StepLoad) -> float:
        """Return the seconds of a step."""
        return self.roofline.step_s(load) + self.overhead_s if self.times is None else self.times.step_s(load)

    @property
    def overhead_s(self) -> float:
        """Seconds of every step in addition to bytes and FLOPs."""
        a = self.roofline.assumptions
        all_reduces = 2 * self.roofline.shape.num_layers if self.roofline.num_devices > 1 else 0
        return a.step_overhead_s + all_reduces * a.all_reduce_s

    def copy_s(self, num_blocks: int) -> float:
        return 2 * num_blocks * self.bytes_per_block / self.roofline.bytes_per_s

    def swap_s(self, num_blocks: int) -> float:
        """Return the seconds to move blocks one way over the host links."""
        roofline, a = self.roofline, self.roofline.assumptions
        rate = roofline.num_devices * roofline.hardware.host_bytes_per_s * a.host_link_efficiency
        latency_s = 2 * roofline.shape.num_layers * a.transfer_latency_s
        return num_blocks * (latency_s + self.bytes_per_block / rate)


def deploy(
    model: SimulatedModel,
    hardware: Hardware,
    *,
    num_devices: int | None = None,
    num_kv_slots: int | None = None,
    block_size: int = 16,
    num_host_blocks: int = 0,
    assumptions: Assumptions = ASSUMED,
) -> SimulatedDeployment:
    """Return a deployment with the paper's pool if the paper has one, else with the memory that the weights leave.

    Raises:
        InvalidArgument: the memory cannot hold one sequence of the model's full length.
    """
    devices, shape, max_model_len = num_devices or model.num_devices, model.shape, model.config.max_model_len
    if num_kv_slots is None and hardware.name == model.paper_hardware and devices == model.num_devices:
        num_kv_slots = model.num_kv_slots
    if num_kv_slots is None:
        usable = devices * hardware.hbm_bytes * assumptions.memory_utilization
        num_kv_slots = int((usable - shape.weight_bytes) / shape.kv_bytes_per_token)
        if num_kv_slots < max_model_len:
            raise InvalidArgument(
                "num_devices",
                f"{devices} x {hardware.name} leave {usable / 1e9:.1f} GB for {shape.weight_bytes / 1e9:.1f} GB of "
                f"weights and the KV of {max_model_len} tokens "
                f"({max_model_len * shape.kv_bytes_per_token / 1e9:.1f} GB): use more devices",
            )
    run_bytes = block_size * model.config.head_dim * 2
    gather_efficiency = run_bytes / (run_bytes + assumptions.half_rate_run_bytes)
    roofline = Roofline(shape, hardware, devices, assumptions, gather_efficiency)
    times = planned_times(model, hardware, devices, block_size) if hardware.clock_hz is not None else None
    return SimulatedDeployment(model, roofline, num_kv_slots, block_size, num_host_blocks, times)


def planned_times(model: SimulatedModel, hardware: Hardware, num_devices: int, block_size: int) -> Times:
    """Return the times of a plan in bfloat16 for devices in a line."""
    from jpaged.plan.step_times import (
        PlannedModel,  # imports jax
        PlanTarget,
    )

    shape, family = model.shape, hardware.name.removeprefix("tpu-")
    return PlannedModel(
        config=model.config,
        kv_dtype="bfloat16",
        itemsize=2,
        target=PlanTarget(family, family, "tpu", num_devices, num_devices, hardware, (num_devices,)),
        num_devices=num_devices,
        weight_bytes=int(shape.weight_bytes / num_devices),
        bytes_per_block=int(shape.kv_bytes_per_token * block_size / num_devices),
        block_size=block_size,
        number_bytes=2,
    ).step_times()
