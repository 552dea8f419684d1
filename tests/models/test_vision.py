"""Vision encoders on the host: configs, patches, tokens, sizes of calls; and what a call computes for each image."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.vision import (
    JaxVisionEncoder,
    call_sizes,
    encoder_bytes,
    pack_images,
    packs_matrices,
    patch_positions,
    random_params,
)
from jpaged.engine.scheduler.output import rope_shifts
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.paged_attention.cascade import attend_ahead
from jpaged.kernels.paged_attention.spec import merge
from jpaged.models.config import MAX_PATCHES, VisionConfig
from jpaged.models.hf_config import from_hf
from jpaged.models.vision import tower
from jpaged.models.vision.config import vision_leaves
from jpaged.models.vision.processors import PatchProcessor, read_processor
from jpaged.types import EmbeddedSpan, PreparedImage, PromptEmbeds
from tests.models.vision import CASES, PREPROCESSORS, VOCABULARY, device, pictures

FLOAT32 = np.dtype(np.float32)


def vision_of(name: str, **changed: object) -> VisionConfig:
    given: dict[str, Any] = {**CASES[name]}
    given["vision_config"] = {**given["vision_config"], **changed}
    found = from_hf(given).vision
    assert found is not None
    return found


def processor_of(name: str) -> PatchProcessor:
    return read_processor(vision_of(name), (PREPROCESSORS.get(name, {}), {}), VOCABULARY)


def test_an_image_of_pixtral_has_a_break_after_each_row_and_an_end() -> None:
    processor = processor_of("mistral3")
    prepared = processor.prepare(np.zeros((20, 32, 3), np.uint8))
    assert prepared.grid == (6, 8)  # 20 pixels make 3 rows of two patches of 4 pixels
    row = (10, 10, 10, 10)
    assert prepared.token_ids == (*row, 12, *row, 12, *row, 13)
    assert prepared.is_embed_t.sum() == 12
    assert processor.count_tokens(32, 20) == len(prepared.token_ids)
    assert processor.placeholder_id == 10


def test_an_image_of_gemma_is_a_square_between_empty_lines() -> None:
    processor = processor_of("gemma3")
    assert processor.prepare(np.zeros((90, 7, 3), np.uint8)).token_ids == (17, 14, *(10,) * 16, 15, 17)
    assert processor.placeholder_id == 14
    assert processor.join(16, 17) == 18
    assert processor.join(16, 3) is processor.join(18, 18) is None


def test_patches_of_an_output_row_are_adjacent() -> None:
    config = vision_of("mistral3")
    prepared = processor_of("mistral3").prepare(np.zeros((16, 16, 3), np.uint8))
    assert patch_positions(prepared.grid, config.merge_size)[:6].tolist() == [
        *([0, 0], [0, 1], [1, 0], [1, 1]),
        *([0, 2], [0, 3]),
    ]
    marked = np.zeros((16, 16, 3), np.uint8)
    marked[4:8, 8:12] = 255  # row 1, column 2 of the patches
    patches = processor_of("mistral3").prepare(marked).patches_pe
    assert np.flatnonzero((patches != patches[0]).any(axis=1)).tolist() == [6]


def test_digests_depend_on_pixels_alone() -> None:
    processor, (image, other) = processor_of("mistral3"), pictures((20, 32), (20, 32))
    assert processor.prepare(image).digest == processor.prepare(image.copy()).digest
    assert processor.prepare(image).digest != processor.prepare(other).digest


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5000, 1)])
def test_shapes_that_leave_no_patch_are_refused(width: int, height: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{width} x {height} pixels"):
        processor_of("mistral3").count_tokens(width, height)
    with pytest.raises(InvalidArgument, match=r"600 x 2 pixels; the limit of the longer side is 200 times"):
        processor_of("qwen2_5_vl").count_tokens(600, 2)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"do_normalize": False}, "do_normalize is False"),
        ({"do_center_crop": True}, "do_center_crop is True"),
        ({"image_mean": [0.5, 0.5]}, "image_mean has 2 numbers; an image has 3 channels"),
        ({"patch_stride": 3}, "unknown setting patch_stride=3"),
    ],
)
def test_settings_of_processors_that_change_pixels_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises((InvalidArgument, Unsupported)) as caught:
        read_processor(vision_of("mistral3"), (fields, {}), VOCABULARY)
    assert problem in str(caught.value).replace(":", "").replace("preprocessor_config.json ", "")


def test_a_tokenizer_without_the_tokens_of_images_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"the tokenizer has no token \[IMG_BREAK\]"):
        read_processor(vision_of("mistral3"), ({}, {}), {})
    with pytest.raises(Unsupported, match=r"the tokenizer has no token of two line breaks"):
        read_processor(vision_of("gemma3"), ({}, {}), {})
    with pytest.raises(Unsupported, match=r"do_pan_and_scan is True; pan and scan is not supported"):
        read_processor(vision_of("gemma3"), ({"do_pan_and_scan": True}, {}), VOCABULARY)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model_type": "clip_vision_model"}, "the supported encoder of this model is pixtral"),
        ({"num_registers": 4}, "unknown setting num_registers=4"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "only rotary positions of rows and columns"),
    ],
)
def test_an_encoder_that_is_not_supported_leaves_a_model_of_text(
    changed: dict[str, object], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {**CASES["mistral3"]}
    given["vision_config"] = {**given["vision_config"], **changed}
    with caplog.at_level(logging.WARNING):
        assert from_hf(given).vision is None
    assert problem in caplog.text
    del given["vision_config"]
    assert from_hf(given).vision is None


@pytest.mark.parametrize("name", CASES)
def test_leaves_are_found_under_the_prefix_of_a_checkpoint(name: str) -> None:
    config = vision_of(name)
    plain = vision_leaves(config)
    names = [tensor for each in (plain.outer, *plain.layers) for leaf in each for tensor, _ in leaf.tensors]
    prefixed = vision_leaves(config, [f"model.{tensor}" for tensor in names])
    assert prefixed.outer[0].tensors[0][0] == f"model.{names[0]}"
    assert prefixed.num_params == plain.num_params
    with pytest.raises(InvalidArgument, match="has 0 tensors"):
        vision_leaves(config, ["model.embed_tokens.weight"])


def test_windows_of_images_are_numbered_apart() -> None:
    config = vision_of("qwen2_5_vl")  # windows of 16 pixels: 4 x 4 patches
    prepared = [processor_of("qwen2_5_vl").prepare(image) for image in pictures((24, 40), (24, 24))]
    packed = pack_images(prepared, config, 128)
    sizes = [len(image.patches_pe) for image in prepared]
    assert np.bincount(packed.images_p + 1).tolist() == [128 - sum(sizes), *sizes]
    for number, (rows, columns) in enumerate(image.grid for image in prepared):
        own = packed.images_p == number
        assert len(np.unique(packed.windows_p[own])) == -(-rows // 4) * -(-columns // 4)
    first, second = (set(packed.windows_p[packed.images_p == number]) for number in range(2))
    assert not first & second


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_image_has_the_same_rows_alone_and_among_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if attention computes its queries in parts."""
    config = vision_of(name)
    params = random_params(config, FLOAT32, device(), seed=1)
    prepared = [processor_of(name).prepare(image) for image in pictures((20, 32), (32, 32))]

    def encode(images: list[PreparedImage], size: int) -> np.ndarray:
        return np.asarray(tower.encode(params, pack_images(images, config, size), config))

    together = encode(prepared, 256)
    monkeypatch.setattr(tower, "MAX_SCORES", 1)
    start = 0
    for image in prepared:
        num_rows = len(image.patches_pe) // config.num_merged
        np.testing.assert_allclose(
            encode([image], 128)[:num_rows], together[start : start + num_rows], rtol=0, atol=1e-5
        )
        start += num_rows


