"""Files of sentence-transformers and heads of classifiers: what is read, and the errors for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.checkpoints.pooler import CheckpointPooler, apply_function, read_pooler
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.hf_config import from_hf
from tests.models.encoders import BERT, make_head, make_tensors, write_encoder, write_modules

MODEL = from_hf({"architectures": ["BertModel"], **BERT})


def write(folder: Path, **more: Any) -> Path:
    return write_encoder(folder, BERT, {"a": np.zeros(1, np.float32)}, "BertModel", **more)


def read(folder: Path) -> CheckpointPooler:
    return read_pooler(folder, {}, MODEL, {})


def test_an_encoder_without_modules_takes_the_first_token(tmp_path: Path):
    found = read(write(tmp_path))
    assert (found.pooling, found.layers, found.normalizes, found.can_shorten) == ("cls", (), False, False)


def test_modules_prompts_and_length_are_read(tmp_path: Path):
    write_modules(write(tmp_path), "max_tokens", make_head({"linear": (3, 32)}))
    found = read(tmp_path)
    assert (found.pooling, found.width, found.normalizes, found.max_len) == ("max", 3, True, 40)
    assert (found.prompts, found.default_prompt) == ({"query": "find ", "document": "a "}, "document")
    assert found.can_shorten and not found.labels


@pytest.mark.parametrize(
    ("file", "value", "problem"),
    [
        ("modules.json", [{"type": "x.Pooling", "path": "../elsewhere"}], "is not inside the folder"),
        ("modules.json", [{"type": "x.WeightedLayerPooling", "path": ""}], "WeightedLayerPooling is not supported"),
        ("modules.json", [{"type": "x.Transformer"}], "there is no Pooling module"),
        ("modules.json", {"type": 1}, "must be a list of modules"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "one pooling"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts must map names to texts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "b"}, "default_prompt_name 'b'"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length is 0"),
    ],
)
def test_what_is_not_supported_is_named(file: str, value: Any, problem: str, tmp_path: Path):
    write_modules(write(tmp_path), "mean_tokens")
    (tmp_path / file).write_text(json.dumps(value))
    with pytest.raises((InvalidArgument, Unsupported), match=problem):
        read(tmp_path)


@pytest.mark.parametrize(
    ("more", "function"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "tanh"),
    ],
)
def test_the_function_of_logits_is_that_of_the_config(more: dict[str, Any], function: str, tmp_path: Path):
    head = make_head({"bert.pooler.dense": (32, 32), "classifier": (more["num_labels"], 32)})
    name = "BertForSequenceClassification"
    write_encoder(tmp_path, BERT, make_tensors(BERT, "bert.") | head, name, **more)
    found = read(tmp_path)
    assert (found.pooling, found.function, len(found.labels)) == ("cls", function, more["num_labels"])
    state = np.linspace(-1, 1, 32).astype(np.float32)
    inner = np.tanh(head["bert.pooler.dense.weight"] @ state + head["bert.pooler.dense.bias"])
    want = head["classifier.weight"] @ inner + head["classifier.bias"]
    np.testing.assert_allclose(found.apply(state), want, rtol=0, atol=1e-6)


def test_functions_of_logits():
    x = np.array([-2.0, 0.0, 1.0], np.float32)
    np.testing.assert_allclose(apply_function(x, "sigmoid"), 1 / (1 + np.exp(-x)), rtol=1e-6)
    np.testing.assert_allclose(apply_function(x, "softmax"), np.exp(x) / np.exp(x).sum(), rtol=1e-6)
    np.testing.assert_allclose(apply_function(x, "relu"), [0, 0, 1])
    np.testing.assert_allclose(apply_function(x, "gelu"), [-0.0455003, 0, 0.8413447], rtol=1e-5)
