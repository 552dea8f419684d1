"""Models that read images, next to transformers: pixels to patches, patches to rows, rows to logits."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params, load_vision
from jpaged.device.vision import JaxVisionEncoder
from jpaged.engine.scheduler.output import rope_shifts
from jpaged.models.config import VisionConfig
from jpaged.models.model import Model
from jpaged.models.tokens import InputEmbeds, TokenBatch
from jpaged.models.vision.processors import PatchProcessor, read_processor
from jpaged.types import EmbeddedSpan, PreparedImage, PromptEmbeds
from tests.models import dense
from tests.models.vision import CASES, VOCABULARY, device, pictures, write_vision_checkpoint

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
transformers: Any = importlib.import_module("transformers")
FLOAT32 = np.dtype(jnp.float32)
SIZES = ((20, 32), (31, 9), (70, 50))


def their_processor(config: VisionConfig) -> Any:
    """The image processor of transformers on Pillow, as its processor calls it."""
    if config.kind.startswith("qwen"):
        qwen = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        return qwen.Qwen2VLImageProcessorPil(patch_size=config.patch_size, min_pixels=1024, max_pixels=2048)
    if config.kind == "siglip":
        gemma = importlib.import_module("transformers.models.gemma3.image_processing_pil_gemma3")
        return gemma.Gemma3ImageProcessorPil(size={"height": config.image_size, "width": config.image_size})
    pixtral = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    edge = config.patch_size * config.merge_size
    return pixtral.PixtralImageProcessorPil(
        size={"longest_edge": config.image_size}, patch_size={"height": edge, "width": edge}
    )


def their_pixels(config: VisionConfig, images: Sequence[np.ndarray]) -> dict[str, Any]:
    made: dict[str, Any] = their_processor(config)(images, return_tensors="pt")
    return {key: value for key, value in made.items() if key != "num_crops"}


def ours(folder: Path, images: Sequence[np.ndarray]) -> tuple[PatchProcessor, list[PreparedImage], list[np.ndarray]]:
    config = read_config(folder).vision
    assert config is not None
    limits = {"min_pixels": 1024, "max_pixels": 2048} if config.kind.startswith("qwen") else {}
    processor = read_processor(config, (limits, {}), VOCABULARY)
    prepared = [processor.prepare(image) for image in images]
    params = load_vision(config, folder, FLOAT32, device())
    return processor, prepared, JaxVisionEncoder(config, params, processor.max_patches).encode(prepared)


@pytest.mark.parametrize("name", CASES)
def test_patches_and_rows_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = write_vision_checkpoint(name, tmp_path).vision
    assert config is not None
    images = pictures(*SIZES)
    _, prepared, rows = ours(tmp_path, images)
    theirs = their_pixels(config, images)
    if config.kind.startswith("qwen"):
        want = np.concatenate([image.patches_pe for image in prepared])
        np.testing.assert_allclose(want, theirs["pixel_values"], atol=1e-6)
        assert [(1, *image.grid) for image in prepared] == [tuple(grid.tolist()) for grid in theirs["image_grid_thw"]]
    else:
        check_pixels(config, prepared, theirs)
    model = load_theirs(tmp_path)
    with torch.no_grad():
        want = model.get_image_features(**theirs).pooler_output
    for mine, other in zip(rows, want, strict=True):
        np.testing.assert_allclose(mine[:, : config.out_size], other.numpy(), rtol=0, atol=1e-4)


def check_pixels(config: VisionConfig, prepared: Sequence[PreparedImage], theirs: dict[str, Any]) -> None:
    """Compare patches with images, padded to one size."""
    sizes = theirs.get("image_sizes", [(config.image_size, config.image_size)] * len(prepared))
    for image, pixels, (height, width) in zip(prepared, theirs["pixel_values"], sizes, strict=True):
        merge, size = config.merge_size, config.patch_size
        split = image.patches_pe.reshape(
            image.grid[0] // merge, image.grid[1] // merge, merge, merge, 3, size, size
        ).transpose(4, 0, 2, 5, 1, 3, 6)
        np.testing.assert_allclose(split.reshape(3, height, width), pixels[:, :height, :width], atol=1e-6)


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, num_images: int, tmp_path: Path) -> None:
    """As its own class writes the checkpoint, with images between and after texts."""
    config = write_vision_checkpoint(name, tmp_path / "ours").vision
    assert config is not None
    theirs = load_theirs(tmp_path / "ours")
    theirs.save_pretrained(tmp_path)
    images = pictures(*SIZES[:num_images])
    _, prepared, rows = ours(tmp_path, images)
    token_ids, is_embed = [3, 20, 40, 50], [False] * 4
    for image in prepared:
        token_ids += [*image.token_ids, 60, 61]
        is_embed += [*image.is_embed_t.tolist(), False, False]
    model = Model(read_config(tmp_path), FLOAT32)
    params = load_params(model, tmp_path, "loop")
    given = np.zeros((len(token_ids), model.config.embed_width), np.float32)
    if rows:
        given[np.array(is_embed)] = np.concatenate(rows)
    positions_t = jnp.arange(len(token_ids), dtype=jnp.int32)
    shifts_3t = np.zeros((3, len(token_ids)), np.int32)
    if images and config.kind.startswith("qwen"):
        starts = [place for place in np.flatnonzero(is_embed) if not is_embed[place - 1]]
        spans = [
            EmbeddedSpan(int(start), values, rope_grid=image.rope_grid)
            for start, values, image in zip(starts, rows, prepared, strict=True)
        ]
        shifts_3t = rope_shifts(PromptEmbeds(tuple(spans), ()), 0, len(token_ids))
    tokens = TokenBatch(
        jnp.asarray(token_ids),
        positions_t,
        jnp.full_like(positions_t, len(token_ids)),
        embeds=InputEmbeds(jnp.asarray(is_embed), jnp.asarray(given)),
        rope_axes_3t=positions_t - shifts_3t,
    )
    numbers_t = jnp.where(jnp.asarray(is_embed), np.cumsum(np.diff(is_embed, prepend=False)), -1)
    attend = functools.partial(dense.attend, images_t=numbers_t if config.is_bidirectional else None)
    hidden_te, _ = model.run(params, tokens, attend, (), "loop")
    pixels = their_pixels(config, images) if images else {}
    if images and config.kind != "pixtral":
        name = "token_type_ids" if config.kind == "siglip" else "mm_token_type_ids"
        pixels[name] = torch.tensor([is_embed]).int()
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor([token_ids]), **pixels).logits[0].numpy()
    np.testing.assert_allclose(model.logits(params, hidden_te), want, rtol=0, atol=1e-4)


def load_theirs(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
