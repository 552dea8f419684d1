"""Models with an MTP layer, an executor of both, and an oracle of the layer without a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params, read_mtp
from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import MeshPlacement, serving_mesh
from jpaged.device.speculative.eagle import HeadProposer
from jpaged.models.decoder import DecoderConfig
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from jpaged.models.tokens import TokenBatch
from tests.device import tiny_model
from tests.device.speculative.eagle_oracle import rms
from tests.device.speculative.eagle_rig import telling
from tests.models import dense
from tests.models.eagle_heads import write
from tests.models.mtp_layers import MtpCase, Tensors
from tests.on_demand import programs_on_demand

LENGTH = 64
"""Tokens that a run of an oracle is padded to."""
FAULTS = ("the inputs in the other order", "states before the final norm", "proposals without a norm", "no shift")


@functools.partial(jax.jit, static_argnames="model")
def run(model: Model, params: Params, ids_t: jax.Array) -> jax.Array:
    """The output of the last layer, of tokens that begin a sequence."""
    positions_t = jnp.arange(len(ids_t), dtype=jnp.int32)
    hidden_te, _ = model.run(params, TokenBatch(ids_t, positions_t, positions_t + 1), dense.attend, (), "loop")
    return hidden_te


def padded(ids: Sequence[int]) -> np.ndarray:
    return np.pad(np.array(ids, np.int32), (0, LENGTH - len(ids)))


@dataclass(frozen=True)
class Target:
    """The model that proposals are made for, run over whole sequences."""

    model: Model
    params: Params
    norm: np.ndarray
    eps: float
    is_normed: bool = True

    def features(self, ids: Sequence[int]) -> np.ndarray:
        """Hidden states of its output, `[T, E]`."""
        hidden_te = np.asarray(run(self.model, self.params, padded(ids)))[: len(ids)]
        return rms(hidden_te, self.norm, self.eps) if self.is_normed else hidden_te


@dataclass(frozen=True)
class MtpOracle:
    """An MTP layer after the equations of DeepSeek-V3's report; the likeliest tokens.

    The layer itself runs as a model of one layer, whose embedding has the projected inputs in its rows.

    Attributes:
        layer: of that model.
        tensors: of the whole checkpoint.
        fault: what it does wrong, one of `FAULTS`.
    """

    layer: Model
    params: Params
    case: MtpCase
    tensors: Tensors
    eps: float
    fault: str = ""

    def propose(self, ids: Sequence[int], features_te: np.ndarray, count: int) -> list[int]:
        """So many tokens after those, of which all but the last have features."""
        token_norm, state_norm, projection, last_norm = (
            self.tensors[f"{self.case.outer_prefix}{name}.weight"] for name in self.case.names
        )
        token_norm, state_norm, last_norm = (x + self.case.norm_offset for x in (token_norm, state_norm, last_norm))
        embedding, output = self.tensors["model.embed_tokens.weight"], self.tensors["lm_head.weight"]
        proposed: list[int] = []
        states = features_te
        state_first = self.case.state_first != (self.fault == "the inputs in the other order")
        for _ in range(count):
            tokens = [*ids, *proposed]
            shown = tokens[:-1] if self.fault == "no shift" else tokens[1:]
            inputs = [rms(embedding[shown], token_norm, self.eps), rms(states, state_norm, self.eps)]
            x_te = np.concatenate(inputs[::-1] if state_first else inputs, axis=-1) @ projection.T
            rows = jnp.asarray(np.pad(x_te, ((0, LENGTH - len(x_te)), (0, 0))), jnp.float32)
            hidden_te = run(self.layer, {**self.params, "embed": {"embedding": rows}}, padded(range(len(x_te))))
            hidden_e = np.asarray(hidden_te)[len(x_te) - 1]
            normed_e = rms(hidden_e, last_norm, self.eps)
            kept = hidden_e if self.fault == "proposals without a norm" else normed_e
            states = np.concatenate([states, kept[None]])
            proposed.append(int(np.argmax(normed_e @ output.T)))
        return proposed


@dataclass(frozen=True)
class Served:
    """As that of `eagle_rig`, with an MTP layer.

    Attributes:
        folder: the checkpoint.
    """

    executor: JaxExecutor
    target: Target
    mtp: MtpOracle
    proposals: list[tuple[np.ndarray, np.ndarray]]
    folder: Path

    def wanted(self, ids: Sequence[int], count: int) -> list[int]:
        return self.mtp.propose(ids, self.target.features(ids[:-1]), count)


Edit = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def unchanged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors


def serve(
    folder: Path,
    case: MtpCase,
    options: EngineConfig,
    *,
    mode: LayerMode = "loop",
    edit: Edit = unchanged,
    num_devices: int = 1,
) -> Served:
    """An executor of a model with its MTP layer, both from one checkpoint.

    Args:
        mode: of the model's layers.
        edit: changes the tensors of the checkpoint.
        num_devices: that the model is split over.
    """
    tensors = edit({**case.model_tensors(), **case.tensors()})
    found = write(folder / "model", case.case.config, tensors)
    model = Model(from_hf(case.case.config), jnp.dtype("float32"))
    mesh = serving_mesh(num_devices)
    mtp = Model(read_mtp(found, model.config), model.dtype)
    places = MeshPlacement.of(model, mesh, mode), MeshPlacement.of(mtp, mesh)
    params, of_mtp = (
        load_params(one, found, where.layer_mode, num_parts=num_devices, shardings=where.shardings)
        for one, where in zip((model, mtp), places, strict=True)
    )
    proposals: list[tuple[np.ndarray, np.ndarray]] = []

    @contextmanager
    def listening() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(HeadProposer, "propose", telling(proposals))
            yield

    with programs_on_demand(listening), listening():
        executor = JaxExecutor.create(model, params, options, mesh=mesh, draft=(mtp, of_mtp))
        executor.warm_up(tiny_model.quiet)
    return Served(executor, *oracles(folder, case, model, tensors), proposals, found)


def oracles(folder: Path, case: MtpCase, model: Model, tensors: Tensors) -> tuple[Target, MtpOracle]:
    """The oracles of a checkpoint with these tensors."""
    plain = load_params(model, write(folder / "plain", case.case.config, tensors), "loop")
    layer = {
        f"model.layers.0.{name.removeprefix(case.prefix)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(case.prefix) and not name.removeprefix(case.prefix).startswith(own(case))
    }
    outer = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(part in name for part in (".layers.", ".mtp_layers.")) and not name.startswith("mtp.")
    }
    config = {**case.case.config, **case.sparse, "num_hidden_layers": 1}
    one = Model(from_hf(config), model.dtype)
    params = load_params(one, write(folder / "layer", config, {**outer, **layer}), "loop")
    assert isinstance(model.config, DecoderConfig)
    eps = model.config.norm_eps
    target = Target(model, plain, tensors["model.norm.weight"] + case.norm_offset, eps)
    return target, MtpOracle(one, params, case, tensors, eps)


def own(case: MtpCase) -> tuple[str, ...]:
    """Names within the MTP layer that a layer of the model does not have."""
    return (*case.names, *(name for name, _ in case.repeated))
