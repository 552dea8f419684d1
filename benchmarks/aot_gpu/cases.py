"""What is compiled: attention calls, moves of blocks, and whole steps of models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.aot_gpu.models import MODEL_CASES
from benchmarks.aot_gpu.program import Program
from jpaged.config import Backend, EngineConfig
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.lowering import abstract_serving, program_lowerings
from jpaged.device.mesh import replicated
from jpaged.device.transfers import lower_move, move_sizes
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.cuda_library import TARGET
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, RaggedRows, paged_attention_update
from jpaged.kernels.paged_attention.cascade import CascadeRows, cascade_attention_update
from jpaged.kernels.paged_attention.cuda import choose_division
from jpaged.kernels.paged_attention.gpu import attention as gpu
from jpaged.kernels.paged_attention.gpu.work import choose_tiling
from jpaged.kernels.paged_attention.spec import AttentionCall
from jpaged.kernels.paged_attention.triton.work import Cut, choose_cut
from jpaged.models.decoder import DecoderConfig
from jpaged.models.model import Model
from jpaged.models.rope_config import RopeConfig

MoveKind = Literal["copy", "swap_out", "swap_in"]


class Case(Protocol):
    """Something to compile."""

    @property
    def name(self) -> str:
        """Unique, and without spaces."""

    @property
    def expected_error(self) -> str:
        """A part of the message with which it has to be refused; empty where it has to compile."""

    @property
    def gpu(self) -> str:
        """The GPU that it is compiled for, one of `jpaged.device.aot.topology.GPUS`."""

    def lower(self, mesh: jax.sharding.Mesh) -> Program:
        """Traces and lowers it for the mesh's device."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of attention with its write, as a step makes it."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    num_tokens: int = 64
    num_rows: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    table_width: int = 128
    is_cascade: bool = False
    backend: Backend = "pallas-gpu"
    gpu: str = "h200"
    expected_error: str = ""
    value_dim: int | None = None

    @property
    def name(self) -> str:
        """Its sizes, spelt out."""
        kind = f"{self.dtype}-{self.kv_dtype}" if self.kv_dtype else self.dtype
        extra = "-window" if self.sliding_window else ""
        extra += "-cap" if self.soft_cap else ""
        extra += "-cascade" if self.is_cascade else ""
        extra += f"-v{self.value_dim}" if self.value_dim else ""
        sizes = f"h{self.num_heads}-k{self.num_kv_heads}-d{self.head_dim}-b{self.block_size}"
        where = where_compiled(self.backend, self.gpu)
        return f"attention-{where}{sizes}-t{self.num_tokens}-s{self.num_rows}-{kind}{extra}"

    def spec(self) -> AttentionSpec:
        """The static side of the call."""
        dtype = jnp.dtype(self.kv_dtype or self.dtype)
        sizes = self.block_size, self.num_kv_heads, self.head_dim
        layout = KVLayout(4, 65_536 // self.block_size, *sizes, dtype, "gpu", value_dim=self.value_dim)
        return AttentionSpec(layout, AttentionKind(self.head_dim**-0.5, self.sliding_window, self.soft_cap))

    def lower(self, mesh: jax.sharding.Mesh) -> Program:
        sharding = replicated(mesh)
        spec = self.spec()
        arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in self.arguments()]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(self.call, donate_argnums=0).lower(*arguments)
        if self.backend == "pallas-triton":
            return self._of_triton(lowered)
        if self.backend == "cuda":
            return self._of_cuda(lowered)
        tile_bytes = self.num_lists * self.num_tokens * self.num_heads * 64 * self.head_dim * 4
        return Program(
            lowered, spec.layout.num_bytes, spec.layout.shape, frozenset(), (16 << 20) + tile_bytes, 1, num_writes=1
        )

    def _of_triton(self, lowered: jax.stages.Lowered) -> Program:
        """What has to be true of the Triton kernels: memory for parts of contexts, and little more."""
        spec, cut = self.spec(), self.triton_cut()
        num_groups = self.num_heads // cut.merged_tile.group
        part_bytes = cut.merged_rows * num_groups * ((self.value_dim or self.head_dim) + 2) * 4
        num_kernels = 2 if cut.merged_rows else 1
        max_temp_bytes = (1 << 20) + part_bytes
        return Program(
            lowered, spec.layout.num_bytes, spec.layout.shape, frozenset(), max_temp_bytes, num_kernels, num_writes=1
        )

    def _of_cuda(self, lowered: jax.stages.Lowered) -> Program:
        """What has to be true of the calls of the CUDA kernels: memory for parts of contexts, and little more."""
        spec = self.spec()
        queries = Queries(self.num_heads, jnp.dtype(self.dtype), self.num_rows, self.table_width, self.num_tokens)
        slots = choose_division(spec, queries).num_slots * self.num_kv_heads
        max_temp_bytes = (2 << 20) + self.num_lists * slots * 16 * ((self.value_dim or self.head_dim) + 2) * 4
        return Program(
            lowered,
            spec.layout.num_bytes,
            spec.layout.shape,
            frozenset(),
            max_temp_bytes,
            0,
            num_writes=1,
            calls={TARGET: self.num_lists},
        )

    def triton_cut(self) -> Cut:
        """How the Triton kernels cut it."""
        sizes = self.num_tokens, self.num_rows, self.table_width
        are_shared = (False, True, False)[: self.num_lists]
        return choose_cut(self.spec(), jnp.dtype(self.dtype), self.num_heads, sizes, are_shared)

    @property
    def num_lists(self) -> int:
        """Lists of rows: their own parts, and where prefixes are shared these, and the edges of windows."""
        return 1 + self.is_cascade * (1 + (self.sliding_window is not None))

    @property
    def call(self) -> Callable[..., Any]:
        """What is compiled, over `arguments`."""
        run = cascade if self.is_cascade else attend
        return functools.partial(run, spec=self.spec(), backend=self.backend)

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what `attend` takes."""
        t, s, layout = self.num_tokens, self.num_rows, self.spec().layout
        new = jax.ShapeDtypeStruct((t, self.num_kv_heads, self.head_dim), self.dtype)
        ints: tuple[tuple[int, ...], ...] = ((t,), (), (s + 1,), (s,), (s, self.table_width), ())
        scales = [jax.ShapeDtypeStruct((4, self.num_kv_heads, 2), jnp.float32)] if layout.is_scaled else []
        if self.is_cascade:
            ints = (*ints, (s,), (s + 1,), ())
        return [
            jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
            jax.ShapeDtypeStruct((t, self.num_heads, self.head_dim), self.dtype),
            new,
            new if self.value_dim is None else jax.ShapeDtypeStruct((), self.dtype),  # not read
            *(jax.ShapeDtypeStruct(shape, np.int32) for shape in ints),
            *scales,
        ]


def where_compiled(backend: Backend, gpu: str) -> str:
    """A part of a case's name: empty for the Hopper kernel, which one GPU has."""
    return {"pallas-gpu": "", "cuda": f"cuda-{gpu}-"}.get(backend, f"{gpu}-")


