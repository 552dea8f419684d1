"""Entry points of the operation, and its backends.

An entry point checks the call, and runs the chosen backend. Each backend runs on some devices, with limitations:

    backend        device               made for
    pallas-tpu     TPUs                 pools of form tpu; the step's keys and values are stored in the kernel
    pallas-gpu     Hopper GPUs (sm_90)  queries of 16 bits; pools of form gpu
    pallas-triton  GPUs since Ampere    also calls that pallas-gpu refuses on Hopper; pools of form gpu
    cuda           GPUs since Ampere    a jax without Pallas Triton, if nvcc built the library; pools of form gpu
    cpu            CPUs                 every call; built if a C++ compiler is present; also stores the step's keys
    itself
    xla            any                  CPUs without a compiler, GPUs before Ampere: correct everywhere, fast nowhere

The reasons for a refusal are known before anything is traced, so that a server reports them at startup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import Backend
from jpaged.errors import Unsupported
from jpaged.kernels.kv_layout import KVForm, KVLayout
from jpaged.kernels.paged_attention import cpu, cuda, reference
from jpaged.kernels.paged_attention.gpu import attention as gpu
from jpaged.kernels.paged_attention.spec import (
    Attended,
    AttentionCall,
    AttentionSpec,
    ContextPart,
    NewKV,
    Queries,
    RaggedRows,
    Updated,
)
from jpaged.kernels.paged_attention.tpu import attention as tpu
from jpaged.kernels.paged_attention.triton import attention as triton

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


@dataclass(frozen=True, slots=True)
class Implementation:
    """One backend's functions.

    Attributes:
        attend: implements `paged_attention`.
        update: implements `paged_attention_update` in one kernel, with keys and values divided by their scales; if
            None, `KVLayout.write` updates the pool first.
        platform: that it is made for; None is any.
        form: of the pool that it reads; None reads any.
        unsupported_reason: (the pool's layout, queries) -> why it cannot run, or None. It refuses no kind of attention.
        unsupported_device_reason: device -> why it does not run there, or None.
        prepare: (rows, slots of the step's tokens or None, spec, queries) -> rows with the preparation for its calls in
            all layers of a step; None if it needs none.
        stores_first: `update` stores all keys and values before a query reads any: queries may see later tokens.
        attend_parts: attention over several parts of each context in one launch (`cascade.py`); if None, each part is a
            separate call.
        rotate: (vectors, type of the result, size of a block) -> `rotate_heads`; None is a matrix product.
    """

    attend: Callable[[AttentionCall], Attended]
    update: Callable[[AttentionCall, NewKV], Updated] | None
    platform: str | None
    form: KVForm | None
    unsupported_reason: Callable[[KVLayout, Queries], str | None]
    unsupported_device_reason: Callable[[jax.Device], str | None]
    prepare: Callable[[RaggedRows, jax.Array | None, AttentionSpec, Queries], RaggedRows] | None = None
    attend_parts: Callable[[AttentionCall, Sequence[ContextPart]], Attended] | None = None
    rotate: Callable[[jax.Array, Any, int], jax.Array] | None = None
    stores_first: bool = False

    def fuses_update(self, rows: RaggedRows) -> bool:
        """Return True if `update` may run for these rows."""
        return self.update is not None and (self.stores_first or rows.first_positions_s is None)


IMPLEMENTATIONS: dict[Backend, Implementation] = {
    "pallas-tpu": Implementation(
        tpu.attend, tpu.update, "tpu", "tpu", tpu.unsupported_reason, tpu.unsupported_device_reason, tpu.prepare
    ),
    "pallas-gpu": Implementation(
        gpu.attend,
        None,
        "gpu",
        "gpu",
        gpu.unsupported_reason,
        gpu.unsupported_device_reason,
        attend_parts=gpu.attend_parts,
    ),
    "pallas-triton": Implementation(
        triton.attend,
        None,
        "gpu",
        "gpu",
        triton.unsupported_reason,
        triton.unsupported_device_reason,
        attend_parts=triton.attend_parts,
    ),
    "cuda": Implementation(
        cuda.attend,
        None,
        "gpu",
        "gpu",
        cuda.unsupported_reason,
        cuda.unsupported_device_reason,
        attend_parts=cuda.attend_parts,
    ),
    "cpu": Implementation(
        cpu.attend,
        cpu.update,
        "cpu",
        "cpu",
        cpu.unsupported_reason,
        cpu.unsupported_device_reason,
        rotate=cpu.rotate,
        stores_first=True,
    ),
    "xla": Implementation(reference.attend, None, None, None, lambda pool, queries: None, lambda device: None),
}
"""In order of preference: `choose` takes the first that refuses neither the device nor the call."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend, and the reasons against others.

    Attributes:
        backend: its name.
        layout: the pool's, in the form that the backend reads.
        passed_over: preferred backends for the platform that were not taken, each with the reason.
    """

    backend: Backend
    layout: KVLayout
    passed_over: tuple[tuple[Backend, str], ...]


def choose(name: str, device: jax.Device, layout: KVLayout, queries: Queries) -> Choice:
    """Return the given backend, or for `auto` the first that supports the call.

    Args:
        name: `auto` or a backend.
        device: the device to run on.
        layout: the pool's; its form is replaced by the one that fits.
        queries: describes the calls.

    Raises:
        Unsupported: the given backend does not support the call; has the reason.
    """
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise Unsupported(f"attention_backend: {name!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
    passed_over: list[tuple[Backend, str]] = []
    for backend, found in IMPLEMENTATIONS.items():
        is_wanted = found.platform in (None, device.platform) if name == "auto" else name == backend
        if not is_wanted:
            continue
        form: KVForm = found.form or ("cpu" if device.platform == "cpu" else "gpu")
        fitting = dataclasses.replace(layout, form=form)
        reason = found.unsupported_device_reason(device) or found.unsupported_reason(fitting, queries)
        if reason is None:
            return Choice(backend, fitting, tuple(passed_over))
        passed_over.append((backend, reason))
    raise Unsupported("; ".join(f"attention_backend: {backend} cannot run here: {why}" for backend, why in passed_over))


def implementation(backend: Backend, spec: AttentionSpec, queries: Queries) -> Implementation:
    """Return the given backend, after a check that it supports the call.

    Raises:
        Unsupported: it does not, or there is none with this name.
    """
    if backend not in IMPLEMENTATIONS:
        raise Unsupported(f"attention backend {backend!r} does not exist; available: {', '.join(get_args(Backend))}")
    found = IMPLEMENTATIONS[backend]
    if found.form is not None and found.form != spec.layout.form:
        raise Unsupported(f"attention backend {backend} requires pools of form {found.form}, not {spec.layout.form}")
    if (reason := found.unsupported_reason(spec.layout, queries)) is not None:
        raise Unsupported(f"attention backend {backend}: {reason}")
    return found


def prepare_rows(
    rows: RaggedRows, slots_t: Int[Array, "T"] | None, spec: AttentionSpec, queries: Queries, *, backend: Backend
) -> RaggedRows:
    """Return the rows with the backend's preparation for all layers of a step.

    A call with unprepared rows prepares them itself. Prepared rows are valid for calls with this spec and queries of
    this description, and for storing keys in these slots.

    Raises:
        Unsupported: as `paged_attention`.
    """
    found = implementation(backend, spec, queries)
    if found.prepare is None:
        return rows
    return found.prepare(rows, slots_t if found.fuses_update(rows) else None, spec, queries)


def paged_attention(
    q_thd: Float[Array, "T H D"],
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> Attended:
    """Compute causal grouped-query attention of ragged rows over paged keys and values.

    The rows may mix prefill chunks and decodes. Query head h reads key/value head h // (H / K). Pool contents that a
    row does not see never matter, not even NaN; a block id outside the layer reads as zeros. The keys and values of
    this step are already in the pool.

    The arguments are the fields of `AttentionCall`, and the backend whose kernel runs; there is no
    fallback.

    Raises:
        Unsupported: the backend does not support the call; has the reason.
        InternalError: shapes that contradict the layout.
    """
    call = AttentionCall(q_thd, pool, layer, rows, spec, scales_lk2)
    return implementation(backend, spec, call.queries).attend(call)


def paged_attention_update(
    q_thd: Float[Array, "T H D"],
    new_kv: NewKV,
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> Updated:
    """Store the step's own keys and values, then run `paged_attention`: in one kernel if the backend has it.

    Donate the pool: it is updated in place. Every row's last queries are the last tokens of the row's context, unless
    the rows have first positions: queries at later positions then see all of the step's keys.
    Arguments and errors are those of `paged_attention`, plus the new keys and values, as the model computes them.
    """
    call = AttentionCall(q_thd, pool, layer, rows, spec, scales_lk2)
    run = implementation(backend, spec, call.queries)
    new_kv = call.scaled(new_kv)
    if run.update is not None and run.fuses_update(rows):
        return run.update(call, new_kv)
    pool = spec.layout.write(pool, layer, *new_kv)
    return *run.attend(dataclasses.replace(call, pool=pool)), pool


def rotate_heads(x: Float[Array, "... D"], dtype: Any, *, backend: Backend) -> Float[Array, "... D"]:
    """Multiply the vectors of heads by an orthogonal matrix that is its own inverse: a Hadamard matrix and D^-1/2.

    Products of two rotated vectors are those of the vectors. Numbers that are large in a few places, as those of keys
    are, spread over all places, so that integers with one scale hold them better (Ashkboos et al., QuaRot, 2024). If
    D is no power of two, each block of the largest one that divides it is rotated by itself.

    Args:
        dtype: of the result; sums are float32.
    """
    head_dim = x.shape[-1]
    block = head_dim & -head_dim
    if (rotate := IMPLEMENTATIONS[backend].rotate) is not None:
        return rotate(x, dtype, block)
    signs = np.ones((1, 1), np.float32)
    while len(signs) < block:
        signs = np.block([[signs, signs], [signs, -signs]])
    blocks = x.reshape(*x.shape[:-1], head_dim // block, block)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # products of 16 bits with 1 are exact
    rotated = jnp.einsum(
        "...d,de->...e", blocks, signs.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    return (rotated * np.float32(block**-0.5)).reshape(x.shape).astype(dtype)
