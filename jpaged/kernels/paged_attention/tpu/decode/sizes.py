"""Sizes of the work of the kernel of rows that decode.

ring      buffers of a chunk each: three in progress, and those whose blocks are in flight
places    tokens of one step of the grid: their queries, outputs, maxima and sums are in vector memory
bundle    heads that share a matmul, so that it has 8 rows; at least two if two heads share a row of lanes, or if the
          matrix units are 256 deep
pitch     rows of words from token to token in a buffer; a load whose stride is a multiple of 4 takes longer
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jpaged.errors import InternalError
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.tpu import sizes as sizing

VMEM_LIMIT_BYTES = 56 * 2**20
"""The compiler's limit; of the generations since v5e the smallest has 64 MiB."""
VMEM_BUDGET_BYTES = 44 * 2**20
"""Planned use; the rest is left to the compiler, for values that spill from registers."""
_CHUNK_BYTES = {"TPU7x": 2 * 2**20}
_CHUNK_BYTES_ELSEWHERE = 2**20
_MAX_CHUNK_TOKENS = 2048
_MAX_AHEAD = 3
_STAGES = 3
_PLACES_BYTES = 12 * 2**20
_LANES, _SUBLANES = 128, 8
_MAX_BUNDLE_LANES = 1024
_DEEP_KINDS = frozenset({"TPU v6 lite", "TPU v6e", "TPU7x"})
"""Device kinds whose matrix units are 256 deep and wide: 128 lanes of keys would fill half of them."""
_DEEP_LANES = 256
_LEAST_PLACES = 16


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """The sizes of one call.

    Attributes:
        chunk_tokens: of a buffer, a multiple of 128 and of the block size.
        ahead: chunks that are fetched before they are needed.
        bundle: heads of one matmul.
        pitch: rows of tiles from token to token in a buffer, some of which the token uses.
        places: tokens of a step of the grid.
    """

    chunk_tokens: int
    ahead: int
    bundle: int
    pitch: int
    places: int

    @property
    def ring(self) -> int:
        """Number of buffers."""
        return self.ahead + _STAGES

    @property
    def vmem_limit_bytes(self) -> int:
        return VMEM_LIMIT_BYTES


def choose(
    layout: KVLayout, num_heads: int, num_places: int, device_kind: str, folder: Path = sizing.TUNED
) -> DecodeSizes:
    """Return sizes with the measured chunks of this device kind and shape, or the rule's.

    Raises:
        InternalError: an invalid entry.
    """
    entry = sizing.measured(layout, num_heads, is_decode=True, device_kind=device_kind, folder=folder)
    if entry is None:
        return rule(layout, num_heads, num_places, device_kind)
    where = f"tuned sizes of {device_kind} for {num_heads}/{layout.num_kv_heads} heads of {layout.head_dim}"
    tokens = entry["fetch_blocks"] * layout.block_size
    if tokens < 1 or tokens % _LANES:
        blocks = entry["fetch_blocks"]
        raise InternalError(f"{where}: fetch_blocks {blocks} are {tokens} tokens, not a multiple of {_LANES}")
    sizes = rule(layout, num_heads, num_places, device_kind, tokens)
    if (need := vmem_bytes(sizes, layout, num_heads)) > VMEM_BUDGET_BYTES:
        limit = VMEM_BUDGET_BYTES / 2**20
        raise InternalError(f"{where}: require {need / 2**20:.1f} MiB of vector memory; the limit is {limit:.1f} MiB")
    return sizes


def refusal(layout: KVLayout, num_heads: int) -> str | None:
    """Return why there is not enough vector memory for any sizes, or None."""
    need = vmem_bytes(rule(layout, num_heads, _LEAST_PLACES, ""), layout, num_heads)
    if need <= VMEM_BUDGET_BYTES:
        return None
    return (
        f"{layout.num_kv_heads} key/value heads and {num_heads} query heads of {layout.head_dim} per chip require "
        f"{need / 2**20:.1f} MiB of vector memory; the limit is {VMEM_BUDGET_BYTES / 2**20:.1f} MiB: split the heads "
        "over more chips"
    )


