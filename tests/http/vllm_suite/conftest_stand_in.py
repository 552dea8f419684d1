"""Replaces what vLLM's tests load from the Hugging Face Hub by the served model; copied to `tests/conftest.py`."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import transformers
import vllm.config
import vllm.tokenizers
import vllm.transformers_utils.repo_utils
from tests.utils import MODEL

_from_pretrained = transformers.AutoTokenizer.from_pretrained


@cache
def _tokenizer() -> Any:
    if MODEL.endswith(".gguf"):
        return _from_pretrained(os.path.dirname(MODEL), gguf_file=os.path.basename(MODEL))
    return _from_pretrained(MODEL)


def _get_tokenizer(*_: object, **__: object) -> Any:
    return _tokenizer()


class _ModelConfig(vllm.config.ModelConfig):  # type: ignore[misc]
    """Stands in for vLLM's, of which the tests use the size of the vocabulary."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(_tokenizer())


class _Hub:
    """Stands in for the client of the Hub; the stand-in server drops adapters."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return "/nonexistent"


vllm.tokenizers.get_tokenizer = _get_tokenizer
transformers.AutoTokenizer.from_pretrained = _get_tokenizer
vllm.config.ModelConfig = _ModelConfig
vllm.transformers_utils.repo_utils.hf_api = _Hub


class HfRunner:
    """Name of a helper of vLLM's tests that compares with transformers; tests that use it fail."""


class LocalAssetServer:
    """Name of a helper of vLLM's tests that serves images; tests that use it fail."""
