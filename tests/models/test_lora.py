"""Adapters beside the weights: logits are those of the checkpoint that an adapter was merged into, in every family."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.adapters import AdapterReader
from jpaged.checkpoints.weights import load_params
from jpaged.device.linear import pack_params
from jpaged.device.lora import AdapterRoom, fill_slot, get_arguments, get_matrices, with_matrices
from jpaged.device.mesh import build_mesh, replicated
from jpaged.kernels import matmul
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from jpaged.models.tokens import TokenBatch
from tests.models import dense
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint

FLOAT32 = np.dtype(np.float32)
SLOTS = AdapterRoom(num_slots=3, max_rank=5)
WITH_VECTORS = AdapterRoom(num_slots=3, max_rank=5, has_vectors=True)
DORA, BIASES = {"use_dora": True, "bias": "all"}, {"lora_bias": True, "bias": "lora_only"}
CASES = (
    "llama_gqa_bias",
    "qwen2",
    "qwen3_tied",
    "gemma2",
    "gemma3",
    "phi3_short",
    "gpt2",
    "gpt_neox",
    "falcon_mqa",
    "falcon_groups",
    "starcoder2",
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
    "opt_post_norm",
    "lfm2",
    "qwen3_next",
    "qwen3_5_text",
    "kimi_linear",
    "granitemoehybrid",
    "mamba2",
    "nemotron_h",
)


@jax.jit
def fill(params: Params, index: jax.Array, adapter: list) -> Params:
    matrices = get_matrices(params)
    return with_matrices(params, dict(zip(matrices, fill_slot(list(matrices.values()), index, adapter), strict=True)))


@functools.partial(jax.jit, static_argnames=("model", "layer_mode", "room"))
def run(
    model: Model, params: Params, ids_t: jax.Array, slot: jax.Array, layer_mode: LayerMode, room: AdapterRoom
) -> jax.Array:
    positions_t = jnp.arange(len(ids_t), dtype=jnp.int32)
    slots_t = jnp.full(len(ids_t), slot, jnp.int32)
    tokens = TokenBatch(ids_t, positions_t, jnp.full(len(ids_t), len(ids_t)), adapters_t=slots_t)
    hidden_te = room.add_slots(model.run(params, tokens, dense.attend, (), layer_mode)[0], slots_t)
    return model.logits(room.bind(params, hidden_te, model.config), room.without_slots(hidden_te))


def logits_of(
    model: Model,
    params: Params,
    prompt: list[int],
    slot: int,
    layer_mode: LayerMode = "loop",
    room: AdapterRoom = SLOTS,
) -> np.ndarray:
    """One program for every slot, as a server has it."""
    return np.asarray(run(model, params, jnp.asarray(prompt, jnp.int32), jnp.int32(slot), layer_mode, room))


def check(name: str, tmp_path: Path, how: str, *forms: dict[str, object]) -> None:
    case = tiny_case(name)
    layer_mode: LayerMode = "scan" if how == "scan" else "loop"
    model = Model(from_hf(case.config), FLOAT32)
    mesh = build_mesh(jax.devices()[:1])
    params = load_params(model, write_checkpoint(case, tmp_path / "base"), layer_mode)
    base = dense.logits(model, params, jnp.asarray(case.prompt(), jnp.int32), case.prompt_len, layer_mode)
    if how == "packed":
        params = pack_params(params, model.config, matmul.loaded().packer(replicated(mesh)))
    params = (WITH_VECTORS if forms else SLOTS).add_to(params, model, layer_mode, mesh)
    read = AdapterReader(model, layer_mode, 1, SLOTS.max_rank, has_vectors=bool(forms), checkpoint=tmp_path / "base")
    adapters = {
        2: TinyAdapter(case, "all", settings=forms[0] if forms else None),
        3: TinyAdapter(case, "some", 5, 2.0, r"\.[1-9]\..*(q_|qkv|up|fc|out|o_|query)"),
    }
    if len(forms) > 1:
        adapters[1] = TinyAdapter(case, "other", settings=forms[1])
    for slot, adapter in adapters.items():
        read_adapter = read(adapter.write(tmp_path / adapter.name))
        params = fill(params, jnp.int32(slot - 1), get_arguments(read_adapter, params))
    np.testing.assert_allclose(logits_of(model, params, case.prompt(), 0, layer_mode), base, rtol=0, atol=1e-4)
    for slot, adapter in adapters.items():
        merged = load_params(model, adapter.write_merged(tmp_path / f"{adapter.name}-merged"), layer_mode)
        want = dense.logits(model, merged, jnp.asarray(case.prompt(), jnp.int32), case.prompt_len, layer_mode)
        assert np.abs(want - base).max() > 0.05, "it does something"
        got = logits_of(model, params, case.prompt(), slot, layer_mode)
        # The delta rule enlarges what norms are rounded by.
        is_rounded = bool(forms) and name == "qwen3_5_text"
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 if is_rounded else 1e-4)


@pytest.mark.parametrize(("name", "how"), [("llama_gqa_bias", "packed"), ("phi3_short", "scan"), ("gpt2", "xla")])
@pytest.mark.thinned(3)
def test_logits_are_those_of_the_merged_checkpoint(name: str, how: str, tmp_path: Path) -> None:
    check(name, tmp_path, how)


@pytest.mark.parametrize(
    ("name", "how", "forms"),
    [
        pytest.param("llama_gqa_bias", "packed", (DORA, BIASES), marks=pytest.mark.long),
        pytest.param("llama_gqa_bias", "xla", (DORA, BIASES), marks=pytest.mark.long),
        pytest.param("llama_gqa_bias", "scan", (DORA, BIASES), marks=pytest.mark.long),
        pytest.param("phi3_short", "packed", ({"use_dora": True},), marks=pytest.mark.long),
        pytest.param("gpt2", "packed", (DORA, BIASES), marks=pytest.mark.long),
        pytest.param("falcon_groups", "packed", ({"use_dora": True},), marks=pytest.mark.long),
        pytest.param("deepseek_v3", "scan", ({"use_dora": True},), marks=pytest.mark.long),
        pytest.param("qwen3_5_text", "scan", ({"use_dora": True},), marks=pytest.mark.long),
    ],
)
def test_dora_and_biases_run_next_to_plain_adapters(
    name: str, how: str, forms: tuple[dict[str, object], ...], tmp_path: Path
) -> None:
    check(name, tmp_path, how, *forms)


def check_output(name: str, tmp_path: Path, how: str) -> None:
    """Compare with merged checkpoints, whose output matrix is another."""
    case, room = tiny_case(name), AdapterRoom(2, 5, has_vectors=True, has_output=True)
    model, mesh = Model(from_hf(case.config), FLOAT32), build_mesh(jax.devices()[:1])
    untied = Model(from_hf({**case.config, "tie_word_embeddings": False}), FLOAT32)
    params = load_params(model, write_checkpoint(case, tmp_path / "base"), "loop")
    if how == "packed":
        params = pack_params(params, model.config, matmul.loaded().packer(replicated(mesh)))
    params = room.add_to(params, model, "loop", mesh)
    read = AdapterReader(model, "loop", 1, 5, has_vectors=True, has_output=True, checkpoint=tmp_path / "base")
    adapters = (
        TinyAdapter(case, "output", 5, 2.0, "lm_head|down", has_output=True),
        TinyAdapter(case, "dora", 4, 6.0, "lm_head|q_proj", {"use_dora": True}, has_output=True),
    )
    for slot, adapter in enumerate(adapters):
        read_adapter = read(adapter.write(tmp_path / adapter.name))
        params = fill(params, jnp.int32(slot), get_arguments(read_adapter, params))
    for slot, adapter in enumerate(adapters, 1):
        merged = load_params(untied, adapter.write_merged(tmp_path / f"{adapter.name}-merged"), "loop")
        want = dense.logits(untied, merged, jnp.asarray(case.prompt(), jnp.int32), case.prompt_len)
        got = logits_of(model, params, case.prompt(), slot, room=room)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("how", ["packed", "xla"])
@pytest.mark.parametrize("name", ["llama_gqa_bias", "llama3_tied", "gemma2"])
def test_output_matrices_take_adapters(name: str, how: str, tmp_path: Path) -> None:
    check_output(name, tmp_path, how)


# Every family with packed matrices, and one of each kind of layer scanned; the others are deep.
SCANNED = {"llama_gqa_bias", "qwen2_moe", "deepseek_v3", "gpt2"}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=pytest.mark.long if is_long else pytest.mark.deep)
        for name in CASES
        for how, is_long in (("packed", True), ("scan", name in SCANNED), ("xla", False))
    ],
)
def test_every_family_takes_adapters(name: str, how: str, tmp_path: Path) -> None:
    check(name, tmp_path, how)
