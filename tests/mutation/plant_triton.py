"""Plants one fault at a time into the Triton kernels, and sees that their quick tests turn red.

python -m tests.mutation.plant_triton
"""

from __future__ import annotations

import sys

from tests.mutation.planting import Bed, Fault

_KERNEL = "kernel.py"
_WORK = "work.py"
_CHUNKS = ("right and chunks",)
_PARTS = ("right and parts",)
_CUT = ("every_query",)

FAULTS = (
    Fault(
        "the layer is left out",
        _KERNEL,
        "first_place=memory.layer[0] * layout.blocks_per_layer",
        "first_place=memory.layer[0] * 0",
        _CHUNKS,
    ),
    Fault("a query sees the key behind it", _KERNEL, "(distances >= 0)", "(distances >= -1)", _CHUNKS),
    Fault(
        "the window is a key too wide",
        _KERNEL,
        "is_seen &= distances < spec.kind.sliding_window",
        "is_seen &= distances <= spec.kind.sliding_window",
        _PARTS,
    ),
    Fault(
        "the sum so far keeps the maximum of its time",
        _KERNEL,
        "fade = jnp.exp2(state.max - new_max)",
        "fade = jnp.exp2(state.max - state.max)",
        _CHUNKS,
    ),
    Fault(
        "keys behind the context are read",
        _KERNEL,
        "& (keys < item.end)",
        "& (keys < item.end + 1)",
        _CHUNKS,
    ),
    Fault(
        "skipped keys are read",
        _KERNEL,
        "(keys >= item.begin) &",
        "(keys >= 0) &",
        ("what_lies_around",),
    ),
    Fault(
        "a block outside of the layer is another's",
        _KERNEL,
        "is_read = is_context & (ids >= 0) & (ids < spec.layout.blocks_per_layer)",
        "is_read = is_context & (ids >= 0)",
        ("what_lies_around",),
    ),
    Fault(
        "keys take the scale of values",
        _KERNEL,
        "spec.kind.scale * (_scale(0, head, memory)",
        "spec.kind.scale * (_scale(1, head, memory)",
        ("right and int8",),
    ),
    Fault(
        "odd columns are taken for even ones",
        _KERNEL,
        "bits = words >> 8 if lane else (words << 8) >> 8",
        "bits = (words << 8) >> 8 if lane else words >> 8",
        ("right and int8",),
    ),
    Fault(
        "floats of 8 bits lose their sign",
        _KERNEL,
        "bits = (bits & -0x8000) | ((bits & 0x7F) << 7)",
        "bits = (bits & 0x7F) << 7",
        ("right and fp8",),
    ),
    Fault(
        "a head's pieces begin at the same column",
        _KERNEL,
        "begin, left = begin + size, left - size",
        "begin, left = begin, left - size",
        ("right and pieces",),
    ),
    Fault(
        "a tile with others stores its own result",
        _KERNEL,
        "is_part = memory.items[item, ItemField.IS_PART] > 0",
        "is_part = memory.items[item, ItemField.IS_PART] > 1",
        _PARTS,
    ),
    Fault(
        "parts are merged without their maxima",
        _KERNEL,
        "share = jnp.exp2(max_ - new_max), jnp.exp2(their_max - new_max)",
        "share = jnp.exp2(max_ - new_max), jnp.exp2(their_max - their_max)",
        _PARTS,
    ),
    Fault(
        "parts of a context overlap",
        _WORK,
        "jnp.clip(chunks_n[tile_i] - done_i, 0, part_chunks)",
        "jnp.maximum(chunks_n[tile_i] - done_i, 0)",
        _CUT,
    ),
    Fault(
        "more parts than there is room for",
        _WORK,
        "(parts_cn.sum(axis=1) > cut.num_parts)",
        "(parts_cn.sum(axis=1) > cut.num_parts + 8)",
        _CUT,
    ),
    Fault(
        "padding belongs to nobody",
        _WORK,
        "jnp.append(counts_s, num_tokens - rows.query_starts_s1[used])",
        "jnp.append(counts_s, 0)",
        _CUT,
    ),
    Fault(
        "a window begins with the tile's last query",
        _WORK,
        "jnp.maximum(first_n, position_n - spec.kind.sliding_window + 1)",
        "jnp.maximum(first_n, position_n + size_n - spec.kind.sliding_window)",
        _CUT,
    ),
    Fault(
        "heads of a token's row lie in another order",
        _KERNEL,
        "head * cut.group + lax.rem(rows, jnp.int32(cut.group))",
        "head * cut.group + cut.group - 1 - lax.rem(rows, jnp.int32(cut.group)) * 0",
        _CHUNKS,
    ),
)

NO_FAULT = Fault(
    "nothing is planted",
    _KERNEL,
    "class _Places(",
    "class _Places(",
    tuple(sorted({name for fault in FAULTS for name in fault.tests})),
)

BED = Bed(
    sources="jpaged/kernels/paged_attention/triton",
    tests="tests/kernels",
    left_out=(),
    words=lambda fault: ["tests/kernels/triton", "-k", " or ".join(f"({name})" for name in fault.tests)],
)


if __name__ == "__main__":
    sys.exit(BED.plant_all(FAULTS))
