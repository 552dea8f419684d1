"""Beam searches whose results are compared with transformers: on one tiny checkpoint, with and without early ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.models.tiny import TinyCase, tiny_case

GOLDENS = Path(__file__).parent / "beam_goldens.json"

_SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 1280}
CHECKPOINT = TinyCase("sharing", {**tiny_case("llama_mha").config, **_SIZES}, 24)
"""Small, and with room for a prompt of 1 000 tokens."""


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


@dataclass(frozen=True, slots=True)
class Found:
    """One sequence of a search's result, the ending token included."""

    token_ids: list[int]
    score: float


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


EOS_TOKEN_IDS: dict[int, tuple[int, ...]] = {0: (26, 99), 1: (77,), 2: (26, 79, 50)}


def found_by_transformers(model: Any, case: BeamCase) -> list[Found]:
    """What `generate` returns; `model` is a torch model of CHECKPOINT."""
    import torch

    prompt = torch.tensor([case.prompt()])
    with torch.no_grad():
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=case.width,
            num_return_sequences=case.n,
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.min_tokens or None,
            do_sample=False,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            eos_token_id=list(case.eos_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = answer.sequences[:, prompt.shape[1] :].tolist()
    if case.width == 1:  # plain greedy search, which reports no scores
        logprobs = model.compute_transition_scores(answer.sequences, answer.scores, normalize_logits=True)
        scores = [float(logprobs[0].sum()) / len(_cut(rows[0], case)) ** case.length_penalty]
    else:
        scores = answer.sequences_scores.tolist()
    return [Found(_cut(row, case), round(score, 5)) for row, score in zip(rows, scores, strict=True)]


def _cut(row: list[int], case: BeamCase) -> list[int]:
    """Up to and with the ending token."""
    for i, token in enumerate(row):
        if token in case.eos_token_ids:
            return row[: i + 1]
    return row
