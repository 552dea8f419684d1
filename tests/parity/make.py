"""Asks transformers: `python -m tests.parity.make [NAME...]` writes goldens (needs torch; see `tests.parity.cases`).

NAME is a tiny model, `beams`, `demo`, or `shapes` of tensors in checkpoints; without one all are written.
The live tests ask by the same functions.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

from jpaged import demo
from tests.models import tiny
from tests.models.tiny import TinyCase, write_checkpoint
from tests.parity import cases
from tests.parity.cases import FAMILY_SEARCH, BeamCase, Found

MADE_BY = {"transformers": transformers.__version__, "torch": torch.__version__}


def get_class(folder: Path) -> Any:
    """The class of a checkpoint's model; the auto class does not know that of Mistral 4."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_known = config["model_type"] != "mistral4"
    return transformers.AutoModelForCausalLM if is_known else transformers.Mistral4ForCausalLM


def load(folder: Path) -> transformers.PreTrainedModel:
    """The model of a checkpoint that fits it, in float32."""
    model, info = get_class(folder).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{folder}: the checkpoint does not fit the model: {info}")
    return model.eval()


def logits(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """What follows each token, [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([list(map(int, token_ids))])).logits[0].numpy()


def continue_greedily(
    model: transformers.PreTrainedModel, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True
) -> tuple[list[int], torch.Tensor]:
    """The likeliest tokens one by one, and the logits [T, V] that each was chosen by."""
    ends = {"min_new_tokens": max_tokens, "eos_token_id": None} if ignore_eos else {}
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **ends,
        )
    return answer.sequences[0, len(prompt) :].tolist(), torch.stack([step[0] for step in answer.logits])


def load_for_beams(case: TinyCase, folder: Path) -> transformers.PreTrainedModel:
    """A model that searches are made on; a search says itself which tokens end it."""
    write_checkpoint(case, folder)
    model = get_class(folder).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def search(model: transformers.PreTrainedModel, case: BeamCase) -> list[Found]:
    """What a beam search finds."""
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


# --- goldens ----------------------------------------------------------------------------------------------------------


def model_golden(case: TinyCase) -> dict[str, object]:
    """A tiny model's answers; it is loaded afresh for each, as dynamic RoPE keeps state between calls."""
    prompt = case.prompt()
    rows = sorted({0, 1, case.prompt_len // 2, case.prompt_len - 1})
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(case, Path(folder))
        of_prompt = logits(load(Path(folder)), prompt)
        tokens, steps = continue_greedily(load(Path(folder)), prompt, cases.NUM_TOKENS)
        found = search(load_for_beams(case, Path(folder)), FAMILY_SEARCH) if case.name in cases.FAMILIES else []
    print(f"{case.name}: {len(set(tokens))} different tokens")
    return {
        **MADE_BY,
        "prompt": prompt,
        "rows": rows,
        "logits": [[round(float(value), 6) for value in of_prompt[row]] for row in rows],
        "last_logits": [round(float(value), 6) for value in steps[-1]],
        "tokens": tokens,
        "smallest_gap": smallest_gap(steps),
    } | ({"beams": [dataclasses.asdict(sequence) for sequence in found]} if found else {})


def smallest_gap(steps: torch.Tensor) -> float:
    """Between the best and the second-best logit on the way: how safe a comparison of tokens is."""
    best = steps.topk(2, dim=-1).values
    return round(float((best[:, 0] - best[:, 1]).min()), 6)


def beams_golden() -> dict[str, object]:
    """Every search, and a print of how long its sequences are: some must end early."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_for_beams(cases.BEAMS_CHECKPOINT, Path(folder))
        searches = {case.name: search(model, case) for case in cases.beam_cases()}
    for name, found in searches.items():
        print(name, [len(sequence.token_ids) for sequence in found])
    return {**MADE_BY, "searches": {name: [dataclasses.asdict(s) for s in found] for name, found in searches.items()}}


def demo_golden() -> dict[str, object]:
    """The packaged model's answers."""
    answers = []
    model, tokenizer = load(demo.FOLDER), transformers.AutoTokenizer.from_pretrained(demo.FOLDER)
    for asked in cases.DEMO_PROMPTS:
        if "messages" in asked:
            text = tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            prompt = tokenizer(asked["prompt"])["input_ids"]
        tokens, steps = continue_greedily(model, prompt, cases.NUM_TOKENS)
        print(tokenizer.decode(tokens))
        top = torch.log_softmax(steps.double(), dim=-1).topk(cases.DEMO_NUM_TOP, dim=-1)
        answers.append(
            {
                **asked,
                "prompt_token_ids": prompt,
                "tokens": tokens,
                "top_ids": top.indices.tolist(),
                "top_logprobs": [[round(value, 6) for value in row] for row in top.values.tolist()],
                "smallest_gap": smallest_gap(steps),
            }
        )
    return {**MADE_BY, "answers": answers}


def record_shapes() -> None:
    """Write the shapes of tensors that transformers saves of configs that the tests do not spell out."""
    recorded = {}
    for case in cases.MODELS.values():
        if case.config["model_type"] not in tiny.SPELT_OUT:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(dict(case.config)), encoding="utf-8")
                config = transformers.AutoConfig.from_pretrained(folder)
                made = get_class(Path(folder))
                make = made.from_config if hasattr(made, "from_config") else made._from_config
                make(config).save_pretrained(folder)
                with safe_open(Path(folder) / "model.safetensors", "np") as saved:
                    shapes = {name: saved.get_slice(name).get_shape() for name in sorted(saved.keys())}
            recorded[tiny.shapes_key(case.config)] = shapes
    lines = (f"{json.dumps(key)}: {json.dumps(shapes)}" for key, shapes in recorded.items())
    tiny.SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    tiny.recorded_shapes.cache_clear()


def main(names: Sequence[str]) -> None:
    """Write what is named, or all."""
    makers = {"beams": beams_golden, "demo": demo_golden}
    if not names or "shapes" in names:
        record_shapes()
    for name in [name for name in names if name != "shapes"] or (() if names else (*cases.MODELS, *makers)):
        golden = model_golden(cases.MODELS[name]) if name in cases.MODELS else makers[name]()
        cases.path_of(name).write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
