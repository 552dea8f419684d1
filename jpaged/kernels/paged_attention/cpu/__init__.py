"""Paged attention on CPUs: a C++ kernel that XLA calls as a foreign function.

core.cc has the arithmetic, kernel.cc distributes the work; this module has the call.

Queries are float32, bfloat16 or float16, the pool any type that a layout supports; head size, block size and group are
arbitrary. The result for a query is a function of the row's context alone, to the last bit. It does not depend on the
batch, the chunks of a prefill, or the number of threads. Vectors have the processor's width (16, 8 or 4 floats). With
AVX512_BF16, bfloat16 queries, keys and values are multiplied as they are, with weights of the same type (pairs.h).
Float32 prompts whose tokens all see each other are attended to by the step's own keys and values (prompts.h).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register
from jpaged.kernels.kv_layout import KVLayout, output_dim
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, AttentionSpec, NewKV, Queries, Updated

NUMBERS = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""The types of the pool's numbers, in the order of `Number` in numbers.h."""


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """The library's two functions.

    Attributes:
        vectors: the widest that this processor has: avx512bf16, avx512, avx2 or baseline.
        max_width: floats of the widest vectors to use, if the processor has them: 16, 8 or 4.
        max_threads: maximum threads of XLA's pool; 0 is all.
    """

    vectors: str
    max_width: int = MAX_WIDTH
    max_threads: int = 0

    def attend(self, call: AttentionCall) -> Attended:
        """See `jpaged.kernels.paged_attention.paged_attention`."""
        run = jax.ffi.ffi_call(f"{NAME}_attend", _output_shapes(call))
        out_thd, lse_th = run(call.q_thd, call.pool, *_numbers(call), **self._attributes(call.spec))
        return out_thd, lse_th

    def update(self, call: AttentionCall, new_kv: NewKV) -> Updated:
        """Store keys and values, which are divided by their scales, then `attend`."""
        k_tkd, v_tkd, slots_t = new_kv
        v_tkd = jnp.zeros((0,), k_tkd.dtype) if v_tkd is None else v_tkd
        shapes = (*_output_shapes(call), jax.ShapeDtypeStruct(call.pool.shape, call.pool.dtype))
        run = jax.ffi.ffi_call(f"{NAME}_update", shapes, input_output_aliases={4: 2})
        operands = (call.q_thd, k_tkd, v_tkd, slots_t.astype(jnp.int32), call.pool, *_numbers(call))
        out_thd, lse_th, pool = run(*operands, **self._attributes(call.spec))
        return out_thd, lse_th, pool

    def _attributes(self, spec: AttentionSpec) -> dict[str, Any]:
        return {
            "scale": np.float32(spec.kind.scale),
            "soft_cap": np.float32(spec.kind.soft_cap or 0),
            "window": np.int64(spec.kind.sliding_window or 0),
            "blocks_per_layer": np.int64(spec.layout.blocks_per_layer),
            "kv_number": np.int64(NUMBERS.index(spec.layout.dtype.name)),
            "max_width": np.int64(self.max_width),
            "max_threads": np.int64(self.max_threads),
            "value_dim": np.int64(spec.layout.value_dim or 0),
        }


def rotate(x: jax.Array, dtype: np.dtype, block: int) -> jax.Array:
    """See `jpaged.kernels.paged_attention.rotate_heads`. No bit depends on the other vectors."""
    _loaded()
    rotated: jax.Array = jax.ffi.ffi_call(f"{NAME}_hadamard", jax.ShapeDtypeStruct(x.shape, dtype))(
        x, block=np.int64(block)
    )
    return rotated


def blank_pool(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array | None:
    """Return zeros, traced, whose memory a CPU maps when it is first used; None if the library is missing or old."""
    if isinstance(register("blank"), str):
        return None
    blank: jax.Array = jax.ffi.ffi_call(f"{NAME}_blank", jax.ShapeDtypeStruct(shape, dtype))()
    return blank


def _output_shapes(call: AttentionCall) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    places, dtype = call.q_thd.shape[:2], call.q_thd.dtype
    o_shape = (*places, output_dim(call.spec.layout))
    return jax.ShapeDtypeStruct(o_shape, dtype), jax.ShapeDtypeStruct(places, jnp.float32)


def _numbers(call: AttentionCall) -> tuple[jax.Array, ...]:
    """Return the operands after the pool."""
    rows, scales_lk2 = call.rows, call.scales_lk2
    numbers = (
        *(jnp.asarray(call.layer), rows.query_starts_s1, rows.positions, rows.begins),
        *(rows.kv_lens_s, rows.block_tables_sm, jnp.asarray(rows.num_rows)),
    )
    scales = jnp.zeros((0,), jnp.float32) if scales_lk2 is None else scales_lk2.astype(jnp.float32)
    return *(x.astype(jnp.int32) for x in numbers), scales


@functools.cache
def kernel() -> CpuKernel | str:
    """Return the package's kernel, or the reason why there is none."""
    found = register("attend", "update", "hadamard")
    if isinstance(found, str):
        return found
    found.jpaged_vectors.restype = ctypes.c_char_p
    return CpuKernel(found.jpaged_vectors().decode())


def attend(call: AttentionCall) -> Attended:
    """Run `CpuKernel.attend` of the package's kernel."""
    return _loaded().attend(call)


def update(call: AttentionCall, new_kv: NewKV) -> Updated:
    """Run `CpuKernel.update` of the package's kernel."""
    return _loaded().update(call, new_kv)


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Return why the kernel cannot run, or None. It supports every call if it was built."""
    found = kernel()
    return found if isinstance(found, str) else None


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Return why it does not run on this device, or None."""
    return None if device.platform == "cpu" else f"it runs on CPUs, not on {device.platform}"


def _loaded() -> CpuKernel:
    found = kernel()
    if isinstance(found, str):
        raise Unsupported(f"attention backend cpu: {found}")
    return found
