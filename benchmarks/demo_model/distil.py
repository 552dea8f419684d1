"""Trains the demo's draft model: `python -m benchmarks.demo_model.distil`.

The demo continues prompts of its corpus, greedily and at temperatures from 0.7 to 1.0. A far smaller Llama learns the
demo's distribution of the next token on these and on documents of the corpus. A run follows from its seed and steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from benchmarks.demo_model.data import Batch, Lesson, batch, empty_batch, encode, fill_row
from benchmarks.demo_model.sample import open_sampler
from benchmarks.demo_model.train import Phase, TrainSettings, logits_of, make_optimizer, package
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.demo import DRAFT_FOLDER, FOLDER
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.model import Model

TEMPERATURE = 0.8
"""Divides both models' logits where their distributions are compared."""

NUM_STORIES = 192
"""Continuations that the demo tells."""

_PROMPT_SEED = 77  # apart from the corpus's own, and from that of acceptance.py
_BEGINNING_LEN = 4  # tokens of a prompt where a document begins without a request
_TEMPERATURES = (0.0, 0.7, 0.85, 1.0)
_DTYPE = jnp.dtype(jnp.bfloat16)

Document = tuple[list[int], list[float]]
Step = Callable[[Params, optax.OptState, Params, Batch], tuple[Params, optax.OptState, jax.Array]]


def draft_config(hidden_size: int, num_layers: int = 1) -> ModelConfig:
    """The shape of a draft model: the demo's vocabulary, heads of 32."""
    num_heads = hidden_size // 32
    return dataclasses.replace(
        read_config(FOLDER),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2 // 16 * 16,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
    )


def corpus_prompts(tokenizer: Tokenizer, seed: int, number: int) -> list[list[int]]:
    """Requests, and beginnings of stories without one, of the corpus of that seed; no prompt twice."""
    prompts: dict[tuple[int, ...], None] = {}
    index = 0
    while len(prompts) < number:
        token_ids, weights = encode(tokenizer, seed, index, Lesson())
        num_asked = next((place for place, weight in enumerate(weights) if weight), 0)
        prompts[tuple(token_ids[: num_asked or _BEGINNING_LEN])] = None
        index += 1
    return [list(prompt) for prompt in prompts]


def learnt_prompts(tokenizer: Tokenizer, number: int = NUM_STORIES) -> list[list[int]]:
    """The prompts whose continuations by the demo the draft learns from."""
    return corpus_prompts(tokenizer, _PROMPT_SEED, number)


def tell(tokenizer: Tokenizer, number: int) -> list[Document]:
    """Continuations by the demo, a share at each temperature; prompts weigh nothing."""
    prompts = learnt_prompts(tokenizer, number)
    documents: list[Document] = []
    for share, temperature in enumerate(_TEMPERATURES):
        mine = prompts[share :: len(_TEMPERATURES)]
        sampler = open_sampler(temperature, "bfloat16")
        rows = sampler.continue_tokens(mine, range(len(mine)))
        documents += [
            (row, [float(place >= len(prompt)) for place in range(len(row))])
            for row, prompt in zip(rows, mine, strict=True)
        ]
    return documents


def told_batch(documents: list[Document], step: int, shape: tuple[int, int]) -> Batch:
    """A batch of continuations, drawn anew for each step."""
    result, rng = empty_batch(shape), Random(step)
    for row in range(shape[0]):
        fill_row(result, row, iter(rng.sample(documents, min(8, len(documents)))))
    return result


def with_embedding_of(params: Params, teacher_params: Params) -> Params:
    """Parameters whose embedding is the demo's in its main directions, of the size that it had.

    Raises:
        StopIteration: there is no embedding `[V, hidden]`.
    """
    path, mine = _embedding(params)
    _, theirs = _embedding(teacher_params)
    left, sizes, _ = np.linalg.svd(np.asarray(theirs, np.float32), full_matrices=False)
    narrow = (left * sizes)[:, : mine.shape[1]]
    narrow *= np.asarray(mine).std() / narrow.std()
    return jax.tree_util.tree_map_with_path(lambda at, leaf: jnp.asarray(narrow) if at == path else leaf, params)


