"""A GGUF file is served, and planned for, as the folder that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.demo import FOLDER
from jpaged.llm import LLM
from jpaged.plan.compilation import find_config
from jpaged.types import SamplingParams
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf
from tests.checkpoints.gguf.test_tokenizer import demo_metadata

PROMPTS = ["Once upon a time", "The little <|user|> dog"]


def generate(model: str) -> list[str]:
    with LLM(model, num_blocks=32, max_num_seqs=2, max_model_len=128, max_num_batched_tokens=64) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=16, temperature=0.0))
    return [answer.outputs[0].text for answer in answers]


@pytest.mark.long
def test_it_writes_what_the_folder_does(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(FOLDER / "model.safetensors").items()}
    write_gguf((config, tensors), tmp_path / "demo.gguf", of_kind("F32"), more=demo_metadata())
    assert generate(str(tmp_path / "demo.gguf")) == generate("demo")


def test_a_plan_reads_its_config(tmp_path: Path) -> None:
    write_gguf(checkpoint("llama_mha"), tmp_path / "tiny.gguf", of_kind("F32"))
    name, config = find_config(str(tmp_path / "tiny.gguf"))
    assert name == str(tmp_path / "tiny.gguf")
    assert (config.num_layers, config.vocab_size) == (3, 131)
