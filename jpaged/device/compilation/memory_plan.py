"""The plan of a device's memory, made before the pool is allocated, and checked against the compiled programs later.

    all memory of the device
    |<-------------- memory_utilization of it -------------->|<- left alone ->|
    | weights | pool | state | temporaries | kept | code |  not used |

    weights       the parameters of one device
    pool          every block, and the null block, in all layers: a step updates it in place, so it counts once
    state         recurrent state: a slot for each row, and one for padding; updated in place, too
    temporaries   working memory of the two largest programs: one step may still run when the next one is dispatched
    kept          data between calls: inputs and outputs of two overlapped steps, last tokens, blocks in flight, token
                  counts, log-probabilities and hidden states that the host has not read
    code          of all programs

On GPUs the memory is that of JAX's allocator. Code is outside of it, next to CUDA's own memory and the CUDA graphs that
XLA records from programs. The plan compares their estimate with what the allocator leaves (`outside_bytes`).

All sizes of programs are the compiler's own (`memory_analysis`). They do not depend on the size of the pool once it is
too large for the on-chip memory of a TPU, so they are taken from programs with a pool of a GiB. Nothing here compiles
or allocates.

If a program does not fit into a device's memory, the compiler's error is parsed for the sizes:

    Ran out of memory on HBM, the total memory required for HLO temporaries (15.99G) exceeds available HBM (15.75G).
    Ran out of memory in memory space hbm. Used 32.02G of 31.25G hbm. Exceeded hbm capacity by 788.55M.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import jax

from jpaged.config import GPU_MEMORY_SHARE_VARIABLE, preallocates_gpu_memory
from jpaged.device.device_info import available_host_bytes, memory_outside_allocator
from jpaged.errors import InternalError, InvalidArgument

_GIB, _MIB = 1 << 30, 1 << 20
_PROBE_BYTES = _GIB
_PROBE_PART = 4  # of the memory left after weights
_MAX_HOST_BYTES, _HOST_PART = 4 * _GIB, 4
"""Limits of a pool in host memory, which other processes need, too: bytes, and a divisor of the free memory.