def _embedding(params: Params) -> tuple[jax.tree_util.KeyPath, jax.Array]:
    vocab_size = read_config(FOLDER).vocab_size
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return next((path, leaf) for path, leaf in leaves if leaf.ndim == 2 and leaf.shape[0] == vocab_size)


def make_step(config: ModelConfig, optimizer: optax.GradientTransformation) -> Step:
    """One jitted optimizer step towards the demo's distribution; parameters and optimizer state are donated."""
    model, teacher = Model(config, _DTYPE), Model(read_config(FOLDER), _DTYPE)

    def mean_loss(params: Params, probs_tv: jax.Array, rows: Batch) -> jax.Array:
        held = jax.tree.map(lambda a: a.astype(_DTYPE), params)
        logits = logits_of(model, held, rows).astype(jnp.float32) / TEMPERATURE
        losses = jax.nn.logsumexp(logits, axis=-1) - (probs_tv * logits).sum(axis=-1)
        weights = rows.weights.reshape(-1)
        return (losses * weights).sum() / jnp.maximum(weights.sum(), 1.0)

    def step(
        params: Params, state: optax.OptState, teacher_params: Params, rows: Batch
    ) -> tuple[Params, optax.OptState, jax.Array]:
        logits = logits_of(teacher, teacher_params, rows).astype(jnp.float32)
        probs = jax.nn.softmax(logits / TEMPERATURE, axis=-1)
        loss, gradients = jax.value_and_grad(mean_loss)(params, probs, rows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def distil(
    config: ModelConfig, settings: TrainSettings, tokenizer: Tokenizer, documents: list[Document], every: int = 50
) -> Params:
    """Train on continuations and on the corpus in turn; float32 parameters in loop mode.

    Args:
        config: shape of the draft model.
        settings: seed, rows, phases.
        tokenizer: the demo's.
        documents: what the demo told.
        every: steps between two lines of progress.
    """
    optimizer = make_optimizer(settings)
    step_fn, shape = make_step(config, optimizer), (settings.num_rows, settings.row_len)
    teacher_params = load_params(Model(read_config(FOLDER), _DTYPE), FOLDER, "loop")
    params = Model(config, jnp.dtype(jnp.float32)).init_params(jax.random.key(settings.seed), "loop")
    params = with_embedding_of(params, teacher_params)
    state, losses, start = optimizer.init(params), [], time.perf_counter()
    for step in range(settings.num_steps):
        is_told = bool(documents) and step % 2 == 0
        rows = (
            told_batch(documents, step, shape)
            if is_told
            else batch(tokenizer, settings.seed, step, shape, settings.lesson(step))
        )
        params, state, loss = step_fn(params, state, teacher_params, rows)
        losses.append(loss)
        if (step + 1) % every == 0 or step + 1 == settings.num_steps:
            mean = np.mean(jax.device_get(losses))
            print(
                f"step {step + 1}/{settings.num_steps}  loss {mean:.4f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            losses = []
    return params


def main() -> None:
    """Train and package the draft model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_model.distil", description="Train and package the demo's draft model."
    )
    parser.add_argument("--seed", type=int, default=2024, help="of corpus and parameters")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps")
    parser.add_argument("--hidden-size", type=int, default=96, help="width, a multiple of 32")
    parser.add_argument("--layers", type=int, default=1, help="number of layers")
    parser.add_argument(
        "--stories", type=int, default=NUM_STORIES, help="continuations that the demo tells; 0 for none"
    )
    parser.add_argument("--out", type=Path, default=DRAFT_FOLDER, help="folder of the packaged checkpoint")
    args = parser.parse_args()
    phases = (Phase(args.steps, 5e-3, Lesson(), is_falling=True),)
    settings = TrainSettings(seed=args.seed, num_warmup_steps=min(30, args.steps - 1), phases=phases)
    tokenizer, config = Tokenizer.from_file(str(FOLDER / "tokenizer.json")), draft_config(args.hidden_size, args.layers)
    documents = tell(tokenizer, args.stories) if args.stories else []
    print(f"{len(documents)} continuations, {sum(len(ids) for ids, _ in documents)} tokens", flush=True)
    package(args.out, config, distil(config, settings, tokenizer, documents), tokenizer)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
