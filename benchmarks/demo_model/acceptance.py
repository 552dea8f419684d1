"""How often the draft model writes what the demo writes: `python -m benchmarks.demo_model.acceptance`.

The demo continues prompts. At every token that it wrote, both models see the same text before it, and the draft is
right where its own choice is that token: its likeliest one, or, with noise, the one that the same Gumbel noise makes
of its logits at temperature 0.8. A run of k guesses is right when k in a row are, since the draft reads what the demo
wrote until its first wrong guess.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo_model.data import one_row
from benchmarks.demo_model.distil import TEMPERATURE, corpus_prompts, learnt_prompts
from benchmarks.demo_model.sample import CARD_PROMPTS, open_sampler, with_template
from benchmarks.demo_model.train import logits_of
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.demo import DRAFT_FOLDER, FOLDER
from jpaged.models.model import Model

MAX_K = 6
_PROMPT_SEED = 4711  # apart from the corpus's own, and from that of distil.py
_DTYPE = jnp.dtype(jnp.float32)


def prompts(number: int) -> list[list[int]]:
    """Those of the model card, then requests and beginnings of another corpus; none that the demo told the draft of."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    card = [tokenizer.encode(with_template(text)).ids for text in CARD_PROMPTS]
    learnt = learnt_prompts(tokenizer)
    several = [*card, *corpus_prompts(tokenizer, _PROMPT_SEED, 2 * number)]
    return [prompt for prompt in several if prompt not in learnt][:number]


def continuations(asked: Sequence[Sequence[int]], temperature: float, num_tokens: int) -> list[list[int]]:
    """Prompt and the demo's continuation, in float32; row r draws with seed r. Stories that end are shorter."""
    rows = open_sampler(temperature).continue_tokens(asked, range(len(asked)))
    return [row[: len(prompt) + num_tokens] for row, prompt in zip(rows, asked, strict=True)]


def matches(
    folder: Path, rows: Sequence[Sequence[int]], asked: Sequence[Sequence[int]], temperature: float
) -> list[np.ndarray]:
    """For each row, whether the model of that folder chooses each token after the prompt, bool `[tokens]`."""
    model = Model(read_config(folder), _DTYPE)
    params = load_params(model, folder, "loop")
    row_len = max(len(row) for row in rows)
    run = jax.jit(functools.partial(logits_of, model))
    result = []
    for seed, (row, prompt) in enumerate(zip(rows, asked, strict=True)):
        logits = run(params, one_row(list(row), row_len))[: len(row) - 1]
        chosen = np.asarray(_choose(logits, temperature, seed))
        first = len(prompt) - 1
        result.append(chosen[first:] == np.asarray(row[first + 1 :]))
    return result


def _choose(logits_tv: jax.Array, temperature: float, seed: int) -> jax.Array:
    if temperature == 0:
        return logits_tv.argmax(axis=-1)
    key = jax.random.key(seed)

    def draw(position: jax.Array, logits_v: jax.Array) -> jax.Array:  # as the sampler does
        return jax.random.categorical(jax.random.fold_in(key, position), logits_v / temperature)

    return jax.vmap(draw)(jnp.arange(logits_tv.shape[0]), logits_tv)


def acceptance(right: Sequence[np.ndarray]) -> list[float]:
    """The share of places from which the next 1 to MAX_K guesses are all right."""
    shares = []
    for k in range(1, MAX_K + 1):
        runs = [np.lib.stride_tricks.sliding_window_view(row, k).all(axis=1) for row in right if len(row) >= k]
        shares.append(float(np.concatenate(runs).mean()))
    return shares


def main() -> None:
    """Print acceptance by the number of guesses, greedily and with noise."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_model.acceptance", description="How often the draft is right."
    )
    parser.add_argument("--draft", type=Path, default=DRAFT_FOLDER, help="folder of the draft model")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=200, help="of each continuation, at most")
    args = parser.parse_args()
    asked = prompts(args.num_prompts)
    for temperature in (0.0, TEMPERATURE):
        rows = continuations(asked, temperature, args.num_tokens)
        for name, folder in (("draft", args.draft), ("demo itself", FOLDER)):
            right = matches(folder, rows, asked, temperature)
            shares = "  ".join(f"{share:.3f}" for share in acceptance(right))
            print(f"temperature {temperature}  {name:11}  k=1..{MAX_K}: {shares}  of {sum(map(len, right))} tokens")


if __name__ == "__main__":
    main()
