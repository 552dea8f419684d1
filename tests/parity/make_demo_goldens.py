"""Writes goldens/demo.json with transformers and torch (needs torch, and neither jax nor jpaged).

    python -m tests.parity.make_demo_goldens

For each prompt the file holds its tokens, 64 greedy tokens of `generate`, the likeliest tokens at each of those places
with their log-probabilities, and the smallest gap between the best and the second-best logit on the way.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers

DEMO = Path(__file__).parents[2] / "jpaged" / "demo" / "checkpoint"
GOLDENS = Path(__file__).parent / "demo_goldens.json"
NUM_TOKENS = 64
NUM_TOP = 8
PROMPTS = (
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


def golden(folder: Path, asked: dict) -> dict[str, object]:
    """The answers of transformers to one prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if "messages" in asked:
        text = tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        prompt = tokenizer(asked["prompt"])["input_ids"]
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    steps = torch.stack([step[0] for step in answer.logits])
    top = torch.log_softmax(steps.double(), dim=-1).topk(NUM_TOP, dim=-1)
    tokens = answer.sequences[0, len(prompt) :].tolist()
    best = steps.topk(2, dim=-1).values
    print(tokenizer.decode(tokens))
    return {
        **asked,
        "prompt_token_ids": prompt,
        "tokens": tokens,
        "top_ids": top.indices.tolist(),
        "top_logprobs": [[round(value, 6) for value in row] for row in top.values.tolist()],
        "smallest_gap": round(float((best[:, 0] - best[:, 1]).min()), 6),
    }


def main() -> None:
    """Writes every prompt's answers."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.make_demo_goldens")
    parser.parse_args()
    made_by = {"transformers": transformers.__version__, "torch": torch.__version__}
    answers = [golden(DEMO, dict(asked)) for asked in PROMPTS]
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(json.dumps({**made_by, "answers": answers}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