def test_calls_have_a_few_sizes_up_to_the_largest_image() -> None:
    assert call_sizes(64) == (64,)
    assert call_sizes(1025)[-2:] == (1024, 1536)
    assert call_sizes(12100)[-1] == 12288
    assert call_sizes(MAX_PATCHES)[-1] == MAX_PATCHES


def test_images_of_qwen_may_have_the_pixels_of_its_published_processor() -> None:
    given = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}
    processor = read_processor(vision_of("qwen2_5_vl", patch_size=14), (given, {}), VOCABULARY)
    assert processor.max_patches == MAX_PATCHES == 12845056 // 14**2
    assert processor.count_tokens(3584, 3584) == 16384


@pytest.mark.parametrize("max_scores", [tower.MAX_SCORES, 1])
def test_attention_in_windows_equals_attention_with_a_mask(max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a few blocks are computed at a time, next to windows of all lengths and padding."""
    monkeypatch.setattr(tower, "MAX_SCORES", max_scores)
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 65, 14)
    windows_p = np.full(512, -1, np.int32)
    numbers = np.repeat(np.arange(14, dtype=np.int32), lengths)[:500]
    windows_p[: len(numbers)] = numbers
    q, k, v = (jnp.asarray(rng.standard_normal((512, 2, 8), np.float32)) for _ in range(3))
    found = tower._attend_windows(q, k, v, jnp.asarray(windows_p), 64)
    want = _masked(q, k, v, windows_p)
    np.testing.assert_allclose(found[: len(numbers)], want[: len(numbers)], rtol=0, atol=1e-5)


def _masked(q_phd: jax.Array, k_phd: jax.Array, v_phd: jax.Array, groups_p: np.ndarray) -> np.ndarray:
    scores_hqk = np.einsum("qhd,khd->hqk", q_phd, k_phd) * q_phd.shape[-1] ** -0.5
    scores_hqk = np.where(groups_p[:, None] == groups_p, scores_hqk, -np.inf)
    weights_hqk = np.exp(scores_hqk - scores_hqk.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights_hqk / weights_hqk.sum(axis=-1, keepdims=True), v_phd)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_cpus_encode_as_xla_does(name: str, dtype: Any) -> None:
    """Heads of 16 numbers are padded to 32 in bfloat16, and windows come back row by row."""
    assert packs_matrices(device())
    config, dtype = vision_of(name), np.dtype(dtype)
    params = random_params(config, dtype, device(), seed=1)
    prepared = [processor_of(name).prepare(image) for image in pictures((20, 32), (32, 32), (70, 50))]
    ours, theirs = (JaxVisionEncoder(config, params, 1024, packs=packs).encode(prepared) for packs in (True, False))
    atol = 1e-5 if dtype == np.float32 else 0.05 * float(np.abs(np.concatenate(theirs)).max())
    for mine, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, want, rtol=0, atol=atol)


def test_memory_of_an_encoder_counts_weights_and_scores() -> None:
    config = vision_of("mistral3")
    found = encoder_bytes(config, FLOAT32)
    assert found.weights == 4 * vision_leaves(config).num_params
    assert found.working > 4 * config.num_heads * 64 * 64
    assert found.total == found.weights + found.working


def test_positions_in_an_image_are_rows_and_columns_and_text_follows_its_longer_side() -> None:
    values = np.zeros((6, 4), np.float32)
    embeds = PromptEmbeds((EmbeddedSpan(2, values, rope_grid=(2, 3)), EmbeddedSpan(9, values, rope_grid=(3, 2))), ())
    axes = np.arange(17) - rope_shifts(embeds, 0, 17)
    assert axes.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 6, 6, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 7, 7, 8, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7, 9, 10],
    ]
    assert embeds.rope_shift == 6
    for start, stop in ((0, 1), (3, 5), (5, 12), (16, 17)):
        np.testing.assert_array_equal(rope_shifts(embeds, start, stop), rope_shifts(embeds, 0, 17)[:, start:stop])


def test_chunks_end_outside_images() -> None:
    values = np.zeros((6, 4), np.float32)
    embeds = PromptEmbeds((EmbeddedSpan(2, values), EmbeddedSpan(10, values)), ())
    assert [embeds.end_outside(0, stop) for stop in (1, 2, 3, 7, 8, 9, 11, 16)] == [1, 2, 2, 2, 8, 9, 10, 16]
    assert [embeds.end_outside(2, stop) for stop in (3, 7, 8)] == [2, 2, 8]


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [4, 7, 16])
def test_attention_ahead_completes_causal_attention_in_images(num_tokens: int) -> None:
    rng, kind = np.random.default_rng(num_tokens), AttentionKind(0.5)
    q, k, v = (rng.standard_normal((num_tokens, heads, 8), np.float32) for heads in (4, 2, 2))
    images_t = np.array([-1, 1, 1, 1, -1, 2, 2, 3, 3, 3, 3, -1, -1, 4, 4, 4][:num_tokens], np.int32)
    order = np.arange(num_tokens)
    is_past, is_own = order[None] <= order[:, None], (images_t[:, None] == images_t) & (images_t >= 0)

    def attended(is_seen: np.ndarray) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("thd,shd->ths", q, np.repeat(k, 2, axis=1)) * kind.scale
        scores = jnp.where(is_seen[:, None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.einsum("ths,shd->thd", jnp.exp(scores - lse[..., None]), np.repeat(v, 2, axis=1)), lse

    given = [jnp.asarray(array) for array in (q, k, v)]
    ahead = attend_ahead(given[0], given[1], given[2], jnp.asarray(images_t), 4, kind)
    found = merge(attended(is_past), ahead)
    for mine, want in zip(found, attended(is_past | is_own), strict=True):
        np.testing.assert_allclose(mine, want, rtol=0, atol=1e-5)
