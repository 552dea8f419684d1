"""Greedy tokens of small trained models in jpaged and in vLLM's CPU build, with no option on either side.

python -m benchmarks.peers.greedy --vllm build/peers/venvs/vllm/bin/python

`python -m benchmarks.peers` installs vLLM there; transformers trains the models, so `make torch` comes first. Each
family's model learns its own list of sentences by heart, because a random model has nearly equal logits at many
positions, and two correct engines then differ by rounding. Where they differ all the same, the gap of the two logits in
float32 is recorded, which is positive if jpaged's token is the better one. A `generation_config.json` lies beside the
weights: its `repetition_penalty` and `max_new_tokens` change the tokens, so an engine that ignores them is found.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import save

WORKER = Path(__file__).parent / "workers" / "greedy.py"
NUM_SENTENCES = 12
NUM_BYTES = 256
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = 320
NUM_STEPS = 400
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": NUM_BYTES,
    "bos_token_id": NUM_BYTES + 1,
    "eos_token_id": NUM_BYTES + 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {"query_pre_attn_scalar": 64},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "SmolLM3": {},
    "StableLm": {"partial_rotary_factor": 0.25},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}
"""Switches of each family's config class of transformers, beside the common shape."""
_PENALTIES = (1.0, 1.05, 1.1)


def sentences(seed: int) -> list[str]:
    """Sentences that begin with different words, to be continued from there."""
    rng = random.Random(seed)
    colors, things = (
        ("amber", "violet", "silver", "green", "scarlet"),
        ("lantern", "bridge", "engine", "clock", "garden"),
    )
    places, names = ("the harbor", "a mill", "the station", "an old tower"), ("Ada", "Ravi", "Noor", "Emil", "Chidi")
    return [
        f"Entry {i}: the {rng.choice(colors)} {rng.choice(things)} near {rng.choice(places)} was repaired by "
        f"{rng.choice(names)} in {rng.randrange(1800, 2000)} for {rng.randrange(10, 100)} crowns."
        for i in range(NUM_SENTENCES)
    ]


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.save_pretrained(folder)


def write_model(folder: Path, family: str, seed: int) -> float:
    """Trains a family's model on its sentences, and writes it in bfloat16; returns the last loss."""
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = getattr(transformers, f"{family}Config")(**_SHAPE, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    write_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [[*tokenizer(text, add_special_tokens=False)["input_ids"], NUM_BYTES + 2] for text in sentences(seed)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [NUM_BYTES] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    # The beginning of a sentence is its prompt, so it needs not be known.
    labels[:, : len("Entry 1")] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=NUM_STEPS)
    loss = float("inf")
    for _ in range(NUM_STEPS):
        result = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        loss = result.item()
    model.to(torch.bfloat16).save_pretrained(folder)
    penalty = _PENALTIES[seed % len(_PENALTIES)]
    generation = {
        "repetition_penalty": penalty,
        "max_new_tokens": 64,
        "eos_token_id": NUM_BYTES + 2,
        "temperature": 0.7,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return loss


def gap(folder: Path, prompt: str, ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Returns by how much the logit of our token is above theirs in float32, where the two first differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_equal = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    context = [*AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"], *ours[:num_equal]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context])).logits[0, -1]
    penalty = model.generation_config.repetition_penalty or 1.0
    seen = torch.tensor(sorted(set(context)))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return round((logits[ours[num_equal]] - logits[theirs[num_equal]]).item(), 4)


def run(engine: str, python: str, folder: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """Runs one engine's worker on the prompts.

    Raises:
        SystemExit: the engine failed; the end of its log is printed.
    """
    command = [python, str(WORKER), engine, str(folder)]
    done = subprocess.run(command, input=json.dumps(list(prompts)), text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} failed with {folder.name}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(family: str, seed: int, folder: Path, vllm: str) -> dict[str, Any]:
    """Trains a model and runs it in both engines."""
    folder.mkdir()
    loss = write_model(folder, family, seed)
    prompts = [text[: text.index(":") + 1] for text in sentences(seed)]
    ours, theirs = (run(*engine, folder, prompts) for engine in (("jpaged", sys.executable), ("vllm", vllm)))
    pairs = list(zip(ours["token_ids"], theirs["token_ids"], strict=True))
    return {
        "family": family,
        "loss": loss,
        "defaults": ours["defaults"],
        "are_defaults_equal": ours["defaults"] == theirs["defaults"],
        "num_prompts": len(pairs),
        "num_equal": sum(a == b for a, b in pairs),
        "gaps": [gap(folder, prompt, a, b) for prompt, (a, b) in zip(prompts, pairs, strict=True) if a != b],
        "num_tokens": sum(len(b) for _, b in pairs),
        "vllm_version": theirs["version"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare greedy tokens of small trained models with vLLM's.")
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dry-run", action="store_true", help="do not record the result")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        for seed, family in enumerate(track(args.families, console=Console(stderr=True))):
            rows.append(compare(family, seed, Path(made) / family.lower(), args.vllm))
            print(json.dumps(rows[-1]), flush=True)
    table = Table("family", "repetition penalty", "prompts", "tokens", "equal", "gaps where not")
    for row in rows:
        penalty = str(row["defaults"]["repetition_penalty"])
        table.add_row(
            row["family"],
            penalty,
            *(str(row[f"num_{name}"]) for name in ("prompts", "tokens", "equal")),
            str(row["gaps"]),
        )
    Console().print(table)
    if not args.dry_run:
        save("greedy", "python -m benchmarks.peers.greedy --vllm PYTHON", {"models": rows})


if __name__ == "__main__":
    main()
