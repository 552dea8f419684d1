"""Faults of the GPUs' product of groups of rows, and of the lists of tiles that it gets."""

from __future__ import annotations

from tests.mutation.planting import Fault

_KERNEL = "kernel.py"
_ONE = ("rows_of_one",)
_OWN = ("own_matrix",)

PRODUCT_FAULTS = (
    Fault(
        "odd columns are taken for even ones",
        _KERNEL,
        "bits = words >> 4 if lane",
        "bits = words >> 4 if not lane",
        _ONE,
    ),
    Fault(
        "a group has the scale of the first",
        _KERNEL,
        "_scaled(part.astype(jnp.float32), group,",
        "_scaled(part.astype(jnp.float32), 0,",
        _ONE,
    ),
    Fault("floats of 4 bits lack their exponent", _KERNEL, '"mxfp4": 2.0**14', '"mxfp4": 2.0**13', _ONE),
    Fault("zero points are added", _KERNEL, "numbers = numbers - zeros", "numbers = numbers + zeros", _ONE),
    Fault(
        "every row meets the first matrix",
        _KERNEL,
        "operands.tiles[tile, TileField.MATRIX],",
        "operands.tiles[tile, TileField.MATRIX] * 0,",
        _OWN,
    ),
    Fault(
        "a part of the depth is the whole",
        _KERNEL,
        "first, last = split * each,",
        "first, last = 0 * each,",
        ("parts",),
    ),
    Fault(
        "a tile reaches into the next matrix",
        "form.py",
        "jnp.minimum(counts_x[matrices_i] - skipped_i, tile_rows)",
        "tile_rows + 0 * skipped_i",
        ("tiles",),
    ),
)
