"""Kinds of replicas in a fleet: a model on the devices of a plan, with price and start-up time.

pool        the share memory_utilization of the data sheet's memory, less the weights (`deploy`)
step        on TPUs as in a plan, on GPUs the roofline with the overheads of the paper's system
cold start  time of a server of the small model (`docs/performance.md`), and the weights at a stated rate
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from jpaged.capacity.fleet.pods import PoolKind
from jpaged.capacity.fleet.worker import Pool
from jpaged.capacity.simulator.deployment import deploy, planned_times
from jpaged.capacity.simulator.models import MODELS
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE, Hardware

START_S = 3.0
"""Seconds from the start of `jpaged serve demo` until it accepts requests, without a compilation cache.

Source: `benchmarks/startup.py`.
"""


@dataclass(frozen=True, slots=True)
class Serving:
    """Serving options of every replica.

    Attributes:
        load_bytes_per_s: rate at which a starting replica reads its weights.
        num_host_blocks: blocks of each replica's host memory, for evicted prefixes and swapped groups.
    """

    model: str
    max_model_len: int = 8192
    block_size: int = 64
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    load_bytes_per_s: float = 2e9
    num_host_blocks: int = 0
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def engine(self) -> EngineConfig:
        """Options of each engine. Its queue is unbounded, because the router limits the load."""
        return EngineConfig().replace(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_queued_reqs=1_000_000,
            overlap=False,
            max_inter_token_latency=0.0,
            num_scheduler_steps=-1,
            **dict(self.options),
        )


def kind_of(
    name: str, serving: Serving, prices: Mapping[str, float], cold_start_s: float | None
) -> tuple[Pool, PoolKind]:
    """Return the kind of replicas on a topology: `v6e:1x1`, `h100`, `h100:2`.

    Args:
        prices: USD per chip-hour, as `price_of` reads them.
        cold_start_s: None for START_S and the time to read the weights.

    Raises:
        InvalidArgument: the topology is not known, the model does not fit, or options do not go together.
    """
    from jpaged.capacity.estimate import price_of  # imports jax

    options = serving.engine
    options.cache.check()
    hardware, num_devices, num_chips, family = _devices(name)
    model = MODELS[serving.model]
    config = model.config
    if serving.max_model_len > config.max_model_len:
        raise InvalidArgument(
            "max_model_len", f"{serving.max_model_len} is over the limit of {model.name}, {config.max_model_len}"
        )
    model = dataclasses.replace(
        model, config=dataclasses.replace(config, max_position_embeddings=serving.max_model_len)
    )
    deployment = deploy(
        model,
        hardware,
        num_devices=num_devices,
        block_size=serving.block_size,
        num_host_blocks=serving.num_host_blocks,
    )
    if deployment.times is None:
        times = planned_times(model, hardware, num_devices, serving.block_size)
        deployment = dataclasses.replace(deployment, times=times)
    if cold_start_s is None:
        cold_start_s = START_S + model.shape.weight_bytes / serving.load_bytes_per_s
    price = price_of(prices, name, family)
    kind = PoolKind(
        name,
        family,
        deployment.num_blocks * serving.block_size,
        num_chips,
        cold_start_s,
        None if price is None else price * num_chips,
    )
    return Pool(deployment, options), kind


def _devices(name: str) -> tuple[Hardware, int, int, str]:
    """Return the hardware of a topology, its devices, its chips, and the key of prices."""
    if (found := HARDWARE.get(name)) is not None:  # hardware that cannot be compiled for here
        return found, 1, 1, name
    from jpaged.capacity.target import find_target  # imports jax

    target = find_target(name)
    return target.hardware, target.num_devices, target.num_chips, target.family
