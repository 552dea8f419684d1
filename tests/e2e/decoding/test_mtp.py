"""Models with MTP layers in an engine: the same tokens with and without drafts, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.engine.speculative.draft_model import DraftModelSpeculation
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import engine_of, open_llm
from tests.engine.proposing import InTurn
from tests.models.eagle_heads import write
from tests.models.mtp_layers import mtp_cases
from tests.models.tiny import tiny_case, write_checkpoint

CASES = mtp_cases()
MTP = {"method": "mtp", "num_speculative_tokens": 2}
SIZES: dict[str, Any] = {"max_num_batched_tokens": 32, "max_model_len": 96, "block_size": 8, "num_blocks": 96}
NUMS_ROUNDS = 2, 0, 3
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "few blocks": {"num_blocks": 14},
    "bfloat16": {"dtype": "bfloat16"},
    "quantized": {"quantization": "int8"},
    "two devices": {"tensor_parallel_size": 2},
}


def checkpoint(name: str, folder: Path) -> Path:
    case = CASES[name]
    return write(folder, case.case.config, {**case.model_tensors(), **case.tensors()})


def requests(num: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of up to 40 tokens, some of which begin alike, greedy and sampled."""
    rng = np.random.default_rng(5)
    shared, found = rng.integers(3, 131, 20).tolist(), []
    for index in range(num):
        own = rng.integers(3, 131, int(rng.integers(1, 20))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 30)), temperature=(0.0, 0.8, 1.2)[index % 3], seed=index, ignore_eos=True
        )
        found.append((shared + own if index % 2 else own, params))
    return found


def generate(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*asked, strict=True)
    return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], list(params))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def check(name: str, way: str, folder: Path) -> None:
    """Together, and one after another, behind prefixes that are cached then."""
    found, asked = checkpoint(name, folder), requests(12)
    with open_llm(found, **SIZES | WAYS[way]) as llm:
        want = tokens(generate(llm, asked))
    with open_llm(found, **SIZES | WAYS[way], speculative_config=MTP) as llm:
        rounds = engine_of(llm)._loop._drafter
        assert isinstance(rounds, DraftModelSpeculation)
        rounds._rule = rule = InTurn(*NUMS_ROUNDS)
        assert tokens(generate(llm, asked)) == want
        assert [tokens(generate(llm, [one]))[0] for one in asked[:4]] == want[:4]
        load = llm.load()
        assert rule.num_dispatches > 0
        assert load.speculation.num_draft_tokens > 0
        assert load.num_preemptions > 0 or way != "few blocks"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_tokens_are_the_same_with_an_mtp_layer(way: str, tmp_path: Path) -> None:
    check("mimo", way, tmp_path)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.long
def test_tokens_of_each_family_are_the_same_with_its_mtp_layer(name: str, tmp_path: Path) -> None:
    check(name, "as it comes", tmp_path)


@pytest.mark.parametrize("way", ["few blocks", "two devices"])
@pytest.mark.long
def test_recurrent_state_returns_to_the_last_accepted_token(way: str, tmp_path: Path) -> None:
    check("qwen3_next", way, tmp_path)


def test_a_model_without_an_mtp_layer_is_refused_by_name(tmp_path: Path) -> None:
    """A family without them, checkpoints that lack the layer, and a family with recurrent state."""
    llama = write_checkpoint(tiny_case("llama_mha"), tmp_path / "llama")
    case = CASES["mimo"]
    saved = write(tmp_path / "saved", case.case.config, case.model_tensors())
    qwen = write_checkpoint(tiny_case("qwen3_next"), tmp_path / "qwen")
    lfm2 = write_checkpoint(tiny_case("lfm2"), tmp_path / "lfm2")
    refusals = {
        llama: "speculative_config.method: mtp: LlamaForCausalLM has no MTP layer that is supported",
        saved: "speculative_config.method: mtp: .*has no MTP layer: tensor model.mtp_layers.0.input_proj.weight",
        qwen: "speculative_config.method: mtp: .*has no MTP layer: tensor mtp.fc.weight",
        lfm2: "speculative_config.method: mtp: Lfm2ForCausalLM has no MTP layer that is supported",
    }
    for folder, refusal in refusals.items():
        with pytest.raises((InvalidArgument, Unsupported), match=refusal), open_llm(folder, speculative_config=MTP):
            raise AssertionError(f"{folder} is served")