def attend(pool: jax.Array, *rest: jax.Array, spec: AttentionSpec, backend: Backend = "pallas-gpu") -> Any:
    """The operation on arrays alone, in the order of `AttentionCase.arguments`."""
    q, k, v, slots, layer, starts, lens, tables, num_rows, *scales = rest
    rows = RaggedRows(starts, lens, tables, num_rows)
    new_kv = k, v if v.ndim else None, slots
    return paged_attention_update(q, new_kv, pool, layer, rows, spec, scales[0] if scales else None, backend=backend)


def cascade(pool: jax.Array, *rest: jax.Array, spec: AttentionSpec, backend: Backend = "pallas-gpu") -> Any:
    """The same where rows may share prefixes; behind the rows lie where each one's own part begins, and the runs."""
    q, k, v, slots, layer, starts, lens, tables, num_rows, begins, run_starts, num_runs, *scales = rest
    rows = RaggedRows(starts, lens, tables, num_rows, kv_begins_s=begins)
    shared = CascadeRows.of(rows, run_starts, num_runs, spec)
    return cascade_attention_update(
        q, (k, v, slots), pool, layer, shared, spec, scales[0] if scales else None, backend=backend
    )


@dataclass(frozen=True, slots=True)
class MoveCase:
    """A move of whole blocks in the pool of an 8B model: copy on write, swap out, swap in."""

    kind: MoveKind
    dtype: str = "bfloat16"
    gpu: str = "h200"
    expected_error: str = ""

    @property
    def name(self) -> str:
        """What it moves."""
        return f"move-{self.kind}-{self.dtype}"

    def lower(self, mesh: jax.sharding.Mesh) -> Program:
        layout = KVLayout(32, 8192, 16, 8, 128, jnp.dtype(self.dtype), "gpu")
        size = move_sizes(layout)[-1]
        lowered = lower_move(ProgramSpec(self.kind, size), layout, mesh)
        donated = 0 if self.kind == "swap_out" else layout.num_bytes
        return Program(lowered, donated, layout.shape, frozenset(), 3 * size * layout.bytes_per_block, 0, num_writes=1)


