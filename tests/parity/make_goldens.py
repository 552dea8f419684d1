"""Writes goldens/<case>.json with transformers and torch: `python -m tests.parity.make_goldens` (needs torch).

Each file holds the prompt's next-token logits at a few places, 64 greedy tokens of `generate`, and the smallest gap
between the best and the second-best logit on the way, which says how safe a comparison of tokens is.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.tiny import TinyCase, tiny_cases, write_checkpoint

GOLDENS = Path(__file__).parent / "goldens"
NUM_TOKENS = 64


def golden(case: TinyCase) -> dict[str, object]:
    """The answers of transformers, from a model loaded afresh (dynamic RoPE keeps state between calls)."""
    prompt = torch.tensor([case.prompt()])
    rows = sorted({0, 1, case.prompt_len // 2, case.prompt_len - 1})
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        write_checkpoint(case, Path(folder))
        logits = _load(Path(folder))(prompt).logits[0].numpy()
        answer = _load(Path(folder)).generate(
            prompt,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    steps = np.stack([step[0].numpy() for step in answer.logits])
    best = np.sort(steps, axis=-1)
    tokens = answer.sequences[0, case.prompt_len :].tolist()
    print(f"{case.name}: {len(set(tokens))} different tokens")
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "prompt": case.prompt(),
        "rows": rows,
        "logits": [[round(float(value), 6) for value in logits[row]] for row in rows],
        "last_logits": [round(float(value), 6) for value in steps[-1]],
        "tokens": tokens,
        "smallest_gap": round(float((best[:, -1] - best[:, -2]).min()), 6),
    }


def _load(folder: Path) -> transformers.PreTrainedModel:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{folder}: the checkpoint does not fit the model: {info}")
    return model.eval()


def main() -> None:
    """Writes every case."""
    GOLDENS.mkdir(exist_ok=True)
    for case in tiny_cases():
        (GOLDENS / f"{case.name}.json").write_text(json.dumps(golden(case)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
