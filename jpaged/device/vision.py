"""The vision encoder of a model on a device: its programs, one for each number of patches, and their memory.

The encoder runs on the first device of the model, next to the steps. Its rows return to the host, and enter steps as
input embeddings of a request.

    images            [I0: 100 patches] [I1: 500] [I2: 4000]
    calls             I0 and I1, padded to 1024            I2, padded to 4096
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.memory_plan import EncoderBytes
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.kernels import matmul
from jpaged.kernels.paged_attention import cpu as cpu_attention
from jpaged.models.config import VisionConfig
from jpaged.models.layers import Params
from jpaged.models.vision import tower
from jpaged.models.vision.config import vision_leaves
from jpaged.models.vision.tower import PackedPatches
from jpaged.types import PreparedImage

_SIZES = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
"""Numbers of patches of programs."""


def call_sizes(max_patches: int) -> tuple[int, ...]:
    """Return the numbers of patches of programs, for images of up to `max_patches`."""
    largest = min(size for size in _SIZES if size >= max_patches)
    return tuple(size for size in _SIZES if size <= largest)


def packs_matrices(device: jax.Device) -> bool:
    """Return True if an encoder on a device runs the kernels of CPUs."""
    if device.platform != "cpu":
        return False
    return not any(isinstance(found, str) for found in (matmul.kernel(), cpu_attention.kernel()))


def _packed(params: Params, config: VisionConfig, device: jax.Device) -> Params:
    """Return parameters, or their shapes, packed for the kernels of a CPU."""
    return tower.pack_params(params, matmul.loaded().packer(SingleDeviceSharding(device)), config)


def lower_encoder(
    config: VisionConfig, dtype: np.dtype, num_patches: int, device: jax.Device, *, packs: bool = False
) -> jax.stages.Lowered:
    """Return the program of a number of patches; neither allocates nor compiles.

    Args:
        packs: the parameters are packed for the kernels of CPUs.
    """
    sharding = SingleDeviceSharding(device)

    def shape(*sizes: int, of: type = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, of, sharding=sharding)

    made = (
        _packed(tower.abstract_params(config, dtype), config, device) if packs else tower.abstract_params(config, dtype)
    )
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), made)
    patches = PackedPatches(
        shape(num_patches, config.patch_dim, of=np.float32),
        shape(num_patches),
        shape(num_patches),
        shape(num_patches, 2),
        shape(num_patches, 2, of=np.float32),
    )
    return jax.jit(functools.partial(tower.encode, config=config)).lower(params, patches)


def encoder_bytes(config: VisionConfig, dtype: np.dtype, max_tokens: int | None = None) -> EncoderBytes:
    """Return the memory of an encoder on its device; working memory of the largest call is estimated.

    Args:
        max_tokens: of an image; None if only the encoder limits them.
    """
    most = config.max_patches if max_tokens is None else min(config.max_patches, max_tokens * config.num_merged)
    size = call_sizes(most)[-1]
    scores = min(config.num_heads * size * size, max(tower.MAX_SCORES, config.num_heads * size * tower.MIN_QUERIES))
    copies = 4 + len(config.deep_layers) + (6 if config.window_edge else 0)  # windows see keys of three blocks
    widths = copies * config.hidden_size + 2 * config.intermediate_size + config.patch_dim
    return EncoderBytes(vision_leaves(config).num_params * dtype.itemsize, 4 * (2 * scores + size * widths))


def random_params(config: VisionConfig, dtype: np.dtype, device: jax.Device, seed: int) -> Params:
    """Return random parameters for measurements without a checkpoint."""
    random = np.random.default_rng(seed)

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put((random.standard_normal(leaf.shape, np.float32) * 0.02).astype(leaf.dtype), device)

    params: Params = jax.tree.map(make, tower.abstract_params(config, dtype))
    return params


class JaxVisionEncoder:
    """Vision encoder of one model on a device. Thread-safe.

    Programs are those of an executor (`set_programs`). Without one they are compiled when they are first needed.

    Args:
        params: the tree of `tower.abstract_params`, on the device.
        max_patches: of one image.
        packs: run the kernels of CPUs; None if they are available.
    """

    def __init__(self, config: VisionConfig, params: Params, max_patches: int, *, packs: bool | None = None) -> None:
        self._config = config
        self._max_patches = max_patches
        self._sizes = call_sizes(max_patches)
        self._dtype = np.dtype(params["patch"]["kernel"].dtype)
        (self._device,) = params["patch"]["kernel"].devices()
        self._packs = packs_matrices(self._device) if packs is None else packs
        self._params = _packed(params, config, self._device) if self._packs else params
        self._programs: dict[int, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._store: ProgramStore | None = None

    @property
    def max_patches(self) -> int:
        """Maximum number of patches of one image."""
        return self._max_patches

    def set_programs(self, programs: ProgramStore) -> None:
        """Run the programs of a server's closed list, for images of up to the largest of them."""
        sizes = tuple(sorted(spec.size for spec in programs.specs if spec.kind == "encode"))
        self._sizes, self._max_patches = sizes, min(self._max_patches, sizes[-1])
        self._store = programs

    def encode(self, images: Sequence[PreparedImage]) -> list[NDArray[np.float32]]:
        """Return the input embeddings `[rows, hidden_size]` of each image. Blocks until the device is done."""
        parts = _split_calls(images, min(tower.MAX_SHARED, self._sizes[-1]))
        calls = [(part, self._start([images[index] for index in part])) for part in parts]
        found: dict[int, NDArray[np.float32]] = {}
        for part, result in calls:
            rows_re, start = np.asarray(result), 0
            for index in part:
                stop = start + len(images[index].patches_pe) // self._config.num_merged
                found[index] = _in_order(rows_re[start:stop], images[index].grid, self._config)
                start = stop
        return [found[index] for index in range(len(images))]

    def compile(self, num_patches: int) -> jax.stages.Compiled:
        """Return the program of a number of patches."""
        if self._store is not None:
            return self._store.wait(ProgramSpec("encode", num_patches))
        with self._lock:
            if num_patches not in self._programs:
                lowered = lower_encoder(self._config, self._dtype, num_patches, self._device, packs=self._packs)
                self._programs[num_patches] = lowered.compile()
            return self._programs[num_patches]

    def _start(self, images: Sequence[PreparedImage]) -> jax.Array:
        total = sum(len(image.patches_pe) for image in images)
        size = min(size for size in self._sizes if size >= total)
        patches = jax.device_put(pack_images(images, self._config, size), self._device)
        result: jax.Array = self.compile(size)(self._params, patches)
        result.copy_to_host_async()
        return result


