"""Balanced experts (EPLB): replicas in the parameters, their load, and moves between devices while steps run.

    start    add_replicas        the model's X experts -> P physical ones, and the map of each layer
    steps    forward             rows go to a replica of each expert, and are counted (`record_routes`)
    change   ExpertBalancer      load -> new places (`balance_experts`) -> `exchange_experts`, a layer in each step

The map is an argument of every program, so a change compiles nothing. Results do not depend on places, see
`jpaged.device.sharded_matmul`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from numpy.typing import NDArray

from jpaged.config import ExpertBalanceOptions
from jpaged.device.compilation.compile import EXPERT_LOAD, ProgramSpec
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.mesh import local_bytes, num_shards, replicated
from jpaged.device.model_runner import DonatedArray
from jpaged.device.sharded_matmul import replicate_experts
from jpaged.device.step import Step
from jpaged.engine.executor import ExpertStats
from jpaged.models.config import ModelConfig
from jpaged.models.layer_kinds import get_stacks
from jpaged.models.layers import Params
from jpaged.models.sharding import balance_experts, build_expert_map, get_sources
from jpaged.models.stack import LayerMode

_LOG = logging.getLogger(__name__)
_BALANCE_DELAY = 16
"""Steps from reading the load to the first move: time for the copy to the host, and for the new places."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertStack:
    """Layers with experts whose arrays are in one place of the parameters.

    Attributes:
        path: of their feed-forward in the tree.
        layers: their numbers; one if layers are not stacked.
        is_stacked: arrays have an axis of layers first.
    """

    path: tuple[str | int, ...]
    layers: range
    is_stacked: bool

    @classmethod
    def list_all(cls, config: ModelConfig, layer_mode: LayerMode) -> list[ExpertStack]:
        """Return the stacks of all layers with experts."""
        kinds = config.layer_kinds
        if layer_mode == "loop":
            return [
                cls(("layers", number, "mlp"), range(number, number + 1), False)
                for number, kind in enumerate(kinds)
                if kind.is_sparse
            ]
        stacks = get_stacks(kinds).items()
        return [cls(("layers", name, "mlp"), layers, True) for name, layers in stacks if kinds[layers[0]].is_sparse]

    def get(self, params: Params) -> dict[str, Any]:
        """Return their feed-forward, a part of the tree."""
        inside: Any = params
        for key in self.path:
            inside = inside[key]
        found: dict[str, Any] = inside
        return found


def add_replicas(params: Params, step: Step) -> Params:
    """Return the tree with physical experts instead of the model's own, and with their maps; its leaves may be shapes.

    The dictionaries of experts are changed in place: an array is freed when it is replaced, so that memory has both of
    one array only. Before any load is known, all experts count as equally busy.
    """
    config, mesh = step.model.config, step.mesh
    num_experts, num_physical = _count_experts(config)
    placement_1p = ExpertPlacer.of(config, mesh).place(np.ones((1, num_experts)))
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params["layers"]))
    for stack in ExpertStack.list_all(config, step.layer_mode):
        placement_lp = np.repeat(placement_1p, len(stack.layers), axis=0)
        inside, is_stacked = stack.get(params), stack.is_stacked
        sources = placement_lp if is_stacked else placement_lp[0]

        def replicate(leaf: Any, sources: np.ndarray = sources, is_stacked: bool = is_stacked) -> Any:
            shape = (*leaf.shape[:is_stacked], num_physical, *leaf.shape[is_stacked + 1 :])
            if is_abstract:
                return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.format)
            return _replicator(leaf.sharding.spec, mesh, is_stacked, leaf.format)(leaf, put_whole(sources, mesh))

        def put(array: np.ndarray) -> Any:
            struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated(mesh))
            return struct if is_abstract else put_whole(array, mesh)

        for linear in inside["experts"].values():
            for name in linear:
                linear[name] = jax.tree.map(replicate, linear[name])
        inside["expert_map"] = jax.tree.map(put, make_expert_map(placement_lp, num_experts, is_stacked=is_stacked))
    return params


@functools.lru_cache(maxsize=16)
def _replicator(spec: PartitionSpec, mesh: Mesh, is_stacked: bool, form: Any) -> Any:
    run = functools.partial(replicate_experts, spec=spec, mesh=mesh, is_stacked=is_stacked)
    return jax.jit(run, out_shardings=form)


def make_expert_map(placement_lp: np.ndarray, num_experts: int, *, is_stacked: bool) -> dict[str, np.ndarray]:
    """Return the arrays of the `ExpertMap` of a stack's layers.

    Args:
        placement_lp: logical expert of each physical one.
    """
    starts, physical = build_expert_map(placement_lp, num_experts)
    return {"starts": starts, "physical": physical} if is_stacked else {"starts": starts[0], "physical": physical[0]}