@dataclass(frozen=True, slots=True)
class StepCase:
    """All layers of a model over T packed tokens."""

    model: str
    num_tokens: int
    kv_cache_dtype: str = "auto"
    backend: Backend = "pallas-gpu"
    gpu: str = "h200"
    expected_error: str = ""

    @property
    def name(self) -> str:
        """Model, tokens and the pool's type."""
        where = where_compiled(self.backend, self.gpu)
        return f"step-{where}{self.model}-t{self.num_tokens}-kv-{self.kv_cache_dtype}"

    def lower(self, mesh: jax.sharding.Mesh) -> Program:
        model = Model(MODELS[self.model], jnp.dtype("bfloat16"))
        options = EngineConfig.load(
            {
                "attention_backend": self.backend,
                "kv_cache_dtype": self.kv_cache_dtype,
                "max_num_seqs": min(64, self.num_tokens),
                "max_num_batched_tokens": self.num_tokens,
                "max_model_len": 8192,
                "num_blocks": 8192,
            }
        )
        step, geometry, params = abstract_serving(model, options, mesh)
        lowerings = program_lowerings(step, params, geometry)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = lowerings[ProgramSpec("forward", self.num_tokens)]()
        leaves = jax.tree.leaves(params["layers"])
        shapes = frozenset(tuple(sorted(leaf.shape)) for leaf in leaves if leaf.size >= 1 << 20)
        layout = step.layout
        wide = max(model.config.intermediate_size * 2, model.config.num_heads * 64 * model.config.head_dim)
        return Program(
            lowered,
            layout.num_bytes,
            layout.shape,
            shapes,
            (32 << 20) + 8 * self.num_tokens * wide,
            0 if self.backend == "cuda" else 1,
            model.config.num_layers,
            calls={TARGET: model.config.num_layers} if self.backend == "cuda" else {},
        )


@dataclass(frozen=True, slots=True)
class OverflowCase:
    """More stages than shared memory holds, behind the backend's back: the compiler says so too."""

    name: str = "overflow-of-shared-memory"
    gpu: str = "h200"
    expected_error: str = "232448"

    def lower(self, mesh: jax.sharding.Mesh) -> Program:
        case = AttentionCase()
        spec = case.spec()
        q, table = case.arguments()[1], case.arguments()[8]
        tiling = choose_tiling(spec, case.num_heads, case.num_tokens, case.num_rows, case.table_width)
        tiling = dataclasses.replace(tiling, stages=7)

        def call(q: jax.Array, pool: jax.Array, tables: jax.Array, numbers: jax.Array) -> Any:
            rows = RaggedRows(numbers, numbers[1:], tables, numbers[0])
            return gpu.attend(AttentionCall(q, pool, 0, rows, spec), tiling)

        numbers = jax.ShapeDtypeStruct((case.num_rows + 1,), np.int32)
        shapes = q, case.arguments()[0], table, numbers
        sharded = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)) for x in shapes]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return Program(jax.jit(call).lower(*sharded), 0, spec.layout.shape, frozenset(), 0, 1, num_writes=0)


def _llama(hidden_size: int, intermediate_size: int, num_layers: int, heads: tuple[int, int, int], vocab: int) -> Any:
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        norm_eps=1e-5,
        ropes=(RopeConfig(),),
        max_position_embeddings=8192,
    )


MODELS = {
    "small": _llama(1024, 2816, 4, (16, 4, 64), 32_000),
    "llama-3-8b": _llama(4096, 14_336, 32, (32, 8, 128), 128_256),
}


