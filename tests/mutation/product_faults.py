"""Faults of the GPUs' product of groups of rows, and of the lists of tiles that it gets."""

from __future__ import annotations

from tests.mutation.planting import Fault

_KERNEL = "kernel.py"
_ONE = ("rows_of_one",)
_OWN = ("own_matrix",)

PRODUCT_FAULTS = (
    Fault(
        "odd and even columns are swapped",
        _KERNEL,
        "bits = words >> 4 if lane",
        "bits = words >> 4 if not lane",
        _ONE,
    ),
    Fault(
        "every group uses the scale of the first",
        _KERNEL,
        "_scaled(part.astype(jnp.float32), group,",
        "_scaled(part.astype(jnp.float32), 0,",
        _ONE,
    ),
    Fault("4-bit floats are scaled to half their value", _KERNEL, '"mxfp4": 2.0**14', '"mxfp4": 2.0**13', _ONE),
    Fault(
        "zero points are added instead of subtracted",
        _KERNEL,
        "numbers = numbers - zeros",
        "numbers = numbers + zeros",
        _ONE,
    ),
    Fault(
        "every row is multiplied with the first matrix",
        _KERNEL,
        "operands.tiles[tile, TileField.MATRIX],",
        "operands.tiles[tile, TileField.MATRIX] * 0,",
        _OWN,
    ),
    Fault(
        "every split of the depth starts at the first chunk",
        _KERNEL,
        "first, last = split * each,",
        "first, last = 0 * each,",
        ("parts",),
    ),
    Fault(
        "a tile extends into the next matrix",
        "form.py",
        "jnp.minimum(counts_x[matrices_i] - skipped_i, tile_rows)",
        "tile_rows + 0 * skipped_i",
        ("tiles",),
    ),
)
