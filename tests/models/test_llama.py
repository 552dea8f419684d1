"""The model as a pure function: layer modes, dtypes, vmap and gradients, one trace a layer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import DTypeLike

from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models import rope
from jpaged.models.decoder import DecoderConfig
from jpaged.models.hf_config import from_hf
from jpaged.models.layer_kinds import LayerKind, get_stacks
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.rope import cos_sin
from jpaged.models.rope_config import RopeConfig
from jpaged.models.stack import LayerMode, run_layers
from jpaged.models.tokens import HeadsKernel, TokenBatch
from tests.models import dense
from tests.models.tiny import TinyCase, tiny_case, tiny_cases, write_checkpoint

MODES: tuple[LayerMode, ...] = ("loop", "scan")
TOKENS = np.random.default_rng(0).integers(0, 131, 12).astype(np.int32)


def model_of(case: TinyCase, dtype: DTypeLike = jnp.float32) -> Model:
    return Model(from_hf(case.config), np.dtype(dtype))


def params_of(case: TinyCase, folder: Path, layer_mode: LayerMode = "loop") -> Params:
    return load_params(model_of(case), write_checkpoint(case, folder), layer_mode)


def rope_of(model: Model, positions: np.ndarray, rope_lens: np.ndarray) -> tuple[jax.Array, jax.Array]:
    assert isinstance(model.config, DecoderConfig)
    return cos_sin(model.config.ropes[0], model.config.head_dim, jnp.asarray(positions), jnp.asarray(rope_lens))


@pytest.mark.parametrize(
    "name", ["llama_gqa_bias", "qwen3_tied", "mistral_yarn", "llama_dynamic_long", "opt", "opt_post_norm"]
)
@pytest.mark.thinned(3)
def test_scan_and_loop_are_the_same_function(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    left = dense.logits(model_of(case), params_of(case, tmp_path, "loop"), TOKENS, 12, layer_mode="loop")
    right = dense.logits(model_of(case), params_of(case, tmp_path, "scan"), TOKENS, 12, layer_mode="scan")
    np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_pairs_that_are_not_rotated_stay_as_they_are() -> None:
    rope = RopeConfig("yarn", fraction=0.5, factor=4.0, original_max_position_embeddings=64, attention_factor=1.5)
    cos_td, sin_td = map(np.asarray, cos_sin(rope, 16, jnp.arange(5), jnp.arange(1, 6)))
    assert cos_td.shape == sin_td.shape == (5, 8)
    assert (cos_td[:, 4:] == 1).all() and (sin_td[:, 4:] == 0).all()
    np.testing.assert_allclose(cos_td[:, :4] ** 2 + sin_td[:, :4] ** 2, 1.5**2, rtol=1e-5)
    assert (sin_td[1, :4] > 0).all()


@pytest.mark.long
def test_random_parameters_are_the_same_numbers_in_both_layer_modes() -> None:
    model = model_of(tiny_case("qwen3"))
    loop, scan = (model.init_params(jax.random.key(1), mode) for mode in MODES)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop["layers"])
    jax.tree.map(np.testing.assert_array_equal, {**loop, "layers": {"0": stacked}}, scan)
    assert bool(jnp.all(loop["norm"]["scale"] == 1))
    assert float(jnp.std(loop["lm_head"]["embedding"])) == pytest.approx(0.02, rel=0.05)
    assert not np.array_equal(*(loop["layers"][index]["mlp"]["down"]["kernel"] for index in (0, 1)))


@pytest.mark.long
def test_the_carry_passes_every_layer_in_order_with_its_index() -> None:
    """In either mode, whatever repeats; a layer keeps what it keeps where its place says."""

    def layer(params, x, carry, place):
        assert place.index.dtype == jnp.int32
        return x + params * place.attention.scale, carry.at[place.index].set(x[0])

    run = jax.jit(run_layers, static_argnums=(0, 4, 5), static_argnames=("mode", "watched"))
    watched = (1, 5, 3, 0, 3)
    for scales in ((1.0,) * 5, (1.0, 2.0, 1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 2.0, 3.0), (1.0, 2.0, 3.0, 1.0, 2.0)):
        params, kinds = 10.0 ** np.arange(5), tuple(LayerKind(AttentionKind(scale)) for scale in scales)
        sums = [0.0, *np.cumsum(params * np.array(scales)).tolist()]
        stacked = {name: jnp.array(params[np.array(layers)]) for name, layers in get_stacks(kinds).items()}
        places = tuple((0, index) for index in range(5))
        for mode, layer_params in (("loop", list(params)), ("scan", stacked)):
            begin = layer, layer_params, jnp.zeros(2), jnp.zeros(5), kinds, places
            x, carry, seen = run(*begin, mode=mode, watched=watched)
            assert [*carry.tolist(), x[0]] == sums
            assert [one.tolist() for one in seen] == [[sums[number]] * 2 for number in watched]
            assert run(*begin, mode=mode)[2] == []


@pytest.mark.long
def test_states_measured_where_they_arise_are_normalised_alike(tmp_path: Path) -> None:
    """A kernel that turns heads has states measured ahead of the norms that ask; here one that does as XLA would."""
    case = tiny_case("llama_mha")

    def turn(qkv_tkrd: jax.Array, angles: Any, norms: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        assert norms is None
        q, k, v = jnp.split(qkv_tkrd, (qkv_tkrd.shape[2] - 2, qkv_tkrd.shape[2] - 1), axis=2)
        q_thd = q.reshape(len(q), -1, q.shape[3])
        return rope.apply(q_thd, *angles), rope.apply(k[:, :, 0], *angles), v[:, :, 0]

    def hidden(heads: HeadsKernel | None, mode: LayerMode) -> jax.Array:
        positions = jnp.arange(len(TOKENS))
        tokens = TokenBatch(jnp.asarray(TOKENS), positions, positions + 1, heads=heads)
        params = params_of(case, tmp_path, mode)
        return jax.jit(lambda: model_of(case).run(params, tokens, dense.attend, (), mode)[0])()

    kernel = HeadsKernel(lambda cos_td, sin_td: (cos_td, sin_td), turn)
    for mode in MODES:
        np.testing.assert_allclose(hidden(kernel, mode), hidden(None, "loop"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama_gqa_bias", "llama_mha"))]
)
def test_states_in_column_parts_are_those_of_whole_states(name: str, tmp_path: Path) -> None:
    """Each part is summed by itself, and a layer projects for the next one; the inputs of layers are found, too.

    Chunks of the rows change no result.
    """
    case, positions = tiny_case(name), jnp.arange(len(TOKENS))
    model, params, watched = model_of(case), params_of(case, tmp_path, "scan"), (2, 0, 3)
    assert model.takes_column_parts

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(num_column_parts: int, num_row_chunks: int = 1) -> tuple[jax.Array, list[jax.Array]]:
        sizes: dict[str, Any] = {"num_column_parts": num_column_parts, "num_row_chunks": num_row_chunks}
        tokens = TokenBatch(jnp.asarray(TOKENS), positions, positions + 1, **sizes)
        hidden_te, _, seen = model.run_watched(params, tokens, dense.attend, (), "scan", watched)
        return hidden_te, seen

    whole = run(1)
    for in_parts in (run(4), run(2, 2)):
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5), in_parts, whole)
        np.testing.assert_array_equal(in_parts[0], in_parts[1][2])


@pytest.mark.parametrize("name", ["opt", "gemma2", "deepseek_v3", "mixtral", "gpt_oss"])
def test_models_that_have_no_column_parts_are_known(name: str) -> None:
    found = [case for case in tiny_cases() if case.name.startswith(name)]
    assert found
    assert not any(model_of(case).takes_column_parts for case in found)


def test_a_loop_traces_and_lowers_its_layer_once() -> None:
    model = model_of(tiny_case("llama_mha"))
    num_traces = 0

    def attend(q_thd, k_tkd, v_tkd, carry, place, sinks_h=None):
        nonlocal num_traces
        num_traces += 1
        return dense.attend(q_thd, k_tkd, v_tkd, carry, place)

    def run(params):
        positions = jnp.arange(12)
        return model.run(params, TokenBatch(jnp.asarray(TOKENS), positions, positions + 1), attend, (), "loop")[0]

    text = jax.jit(run).lower(model.abstract_params("loop")).as_text()
    assert num_traces == 1
    assert text.count("call @layer(") == 3
    assert text.count("func.func private @layer(") == 1


@pytest.mark.long
def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    case = tiny_case("qwen3")
    params = params_of(case, tmp_path)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = dense.logits(model_of(case, jnp.bfloat16), rounded, TOKENS, 12)
    expected = dense.logits(model_of(case), params, TOKENS, 12)
    assert logits.dtype == jnp.float32
    error = jnp.sqrt(jnp.mean(jnp.square(logits - expected)))
    assert float(error) < 0.03 * float(jnp.std(expected))


@pytest.mark.parametrize("layer_mode", MODES)
@pytest.mark.thinned(2)
@pytest.mark.long
def test_a_batch_can_be_mapped_and_differentiated(layer_mode: LayerMode, tmp_path: Path) -> None:
    case = tiny_case("qwen2_tied_yarn")
    model, params = model_of(case), params_of(case, tmp_path, layer_mode)
    batch = np.stack([TOKENS, TOKENS[::-1]])

    @jax.jit
    @jax.value_and_grad
    def loss(params: Params) -> jax.Array:
        logits = jax.vmap(lambda tokens: dense.logits(model, params, tokens, 12, layer_mode=layer_mode))(batch)
        return jnp.mean(jnp.square(logits))

    before, gradient = loss(params)
    assert all(bool(jnp.any(leaf != 0)) and bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))
    after, _ = loss(jax.tree.map(lambda leaf, slope: leaf - 1e-3 * slope, params, gradient))
    assert float(after) < float(before)


@pytest.mark.long
def test_dynamic_rope_does_not_depend_on_how_a_prompt_is_cut() -> None:
    model = model_of(tiny_case("llama_dynamic_long"))
    positions = np.arange(100, dtype=np.int32)
    whole = rope_of(model, positions, np.maximum(positions + 1, 80))
    for start, stop in ((0, 7), (7, 80), (80, 81), (81, 100)):
        chunk = positions[start:stop]
        for part, expected in zip(rope_of(model, chunk, np.maximum(chunk + 1, 80)), whole, strict=True):
            np.testing.assert_array_equal(part, expected[start:stop])
    # Below the length of pretraining nothing is stretched.
    plain = rope_of(model_of(tiny_case("llama_mha")), positions, positions + 1)
    np.testing.assert_array_equal(rope_of(model, positions[:64], positions[:64] + 1)[0], plain[0][:64])
    assert not np.allclose(whole[0][64:], plain[0][64:], atol=1e-3)


def test_a_model_is_a_static_value() -> None:
    case = tiny_case("qwen3")
    assert model_of(case) == model_of(case)
    assert hash(model_of(case)) == hash(model_of(case))
    assert model_of(case) != model_of(case, jnp.bfloat16)
    assert jax.tree.leaves(model_of(case).config) == [model_of(case).config]


def test_other_types_than_float32_and_bfloat16_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dtype: is int8; it must be one of float32, bfloat16, float16"):
        model_of(tiny_case("llama_mha"), jnp.int8)


def test_stages_one_after_the_other_are_the_whole_model(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    model, params = model_of(case), params_of(case, tmp_path, "scan")
    tokens = TokenBatch(jnp.asarray(TOKENS), jnp.arange(12), jnp.full((12,), 12))
    whole = model.run(params, tokens, dense.attend, (), "scan")[0]
    num_layers = model.config.num_layers
    places = [(0, index) for index in range(num_layers // 2)]
    x, states = model.begin(params, tokens), whole
    for first in range(0, num_layers, len(places)):
        layers = jax.tree.map(lambda leaf, at=first: leaf[at : at + len(places)], params["layers"])
        x, _, states = model.run_stage(
            {**params, "layers": layers}, tokens, dense.attend, (), places, (jnp.bool(first == 0), x)
        )
    np.testing.assert_allclose(states, whole, rtol=1e-5, atol=1e-5)