ATTENTION: tuple[AttentionCase, ...] = (
    *(AttentionCase(head_dim=d, num_tokens=t) for d in (64, 128, 256) for t in (64, 512)),
    *(AttentionCase(num_tokens=8, num_rows=8, kv_dtype=kv) for kv in (None, "int8", "float8_e4m3fn")),
    *(AttentionCase(block_size=b) for b in (8, 32, 48, 64, 128)),
    *(AttentionCase(head_dim=d) for d in (32, 80, 96)),
    *(AttentionCase(h, k, 64) for h, k in ((14, 2), (8, 8), (64, 1), (12, 4))),
    *(AttentionCase(head_dim=d, dtype="float16") for d in (64, 128)),
    *(AttentionCase(head_dim=d, kv_dtype=kv) for d in (64, 128, 256) for kv in ("int8", "float8_e4m3fn")),
    *(AttentionCase(dtype="float16", kv_dtype=kv) for kv in ("int8", "float8_e4m3fn")),
    AttentionCase(head_dim=80, kv_dtype="int8"),
    AttentionCase(block_size=128, kv_dtype="float8_e4m3fn", num_tokens=512),
    *(AttentionCase(num_tokens=512, kv_dtype=kv) for kv in ("int8", "float8_e4m3fn")),
    *(AttentionCase(14, 2, d, block_size=48, num_tokens=512) for d in (64, 128)),
    AttentionCase(num_tokens=512, sliding_window=1024, soft_cap=30.0),
    AttentionCase(8, 4, 256, num_tokens=2048, sliding_window=4096, soft_cap=50.0),
    AttentionCase(8, 4, 256, num_tokens=2048, sliding_window=4096),
    *(AttentionCase(is_cascade=True, sliding_window=window) for window in (None, 1024)),
)

_TRITON: dict[str, Any] = {"backend": "pallas-triton"}
TRITON_GPUS = ("a100", "rtx3090", "l4", "h100", "h200", "b200", "rtx5090")
TRITON: tuple[AttentionCase, ...] = (
    *(AttentionCase(num_tokens=t, gpu=gpu, **_TRITON) for gpu in TRITON_GPUS for t in (64, 2048)),
    *(
        AttentionCase(kv_dtype=kv, num_tokens=t, gpu=gpu, **_TRITON)
        for gpu in ("a100", "l4", "b200")
        for kv in ("int8", "float8_e4m3fn")
        for t in (64, 512)
    ),
    *(AttentionCase(8, 4, 256, num_tokens=t, soft_cap=50.0, gpu="l4", **_TRITON) for t in (64, 2048)),
    *(AttentionCase(head_dim=d, gpu="l4", **_TRITON) for d in (16, 64, 80, 96)),
    *(AttentionCase(block_size=b, gpu="l4", **_TRITON) for b in (1, 48, 256)),
    *(AttentionCase(h, k, 64, gpu="l4", **_TRITON) for h, k in ((14, 2), (8, 8), (71, 1))),
    AttentionCase(dtype="float16", num_tokens=512, sliding_window=1024, gpu="a100", **_TRITON),
    *(
        AttentionCase(num_tokens=t, is_cascade=True, gpu=gpu, **_TRITON)
        for gpu in ("a100", "l4", "b200")
        for t in (64, 2048)
    ),
    *(AttentionCase(is_cascade=True, sliding_window=1024, gpu=gpu, **_TRITON) for gpu in ("a100", "l4")),
    AttentionCase(is_cascade=True, kv_dtype="int8", gpu="l4", **_TRITON),
    AttentionCase(8, 4, 256, is_cascade=True, gpu="l4", **_TRITON),
)

_CUDA: dict[str, Any] = {"backend": "cuda"}
CUDA: tuple[AttentionCase, ...] = (
    *(AttentionCase(num_tokens=t, gpu=gpu, **_CUDA) for gpu in ("a100", "l4", "rtx5090") for t in (64, 2048)),
    AttentionCase(kv_dtype="int8", is_cascade=True, sliding_window=1024, gpu="a100", **_CUDA),
    AttentionCase(8, 4, 256, dtype="float32", kv_dtype="float8_e4m3fn", soft_cap=50.0, gpu="l4", **_CUDA),
    AttentionCase(128, 1, 576, value_dim=512, gpu="a100", **_CUDA),
)
"""The library is called, and compiled by itself (`cuda_kernels.py`)."""

REFUSED = (AttentionCase(head_dim=256, block_size=128, expected_error="the limit is 232448"), OverflowCase())

CASES: tuple[Case, ...] = (
    *(MoveCase(kind, dtype) for kind in get_args(MoveKind) for dtype in ("bfloat16", "int8")),
    *(StepCase("small", t) for t in (8, 64, 512)),
    *(StepCase("llama-3-8b", t) for t in (64, 2048)),
    StepCase("llama-3-8b", 64, "int8"),
    *(StepCase("small", t, gpu=gpu, **_TRITON) for gpu in TRITON_GPUS for t in (64, 512)),
    StepCase("llama-3-8b", 64, gpu="a100", **_TRITON),
    *(StepCase("small", t, gpu="a100", backend="cuda") for t in (64, 512)),
    *MODEL_CASES,
    *REFUSED,
    *ATTENTION,
    *TRITON,
    *CUDA,
)
