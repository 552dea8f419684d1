"""Samples stories from the demo model with a dense cache, apart from the engine.

    python -m benchmarks.demo_model.sample

Sequences advance together, one token a step; attention sees a contiguous cache `[L, R, S, K, D]`. It is the plainest
correct sampler, there to look at the model and to write its card.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo_model.stories.grammar import ASSISTANT, USER
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.demo import FOLDER
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import TokenBatch

# Prompts of the model card; a prompt that starts with "user: " goes through the chat template.
CARD_PROMPTS = (
    "user: Tell me a story about a dragon.",
    "user: Write a short story about a brave fox and a river.",
    "user: Can you tell a story about two friends?",
    "user: I want a sad story about a lighthouse keeper.",
    "user: Please tell me a bedtime story about a little star.",
    "user: tell me a funny story about a toaster",
    "user: Write a story about a walrus who lives near a reef.",
    "Once upon a time",
    "In a small village",
    "There was once a robot who",
)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The model, ready to continue texts.

    Attributes:
        config: shape of the model.
        params: parameters in loop mode, in `dtype`.
        tokenizer: of the same checkpoint.
        dtype: the type to compute in.
        temperature: divides the logits; 0 takes the likeliest token.
        max_num_tokens: prompt and continuation together.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    dtype: np.dtype
    temperature: float = 0.8
    max_num_tokens: int = 320

    def continue_texts(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[str]:
        """One continuation a prompt, without the prompt and the end token; a row's draws depend on its seed alone."""
        encoded = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        rows = self.continue_tokens(encoded, seeds)
        return [self.tokenizer.decode(row[len(ids) :]) for row, ids in zip(rows, encoded, strict=True)]

    def continue_tokens(self, encoded: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        """Each prompt and its continuation, without the end token; draws are as in `continue_texts`."""
        num_rows = len(encoded)
        cache_shape = (
            self.config.num_layers,
            num_rows,
            self.max_num_tokens,
            self.config.num_kv_heads,
            self.config.head_dim,
        )
        cache = (jnp.zeros(cache_shape, self.dtype), jnp.zeros(cache_shape, self.dtype))
        step = jax.jit(functools.partial(_step, Model(self.config, self.dtype), self.temperature), donate_argnums=(1,))
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
        rows, done = [list(ids) for ids in encoded], [False] * num_rows
        for position in range(self.max_num_tokens - 1):
            token_ids = np.asarray([row[min(position, len(row) - 1)] for row in rows], np.int32)
            drawn, cache = step(self.params, cache, token_ids, jnp.int32(position), keys)
            for index, token_id in enumerate(np.asarray(drawn).tolist()):
                if position + 1 == len(rows[index]) and not done[index]:
                    done[index] = token_id in self.config.eos_token_ids
                    if not done[index]:
                        rows[index].append(token_id)
            if all(done):
                break
        return rows


def open_sampler(temperature: float = 0.8, dtype: str = "float32") -> Sampler:
    """The packaged model, ready to sample."""
    config = read_config(FOLDER)
    params = load_params(Model(config, jnp.dtype(dtype)), FOLDER, "loop")
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return Sampler(config, params, tokenizer, jnp.dtype(dtype), temperature)


def with_template(prompt: str) -> str:
    """The text the model sees: "user: ..." becomes a chat turn, all else stays as it is."""
    is_chat = prompt.startswith("user: ")
    return f"{USER}{prompt.removeprefix('user: ')}{ASSISTANT}" if is_chat else prompt


def _step(
    model: Model,
    temperature: float,
    params: Params,
    cache: tuple[jax.Array, jax.Array],
    token_ids_r: jax.Array,
    position: jax.Array,
    keys_r: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    positions_r = jnp.full_like(token_ids_r, position)
    attend = functools.partial(_attend, position)
    hidden, cache = model.run(params, TokenBatch(token_ids_r, positions_r, positions_r + 1), attend, cache, "loop")
    logits = model.logits(params, hidden)
    if temperature == 0:
        return logits.argmax(axis=-1), cache

    def draw(key: jax.Array, logits_v: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, position), logits_v / temperature)

    return jax.vmap(draw)(keys_r, logits), cache


def _attend(
    position: jax.Array, q_rhd: jax.Array, k_rkd: jax.Array, v_rkd: jax.Array, cache: Any, place: LayerPlace
) -> tuple[jax.Array, Any]:
    k_cache, v_cache = (
        jax.lax.dynamic_update_slice(old, new[None, :, None].astype(old.dtype), (place.index, 0, position, 0, 0))
        for old, new in zip(cache, (k_rkd, v_rkd), strict=True)
    )
    num_rows, num_heads, head_dim = q_rhd.shape
    q = q_rhd.reshape(num_rows, k_rkd.shape[1], -1, head_dim).astype(jnp.float32)
    k, v = (
        jax.lax.dynamic_index_in_dim(x, place.index, keepdims=False).astype(jnp.float32) for x in (k_cache, v_cache)
    )
    scores = jnp.einsum("rkgd,rskd->rkgs", q, k) / math.sqrt(head_dim)
    scores = jnp.where(jnp.arange(k.shape[1]) <= position, scores, -jnp.inf)
    o = jnp.einsum("rkgs,rskd->rkgd", jax.nn.softmax(scores, axis=-1), v)
    return o.reshape(num_rows, num_heads, head_dim).astype(q_rhd.dtype), (k_cache, v_cache)


def main() -> None:
    """Print stories; without prompts, those of the model card."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_model.sample",
        description="Print stories; without prompts, those of the model card.",
    )
    parser.add_argument("prompts", nargs="*", help='texts to continue, or "user: ..." for a chat turn')
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=1, help="of the first prompt; each further one adds 1")
    args = parser.parse_args()
    prompts = args.prompts or list(CARD_PROMPTS)
    seeds = [args.seed + index for index in range(len(prompts))]
    texts = open_sampler(args.temperature).continue_texts([with_template(prompt) for prompt in prompts], seeds)
    for prompt, seed, text in zip(prompts, seeds, texts, strict=True):
        print(f"**{prompt}** (seed {seed})\n\n> {text.strip()}\n")


if __name__ == "__main__":
    main()
