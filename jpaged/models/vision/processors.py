"""Image processors: pixels -> patches as a model's encoder takes them, and the tokens of an image in a prompt.

Results equal those of transformers' processors on Pillow up to rounding.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import MAX_PATCHES, VisionConfig
from jpaged.models.json_fields import JsonFields
from jpaged.types import PreparedImage

FIELD = "image"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BILINEAR, _BICUBIC = 2, 3
_MAX_RATIO = 200
_MAX_NEWLINES = 32
_WITH_ROPE_GRID = ("qwen2_5_vl", "qwen3_vl")
"""Encoders of models whose rotary positions in an image are rows and columns."""
_NAMES = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "data_format", "input_data_format"),
    *("device", "return_tensors", "disable_grouping", "default_to_square", "do_pad", "pad_size", "crop_size"),
    *("image_seq_length", "_valid_processor_keys", "_processor_class", "auto_map"),
)
"""Keys of a processor's file without effect on a single image."""


@dataclass(frozen=True, slots=True)
class PixelScale:
    """Resize with a filter of Pillow, and scale of pixels: (pixel * factor - mean) / std, by channel.

    Attributes:
        resample: number of the filter in Pillow.
    """

    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(
        cls, fields: JsonFields, resample: int, mean: tuple[float, ...] = _CLIP_MEAN, std: tuple[float, ...] = _CLIP_STD
    ) -> PixelScale:
        """Read the keys that all processors share, with the defaults of one of them.

        Raises:
            Unsupported: a step is off.
        """
        fields.ignore(_NAMES)
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            fields.only(key, True, why="image processors that leave out a step are not supported")
        fields.only("do_center_crop", False, why="image processors that crop are not supported")
        return cls(
            fields.integer("resample", resample, minimum=0, maximum=5),
            fields.number("rescale_factor", 1 / 255),
            _read_channels(fields, "image_mean", mean),
            _read_channels(fields, "image_std", std),
        )

    def apply(self, pixels_hwc: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float32]:
        """Return a resized image as float32 `[3, height, width]`."""
        from PIL import Image  # only if a request has images

        resized = Image.fromarray(pixels_hwc).resize((width, height), resample=Image.Resampling(self.resample))
        values_hwc: NDArray[np.float32] = np.asarray(resized, np.float32) * np.float32(self.factor)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        normalized_hwc: NDArray[np.float32] = (values_hwc - mean) / std
        return np.ascontiguousarray(normalized_hwc.transpose(2, 0, 1))


