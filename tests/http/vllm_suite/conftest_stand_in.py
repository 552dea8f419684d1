"""Replaces what vLLM's tests load from the Hugging Face Hub by the served model; copied to `tests/conftest.py`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tests.entrypoints.rl.conftest
import torch
import transformers
import vllm.config
import vllm.tokenizers
import vllm.transformers_utils.repo_utils
from safetensors.torch import save_file
from tests.utils import RemoteOpenAIServer, load, load_tokenizer, served_model


def _get_tokenizer(*_: object, **__: object) -> Any:
    return load_tokenizer()


class _ModelConfig(vllm.config.ModelConfig):  # type: ignore[misc]
    """Stands in for vLLM's, of which the tests use the size of the vocabulary."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(load_tokenizer())


@cache
def _adapter() -> str:
    """Return the folder of a LoRA adapter of the served model that changes nothing: its second factors are zero."""
    folder = Path(os.environ["JPAGED_LOG"]).parent / "adapter"
    folder.mkdir(exist_ok=True)
    config, rank, tensors = load(transformers.AutoConfig.from_pretrained), 8, {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.full((rank, config.hidden_size), 1e-3)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(config.num_attention_heads * size, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


class _Hub:
    """Stands in for the client of the Hub: every repository that the tests download is an adapter."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return _adapter()


vllm.tokenizers.get_tokenizer = _get_tokenizer
transformers.AutoTokenizer.from_pretrained = _get_tokenizer
vllm.config.ModelConfig = _ModelConfig
vllm.transformers_utils.repo_utils.hf_api = _Hub


@contextmanager
def _server(extra_args: list[str] | None = None, **_: object) -> Iterator[str]:
    """Stand in for what starts a server for the tests of reinforcement learning, under the name "m"."""
    with RemoteOpenAIServer("m", ["--max-model-len", "2048", "--enable-sleep-mode", *(extra_args or ())]) as server:
        yield server.url_root


tests.entrypoints.rl.conftest.server = _server


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Cancel the tasks of a test that failed before it ended them: one that ignores errors would never yield again."""
    runner = getattr(item, "funcargs", {}).get("_function_scoped_runner")
    for task in asyncio.all_tasks(runner.get_loop()) if runner is not None else ():
        task.cancel()


class HfRunner:
    """Interface of vLLM's class of this name for encoders and cross-encoders, by transformers."""

    def __init__(
        self, name: str, *, is_sentence_transformer: bool = False, is_cross_encoder: bool = False, **_: object
    ):
        if not (is_sentence_transformer or is_cross_encoder):
            raise NotImplementedError("only encoders and cross-encoders are compared")
        kind = transformers.AutoModelForSequenceClassification if is_cross_encoder else transformers.AutoModel
        self._model = kind.from_pretrained(served_model(name)).eval()

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *_: object) -> None:
        """Free nothing: the model is small."""

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> list[list[float]]:
        """Return the normalized mean of the hidden states of each text."""
        states = (self._model(**load_tokenizer()(text, return_tensors="pt")).last_hidden_state for text in texts)
        return [torch.nn.functional.normalize(one[0].mean(0), dim=-1).tolist() for one in states]

    @torch.inference_mode()
    def predict(self, pairs: list[list[str]], **_: object) -> torch.Tensor:
        """Return the score of each pair."""
        logits = [self._model(**load_tokenizer()(*pair, return_tensors="pt")).logits[0, 0] for pair in pairs]
        return torch.sigmoid(torch.stack(logits))


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    """Return the class that loads models with transformers."""
    return HfRunner


class LocalAssetServer:
    """Name of a helper of vLLM's tests that serves images; tests that use it fail."""
