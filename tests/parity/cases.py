"""What is compared with transformers, and where its answers lie.

models   every tiny checkpoint (tests/models/tiny.py): logits at a few places, and 64 greedy tokens
beams    beam searches on one tiny checkpoint: sequences with their scores
demo     the packaged model: 64 greedy tokens, and the likeliest ones at each place
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jpaged.device.executor import JaxExecutor
from jpaged.types import SamplingParams
from tests.e2e.sharing_rig import CHECKPOINT, Rig
from tests.models.tiny import tiny_cases

GOLDENS = Path(__file__).parent / "goldens"
MODELS = {case.name: case for case in tiny_cases()}
BEAMS_CHECKPOINT = CHECKPOINT
FAMILIES = (
    "llama_mha",
    "mistral_window",
    "qwen2_window",
    "qwen3_tied",
    "gemma2",
    "gemma3",
    "phi3_grows",
    "gpt2",
    "gpt_neox",
    "falcon_mqa",
    "falcon_groups",
    "starcoder2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "opt",
    "arcee",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "glm4",
    "seed_oss",
    "exaone4",
    "hunyuan_v1_dense",
    "cohere",
    "cohere2",
    "phi",
    "stablelm",
    "internlm3",
    "nemotron",
    "apertus",
    "ernie4_5",
    "ministral3",
    "gemma",
    "granitemoe",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "phimoe",
    "llama4_text",
    "glm4_moe_lite",
    "mistral4",
    "lfm2",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "granitemoehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "gemma4_text",
    "gemma4_keys",
    "gemma4_moe",
    "mamba2",
    "gemma3n_text",
)
"""One checkpoint of each family, which is served in every way; a search on it is golden, too."""
NUM_TOKENS = 64
"""Greedy tokens of a golden text."""
DEMO_PROMPTS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Tell me a story about a dragon."}]},
    {"messages": [{"role": "user", "content": "Write a short story about a brave fox and a river."}]},
    {
        "messages": [
            {"role": "system", "content": "You are a story teller."},
            {"role": "user", "content": "I want a sad story about a lighthouse keeper named Mara."},
        ]
    },
    {"prompt": "Once upon a time"},
)
DEMO_NUM_TOP = 8


def path_of(name: str) -> Path:
    """Where the answers for a tiny model, for "beams" or for "demo" lie."""
    return GOLDENS / (f"models/{name}.json" if name in MODELS else f"{name}.json")


def read(name: str) -> dict[str, Any]:
    """The answers that `python -m tests.parity.make NAME` wrote."""
    return dict(json.loads(path_of(name).read_text(encoding="utf-8")))


# --- beam searches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeamCase:
    """One search.

    Attributes:
        prompt_seed: which prompt.
        n: sequences to return.
        eos_token_ids: chosen among the likely tokens, so that searches do end before max_tokens.
    """

    prompt_seed: int
    width: int
    n: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_tokens: int = 0

    @property
    def name(self) -> str:
        eos = "-".join(map(str, self.eos_token_ids)) or "none"
        how = f"lp{self.length_penalty:g}/{self.early_stopping}/min{self.min_tokens}"
        return f"p{self.prompt_seed}/b{self.width}/n{self.n}/max{self.max_tokens}/eos-{eos}/{how}"

    def prompt(self) -> list[int]:
        rng = np.random.default_rng([self.prompt_seed, 77])
        return rng.integers(3, 131, 9 + 5 * self.prompt_seed).tolist()


FAMILY_SEARCH = BeamCase(prompt_seed=5, width=3, n=3, max_tokens=12)
"""The search that is made on every family's checkpoint."""


@dataclass(frozen=True, slots=True)
class Found:
    """One sequence of a search's result, the ending token included."""

    token_ids: list[int]
    score: float


EOS_TOKEN_IDS: dict[int, tuple[int, ...]] = {0: (26, 99), 1: (77,), 2: (26, 79, 50)}


def beam_cases() -> list[BeamCase]:
    """Every rule at least once; eos ids are filled in for each prompt."""
    cases: list[BeamCase] = []
    for seed, eos in EOS_TOKEN_IDS.items():
        cases += [
            BeamCase(seed, 4, 4, 20, eos, length_penalty, early_stopping)
            for length_penalty in (0.0, 1.0, 2.0, -0.5)
            for early_stopping in (True, False, "never")
        ]
        cases += [
            BeamCase(seed, 4, 2, 16),
            BeamCase(seed, 2, 1, 12, eos[:1]),
            BeamCase(seed, 1, 1, 12),
            BeamCase(seed, 6, 3, 18, eos, 1.5, False),
            BeamCase(seed, 4, 4, 20, eos, 1.0, True, min_tokens=8),
            BeamCase(seed, 3, 3, 1, eos),
        ]
    return cases


def check_search(executor: JaxExecutor, case: BeamCase, expected: list[Found], **options: Any) -> None:
    """An engine with these options finds the same sequences, in the same order, with the same scores."""
    params = SamplingParams(
        beam_width=case.width,
        n=case.n,
        max_tokens=case.max_tokens,
        min_tokens=case.min_tokens,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
    )
    answer = Rig(executor, eos_token_ids=frozenset(case.eos_token_ids), **options).answer(case.prompt(), params)
    assert answer.sequences == [sequence.token_ids for sequence in expected]
    scores = [
        answer.cumulative_logprobs[index] / len(tokens) ** case.length_penalty
        for index, tokens in enumerate(answer.sequences)
    ]
    np.testing.assert_allclose(scores, [sequence.score for sequence in expected], rtol=2e-5, atol=2e-5)