They apply unless the user sets a size. The smaller one is rounded down to 4, 5, 6 or 7 times a power of two: compiled
programs contain the size of the pool, and a start whose free memory differs a little finds them in the cache.
"""
CUDA_BYTES = 512 * _MIB
"""Memory of a CUDA context and its libraries, assumed; 330 MiB were seen before any graph (driver 470)."""
GRAPH_NODE_BYTES = 64 << 10
"""Memory of a node of a CUDA graph: graphs of 500, 1000 and 2000 kernels took 362, 395 and 458 MiB with CUDA 11.2
(https://forums.developer.nvidia.com/t/increasing-memory-footprint-with-large-task-graphs/244901)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device available to this process, including what it already holds.

    Attributes:
        total_bytes: None if the device does not report it.
        is_own: True for dedicated device memory, False for a CPU, which uses the host's memory.
        what: explains the total in messages.
        outside_bytes: memory of a GPU outside JAX's allocator; None for other devices.
    """

    total_bytes: int | None
    is_own: bool = True
    what: str = field(default="", compare=False)
    outside_bytes: int | None = field(default=None, compare=False)

    @classmethod
    def of(cls, device: jax.Device, weight_bytes: int, num_devices: int = 1) -> DeviceMemory:
        """Query the device, or the host of a CPU device.

        Args:
            device: one of the model's devices; all are of one kind.
            weight_bytes: of one device, which are in memory already.
            num_devices: of the model; CPU devices share the memory of their host.
        """
        if device.platform == "cpu":
            free = available_host_bytes()
            share = f", shared by {num_devices} devices" if num_devices > 1 else ""
            what = f"the weights, and {_in_text(free)} of free memory of this machine or its container{share}"
            return cls(free // num_devices + weight_bytes, is_own=False, what=what)
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return cls(None)
        others = max(0, stats.get("bytes_in_use", 0) - weight_bytes)
        held = f", minus {_in_text(others)} used by others" if others else ""
        limit, reserved = stats["bytes_limit"], stats.get("pool_bytes", 0)
        if 0 < reserved < limit and device.platform == "gpu" and preallocates_gpu_memory():
            held += f"; it could reserve only {_in_text(reserved)} of {_in_text(limit)}: another process uses this GPU"
        outside = memory_outside_allocator(limit) if device.platform == "gpu" else None
        return cls(limit - others, what=f"all that the device's allocator may use{held}", outside_bytes=outside)


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Memory that programs take on one device in addition to weights and pool, in bytes.

    Attributes:
        temp_bytes: working memory.
        kept_bytes: inputs and outputs of two steps, and blocks in flight.
        code_bytes: of the programs.
        graph_bytes: of their CUDA graphs, estimated; 0 on other devices.
    """

    temp_bytes: int = 0
    kept_bytes: int = 0
    code_bytes: int = 0
    graph_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes of loaded programs, which a GPU holds outside JAX's allocator."""
        return self.code_bytes + self.graph_bytes

    @property
    def total_bytes(self) -> int:
        return self.temp_bytes + self.kept_bytes + self.loaded_bytes


@dataclass(frozen=True, slots=True)
class EncoderBytes:
    """Memory of a vision encoder on its device, in bytes: its weights, and working memory of a call."""

    weights: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.working


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Everything that decides the number of blocks, except memory and programs.

    Attributes:
        bytes_per_block: one device's part of a block, which has all layers of a KV group.
        blocks_per_seq: blocks of one sequence of maximum length, in all KV groups. A pool has at least this many unless
            the user sets a size.
        max_num_seqs: maximum number of running sequences.
        max_model_len: maximum tokens of a sequence.
        memory_utilization: share of the memory that weights, programs and the pool may take.
        weight_bytes: of the parameters of one device.
        state_bytes: of the recurrent state of running sequences on one device; 0 without recurrent layers.
        checkpoint_bytes: of one more slot, which holds a checkpoint of recurrent state.
        blocks_per_checkpoint: blocks of the pool for each checkpoint; 0 without checkpoints.
        encoder_bytes: of a vision encoder: its weights and working memory; 0 without any.
        has_default_share: memory_utilization is the platform's default, not the user's.
        num_blocks: the user's choice; None if memory decides.
        pool_bytes: the user's choice of the pool's bytes on one device instead; it determines num_blocks.

    Raises:
        InvalidArgument: pool_bytes have no room for the null block and one more.
    """

    bytes_per_block: int
    blocks_per_seq: int
    max_num_seqs: int
    max_model_len: int
    memory_utilization: float
    weight_bytes: int
    num_blocks: int | None = None
    pool_bytes: int | None = None
    has_default_share: bool = False
    state_bytes: int = 0
    checkpoint_bytes: int = 0
    blocks_per_checkpoint: int = 0
    encoder_bytes: int = 0

    def __post_init__(self) -> None:
        if self.pool_bytes is None:
            return
        if self.pool_bytes < 2 * self.bytes_per_block:
            raise InvalidArgument(
                "kv_cache_memory_bytes",
                f"{self.pool_bytes} is below the limit of {2 * self.bytes_per_block}: the null block and one more "
                f"block of {self.bytes_per_block} bytes each",
            )
        object.__setattr__(self, "num_blocks", self.pool_bytes // self.bytes_per_block - 1)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one device that do not depend on the pool: weights, recurrent state and the vision encoder."""
        return self.weight_bytes + self.state_bytes + self.encoder_bytes

    def num_checkpoints(self, num_blocks: int) -> int:
        """Return the checkpoints of recurrent state that a pool of this many blocks has."""
        return num_blocks // self.blocks_per_checkpoint if self.blocks_per_checkpoint else 0

    def blocks_within(self, num_bytes: int) -> int:
        """Return the blocks that fit into num_bytes, with the null block and checkpoints; negative if none does."""
        room = num_bytes - self.bytes_per_block
        if room < 0 or not self.blocks_per_checkpoint:
            return room // self.bytes_per_block
        count, rest = divmod(room, self.blocks_per_checkpoint * self.bytes_per_block + self.checkpoint_bytes)
        return count * self.blocks_per_checkpoint + min(self.blocks_per_checkpoint - 1, rest // self.bytes_per_block)

    def most_blocks(self, memory: DeviceMemory) -> int:
        """Return the blocks of max_num_seqs sequences of maximum length, within the default limit of host memory."""
        most = self.max_num_seqs * self.blocks_per_seq
        if memory.is_own or not self.has_default_share or memory.total_bytes is None:
            return most
        free = max(0, memory.total_bytes - self.fixed_bytes)
        limit = self.blocks_within(_rounded_down(min(_MAX_HOST_BYTES, free // _HOST_PART)))
        return max(self.blocks_per_seq, min(most, limit))

    def probe_blocks(self, memory: DeviceMemory) -> int:
        """Return the pool size for compiling programs to measure their memory: a GiB, if that fits."""
        free = int((memory.total_bytes or 0) * self.memory_utilization) - self.fixed_bytes
        room = max(1, min(_PROBE_BYTES, free // _PROBE_PART) // self.bytes_per_block)
        return min(room, self.num_blocks or room)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One device's memory. Its rows add up to the total.

    Attributes:
        request: the inputs of the plan.
        total_bytes: of the device; None if the device does not report it.
        num_blocks: usable blocks of the pool, without the null block.
        programs: memory of the programs; None until they have been compiled.
        what: explains the total in messages.
        outside_bytes: memory of a GPU outside JAX's allocator, for CUDA and loaded programs; None for other devices.
    """

    request: PoolRequest
    total_bytes: int | None
    num_blocks: int
    programs: ProgramMemory | None = None
    what: str = field(default="", compare=False)
    outside_bytes: int | None = field(default=None, compare=False)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, with the null block."""
        return (self.num_blocks + 1) * self.request.bytes_per_block

    @property
    def num_checkpoints(self) -> int:
        """Slots for checkpoints of recurrent state."""
        return self.request.num_checkpoints(self.num_blocks)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints of recurrent state."""
        return self.num_checkpoints * self.request.checkpoint_bytes

    @property
    def program_bytes(self) -> int:
        """Bytes of the total that programs take; 0 as long as their memory is unknown."""
        programs = self.programs or ProgramMemory()
        return programs.total_bytes - (0 if self.outside_bytes is None else programs.loaded_bytes)

    @property
    def used_bytes(self) -> int:
        """All planned bytes of the total; excludes programs as long as their memory is unknown."""
        return self.request.fixed_bytes + self.pool_bytes + self.checkpoint_bytes + self.program_bytes

    @property
    def usable_bytes(self) -> int | None:
        return None if self.total_bytes is None else int(self.total_bytes * self.request.memory_utilization)

    @property
    def free_bytes(self) -> int | None:
        """Usable bytes that are left; negative if the plan exceeds them."""
        return None if self.usable_bytes is None else self.usable_bytes - self.used_bytes

    @property
    def fits(self) -> bool:
        """True if the plan stays within the usable bytes, or the device does not report its memory."""
        return self.free_bytes is None or self.free_bytes >= 0

    @property
    def most_blocks(self) -> int | None:
        """Largest pool that would fit; negative if not even the rest fits."""
        if self.free_bytes is None:
            return None
        return self.request.blocks_within(self.free_bytes + self.pool_bytes + self.checkpoint_bytes)

    def rows(self) -> list[tuple[str, int]]:
        """Return rows (what, bytes), which add up to `total_bytes` if it is known."""
        request, programs = self.request, self.programs or ProgramMemory()
        rows = [
            ("weights", request.weight_bytes),
            (f"pool of {self.num_blocks} blocks of {request.bytes_per_block} bytes", self.pool_bytes),
            *([("recurrent state", request.state_bytes)] if request.state_bytes else []),
            *([(f"{self.num_checkpoints} checkpoints of it", self.checkpoint_bytes)] if self.num_checkpoints else []),
            *([("vision encoder", request.encoder_bytes)] if request.encoder_bytes else []),
            ("temporaries of programs", programs.temp_bytes),
            ("inputs, outputs and blocks in flight", programs.kept_bytes),
            *([("code of programs", programs.loaded_bytes)] if self.outside_bytes is None else []),
        ]
        if self.total_bytes is not None and self.usable_bytes is not None and self.free_bytes is not None:
            over = "" if self.fits else " (exceeded)"
            rows.append((f"unused within memory_utilization {request.memory_utilization:g}{over}", self.free_bytes))
            rows.append(("outside memory_utilization", self.total_bytes - self.usable_bytes))
        return rows

    def lines(self) -> list[str]:
        """Return the table as lines of text: a line per row, their sum, and its explanation."""
        rows = [*self.rows(), ("memory of one device", self.total_bytes)]
        width = max(len(name) for name, _ in rows)
        table = [f"  {name:<{width}} {_in_text(num_bytes):>14}" for name, num_bytes in rows]
        return [*table, *([f"  which is {self.what}"] if self.what else []), *self._lines_outside()]

    def _lines_outside(self) -> list[str]:
        """Return lines on a GPU's memory outside the allocator: its use, and what to change if it may not suffice."""
        if self.outside_bytes is None or self.programs is None or self.total_bytes is None:
            return []
        code, graphs = self.programs.code_bytes, self.programs.graph_bytes
        lines = [
            f"  outside of it {_in_text(self.outside_bytes)}: about {_in_text(CUDA_BYTES)} for CUDA, {_in_text(code)} "
            f"for code and {_in_text(graphs)} for graphs"
        ]
        needed = CUDA_BYTES + self.programs.loaded_bytes
        if needed > self.outside_bytes:
            card_bytes = self.total_bytes + self.outside_bytes
            share = math.floor(100 * (1 - needed / card_bytes)) / 100
            lines.append(f"  which may not suffice: set {GPU_MEMORY_SHARE_VARIABLE}={share:g} in the environment")
        return lines

    def verified(self, programs: ProgramMemory) -> MemoryPlan:
        """Return the plan with the memory of the compiled programs that serve.

        Raises:
            InternalError: it exceeds the device's memory: serving would run out of memory under load.
        """
        plan = dataclasses.replace(self, programs=programs)
        if plan.total_bytes is not None and plan.used_bytes > plan.total_bytes:
            raise InternalError(
                "the compiled programs need more memory than planned: "
                + "; ".join(f"{name}: {num_bytes}" for name, num_bytes in plan.rows())
            )
        return plan


def _rounded_down(num_bytes: int) -> int:
    """Return the largest number of three significant bits that is not over `num_bytes`."""
    shift = max(0, num_bytes.bit_length() - 3)
    return num_bytes >> shift << shift


def plan_memory(request: PoolRequest, memory: DeviceMemory, programs: Callable[[], ProgramMemory]) -> MemoryPlan:
    """Decide the number of blocks, and plan everything else.

    A pool takes all that is left of a device's own memory. In host memory it takes at most what max_num_seqs sequences
    of maximum length can use, and, unless the user chose memory_utilization, at most 4 GiB or a quarter of the free
    memory, rounded down. If that leaves a quarter of the usable memory in reserve, the plan omits the memory of
    programs until they are compiled.

    Args:
        request: the sizes.
        memory: of the device.
        programs: compiles the largest programs and returns their memory. Called only if that matters.

    Raises:
        InvalidArgument: the chosen number does not fit, or one sequence of maximum length does not.
    """
    if memory.total_bytes is None:
        if request.num_blocks is None:
            raise InvalidArgument("num_blocks", "this device does not report its memory; choose a number")
        return MemoryPlan(request, None, request.num_blocks, what=memory.what, outside_bytes=memory.outside_bytes)
    most = request.most_blocks(memory)
    wanted = most if request.num_blocks is None else request.num_blocks
    before = MemoryPlan(request, memory.total_bytes, wanted, what=memory.what, outside_bytes=memory.outside_bytes)
    free = int(memory.total_bytes * request.memory_utilization) - request.fixed_bytes
    if not memory.is_own and before.pool_bytes + before.checkpoint_bytes < free * 3 // 4:
        return before
    if free <= 0:
        raise too_large(before)  # regardless of programs: compilation is not needed to know
    planned = dataclasses.replace(before, programs=programs())
    if request.num_blocks is None:
        left = planned.most_blocks or 0
        fitting = left if memory.is_own else min(most, left)
        if fitting < request.blocks_per_seq:
            raise too_large(planned)
        return dataclasses.replace(planned, num_blocks=fitting)
    if not planned.fits:
        raise too_large(planned)
    return planned


def too_large(plan: MemoryPlan) -> InvalidArgument:
    """Return the error of a plan that does not fit, with the numbers and what to change."""
    request = plan.request
    most, total = max(0, plan.most_blocks or 0), plan.total_bytes or 0
    what = f" ({plan.what})" if plan.what else ""
    state = f", {request.state_bytes / _GIB:.2f} GiB for recurrent state" if request.state_bytes else ""
    state += f", {request.encoder_bytes / _GIB:.2f} GiB for the vision encoder" if request.encoder_bytes else ""
    share = f", with {request.checkpoint_bytes} bytes of state for each {request.blocks_per_checkpoint}"
    shared = share if request.blocks_per_checkpoint else ""
    if plan.usable_bytes is not None and request.weight_bytes >= plan.usable_bytes:
        return InvalidArgument(
            "tensor_parallel_size",
            f"the weights alone are {request.weight_bytes / _GIB:.2f} GiB per device, but only "
            f"{request.memory_utilization:g} of {total / _GIB:.2f} GiB{what} may be used: raise tensor_parallel_size, "
            "or use devices with more memory",
        )
    spent = (
        f"{request.memory_utilization:g} of {total / _GIB:.2f} GiB{what}, minus {request.weight_bytes / _GIB:.2f} GiB "
        f"for weights{state} and {plan.program_bytes / _GIB:.2f} GiB for programs, leaves {most} blocks of "
        f"{request.bytes_per_block} bytes{shared}"
    )
    if request.pool_bytes is not None and most >= 1:
        fitting = (most + 1) * request.bytes_per_block
        return InvalidArgument(
            "kv_cache_memory_bytes",
            f"{request.pool_bytes} bytes do not fit: {spent}; lower it to {fitting}, or raise tensor_parallel_size or "
            "memory_utilization, use 8 bits (kv_cache_dtype), or use devices with more memory",
        )
    if request.num_blocks is not None and most >= 1:
        return InvalidArgument(
            "num_blocks",
            f"{request.num_blocks} blocks do not fit: {spent}; lower num_blocks to {most}, or raise "
            "tensor_parallel_size or memory_utilization, use 8 bits (kv_cache_dtype), or use devices with more memory",
        )
    return InvalidArgument(
        "memory_utilization",
        f"{spent}; one sequence of max_model_len ({request.max_model_len}) needs {request.blocks_per_seq}: raise "
        "memory_utilization or tensor_parallel_size, lower max_model_len or max_num_batched_tokens, use 8 bits "
        "(kv_cache_dtype), or use devices with more memory",
    )


def _in_text(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / _GIB:.3f} GiB" if abs(num_bytes) >= _GIB else f"{num_bytes / _MIB:.2f} MiB"


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """A program's memory as the compiler reports it, in bytes of one device.

    Attributes:
        argument_bytes: of all arguments, padded as the device lays them out.
        output_bytes: of all results, including arguments updated in place.
        alias_bytes: of the results that are arguments updated in place.
        temp_bytes: additional working memory.
        code_bytes: of the program itself.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @classmethod
    def of(cls, executable: jax.stages.Compiled) -> ProgramReport:
        """Read the compiler's report and cache it, because reading takes some milliseconds.

        All numbers are zero if the backend gives no report.
        """
        known = _KNOWN.get(executable)
        if known is None:
            known = _KNOWN[executable] = cls._read(executable)
        return known

    @classmethod
    def _read(cls, executable: jax.stages.Compiled) -> ProgramReport:
        memory = executable.memory_analysis()
        if memory is None:
            return cls(0, 0, 0, 0, 0)
        return cls(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes or _gpu_code_bytes(executable),
        )

    @property
    def total_bytes(self) -> int:
        """Device memory that must be free for one call, including arguments."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


_KNOWN: WeakKeyDictionary[jax.stages.Compiled, ProgramReport] = WeakKeyDictionary()
_KNOWN_LAUNCHES: WeakKeyDictionary[jax.stages.Compiled, int] = WeakKeyDictionary()
_LAUNCH = re.compile(r"^\s+(?:ROOT )?%\S+ = .*? (?:fusion|custom-call|copy|sort|scatter|all-reduce)\(", re.MULTILINE)


def count_launches(executable: jax.stages.Compiled) -> int:
    """Return the kernels that a program for GPUs launches, with each loop's body once: CUDA graph nodes."""
    known = _KNOWN_LAUNCHES.get(executable)
    if known is None:
        known = _KNOWN_LAUNCHES[executable] = len(_LAUNCH.findall(executable.as_text() or ""))
    return known


def _gpu_code_bytes(executable: jax.stages.Compiled) -> int:
    """Return the size of a GPU program's code, which its memory report omits; 0 on other devices."""
    runtime = executable.runtime_executable() if _is_for_gpu(executable) else None
    if runtime is None:
        return 0
    try:
        size = getattr(runtime, "size_of_generated_code_in_bytes", None)  # only of a loaded program
        num_bytes = 0 if size is None else int(size())
        return num_bytes if num_bytes > 0 else len(runtime.serialize())
    except (jax.errors.JaxRuntimeError, AttributeError):
        return 0


def _is_for_gpu(executable: jax.stages.Compiled) -> bool:
    shardings = jax.tree.leaves(getattr(executable, "output_shardings", ()))
    return any(device.platform == "gpu" for sharding in shardings[:1] for device in sharding.device_set)


_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"(?P<needs>[\d.]+)(?P<unit>[KMGT]?)i?B?"
_SIZES = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \("),
    re.compile(rf"Used {_SIZE} of \S+ hbm"),
)


@dataclass(frozen=True, slots=True)
class CompilerOutOfMemory:
    """An out-of-memory error of the compiler.

    Attributes:
        needs_bytes: of the program; None if the message has no known number.
        message: its first line.
    """

    needs_bytes: int | None
    message: str

    @classmethod
    def of(cls, error: jax.errors.JaxRuntimeError) -> CompilerOutOfMemory | None:
        """Parse the error; return None if it is not about memory."""
        text = str(error)
        if _OUT_OF_MEMORY not in text:
            return None
        message = text.splitlines()[0]
        for sizes in _SIZES:
            if found := sizes.search(text):
                return cls(int(float(found["needs"]) * _UNITS[found["unit"]]), message)
        return cls(None, message)

    @property
    def problem(self) -> str:
        """The problem, and what to change."""
        return (
            f"the compiler found too little device memory: {self.message}: lower num_blocks, memory_utilization or "
            "max_num_batched_tokens, or raise tensor_parallel_size"
        )


@contextmanager
def memory_refusals() -> Iterator[None]:
    """Convert a compiler's out-of-memory error inside the context to an InvalidArgument with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        refusal = CompilerOutOfMemory.of(error)
        if refusal is None:
            raise
        raise InvalidArgument("num_blocks", refusal.problem) from error
