"""Reading what PEFT writes: ranks and scales of each module, and everything that is refused, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.checkpoints.adapters import AdapterReader
from jpaged.checkpoints.hub import read_config, read_scheme
from jpaged.checkpoints.quantized.scheme import read_matrix
from jpaged.checkpoints.weights import open_tensors
from jpaged.errors import InvalidArgument, JpagedError, NotFound, Unsupported
from jpaged.models.hf_config import from_hf
from jpaged.models.lora import Patterns
from jpaged.models.model import Model
from tests.checkpoints.quantized.layouts import LAYOUTS, write_quantized
from tests.checkpoints.quantized.test_layouts import case_of
from tests.models.adapters import ExpertAdapter, TinyAdapter
from tests.models.tiny import tensors as base_tensors
from tests.models.tiny import tiny_case, write_checkpoint

CASE = tiny_case("llama_gqa_bias")
MODEL = Model(from_hf(CASE.config), np.dtype(np.float32))
READ = AdapterReader(MODEL, "loop", 1, 8)
DOWN = ("layers", 1, "mlp", "down", "kernel")
MODULE = "model.layers.1.mlp.down_proj"
NAME = f"base_model.model.{MODULE}.lora_{{}}.weight"
ONES = np.ones(64, np.float32)


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("settings", "rank", "scale"),
    [
        ({}, 4, 6 / 4),
        ({"use_rslora": True}, 4, 6 / 2),
        ({"r": 2, "rank_pattern": {"down_proj": 4}}, 4, 6 / 4),
        ({"alpha_pattern": {r"layers\.1\.mlp\..*": 3.0, "down_proj": 100}}, 4, 3 / 4),
        ({"alpha_pattern": {"own_proj": 100}}, 4, 6 / 4),
        ({"alpha_pattern": {r".*\.layers\.[0-3]\..*(up|down)_proj": 0, "down_proj": 100}}, 4, 0),
        ({"alpha_pattern": {r"^model\.layers.\d+.mlp.(up|down)_proj": -2}}, 4, -2 / 4),
        ({"lora_alpha": -1, "init_lora_weights": "mica"}, 4, -1 / 4),
    ],
)
def test_what_a_module_is_scaled_by(settings: dict[str, Any], rank: int, scale: float, tmp_path: Path) -> None:
    adapter = TinyAdapter(CASE, "scaled", modules="down_proj")
    a, b = READ(adapter.write(tmp_path, **settings)).matrices[DOWN]
    tensors = adapter.tensors()
    np.testing.assert_array_equal(a[:rank], tensors[NAME.format("A")])
    np.testing.assert_allclose(b[0][:rank], tensors[NAME.format("B")].T * scale, rtol=1e-6)
    assert not a[rank:].any()
    assert not b[0][rank:].any()


@pytest.fixture(scope="module")
def with_vectors(tmp_path_factory: pytest.TempPathFactory) -> AdapterReader:
    """A reader for slots with room for DoRA and biases."""
    base = write_checkpoint(CASE, tmp_path_factory.mktemp("base"))
    return replace(READ, has_vectors=True, checkpoint=base)


def test_dora_scales_each_output_by_its_magnitude_over_its_norm(with_vectors: AdapterReader, tmp_path: Path) -> None:
    adapter = TinyAdapter(CASE, "dora", modules="down_proj", settings={"use_dora": True, "use_rslora": True})
    read, own = with_vectors(adapter.write(tmp_path)), adapter.tensors()
    a, b = (own[NAME.format(which)].astype(np.float64) for which in "AB")
    weight = base_tensors(CASE)[f"{MODULE}.weight"].astype(np.float64)
    gains = own[f"base_model.model.{MODULE}.lora_magnitude_vector"] / np.linalg.norm(weight + 3 * b @ a, axis=1)
    np.testing.assert_allclose(read.matrices[DOWN][1][0][:4], (3 * gains[:, None] * b).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(read.vectors[DOWN][0], [gains - 1, np.zeros_like(gains)], rtol=1e-5, atol=1e-6)
    plain = with_vectors(TinyAdapter(CASE, "plain", modules="down_proj").write(tmp_path / "plain"))
    assert not any(part.any() for parts in plain.vectors.values() for part in parts)
    assert read.num_bytes == plain.num_bytes > READ(str(tmp_path / "plain")).num_bytes


def test_biases_are_shifts_from_those_of_the_model(with_vectors: AdapterReader, tmp_path: Path) -> None:
    settings = {"lora_bias": True, "bias": "all"}
    adapter = TinyAdapter(CASE, "biases", modules="down_proj", settings=settings)
    path, own = adapter.write(tmp_path), adapter.tensors()
    trained, added = (own[f"base_model.model.{MODULE}.{name}"] for name in ("base_layer.bias", "lora_B.bias"))
    want = trained - base_tensors(CASE)[f"{MODULE}.bias"] + added * np.float32(1.5)
    np.testing.assert_allclose(with_vectors(path).vectors[DOWN][0], [np.zeros_like(want), want], rtol=1e-5, atol=1e-6)
    with pytest.raises(Unsupported, match="saved embeddings need the model's weights, but load_format is dummy"):
        replace(with_vectors, checkpoint=None)(path)

    def add_others(tensors: dict[str, np.ndarray]) -> None:
        tensors["base_model.model.model.layers.1.mlp.up_proj.bias"] = np.full(88, 3, np.float32)

    change(tmp_path, add_others)
    up = with_vectors(path).vectors["layers", 1, "mlp", "gate_up", "kernel"]
    np.testing.assert_allclose(up[1][1], 3 - base_tensors(CASE)["model.layers.1.mlp.up_proj.bias"], rtol=1e-6)
    assert not up[0].any()


@pytest.mark.parametrize(
    ("settings", "edit", "message"),
    [
        (
            {"use_dora": True},
            lambda own: own.pop(f"base_model.model.{MODULE}.lora_magnitude_vector"),
            "has no lora_mag",
        ),
        ({}, lambda own: own.update({f"base_model.model.{MODULE}.lora_magnitude_vector": ONES}), "has a lora_magn"),
        (
            {"bias": "all"},
            lambda own: own.update({"base_model.model.model.norm.bias": ONES}),
            "model.norm: adapters are",
        ),
        (
            {"use_dora": True},
            lambda own: own.update({f"base_model.model.{MODULE}.lora_magnitude_vector": ONES[:48] * np.nan}),
            "lora_magnitude_vector times 1 has non-finite",
        ),
        ({"lora_bias": True}, lambda own: own.pop(f"base_model.model.{MODULE}.lora_B.bias"), "has no lora_B.bias, but"),
        (
            {},
            lambda own: own.update({f"base_model.model.{MODULE}.lora_B.bias": ONES}),
            "a lora_B.bias, but lora_bias is F",
        ),
        ({"use_dora": True, "lora_bias": True}, dict.copy, "lora_bias: is True; it must be False if use_dora is True"),
        (
            {"use_dora": True},
            lambda own: own.update({NAME.format(w): own[NAME.format(w)] * 1e30 for w in "AB"}),
            "or not",
        ),
    ],
    ids=[
        "no magnitude",
        "magnitude without DoRA",
        "norm",
        "not finite",
        "no bias",
        "bias without lora_bias",
        "DoRA with lora_bias",
        "large",
    ],
)
def test_vectors_that_cannot_be_are_refused(
    with_vectors: AdapterReader,
    settings: dict[str, object],
    edit: Callable[[dict[str, np.ndarray]], Any],
    message: str,
    tmp_path: Path,
) -> None:
    path = TinyAdapter(CASE, "bad", modules="down_proj", settings=settings).write(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(JpagedError, match=message):
        with_vectors(path)


def test_a_bias_far_from_the_models_is_refused(with_vectors: AdapterReader, tmp_path: Path) -> None:
    path = TinyAdapter(CASE, "far", modules="down_proj", settings={"bias": "all", "lora_bias": True}).write(tmp_path)
    store(tmp_path, f"{MODULE}.base_layer.bias", np.full(48, 3e38, np.float32))
    store(tmp_path, f"{MODULE}.lora_B.bias", np.full(48, 2e38, np.float32))
    with pytest.raises(InvalidArgument, match=f"{MODULE}: its biases less those of the model are not finite"):
        with_vectors(path)


def store(folder: Path, key: str, array: np.ndarray) -> None:
    change(folder, lambda own: own.update({f"base_model.model.{key}": array}))


@pytest.mark.parametrize("name", ["llama_gqa_bias", "llama3_tied"])
def test_the_output_matrix_has_an_adapter_if_there_is_room(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    adapter, path = TinyAdapter(case, "output", modules="lm_head", has_output=True), ("lm_head", "embedding")
    read = AdapterReader(Model(from_hf(case.config), np.dtype(np.float32)), "loop", 2, 8, has_output=True)
    a, (b,) = read(adapter.write(tmp_path)).matrices[path if name == "llama_gqa_bias" else ("embed", "embedding")]
    own = adapter.tensors()
    want = own["base_model.model.lm_head.lora_B.weight"].T * np.float32(1.5)
    np.testing.assert_array_equal(a[:4], own["base_model.model.lm_head.lora_A.weight"])
    np.testing.assert_allclose(b[:4, : want.shape[1]], want, rtol=1e-6)
    assert b.shape[1] % 2 == 0
    with pytest.raises(Unsupported, match=r"lm_head: .* start the server with --enable-lm-head-lora, or merge"):
        replace(read, has_output=False)(str(tmp_path))


@pytest.mark.parametrize("name", ["llama_gqa_bias", "llama3_tied"])
def test_the_embedding_has_an_adapter_if_there_is_room(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    adapter = TinyAdapter(case, "input", modules="embed_tokens", has_input=True)
    read = AdapterReader(Model(from_hf(case.config), np.dtype(np.float32)), "loop", 2, 8, has_input=True)
    a, (b,) = read(adapter.write(tmp_path)).matrices["embed", "adapters"]
    own = adapter.tensors()
    want = own["base_model.model.model.embed_tokens.lora_embedding_A"]
    np.testing.assert_array_equal(a[:4, : want.shape[1]], want)
    assert not a[:, want.shape[1] :].any()
    assert a.shape[1] % 2 == 0, "the embedding is padded for two devices"
    want = own["base_model.model.model.embed_tokens.lora_embedding_B"].T * np.float32(1.5)
    np.testing.assert_allclose(b[:4], want, rtol=1e-6)
    with pytest.raises(Unsupported, match=r"embed_tokens: .* start the server with --enable-embedding-lora, or merge"):
        replace(read, has_input=False)(str(tmp_path))
    change(tmp_path, lambda own: own.update({"base_model.model.model.embed_tokens.lora_magnitude_vector": ONES}))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(Unsupported, match="embed_tokens: DoRA and biases of embeddings"):
        replace(read, has_vectors=True)(str(tmp_path))


@pytest.mark.parametrize("is_copy", [False, True], ids=["rows", "copy"])
@pytest.mark.parametrize("name", ["llama_gqa_bias", "llama3_tied"])
def test_replaced_rows_are_an_adapter_of_their_number(name: str, is_copy: bool, tmp_path: Path) -> None:
    """A tied output matrix follows rows, and no copy that PEFT saved of one module."""
    case, ids = tiny_case(name), (7, 2, 40)
    model, base = Model(from_hf(case.config), np.dtype(np.float32)), write_checkpoint(case, tmp_path / "base")
    read = AdapterReader(model, "loop", 1, 3, has_output=True, has_input=True, checkpoint=base)
    adapter = TinyAdapter(case, "rows", 3, modules="down_proj", tokens=ids)
    path, new = adapter.write(tmp_path / "rows"), adapter.tensors()[f"{EMBED}.token_adapter.trainable_tokens_delta"]
    embedding = base_tensors(case)["model.embed_tokens.weight"]
    if is_copy:
        path = replace(adapter, tokens=()).write(tmp_path / "rows", modules_to_save=["embed_tokens"])
        changed = embedding.copy()
        changed[list(ids)] = new
        store(tmp_path / "rows", "model.embed_tokens.weight", changed)
    matrices = read(path).matrices
    a, (b,) = matrices["embed", "adapters"]
    want = np.zeros_like(embedding)
    want[list(ids)] = new - embedding[list(ids)]
    np.testing.assert_allclose(a.T @ b, want, atol=1e-6)
    output = ("embed" if name == "llama3_tied" else "lm_head"), "embedding"
    a, (b,) = matrices[output]
    want = want if name == "llama3_tied" and not is_copy else np.zeros_like(want)
    np.testing.assert_allclose((a.T @ b).T, want, atol=1e-6)
    with pytest.raises(Unsupported, match=r"replaces rows of .* start the server with --enable-embedding-lora"):
        replace(read, has_input=False)(path)
    adapter = replace(adapter, rank=2)
    adapter.write(tmp_path / "rows", trainable_token_indices=None if is_copy else list(ids), modules_to_save=None)
    if is_copy:
        store(tmp_path / "rows", "model.embed_tokens.weight", changed)
    with pytest.raises(
        JpagedError, match="in more rows than max_lora_rank" if is_copy else "3 rows; max_lora_rank is 2"
    ):
        replace(read, max_rank=2)(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["score"]}, "modules_to_save has 'score'; copies are supported only of embed_tokens"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head', but adapter_model.safetensors has no copy"),
        ({"trainable_token_indices": [1, 2]}, r"delta has shape \[3, 48\]; the model .* require \[2, 48\]"),
        ({"trainable_token_indices": [1, 2, 999]}, "replaces the row of token 999; the model has"),
        ({"trainable_token_indices": [1, 2, 2]}, "trainable_token_indices: has an id twice"),
        ({"trainable_token_indices": {"q_proj": [1]}}, "has 'q_proj'; it must have only embed_tokens and lm_head"),
        ({"trainable_token_indices": "all"}, "is 'all'; it must be a token id or a list"),
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            "mlp.experts.down_proj': adapters of experts and routers are not",
        ),
    ],
)
def test_replaced_rows_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str, with_vectors: AdapterReader, tmp_path: Path
) -> None:
    path = TinyAdapter(CASE, "bad", modules="down_proj", tokens=(1, 2, 3)).write(tmp_path, **settings)
    with pytest.raises(JpagedError, match=message):
        replace(with_vectors, has_vectors=False, has_input=True, has_output=True)(path)


EXPERTS = ExpertAdapter(tiny_case("mixtral"), "experts")
GATE = ("layers", 0, "mlp", "experts", "gate", "kernel")


@pytest.fixture(scope="module")
def with_experts() -> AdapterReader:
    """A reader for slots of experts."""
    model = Model(from_hf(EXPERTS.case.config), np.dtype(np.float32))
    return AdapterReader(model, "loop", 1, 4, has_vectors=True, has_experts=True)


def test_adapters_of_experts_are_the_same_from_every_release(with_experts: AdapterReader, tmp_path: Path) -> None:
    late = with_experts(EXPERTS.write(tmp_path / "late"))
    early = with_experts(replace(EXPERTS, is_early=True).write(tmp_path / "early"))
    assert late.matrices.keys() == early.matrices.keys()
    num_experts, width = 4, 4 * 4
    for path, (a, (b, *_)) in late.matrices.items():
        others = early.matrices[path]
        if "experts" not in path:
            assert a.any() == ("router" in path)
            continue
        assert len(a) == len(b) == width
        products, of_early = (
            x.reshape(num_experts, 4, -1).swapaxes(1, 2) @ y.reshape(num_experts, 4, -1)
            for x, y in ((a, b), (others[0], others[1][0]))
        )
        assert products.any()
        np.testing.assert_allclose(products, of_early, rtol=1e-5, atol=1e-6)


def test_a_square_matrix_of_experts_depends_on_the_release(tmp_path: Path) -> None:
    """Its A and B have the same sizes, however PEFT took it."""
    config = replace(from_hf(EXPERTS.case.config))
    width = config.mixture.width if config.mixture is not None else 0
    config = replace(config, hidden_size=width)
    read = AdapterReader(Model(config, np.dtype(np.float32)), "loop", 1, 4, has_experts=True)
    rng, found = np.random.default_rng(3), {}
    name, settings = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight", dict(EXPERTS.config())
    first, second = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((4 * 3, width), (width, 3 * 4)))
    save_file({name.format("A"): first, name.format("B"): second}, tmp_path / "adapter_model.safetensors")
    for version in ("0.18.1", "0.21.0"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "peft_version": version}))
        found[version] = read(str(tmp_path)).matrices[(*GATE[:4], "down", "kernel")][0].reshape(4, 4, width)
    np.testing.assert_array_equal(found["0.21.0"][:, :3], first.reshape(4, 3, width))
    exchanged = second.reshape(width, 3, 4).transpose(2, 1, 0)
    np.testing.assert_allclose(found["0.18.1"][:, :3], exchanged, rtol=1e-6)


def test_linear_modules_of_single_experts_have_adapters(with_experts: AdapterReader, tmp_path: Path) -> None:
    plain = TinyAdapter(EXPERTS.case, "one", modules="q_proj").write(tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.lora_{}.weight"
    num_experts, width, inner = with_experts.model.abstract_params("loop")["layers"][0]["mlp"]["experts"]["gate"][
        "kernel"
    ].shape
    rng = np.random.default_rng(5)
    a, b = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((4, width), (inner, 4)))
    store(tmp_path, name.format("A"), a)
    store(tmp_path, name.format("B"), b)
    found, (other,) = with_experts(plain).matrices[GATE]
    np.testing.assert_array_equal(found.reshape(num_experts, 4, width)[2], a)
    np.testing.assert_allclose(other.reshape(num_experts, 4, inner)[2], b.T * np.float32(1.5), rtol=1e-6)
    assert np.count_nonzero(found) == a.size
    with pytest.raises(Unsupported, match=r"w1: adapters of experts and routers .* with --enable-expert-lora"):
        replace(with_experts, has_experts=False)(plain)


def add_twice(own: dict[str, np.ndarray]) -> None:
    for which in "AB":
        own[f"{LAYER}experts.base_layer.base_layer.lora_{which}.weight"] = (
            own[f"{LAYER}experts.lora_{which}.weight"] + 1
        )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda own: own.update({f"{LAYER}experts.base_layer.lora_A.weight": ONES[None]}), "are of no matrix of the"),
        (
            add_twice,
            "two adapters of experts' down",
        ),
        (lambda own: own.pop(f"{LAYER}experts.lora_A.weight"), "experts has no lora_A.weight"),
        (lambda own: own.update({f"{LAYER}gate.base_layer.bias": ONES[:4]}), "DoRA and biases of embeddings, experts"),
    ],
    ids=["sizes", "twice", "half", "bias of a router"],
)
def test_adapters_of_experts_that_cannot_be_are_refused(
    edit: Callable[[dict[str, np.ndarray]], Any], message: str, with_experts: AdapterReader, tmp_path: Path
) -> None:
    path = EXPERTS.write(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(JpagedError, match=message):
        with_experts(path)


LAYER = "base_model.model.model.layers.0.mlp."
EMBED = "base_model.model.model.embed_tokens"
COPIES = {
    "lm_head.weight": "lm_head.weight",
    "model.embed_tokens.base_layer.weight": "model.embed_tokens.weight",
}


def test_copies_of_embeddings_are_accepted_if_they_are_the_models(with_vectors: AdapterReader, tmp_path: Path) -> None:
    path, base = TinyAdapter(CASE, "resized", modules="down_proj").write(tmp_path), base_tensors(CASE)
    want = with_vectors(path)
    change(tmp_path, lambda own: own.update({f"base_model.model.{key}": base[name] for key, name in COPIES.items()}))
    read = replace(with_vectors, has_vectors=False)
    assert read(path).digest == replace(want, vectors={}).digest
    for key, name in COPIES.items():
        store(tmp_path, key, base[name] + np.float32(1e-3))
        with pytest.raises(
            Unsupported, match=rf"{key} replaces (lm_head|embed_tokens) .* with other numbers in more rows .* merge"
        ):
            read(path)
        store(tmp_path, key, base[name][1:])
        with pytest.raises(Unsupported, match=rf"{key} replaces .*, whose shape is .* instead of .* merge"):
            read(path)
        store(tmp_path, key, base[name])


def test_tensors_of_dora_are_refused_without_room_for_them(tmp_path: Path) -> None:
    path = TinyAdapter(CASE, "bad", modules="down_proj", settings={"use_dora": True}).write(tmp_path, use_dora=False)
    with pytest.raises(Unsupported, match=r"magnitude_vector: DoRA and biases .* with --enable-dora"):
        READ(path)


def test_modules_without_an_adapter_are_zeros(tmp_path: Path) -> None:
    read = READ(TinyAdapter(CASE, "few", modules=r"layers\.1\.mlp\.down_proj").write(tmp_path))
    assert [path for path, (a, b) in read.matrices.items() if a.any() or any(part.any() for part in b)] == [DOWN]
    assert read.num_bytes == sum(a.nbytes + sum(part.nbytes for part in b) for a, b in read.matrices.values())


@pytest.mark.parametrize("pattern", [r"^{}layers\.1\.mlp\.down_proj", "{}layers.1.mlp.down_proj"])
@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_the_class_that_was_trained_does_not_matter(prefix: str, pattern: str, tmp_path: Path) -> None:
    adapter = TinyAdapter(CASE, "named", modules="down_proj")
    want = READ(adapter.write(tmp_path, alpha_pattern={"down_proj": 3.0})).matrices[DOWN]
    adapter.write(tmp_path, alpha_pattern={pattern.format(prefix): 3.0})

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.", f"base_model.model.{prefix}")] = tensors.pop(name)

    change(tmp_path, rename)
    got = READ(str(tmp_path)).matrices[DOWN]
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1][0], want[1][0])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"use_dora": True}, Unsupported, "use_dora is True; DoRA is not supported"),
        ({"bias": "all"}, Unsupported, "bias is 'all'"),
        ({"peft_type": "IA3"}, Unsupported, "peft_type is 'IA3'; only LORA"),
        ({"init_lora_weights": "pissa"}, Unsupported, "init_lora_weights is 'pissa'; it changes the weights"),
        ({"new_trick": 3}, Unsupported, "unknown setting new_trick=3"),
        ({"r": 0}, InvalidArgument, "r: is 0; it must be an integer of at least 1"),
        ({"r": 9}, InvalidArgument, "down_proj has rank 9; max_lora_rank is 8"),
        ({"r": 3}, InvalidArgument, r"lora_A.weight has shape \[4, 88\]; model and rank require \[3, 88\]"),
        ({"lora_alpha": "much"}, InvalidArgument, "lora_alpha: is 'much'; it must be a finite number"),
        ({"lora_alpha": 1e300}, InvalidArgument, r"lora_B.weight times 2.5e\+299 .* non-finite numbers in float32"),
        ({"rank_pattern": {"(": 4}}, InvalidArgument, r"rank_pattern: '\(' is not a regular expression"),
        ({"alpha_pattern": {"(?i)down_proj": 3}}, InvalidArgument, r"'\(\?i\)down_proj' is not a regular expression"),
        ({"alpha_pattern": {"(" * 999 + ")" * 999: 3}}, InvalidArgument, "is not a regular expression"),
        (
            {"target_modules": ["down_proj", "k_proj"]},
            InvalidArgument,
            "target_modules has 'k_proj', but adapter_model",
        ),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    settings: dict[str, Any], error: type[JpagedError], message: str, tmp_path: Path
) -> None:
    path = TinyAdapter(CASE, "bad", modules="down_proj").write(tmp_path, **settings)
    with pytest.raises(error, match=message):
        READ(path)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(a+)+b", "repeats a group"),
        (r"(\w|_){1,99}x", "repeats a group"),
        (r"(?x: (\w|_) *x)", "has a special group"),
        (".*.*.*.*.*x", r"\d+ ways; the limit is \d+: use fewer"),
        (".?" * 40 + "x", r"\d+ ways; the limit is \d+: use fewer"),
        ("(.|.)" * 25 + "x", r"\d+ ways; the limit is \d+: use fewer"),
        (".?" * 20000, r"at least \d{8} ways; the limit is \d+: use fewer"),
    ],
)
def test_a_pattern_that_would_hold_up_the_server_is_refused(pattern: str, problem: str, tmp_path: Path) -> None:
    for key in ("rank_pattern", "alpha_pattern"):
        path = TinyAdapter(CASE, "slow", modules="down_proj").write(tmp_path, **{key: {"q_proj": 4, pattern: 4}})
        with pytest.raises(InvalidArgument, match=f"{key}: {re.escape(repr(pattern)[:200])}.* {problem}"):
            READ(path)


@pytest.mark.parametrize("letters", ["[)+*](a)", r"\)+", "[]|)*]*", r"x{2}\{3}"])
def test_letters_that_mean_themselves_are_no_choices(letters: str) -> None:
    Patterns.checked({letters: 1}, "rank_pattern")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["down_proj", "fc3", "query_key_value"]},
        {"target_modules": r".*\.(down|up)_proj"},
        {"target_modules": ["down_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["mlp.down_proj", "layers.1.self_attn.k_proj"], "layers_to_transform": 0},
        {"target_modules": "all-linear", "fan_in_fan_out": True},
        {"target_modules": ["down_proj", "k_proj"], "exclude_modules": ["k_proj"], "layers_to_transform": [0, 1]},
    ],
    ids=["for several models", "expression", "excluded", "layers", "all linear", "excluded and layers"],
)
def test_targets_without_tensors_that_need_not_be_there(settings: dict[str, Any], tmp_path: Path) -> None:
    assert READ(TinyAdapter(CASE, "whole", modules="down_proj").write(tmp_path, **settings)).matrices[DOWN][0].any()


def poison(tensors: dict[str, np.ndarray]) -> None:
    tensors[NAME.format("B")][3, 1] = np.inf


def add(*names: str) -> Callable[[dict[str, np.ndarray]], None]:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        for name in names:
            for which in "AB":
                tensors[name.format(which)] = np.zeros((4, 4), np.float32)

    return edit


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (
            lambda tensors: tensors.pop(NAME.format("A")),
            InvalidArgument,
            r"layers.1.mlp.down_proj has no lora_A.weight",
        ),
        (dict.clear, InvalidArgument, "adapter_model.safetensors has no tensors"),
        (poison, InvalidArgument, r"lora_B.weight times 1.5 has non-finite numbers in float32"),
        (
            add("base_model.model.lm_head.lora_{}.weight"),
            Unsupported,
            "lm_head: adapters of lm_head are not supported",
        ),
        (
            add("base_model.model.a.lora_{}.weight", "base_model.model.lm_head.lora_{}.weight"),
            Unsupported,
            ": lm_head: adapters of lm_head",
        ),
        (
            add(*(f"base_model.model.{module}.lora_{{}}.weight" for module in "abcdefg")),
            InvalidArgument,
            "a, b, c, d, e and 2 more: no such module",
        ),
        (
            add(f"base_model.model.{'model.' * 40}layers.1.mlp.up_proj.lora_{{}}.weight"),
            InvalidArgument,
            "limit is 200",
        ),
        (
            add("base_model.model.model.layers.7.mlp.down_proj.lora_{}.weight"),
            InvalidArgument,
            "no such module in Llama",
        ),
        (add("base_model.model.vision.layers.1.mlp.down_proj.lora_{}.weight"), InvalidArgument, "no such module"),
        (
            add("base_model.model.model.embed_tokens.lora_embedding_{}"),
            Unsupported,
            "embed_tokens: adapters of embeddings are not",
        ),
    ],
    ids=["half", "empty", "infinite", "lm_head", "one known", "many", "long", "layer", "vision", "embedding"],
)
def test_tensors_that_are_not_understood_are_refused(
    edit: Callable[[dict[str, np.ndarray]], None], error: type[JpagedError], message: str, tmp_path: Path
) -> None:
    path = TinyAdapter(CASE, "bad", modules="down_proj").write(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(error, match=message):
        READ(path)


@pytest.mark.parametrize(
    ("name", "module", "why"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.gate", "adapters of experts and routers are not supported"),
        ("mixtral", "model.layers.0.mlp.gate", "adapters of experts and routers are not supported"),
        ("mixtral", "model.layers.0.mlp.experts.0.w1", "adapters of experts and routers are not supported"),
        ("gpt_oss", "model.layers.0.mlp.experts", "adapters of experts and routers are not supported"),
        ("deepseek_v3", "model.layers.1.mlp.experts.base_layer", "adapters of experts and routers are not supported"),
        (
            "deepseek_v3",
            "model.layers.1.self_attn.kv_b_proj",
            "adapters are supported only for linear modules of layers",
        ),
        ("opt_post_norm", "model.decoder.project_in", "adapters are supported only for linear modules of layers"),
        (
            "gemma3",
            "model.vision_tower.layers.0.self_attn.k_proj",
            "the server does not load these modules of the model",
        ),
    ],
)
def test_modules_that_take_no_adapters_are_refused_by_name(name: str, module: str, why: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    path = TinyAdapter(case, "bad", modules="o_proj|out_proj").write(tmp_path)
    change(tmp_path, add(f"base_model.model.{module}.lora_{{}}.weight"))
    config = from_hf(case.config)
    if name == "gemma3":
        config = replace(config, architecture="Gemma3ForConditionalGeneration")
    with pytest.raises(Unsupported, match=f": {re.escape(module)}: {why}"):
        AdapterReader(Model(config, np.dtype(np.float32)), "loop", 1, 8)(path)


def test_folders_that_are_none_of_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"folder .* does not exist"):
        READ(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidArgument, match="lora: ~nosuchuser/x begins with an unknown user"):
        READ("~nosuchuser/x")
    with pytest.raises(InvalidArgument, match=r"has no adapter_config\.json"):
        READ(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps(TinyAdapter(CASE, "x").config()))
    with pytest.raises(InvalidArgument, match=r"has no adapter_model.safetensors"):
        READ(str(tmp_path))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(Unsupported, match="pickles are not supported: save the adapter with safe_serialization=True"):
        READ(str(tmp_path))


@pytest.mark.parametrize("name", ["gptq", "fp8_channel", "w8a8", "nvfp4"])
def test_dora_normalizes_by_the_decoded_weights_of_a_quantized_model(name: str, tmp_path: Path) -> None:
    layout = next(each for each in LAYOUTS if each.name == name)
    case, base = case_of(layout), tmp_path / "base"
    base.mkdir()
    write_quantized(case, layout, base)
    adapter = TinyAdapter(case, "dora", modules=r"layers\.0\.mlp\.down_proj", settings={"use_dora": True})
    model, scheme, own = Model(read_config(base), np.dtype(np.float32)), read_scheme(base), adapter.tensors()
    assert scheme is not None
    module, place = "model.layers.0.mlp.down_proj", ("layers", 0, "mlp", "down", "kernel")
    a, b = (own[f"base_model.model.{module}.lora_{which}.weight"].astype(np.float64) for which in "AB")
    with open_tensors(base) as files:
        weights = read_matrix(scheme, files, module, (len(b), a.shape[1])).weights()
    gains = own[f"base_model.model.{module}.lora_magnitude_vector"] / np.linalg.norm(weights + 1.5 * b @ a, axis=1)
    reader = AdapterReader(model, "loop", 1, 8, has_vectors=True, checkpoint=base)
    (vectors,) = reader(adapter.write(tmp_path / "adapter")).vectors[place]
    np.testing.assert_allclose(vectors, [gains - 1, np.zeros_like(gains)], rtol=1e-5, atol=1e-6)
