"""Tiny checkpoints of models that read images, made from a seed alone, and pictures for them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jpaged.checkpoints.names import model_leaves
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import from_hf
from jpaged.models.vision.config import vision_leaves

TEXT: Mapping[str, object] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PIXTRAL: Mapping[str, object] = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": 4,
    "image_size": 32,
}
MISTRAL_TEXT = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
CASES: Mapping[str, Mapping[str, object]] = {
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "vision_config": {**PIXTRAL, "hidden_act": "silu"},
        "text_config": MISTRAL_TEXT,
    },
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 10,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "vision_config": {**PIXTRAL, "num_hidden_layers": 3, "rope_parameters": {"rope_theta": 100.0}},
        "text_config": MISTRAL_TEXT,
    },
}
QWEN_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"}
CASES = {
    **CASES,
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": 10,
        "video_token_id": 11,
        "vision_start_token_id": 12,
        "vision_end_token_id": 13,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 3,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        **QWEN_TEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
}
_QWEN_PIXELS = {"min_pixels": 512, "max_pixels": 1024}
PREPROCESSORS = {"qwen2_5_vl": _QWEN_PIXELS, "qwen3_vl": {**_QWEN_PIXELS, "patch_size": 4}}
CASES = {
    **CASES,
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 10,
        "video_token_id": 11,
        "vision_start_token_id": 12,
        "vision_end_token_id": 13,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 4,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 3,
            "patch_size": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
    },
}
CASES = {
    **CASES,
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": 10,
        "boi_token_index": 14,
        "eoi_token_index": 15,
        "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "patch_size": 4,
            "image_size": 32,
        },
        "text_config": {
            **TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
}
VOCABULARY = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13, "\n": 16, "\n\n": 17, "\n\n\n": 18}
"""Tokens that processors look up."""


def write_vision_checkpoint(name: str, folder: Path) -> ModelConfig:
    """A checkpoint of a case, with weights whose effect on the logits shows; returns its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CASES[name]), encoding="utf-8")
    if name in PREPROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]), encoding="utf-8")
    config = from_hf(CASES[name])
    rng = np.random.default_rng(zlib.crc32(name.encode()))

    def make(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32)
        is_scale = ("norm" in tensor and tensor.endswith("weight")) or "ln_" in tensor
        return 1 + np.float32(0.1) * values if is_scale else np.float32(shape[-1] ** -0.5) * values

    tensors = {tensor: make(tensor, shape) for tensor, shape in iter_tensors(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config.vocab_size)
    return config


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer in which token n reads as "n,", except those of images."""
    names = {token_id: name for name, token_id in VOCABULARY.items()}
    inner = Tokenizer(models.WordLevel({names.get(n, f"{n},"): n for n in range(vocab_size)}, unk_token="0,"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+,"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")


def iter_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the language model and the encoder."""
    assert config.vision is not None
    for leaves in (model_leaves(config, ("language_model.model.norm.weight",)), vision_leaves(config.vision)):
        for leaf in (leaf for each in (leaves.outer, *leaves.layers) for leaf in each):
            yield from leaf.tensors


def pictures(*sizes: tuple[int, int]) -> list[np.ndarray]:
    """Smooth noise of each height and width, RGB."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def device() -> jax.Device:
    """The device that holds encoders in tests."""
    return jax.devices()[0]
