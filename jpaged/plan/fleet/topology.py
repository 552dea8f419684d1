"""Kinds of replicas in a fleet: a model on the devices of a plan, with price and start-up time; and their states.

pool        the share memory_utilization of the data sheet's memory, less the weights (`deploy`)
step        on TPUs as in a plan, on GPUs the roofline with the overheads of the paper's system
cold start  time of a server of the small model (`docs/performance.md`), and the weights at a stated rate

Each place of a replica has a state:

    empty ──start──> starting ──ready_s──> ready ──drain──> draining ──nothing in flight, or time limit──> empty
                         └───────────────────┴──────fail──────┴──> failed ──restart──> starting

A place is billed from start to end, including loading and the replacement of a failed replica.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.hardware import HARDWARE, Hardware
from jpaged.plan.fleet.replica import ReplicaPool
from jpaged.plan.simulator.deployment import MODELS, deploy, planned_times


class PodState(enum.Enum):
    """State of a place."""

    EMPTY = "empty"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PoolKind:
    """Cost and size of one kind of replica.

    Attributes:
        name: of the topology.
        family: alternative key of prices.
        capacity: tokens that the KV pool holds.
        cold_start_s: from the start of a pod until it accepts requests.
        usd_per_hour: price of all its chips; None without a price.
    """

    name: str
    family: str
    capacity: int
    num_chips: int
    cold_start_s: float
    usd_per_hour: float | None


class Pods:
    """All places, each for one kind of replica.

    Args:
        kinds: kinds of replicas.
        kind_of: index of the kind of each place.
    """

    def __init__(self, kinds: Sequence[PoolKind], kind_of: Sequence[int]) -> None:
        self.kinds = kinds
        self.kind_of = kind_of
        count = len(kind_of)
        self._states = [PodState.EMPTY] * count
        self._ready_s = [0.0] * count
        self._since_s = [0.0] * count
        self._until_s = [0.0] * count
        self._paid_s = [0.0] * count
        self._is_to_restart = [False] * count

    def __len__(self) -> int:
        return len(self._states)

    def state(self, place: int) -> PodState:
        """Return the state of a place."""
        return self._states[place]

    def where(self, *states: PodState) -> list[int]:
        """Return the places in one of some states."""
        return [place for place, state in enumerate(self._states) if state in states]

    def start(self, place: int, now_s: float, *, is_warm: bool = False) -> None:
        """Start a pod; with `is_warm` it is ready at once."""
        if self._states[place] is PodState.EMPTY:
            self._since_s[place] = now_s
        self._states[place] = PodState.STARTING
        self._ready_s[place] = now_s if is_warm else now_s + self.kinds[self.kind_of[place]].cold_start_s

    def become_ready(self, now_s: float) -> list[int]:
        """Mark the pods that have finished loading as ready, and return their places."""
        loaded = [place for place in self.where(PodState.STARTING) if self._ready_s[place] <= now_s]
        for place in loaded:
            self._states[place] = PodState.READY
        return loaded

    def drain(self, place: int, until_s: float, *, restarts: bool) -> None:
        """Stop sending requests to a pod, which ends by `until_s`; with `restarts` another one follows."""
        self._states[place] = PodState.DRAINING
        self._until_s[place] = until_s
        self._is_to_restart[place] = restarts

    def restarting(self) -> list[int]:
        """Return the places of draining pods that will be replaced."""
        return [place for place in self.where(PodState.DRAINING) if self._is_to_restart[place]]

    def follow_by_none(self, place: int) -> None:
        """Do not replace a draining pod."""
        self._is_to_restart[place] = False

    def is_over(self, place: int, now_s: float) -> bool:
        """Return True if a draining pod has reached its time limit."""
        return self._until_s[place] <= now_s

    def end(self, place: int, now_s: float) -> bool:
        """Record the end of a pod. Return True if it is to be replaced."""
        restarts, self._is_to_restart[place] = self._is_to_restart[place], False
        self._paid_s[place] += now_s - self._since_s[place]
        self._states[place] = PodState.EMPTY
        return restarts

    def since_s(self, place: int) -> float:
        """Return the start time of the pod in a place."""
        return self._since_s[place]

    def paid_s(self, place: int, now_s: float) -> float:
        """Return the seconds for which a place has been billed."""
        going = 0.0 if self._states[place] is PodState.EMPTY else now_s - self._since_s[place]
        return self._paid_s[place] + going

    def usd(self, now_s: float) -> float | None:
        """Return the total price; None without prices."""
        prices = [self.kinds[kind].usd_per_hour for kind in self.kind_of]
        if any(price is None for price in prices):
            return None
        return sum((price or 0.0) * self.paid_s(place, now_s) / 3600 for place, price in enumerate(prices))

    def replica_hours(self, now_s: float) -> float:
        """Return the billed hours of all places."""
        return sum(self.paid_s(place, now_s) for place in range(len(self))) / 3600


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


def get_kind(
    name: str, serving: Serving, prices: Mapping[str, float], cold_start_s: float | None
) -> tuple[ReplicaPool, PoolKind]:
    """Return the kind of replicas on a topology: `v6e:1x1`, `h100`, `h100:2`.

    Args:
        prices: USD per chip-hour, as `get_price` reads them.
        cold_start_s: None for START_S and the time to read the weights.

    Raises:
        InvalidArgument: the topology is not known, the model does not fit, or options do not go together.
    """
    from jpaged.plan.estimate import get_price  # imports jax

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
    price = get_price(prices, name, family)
    kind = PoolKind(
        name,
        family,
        deployment.num_blocks * serving.block_size,
        num_chips,
        cold_start_s,
        None if price is None else price * num_chips,
    )
    return ReplicaPool(deployment, options), kind


def _devices(name: str) -> tuple[Hardware, int, int, str]:
    """Return the hardware of a topology, its devices, its chips, and the key of prices."""
    if (found := HARDWARE.get(name)) is not None:  # hardware that cannot be compiled for here
        return found, 1, 1, name
    from jpaged.plan.step_times import find_target  # imports jax

    target = find_target(name)
    return target.hardware, target.num_devices, target.num_chips, target.family