def _read_channels(fields: JsonFields, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = fields.numbers(key, maximum=3) if fields.has(key) else default
    if len(found) != 3:
        raise fields.bad(key, f"has {len(found)} numbers; an image has 3 channels")
    return found


class PatchProcessor(abc.ABC):
    """Image processor of one model.

    Args:
        config: the encoder's shape.
        scale: how pixels become numbers.

    Attributes:
        placeholder_id: token that stands for an image in the text of a chat.
        max_patches: maximum number of patches of an image.
    """

    def __init__(self, config: VisionConfig, scale: PixelScale, max_patches: int = MAX_PATCHES) -> None:
        self.placeholder_id = config.image_token_id
        self.max_patches = min(max_patches, MAX_PATCHES)
        self._config = config
        self._scale = scale

    def join(self, first: int, second: int) -> int | None:
        """Return the token of two adjacent ones at an image's edge, if the tokenizer has one token for their text."""
        return None

    @abc.abstractmethod
    def _fit(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width in pixels after the resize, multiples of those of an output row."""

    @abc.abstractmethod
    def _tokens(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of an image with this many output rows in rows and columns."""

    def count_tokens(self, width: int, height: int) -> int:
        """Return the number of prompt tokens of an image of this size in pixels.

        Raises:
            InvalidArgument: the model takes no image of this shape.
        """
        rows, columns = self._grid(height, width)
        merge = self._config.merge_size
        return len(self._tokens(rows // merge, columns // merge))

    def prepare(self, pixels_hwc: NDArray[np.uint8]) -> PreparedImage:
        """Return an RGB image `[height, width, 3]` as the encoder takes it.

        Raises:
            InvalidArgument: the model takes no image of this shape.
        """
        config, (height, width, _) = self._config, pixels_hwc.shape
        grid = self._grid(height, width)
        values_chw = self._scale.apply(pixels_hwc, grid[0] * config.patch_size, grid[1] * config.patch_size)
        patches_pe = split_patches(values_chw, config)
        merge = config.merge_size
        token_ids = self._tokens(grid[0] // merge, grid[1] // merge)
        digest = hashlib.sha256(b"jpaged/image/1\0" + np.array(grid, "<i8").tobytes())
        digest.update(patches_pe.tobytes())
        is_embed_t = np.array(token_ids) == config.image_token_id
        rope_grid = (grid[0] // merge, grid[1] // merge) if self._config.kind in _WITH_ROPE_GRID else None
        return PreparedImage(patches_pe, grid, tuple(token_ids), is_embed_t, digest.digest(), rope_grid)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of an image."""
        if min(height, width) < 1:
            raise InvalidArgument(FIELD, f"has {width} x {height} pixels; both must be at least 1")
        rows, columns = (size // self._config.patch_size for size in self._fit(height, width))
        if not 0 < rows * columns <= self.max_patches:
            size = f"{width} x {height} pixels makes {rows} x {columns} patches"
            raise InvalidArgument(FIELD, f"of {size}; the limit is {self.max_patches} patches")
        return rows, columns


def split_patches(values_chw: NDArray[np.float32], config: VisionConfig) -> NDArray[np.float32]:
    """Return the patches `[P, D]` of an image; those of an output row are adjacent, row by row in all."""
    size, merge, num_channels = config.patch_size, config.merge_size, len(values_chw)
    rows, columns = (length // (size * merge) for length in values_chw.shape[1:])
    split = values_chw.reshape(num_channels, rows, merge, size, columns, merge, size)
    ordered = split.transpose(1, 4, 2, 5, 0, 3, 6)
    if config.temporal_size > 1:
        frames = (*ordered.shape[:5], config.temporal_size, *ordered.shape[5:])
        ordered = np.broadcast_to(ordered[:, :, :, :, :, None], frames)
    return np.ascontiguousarray(ordered).reshape(-1, config.patch_dim)


class PixtralProcessor(PatchProcessor):
    """Image processor of Pixtral and Mistral 3: the aspect ratio stays, and each row of patches ends with a break.

    Args:
        break_id, end_id: tokens after each row of an image, and after the last one.
        longest: maximum pixels of an edge.
    """

    def __init__(self, config: VisionConfig, scale: PixelScale, longest: int, break_id: int, end_id: int) -> None:
        self._step = config.patch_size * config.merge_size
        super().__init__(config, scale, (math.ceil(longest / self._step) * config.merge_size) ** 2)
        self._longest = longest
        self._break_id, self._end_id = break_id, end_id

    @classmethod
    def read(
        cls, config: VisionConfig, fields: JsonFields, processor: JsonFields, vocabulary: Mapping[str, int]
    ) -> PixtralProcessor:
        """Read the files of a checkpoint; see `read_processor`."""
        scale = PixelScale.read(fields, _BICUBIC)
        fields.ignore(("patch_size",))  # replaced by that of the processor
        size = fields.mapping("size")
        longest = JsonFields(size, f"{fields.name} size").integer("longest_edge", config.image_size)
        for key, value in (("patch_size", config.patch_size), ("spatial_merge_size", config.merge_size)):
            if processor.has(key):
                processor.only(key, value, why=f"the encoder has {value}")
        names = [
            processor.text(f"image{part}_token", default)
            for part, default in (("_break", "[IMG_BREAK]"), ("_end", "[IMG_END]"))
        ]
        for name in names:
            if name not in vocabulary:
                raise Unsupported(f"the tokenizer has no token {name}")
        return cls(config, scale, longest, *(vocabulary[name] for name in names))

    def _fit(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height, width) / self._longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return math.ceil(height / self._step) * self._step, math.ceil(width / self._step) * self._step

    def _tokens(self, rows: int, columns: int) -> list[int]:
        tokens = ([self._config.image_token_id] * columns + [self._break_id]) * rows
        return [*tokens[:-1], self._end_id]


class QwenProcessor(PatchProcessor):
    """Image processor of Qwen2.5-VL and Qwen3-VL: the aspect ratio stays, within limits of pixels in all.

    Args:
        pixels: minimum and maximum number of pixels after the resize.
    """

    def __init__(self, config: VisionConfig, scale: PixelScale, pixels: tuple[int, int]) -> None:
        super().__init__(config, scale, pixels[1] // config.patch_size**2)
        self._step = config.patch_size * config.merge_size
        self._pixels = pixels

    @classmethod
    def read(
        cls, config: VisionConfig, fields: JsonFields, processor: JsonFields, vocabulary: Mapping[str, int]
    ) -> QwenProcessor:
        """Read the files of a checkpoint; see `read_processor`."""
        scale = PixelScale.read(fields, _BICUBIC)
        for key, value in (
            ("patch_size", config.patch_size),
            ("temporal_patch_size", config.temporal_size),
            ("merge_size", config.merge_size),
        ):
            fields.only(key, value, why=f"the encoder has {value}")
        size = JsonFields(fields.mapping("size"), f"{fields.name} size")
        limits = {"shortest_edge": ("min_pixels", 56 * 56), "longest_edge": ("max_pixels", 28 * 28 * 1280)}
        pixels = [fields.integer(key, size.integer(edge, default)) for edge, (key, default) in limits.items()]
        return cls(config, scale, (pixels[0], pixels[1]))

    def _fit(self, height: int, width: int) -> tuple[int, int]:
        step, (least, most) = self._step, self._pixels
        if max(height, width) > _MAX_RATIO * min(height, width):
            problem = f"has {width} x {height} pixels; the limit of the longer side is {_MAX_RATIO} times the shorter"
            raise InvalidArgument(FIELD, problem)
        sizes = round(height / step) * step, round(width / step) * step
        if sizes[0] * sizes[1] > most:
            ratio = math.sqrt(height * width / most)
            return (
                max(step, math.floor(height / ratio / step) * step),
                max(step, math.floor(width / ratio / step) * step),
            )
        if sizes[0] * sizes[1] < least:
            ratio = math.sqrt(least / (height * width))
            return math.ceil(height * ratio / step) * step, math.ceil(width * ratio / step) * step
        return sizes

    def _tokens(self, rows: int, columns: int) -> list[int]:
        return [self._config.image_token_id] * (rows * columns)


class SiglipProcessor(PatchProcessor):
    """Image processor of Gemma 3: every image becomes a square, and its tokens stand between empty lines.

    Args:
        newlines: tokens of 1, 2, ... line breaks, by their number.
    """

    def __init__(self, config: VisionConfig, scale: PixelScale, newlines: Mapping[int, int]) -> None:
        super().__init__(config, scale)
        assert config.begin_token_id is not None
        self.placeholder_id = config.begin_token_id
        self._newlines = newlines
        self._lengths = {token_id: length for length, token_id in newlines.items()}

    @classmethod
    def read(
        cls, config: VisionConfig, fields: JsonFields, processor: JsonFields, vocabulary: Mapping[str, int]
    ) -> SiglipProcessor:
        """Read the files of a checkpoint; see `read_processor`."""
        half = (0.5, 0.5, 0.5)
        scale = PixelScale.read(fields, _BILINEAR, half, half)
        for part in (fields, processor):
            part.only("do_pan_and_scan", False, why="pan and scan is not supported: an image is one square")
        size = JsonFields(fields.mapping("size"), f"{fields.name} size")
        for key in ("height", "width"):
            size.only(key, config.image_size, why=f"the encoder takes {config.image_size}")
        processor.only("image_seq_length", config.num_tokens, why=f"the encoder makes {config.num_tokens}")
        newlines = {n: vocabulary["\n" * n] for n in range(1, _MAX_NEWLINES) if "\n" * n in vocabulary}
        if 2 not in newlines:
            raise Unsupported("the tokenizer has no token of two line breaks")
        return cls(config, scale, newlines)

    def join(self, first: int, second: int) -> int | None:
        """See `PatchProcessor`."""
        if first not in self._lengths or second not in self._lengths:
            return None
        return self._newlines.get(self._lengths[first] + self._lengths[second])

    def _fit(self, height: int, width: int) -> tuple[int, int]:
        return self._config.image_size, self._config.image_size

    def _tokens(self, rows: int, columns: int) -> list[int]:
        config, space = self._config, self._newlines[2]
        assert config.begin_token_id is not None
        assert config.end_token_id is not None
        image = [config.image_token_id] * (rows * columns)
        return [space, config.begin_token_id, *image, config.end_token_id, space]


_READERS: Mapping[str, Callable[[VisionConfig, JsonFields, JsonFields, Mapping[str, int]], PatchProcessor]] = {
    "pixtral": PixtralProcessor.read,
    "qwen2_5_vl": QwenProcessor.read,
    "qwen3_vl": QwenProcessor.read,
    "siglip": SiglipProcessor.read,
}


def read_processor(
    config: VisionConfig,
    files: Sequence[Mapping[str, object]],
    vocabulary: Mapping[str, int],
) -> PatchProcessor:
    """Return the image processor of a model.

    Args:
        files: the parsed preprocessor_config.json and processor_config.json; empty for one that is missing.
        vocabulary: ids of tokens, with special ones.

    Raises:
        InvalidArgument: a malformed value.
        Unsupported: a setting that is not implemented, or a token that is missing.
    """
    image_fields, processor_fields = files
    nested = processor_fields.get("image_processor")
    if not image_fields and isinstance(nested, Mapping):
        image_fields = nested
    fields = JsonFields(image_fields, "preprocessor_config.json")
    processor = JsonFields(processor_fields, "processor_config.json")
    found = _READERS[config.kind](config, fields, processor, vocabulary)
    fields.finish()
    return found