def _split_calls(images: Sequence[PreparedImage], max_shared: int) -> Iterator[list[int]]:
    """Yield the images of each call: several with up to `max_shared` patches in all, or a single one."""
    part: list[int] = []
    total = 0
    for index in sorted(range(len(images)), key=lambda index: len(images[index].patches_pe)):
        num_patches = len(images[index].patches_pe)
        if part and total + num_patches > max_shared:
            yield part
            part, total = [], 0
        part.append(index)
        total += num_patches
    if part:
        yield part


def pack_images(images: Sequence[PreparedImage], config: VisionConfig, size: int) -> PackedPatches:
    """Return the patches of some images, padded to a size; those of a window are adjacent."""
    values_pe = np.zeros((size, config.patch_dim), np.float32)
    images_p, windows_p = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    positions_p2, start, num_windows = np.zeros((size, 2), np.int32), 0, 0
    places_p2 = np.zeros((size, 2), np.float32)
    for number, image in enumerate(images):
        place = slice(start, start + len(image.patches_pe))
        positions, windows = patch_positions(image.grid, config.merge_size), _windows(image.grid, config)
        images_p[place] = number
        if windows is None:
            values_pe[place], positions_p2[place] = image.patches_pe, positions
        else:
            order = np.argsort(windows, kind="stable")
            values_pe[place], positions_p2[place] = image.patches_pe[order], positions[order]
            windows_p[place] = num_windows + windows[order]
            num_windows += int(windows.max()) + 1
        if config.num_places:
            spans = np.maximum(np.array(image.grid, np.float32) - 1, 1)
            places_p2[place] = positions_p2[place].astype(np.float32) * np.float32(config.num_places - 1) / spans
        start = place.stop
    return PackedPatches(values_pe, images_p, windows_p, positions_p2, places_p2)


def _windows(grid: tuple[int, int], config: VisionConfig) -> NDArray[np.int32] | None:
    """Return the window of each patch of an image; None without windows."""
    if not config.window_edge:
        return None
    across = math.ceil(grid[1] / config.window_edge)
    windows: NDArray[np.int32] = (
        patch_positions(grid, config.merge_size) // config.window_edge @ np.array([across, 1], np.int32)
    )
    return windows


def _in_order(rows_re: NDArray[np.float32], grid: tuple[int, int], config: VisionConfig) -> NDArray[np.float32]:
    """Return a copy of an image's rows, which come window by window, row by row."""
    windows = _windows(grid, config)
    if windows is None:
        return rows_re.copy()
    ordered_re = np.empty_like(rows_re)
    ordered_re[np.argsort(windows[:: config.num_merged], kind="stable")] = rows_re
    return ordered_re


def patch_positions(grid: tuple[int, int], merge_size: int) -> NDArray[np.int32]:
    """Return row and column of each patch `[P, 2]`, with those of an output row next to each other."""
    rows, columns = (length // merge_size for length in grid)
    shape = (rows, columns, merge_size, merge_size)
    row, column, y, x = np.meshgrid(*map(np.arange, shape), indexing="ij")
    both = np.stack([row * merge_size + y, column * merge_size + x], axis=-1)
    return both.reshape(-1, 2).astype(np.int32)
