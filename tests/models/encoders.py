"""Tiny encoders in Hugging Face layout, and what they compute in NumPy: a pass over one prompt without a batch."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Tensors = Mapping[str, np.ndarray]

BERT: Mapping[str, Any] = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
}
XLM_ROBERTA: Mapping[str, Any] = {
    **BERT,
    "model_type": "xlm-roberta",
    "max_position_embeddings": 50,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
_erf = np.vectorize(math.erf)


def make_tensors(config: Mapping[str, Any], prefix: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a model without a head."""
    rng = np.random.default_rng(seed)
    width, inner = config["hidden_size"], config["intermediate_size"]

    def linear(name: str, num_out: int, num_in: int) -> dict[str, np.ndarray]:
        return {f"{name}.weight": rng.normal(0, 0.2, (num_out, num_in)), f"{name}.bias": rng.normal(0, 0.2, num_out)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": 1 + rng.normal(0, 0.2, width), f"{name}.bias": rng.normal(0, 0.2, width)}

    found = {
        f"embeddings.{part}_embeddings.weight": rng.normal(0, 0.5, (config[key], width))
        for part, key in (
            ("word", "vocab_size"),
            ("position", "max_position_embeddings"),
            ("token_type", "type_vocab_size"),
        )
    } | norm("embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            found |= linear(f"{name}.attention.self.{part}", width, width)
        found |= linear(f"{name}.attention.output.dense", width, width) | norm(f"{name}.attention.output.LayerNorm")
        found |= linear(f"{name}.intermediate.dense", inner, width) | linear(f"{name}.output.dense", width, inner)
        found |= norm(f"{name}.output.LayerNorm")
    return {prefix + name: tensor.astype(np.float32) for name, tensor in found.items()}


def make_head(names: Mapping[str, tuple[int, int]], seed: int = 1) -> dict[str, np.ndarray]:
    """Random linear layers: name -> (outputs, inputs)."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for name, (num_out, num_in) in names.items():
        found[f"{name}.weight"] = rng.normal(0, 0.2, (num_out, num_in)).astype(np.float32)
        found[f"{name}.bias"] = rng.normal(0, 0.2, num_out).astype(np.float32)
    return found


def hidden_states(
    config: Mapping[str, Any], tensors: Tensors, ids: Sequence[int], types: Sequence[int] | None = None
) -> np.ndarray:
    """The last hidden state of each token, in float64."""
    heads, eps, num = config["num_attention_heads"], config["layer_norm_eps"], len(ids)
    offset = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ tensors[f"{name}.weight"].T.astype(np.float64) + tensors[f"{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def embedded(name: str, rows: Any) -> np.ndarray:
        return tensors[f"embeddings.{name}_embeddings.weight"].astype(np.float64)[rows]

    x = embedded("word", list(ids)) + embedded("position", np.arange(num) + offset)
    x = norm("embeddings.LayerNorm", x + embedded("token_type", list(types or [0] * num)))
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            linear(f"{name}.attention.self.{part}", x).reshape(num, heads, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o = (weights / weights.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(num, -1)
        x = norm(f"{name}.attention.output.LayerNorm", x + linear(f"{name}.attention.output.dense", o))
        inner = linear(f"{name}.intermediate.dense", x)
        inner = inner * 0.5 * (1 + _erf(inner / math.sqrt(2)))
        x = norm(f"{name}.output.LayerNorm", x + linear(f"{name}.output.dense", inner))
    return x


def make_tokenizer() -> Tokenizer:
    """Letters as tokens, with BERT's special tokens and token types."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    made = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def write_encoder(folder: Path, config: Mapping[str, Any], tensors: Tensors, architecture: str, **more: Any) -> Path:
    """Write a checkpoint with a tokenizer; `more` are other keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config, **more}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_modules(folder: Path, pooling: str, dense: Tensors | None = None, *, normalizes: bool = True) -> None:
    """Write the modules of sentence-transformers next to a checkpoint: Pooling, Dense with Tanh, Normalize."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if dense:
        (folder / "2_Dense").mkdir()
        num_out, num_in = dense["linear.weight"].shape
        sizes = {"in_features": num_in, "out_features": num_out, "bias": True}
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(sizes | activation))
        save_file(dict(dense), folder / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "find ", "document": "a "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