def rule(
    layout: KVLayout, num_heads: int, num_places: int, device_kind: str, chunk_tokens: int | None = None
) -> DecodeSizes:
    """Return chunks of one or two MiB, and as large a number in flight as the vector memory holds, at least one.

    If that does not fit either, return the smallest sizes (see `vmem_bytes`).
    """
    group, rows = num_heads // layout.num_kv_heads, layout.token_shape[0]
    folds = layout.lanes // _LANES
    column_heads = 2 if layout.is_joined else 1
    num_columns = min(_SUBLANES // group // column_heads, _MAX_BUNDLE_LANES // layout.lanes)
    num_columns = max(num_columns, _least_columns(layout, device_kind))
    bundle = min(layout.num_kv_heads, num_columns * column_heads)
    if chunk_tokens is None:
        token_bytes = rows * folds * _LANES * 4
        wanted = min(_MAX_CHUNK_TOKENS, _CHUNK_BYTES.get(device_kind, _CHUNK_BYTES_ELSEWHERE) // token_bytes)
        chunk_tokens = max(_LANES, layout.block_size, 1 << max(wanted, 1).bit_length() - 1)
    sizes = DecodeSizes(
        chunk_tokens=chunk_tokens,
        ahead=_MAX_AHEAD,
        bundle=bundle,
        pitch=rows + 1 if rows * folds % 4 == 0 else rows,
        places=1,
    )
    most = max(_LEAST_PLACES, _PLACES_BYTES // _place_bytes(sizes, layout, num_heads))
    sizes = dataclasses.replace(sizes, places=num_places if num_places <= most else _get_tile(num_places, most))
    while vmem_bytes(sizes, layout, num_heads) > VMEM_BUDGET_BYTES and sizes.ahead > 1:
        sizes = dataclasses.replace(sizes, ahead=sizes.ahead - 1)
    return sizes


def _least_columns(layout: KVLayout, device_kind: str) -> int:
    """Return the columns of lanes that fill the depth of the matrix units, if the heads divide evenly into them."""
    columns, heads = _DEEP_LANES // layout.lanes, 2 if layout.is_joined else 1
    return columns if device_kind in _DEEP_KINDS and columns > 1 and layout.num_kv_heads % (columns * heads) == 0 else 1


def num_tiles(layout: KVLayout, num_heads: int, num_tokens: int) -> int:
    """Return the maximum steps of the grid for a step of `num_tokens` tokens."""
    num_tokens = -(-num_tokens // _LEAST_PLACES) * _LEAST_PLACES
    return num_tokens // rule(layout, num_heads, num_tokens, "").places


def _get_tile(num_tokens: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides the tokens, whole tiles of the other kernel."""
    tile = 1 << most.bit_length() - 1
    while num_tokens % tile:
        tile //= 2
    return tile


def vmem_bytes(sizes: DecodeSizes, layout: KVLayout, num_heads: int) -> int:
    """Return the vector memory of a call with 32-bit queries."""
    bundles, rows = _rows(sizes, layout, num_heads)
    chunk = sizes.chunk_tokens * sizes.pitch * layout.lanes * 4
    scores = 2 * bundles * rows * sizes.chunk_tokens * 4
    one_bundle = 3 * sizes.chunk_tokens * sizes.bundle * sizing.key_lanes(layout) * 4
    if layout.is_joined:
        # Half of the chunk, with numbers that may be twice as wide after conversion.
        chunk += sizes.chunk_tokens * -(-layout.num_kv_heads // 2) * _LANES * max(2, layout.dtype.itemsize)
    return sizes.ring * chunk + scores + one_bundle + (sizes.places + 1) * _place_bytes(sizes, layout, num_heads)


def _rows(sizes: DecodeSizes, layout: KVLayout, num_heads: int) -> tuple[int, int]:
    group = num_heads // layout.num_kv_heads
    return -(-layout.num_kv_heads // sizes.bundle), -(-sizes.bundle * group // _SUBLANES) * _SUBLANES


def _place_bytes(sizes: DecodeSizes, layout: KVLayout, num_heads: int) -> int:
    bundles, rows = _rows(sizes, layout, num_heads)
    lanes = sizing.key_lanes(layout) + sizing.value_lanes(layout)
    queries_and_outputs, kept = 2 * lanes * 4, (2 * _LANES + lanes) * 4
    lse = 2 * _SUBLANES * -(-bundles * rows // _LANES) * _LANES * 4
    return bundles * rows * (queries_and_outputs + kept) + lse
