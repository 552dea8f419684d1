"""A small Llama and heads for it, as published checkpoints have them, and an executor of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params, read_head
from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.device.speculative.eagle import HeadProposer
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.speculative.eagle_oracle import Head, Llama, Shape, Tensors
from tests.models.eagle_heads import HeadSizes, finding_head, layer_tensors, write
from tests.on_demand import programs_on_demand

VOCAB_SIZE, NUM_LAYERS = tiny_model.CONFIG.vocab_size, 4
SIZES = HeadSizes(VOCAB_SIZE, 32, inner=48, num_heads=4, num_kv_heads=2, head_dim=16, target_hidden_size=32)
SHAPE = Shape(SIZES.num_heads, SIZES.num_kv_heads, SIZES.head_dim, eps=1e-5)
WATCHED = (0, 2, 4)
_PROPOSE = HeadProposer.propose
HEAD = SIZES.config(eagle_aux_hidden_state_layer_ids=list(WATCHED))
_NOT_OF_LLAMA = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
LLAMA = {name: value for name, value in HEAD.items() if name not in _NOT_OF_LLAMA} | {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": NUM_LAYERS,
    "eos_token_id": None,
}


def llama_tensors(scale: float = 0.02) -> dict[str, np.ndarray]:
    """A model that goes by its last token, and a little by what is in front of it."""
    rng, width = np.random.default_rng(3), SIZES.hidden_size
    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(VOCAB_SIZE, width)),
        "model.norm.weight": np.ones(width),
        "lm_head.weight": rng.normal(size=(VOCAB_SIZE, width)),
    }
    for layer in range(NUM_LAYERS):
        tensors |= layer_tensors(rng, f"model.layers.{layer}.", SIZES, width, scale)
    return tensors


def likely_head() -> dict[str, np.ndarray]:
    """A head that is often right: it tells what the model makes of a token alone."""
    llama = llama_tensors()
    return finding_head(SIZES, llama["model.embed_tokens.weight"], llama["lm_head.weight"])


class Proposing(Protocol):
    """An executor of a head, and what was and what should be proposed."""

    @property
    def executor(self) -> JaxExecutor: ...

    @property
    def proposals(self) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def wanted(self, ids: Sequence[int], count: int) -> list[int]:
        """So many tokens after those."""


@dataclass(frozen=True)
class Served:
    """An executor of a head, its oracles, and what was proposed.

    Attributes:
        proposals: of each round (tokens that each row had sampled before, what was proposed), of whole programs.
    """

    executor: JaxExecutor
    llama: Llama
    head: Head
    proposals: list[tuple[np.ndarray, np.ndarray]]
    watched: tuple[int, ...] = WATCHED

    def wanted(self, ids: Sequence[int], count: int) -> list[int]:
        return self.head.propose(ids, self.llama.features(ids[:-1], self.watched), count)


def serve(
    folder: Path,
    tensors: Tensors,
    options: EngineConfig,
    config: dict[str, Any] | None = None,
    *,
    mode: LayerMode = "loop",
    layer_name: str = "midlayer.",
    watched: tuple[int, ...] = WATCHED,
) -> Served:
    """An executor of the small Llama with a head.

    Args:
        mode: of the Llama's layers.
        layer_name: what the head's layer is called in the checkpoint.
        watched: the layers that its configuration names.
    """
    llama = llama_tensors()
    model = Model(from_hf(LLAMA), jnp.dtype("float32"))
    params = load_params(model, write(folder / "llama", LLAMA, llama), mode)
    config = {**HEAD, "draft_vocab_size": len(tensors["lm_head.weight"]), **(config or {})}
    stored = {name.replace("midlayer.", layer_name): tensor for name, tensor in tensors.items()}
    found = write(folder / "head", config, stored)
    head = Model(read_head(found), jnp.dtype("float32"))
    of_head = load_params(head, found, "loop")
    proposals: list[tuple[np.ndarray, np.ndarray]] = []

    @contextmanager
    def listening() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(HeadProposer, "propose", telling(proposals))
            yield

    with programs_on_demand(listening), listening():
        executor = JaxExecutor.create(model, params, options, draft=(head, of_head))
        executor.warm_up(tiny_model.quiet)
    shared = {"embed_tokens.weight": llama["model.embed_tokens.weight"]}
    oracle = Head(rounded({**shared, **tensors}), SHAPE, bool(config.get("norm_before_residual")))
    return Served(executor, Llama(rounded(llama), SHAPE, NUM_LAYERS), oracle, proposals, watched)


def rounded(tensors: Tensors) -> dict[str, np.ndarray]:
    """The numbers as the checkpoint holds them, in float64."""
    return {name: tensor.astype(np.float32).astype(np.float64) for name, tensor in tensors.items()}


def telling(into: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Proposals that are told of when they are made."""

    def propose(self: HeadProposer, kept: Any, reached: Any) -> Any:
        proposals_rk, kept = _PROPOSE(self, kept, reached)
        jax.debug.callback(
            lambda done, proposed: into.append((np.array(done), np.array(proposed))), reached.num_done_r, proposals_rk
        )
        return proposals_rk, kept

    return propose
