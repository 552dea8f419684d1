"""Models that read images, next to transformers: pixels to patches, patches to rows, rows to logits."""

from __future__ import annotations

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
from jpaged.models.config import VisionConfig
from jpaged.models.model import Model
from jpaged.models.tokens import InputEmbeds, TokenBatch
from jpaged.models.vision.processors import PatchProcessor, read_processor
from jpaged.types import PreparedImage
from tests.models import dense
from tests.models.vision import CASES, VOCABULARY, device, pictures, write_vision_checkpoint

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
transformers: Any = importlib.import_module("transformers")
FLOAT32 = np.dtype(jnp.float32)
SIZES = ((20, 32), (31, 9), (70, 50))


def their_processor(config: VisionConfig) -> Any:
    """The image processor of transformers on Pillow, as its processor calls it."""
    pixtral = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    edge = config.patch_size * config.merge_size
    return pixtral.PixtralImageProcessorPil(
        size={"longest_edge": config.image_size}, patch_size={"height": edge, "width": edge}
    )


def their_pixels(config: VisionConfig, images: Sequence[np.ndarray]) -> dict[str, Any]:
    made: dict[str, Any] = their_processor(config)(images, return_tensors="pt")
    return {**made}


def ours(folder: Path, images: Sequence[np.ndarray]) -> tuple[PatchProcessor, list[PreparedImage], list[np.ndarray]]:
    config = read_config(folder).vision
    assert config is not None
    processor = read_processor(config, ({}, {}), VOCABULARY)
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
    for image, pixels, (height, width) in zip(prepared, theirs["pixel_values"], theirs["image_sizes"], strict=True):
        merge, size = config.merge_size, config.patch_size
        split = image.patches_pe.reshape(
            image.grid[0] // merge, image.grid[1] // merge, merge, merge, 3, size, size
        ).transpose(4, 0, 2, 5, 1, 3, 6)
        np.testing.assert_allclose(split.reshape(3, height, width), pixels[:, :height, :width], atol=1e-6)
    model = load_theirs(tmp_path)
    with torch.no_grad():
        want = model.get_image_features(**theirs).pooler_output
    for mine, other in zip(rows, want, strict=True):
        np.testing.assert_allclose(mine, other.numpy(), rtol=0, atol=1e-4)


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
    given = np.zeros((len(token_ids), model.config.hidden_size), np.float32)
    if rows:
        given[np.array(is_embed)] = np.concatenate(rows)
    positions_t = jnp.arange(len(token_ids), dtype=jnp.int32)
    tokens = TokenBatch(
        jnp.asarray(token_ids),
        positions_t,
        jnp.full_like(positions_t, len(token_ids)),
        embeds=InputEmbeds(jnp.asarray(is_embed), jnp.asarray(given)),
    )
    hidden_te, _ = model.run(params, tokens, dense.attend, (), "loop")
    pixels = their_pixels(config, images) if images else {}
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor([token_ids]), **pixels).logits[0].numpy()
    np.testing.assert_allclose(model.logits(params, hidden_te), want, rtol=0, atol=1e-4)


def load_theirs(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