def put_whole(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return the array on every device. In several processes, `device_put` would compile a comparison."""
    return jax.make_array_from_callback(array.shape, replicated(mesh), lambda part: array[part])


ArrayKind = tuple[tuple[int, ...], str, str]
"""Shape, type and sharding of an array of experts: arrays of one kind share a program."""


def get_kind(array: Any) -> ArrayKind:
    """Return the kind of an array, or of a shape."""
    return array.shape, np.dtype(array.dtype).name, str(array.sharding.spec)


def expert_arrays(params: Params, step: Step) -> dict[ArrayKind, Any]:
    """Return one array of experts, or shape, of each kind, smallest first; empty if experts are not balanced."""
    if step.abstract_expert_load() is None:
        return {}
    stacks = ExpertStack.list_all(step.model.config, step.layer_mode)
    leaves = [leaf for stack in stacks for leaf in jax.tree.leaves(stack.get(params)["experts"])]
    return {
        get_kind(leaf): leaf for leaf in sorted(leaves, key=lambda leaf: (local_bytes({"leaf": leaf}), get_kind(leaf)))
    }


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertPlacer:
    """Chooses the devices of a model's physical experts by load: see `balance_experts`.

    Attributes:
        num_physical: experts of a layer, with replicas.
        num_groups: groups of the model's experts, of which a token may use some.
        num_nodes: nodes of devices; the links between nodes are slower than those within one.
    """

    num_physical: int
    num_devices: int
    num_groups: int
    num_nodes: int

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh) -> ExpertPlacer:
        """Return the placer of a model on its devices.

        A node is a slice of TPUs, or a machine of GPUs. Other devices have nodes by process. If nodes have unequal
        numbers of devices, or their devices are not consecutive, all devices are one node.
        """
        mixture = config.mixture
        assert mixture is not None
        nodes = [getattr(device, "slice_index", device.process_index) for device in mesh.devices.flat]
        names = list(dict.fromkeys(nodes))
        is_even = nodes == list(np.repeat(names, len(nodes) // len(names)))
        num_nodes = len(names) if is_even else 1
        return cls(mixture.num_physical_experts, num_shards(mesh), mixture.routing.num_groups, num_nodes)

    def place(self, load_lx: np.ndarray, current_lp: np.ndarray | None = None) -> NDArray[np.int32]:
        """Return the logical expert of each physical one, `[L, P]`; `current_lp` is None before any load is known."""
        nodes = {"num_groups": self.num_groups, "num_nodes": self.num_nodes}
        return balance_experts(load_lx, self.num_physical, self.num_devices, current_lp, **nodes)


def _count_experts(config: ModelConfig) -> tuple[int, int]:
    """Return the number of logical and of physical experts."""
    mixture = config.mixture
    assert mixture is not None
    return mixture.routing.num_experts, mixture.num_physical_experts


def expert_ratios(load_lx: np.ndarray) -> np.ndarray:
    """Return each expert's load relative to the layer's mean load `[L, X]`; 1 in a layer without any load."""
    means_l1 = load_lx.mean(axis=1, keepdims=True)
    ratios_lx: np.ndarray = np.divide(load_lx, means_l1, out=np.ones_like(load_lx), where=means_l1 > 0)
    return ratios_lx


class ExpertBalancer:
    """Balances the load of experts over devices while steps run (EPLB). Used only by the engine thread.

        steps   ──────── window_size ────────┬── delay ──┬─┬─┬─┬──────────
        load    reset, then counted          read        │ │ │ │
        host                                 new places  │ │ │ │
        device                                           a layer's experts per step

    All depends on the number of steps alone, so that several processes do the same. The first change follows a quarter
    of an interval after the start, as in vLLM.

    Args:
        step: whose experts it balances.
        options: when it does.
        load: the load of physical experts, which every forward adds to.
        programs: have `expert_load` and `exchange_experts`.
    """

    def __init__(self, step: Step, options: ExpertBalanceOptions, load: DonatedArray, programs: ProgramStore) -> None:
        config, mesh = step.model.config, step.mesh
        self._mesh, self._num_devices = mesh, num_shards(mesh)
        self._num_experts, _ = _count_experts(config)
        self._placer = ExpertPlacer.of(config, mesh)
        self._stacks = ExpertStack.list_all(config, step.layer_mode)
        self._places = [step.kv_groups.places[layer] for stack in self._stacks for layer in stack.layers]
        first_1p = self._placer.place(np.ones((1, self._num_experts)))
        self._placement_lp = np.repeat(first_1p, len(self._places), axis=0)
        self._options, self._load, self._programs = options, load, programs
        if options.log_balancedness:  # other lines of this level are not logged
            _LOG.setLevel(logging.INFO)
        self._kinds: list[ArrayKind] = []
        self._thread = ThreadPoolExecutor(1, "jpaged-eplb")
        self._num_steps = options.step_interval - options.step_interval // 4
        self._is_counting = self._has_started = False
        self._pending: Future[NDArray[np.int32]] | None = None
        self._moves: deque[tuple[int, NDArray[np.int32]]] = deque()
        self.stats = ExpertStats()

    def start(self, params: Params, step: Step) -> None:
        """Count from now on: steps before it, at the start, have no real tokens."""
        self._kinds = list(expert_arrays(params, step))
        self._read()
        self._has_started = True

    def record_steps(self, params: Params, num_steps: int) -> None:
        """Count steps that were dispatched, and dispatch what is due after them; changes the parameters in place."""
        if not self._has_started:
            return
        self._num_steps += num_steps
        options = self._options
        if self._moves:
            self._move(params, *self._moves.popleft())
        elif self._pending is not None:
            if self._num_steps >= min(_BALANCE_DELAY, options.step_interval):
                self._plan_moves(self._pending.result())
                self._pending = None
        elif self._num_steps >= options.step_interval:
            self._pending = self._thread.submit(self._balance, self._read(), self._placement_lp.copy())
            self._num_steps, self._is_counting = 0, False
        elif not self._is_counting and self._num_steps >= options.step_interval - options.window_size:
            self._read()
            self._is_counting = True

    def release(self) -> None:
        """End the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._moves.clear()

    def _read(self) -> jax.Array:
        """Reset the load; return the old one, float32 `[G, L, P]`, with the copy to the host started."""
        zeros, load = self._programs.find(EXPERT_LOAD)(self._load.take())
        self._load.put(zeros)
        load.copy_to_host_async()
        return load

    def _balance(self, load: jax.Array, placement_lp: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the new placement of all layers. Runs on the thread, and waits for the load."""
        host_load = np.asarray(load)
        physical_lp = np.stack([host_load[place] for place in self._places])
        of_devices = physical_lp.reshape(len(physical_lp), self._num_devices, -1).sum(axis=2)
        load_lx = np.zeros((len(physical_lp), self._num_experts))
        np.add.at(load_lx, (np.arange(len(physical_lp))[:, None], placement_lp), physical_lp)
        busiest = float(of_devices.max(axis=1).sum())
        balancedness = float(of_devices.mean(axis=1).sum()) / busiest if busiest else 1.0
        ratios_lx, stats = expert_ratios(load_lx), self.stats
        peak_ratio = float(ratios_lx.max(axis=1).mean())
        self.stats = dataclasses.replace(
            stats, num_reads=stats.num_reads + 1, balancedness=balancedness, peak_ratio=peak_ratio
        )
        if self._options.log_balancedness:
            _LOG.info("balancedness of experts: %.3f (mean load of a device by that of the busiest)", balancedness)
            _LOG.info("busiest experts: %s", self._describe_busiest(ratios_lx))
        return self._placer.place(load_lx, placement_lp)

    def _describe_busiest(self, ratios_lx: np.ndarray, most: int = 5) -> str:
        """Return the experts with the most load relative to their layer's mean, such as `layer 3 expert 17: 4.2`."""
        numbers = [layer for stack in self._stacks for layer in stack.layers]
        busiest = np.argsort(-ratios_lx, axis=None, kind="stable")[:most]
        places = zip(*np.unravel_index(busiest, ratios_lx.shape), strict=True)
        return ", ".join(
            f"layer {numbers[row]} expert {expert}: {ratios_lx[row, expert]:.1f}" for row, expert in places
        )

    def _plan_moves(self, placement_lp: NDArray[np.int32]) -> None:
        changed = np.flatnonzero(np.any(placement_lp != self._placement_lp, axis=1)).tolist()
        self._moves.extend((row, placement_lp[row]) for row in changed)
        if changed:
            num_moved = int(np.sum(placement_lp != self._placement_lp))
            stats = self.stats
            self.stats = dataclasses.replace(
                stats,
                num_rearrangements=stats.num_rearrangements + 1,
                num_moved=stats.num_moved + num_moved,
            )

    def _move(self, params: Params, row: int, new_p: NDArray[np.int32]) -> None:
        """Dispatch the change of a layer's experts and map."""
        first = 0
        for stack in self._stacks:
            if row < first + len(stack.layers):
                break
            first += len(stack.layers)
        sources_p = get_sources(self._placement_lp[row], new_p, self._num_devices)
        self._placement_lp[row] = new_p
        inside, layer = stack.get(params), np.int32(row - first)

        def exchange(leaf: jax.Array) -> jax.Array:
            program = self._programs.find(ProgramSpec("exchange_experts", self._kinds.index(get_kind(leaf)) + 1))
            exchanged: jax.Array = program(leaf, layer, sources_p)
            return exchanged

        inside["experts"] = jax.tree.map(exchange, inside["experts"])
        placement_lp = self._placement_lp[first : first + len(stack.layers)]
        arrays = make_expert_map(placement_lp, self._num_experts, is_stacked=stack.is_stacked)
        inside["expert_map"] = {name: put_whole(array, self._mesh) for name, array in arrays.items()}
