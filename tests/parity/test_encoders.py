"""Vectors and scores of tiny checkpoints that transformers' own classes write, compared with those classes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import TokensPrompt
from tests.e2e.rig import open_llm
from tests.models.encoders import make_tokenizer

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
transformers: Any = importlib.import_module("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
MODERN = {"local_attention": 8, "cls_token_id": 2, "sep_token_id": 3, **SPECIAL}
GEMMA = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8, "use_bidirectional_attention": True, **SPECIAL}
QWEN = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", {}),
    "roberta": ("RobertaModel", "RobertaConfig", {"max_position_embeddings": 50, "pad_token_id": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", MODERN),
    "nomic": ("NomicBertModel", "NomicBertConfig", {}),
    "gemma": ("Gemma3TextModel", "Gemma3TextConfig", GEMMA),
}


def make_model(name: str, config: str, options: dict[str, Any], folder: Path) -> Any:
    """A model of transformers with random weights, saved in a folder."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**SIZES, **options}))
    is_offset = name.startswith("Gemma")  # the stored weights of its norms are near 0
    for path, values in model.named_parameters():
        is_scale = "norm" in path.lower() and path.endswith("weight") and not is_offset
        values.data = torch.randn_like(values) * 0.15 + float(is_scale)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hidden_states_are_those_of_transformers(case: tuple[str, str, dict[str, Any]], tmp_path: Path) -> None:
    model, rng = make_model(*case, tmp_path), np.random.default_rng(0)
    prompts = [rng.integers(4, 64, length).tolist() for length in (5, 40, 1, 17)]
    with open_llm(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=64) as llm:
        found = llm.embed([TokensPrompt(prompt_token_ids=ids) for ids in prompts], pooling="mean")
    for ids, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector.values, want, rtol=0, atol=1e-5)


FROM_TOKENS = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["a", "b"]}


@pytest.mark.parametrize("from_tokens", [True, False], ids=["rows of the output matrix", "a matrix of its own"])
def test_a_decoder_scores_pairs_by_its_head(from_tokens: bool, tmp_path: Path) -> None:
    name = "Qwen3ForCausalLM" if from_tokens else "Qwen3ForSequenceClassification"
    options = {**QWEN, "tie_word_embeddings": from_tokens} | ({} if from_tokens else {"num_labels": 1})
    model, tokenizer = make_model(name, "Qwen3Config", options, tmp_path), make_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    texts, overrides = ["fish", "a b c"], FROM_TOKENS if from_tokens else {}
    with open_llm(tmp_path, hf_overrides=overrides, max_num_batched_tokens=64) as llm:
        found = [one.outputs.score for one in llm.score("query", texts)]
    for text, score in zip(texts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode("query", text).ids])).logits[0]
        of_tokens = [tokenizer.token_to_id(token) for token in ("a", "b")]
        want = torch.softmax(logits[-1][of_tokens], 0)[1] if from_tokens else torch.sigmoid(logits[0])
        assert score == pytest.approx(float(want), abs=1e-6)
