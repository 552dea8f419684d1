"""What multiplies with the weights: who is chosen, what becomes of the parameters, and rows that keep every bit."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.weights import load_params
from jpaged.config import EngineConfig
from jpaged.device.compilation.lowering import abstract_serving
from jpaged.device.executor import JaxExecutor
from jpaged.device.linear import choose_activation_dtype, choose_linear_backend, pack_params, served_config
from jpaged.device.mesh import build_mesh, replicated, serving_mesh
from jpaged.engine.executor import Detail
from jpaged.errors import Unsupported
from jpaged.kernels import matmul
from jpaged.kernels.cpu import build, library
from jpaged.kernels.matmul.quantized import quantize
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from tests.checkpoints.quantized.layouts import LAYOUTS, write_quantized
from tests.checkpoints.quantized.test_layouts import case_of
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.models.tiny import tiny_case, write_checkpoint
from tests.on_demand import programs_on_demand

NUM_BESIDE = (0, 1, 2, 4, 7, 8, 12, 15, 20, 32, 47, 63)
NUM_BESIDE_LONG = (100, 127, 200, 256, 300, 511)


def packer() -> matmul.Packer:
    return matmul.loaded().packer(replicated(serving_mesh(1)))


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (matmul.kernel, library.library)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "libjpaged_cpu.so")
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_one_cpu_device_has_the_kernel() -> None:
    assert choose_linear_backend("auto", serving_mesh(1), "loop") == "cpu"
    assert choose_linear_backend("xla", serving_mesh(1), "loop") == "xla"


def test_a_model_that_is_split_or_scanned_has_not() -> None:
    split = build_mesh(jax.devices()[:2])
    assert choose_linear_backend("auto", split, "loop") == "xla"
    assert choose_linear_backend("auto", serving_mesh(1), "scan") == "xla"
    with pytest.raises(Unsupported, match="linear_backend: cpu cannot run here: the model is split over 2 devices"):
        choose_linear_backend("cpu", split, "loop")
    with pytest.raises(Unsupported, match="linear_backend: cpu cannot run here: weights of scanned layers"):
        choose_linear_backend("cpu", serving_mesh(1), "scan")


def test_rows_are_rounded_for_matrices_of_integers() -> None:
    plain = tiny_model.model().config
    int8, fp8 = (quantized_here(plain, name) for name in ("int8", "fp8"))
    assert choose_activation_dtype("auto", "cpu", int8) == ("int8" if matmul.loaded().has_byte_products else "model")
    assert choose_activation_dtype("int8", "cpu", int8) == "int8"
    assert choose_activation_dtype("model", "cpu", int8) == "model"
    assert choose_activation_dtype("auto", "xla", int8) == "model"
    with pytest.raises(Unsupported, match="activation_dtype: int8 cannot run here: it requires linear_backend cpu"):
        choose_activation_dtype("int8", "xla", int8)
    for config in (plain, fp8):
        assert choose_activation_dtype("auto", "cpu", config) == "model"
        with pytest.raises(Unsupported, match="int8 cannot run here: the model has no quantized matrices"):
            choose_activation_dtype("int8", "cpu", config)


def test_rows_are_rounded_for_experts_too() -> None:
    """Also if only the experts are quantized."""
    config = from_hf(tiny_case("mixtral").config)
    of_experts = dataclasses.replace(
        config, quantization=Quantization("gptq", ((r".*experts.*", MatrixFormat("int4", 32)),))
    )
    assert choose_activation_dtype("int8", "cpu", of_experts) == "int8"
    expected = "int8" if matmul.loaded().has_byte_products else "model"
    assert choose_activation_dtype("auto", "cpu", of_experts) == expected


def test_experts_are_packed_together_or_not_at_all() -> None:
    def linear(form: MatrixFormat) -> dict[str, matmul.QuantizedMatrix]:
        return {"kernel": quantize(np.ones((2, 64, 32), np.float32), form, axis=-2)}

    int4, odd = MatrixFormat("int4", 32), MatrixFormat("int4", 4)
    config = from_hf(tiny_case("mixtral").config)
    for up, is_packed in ((int4, True), (odd, False)):
        experts = {"gate": linear(int4), "up": linear(up), "down": linear(MatrixFormat("int8"))}
        packed = pack_params({"layers": [{"mlp": {"experts": experts}}]}, config, packer())
        kernels = [each["kernel"] for each in packed["layers"][0]["mlp"]["experts"].values()]
        assert [isinstance(kernel, matmul.PackedMatrix) for kernel in kernels] == [is_packed] * 3


def test_an_embedding_stays_quantized_where_it_is_multiplied_so() -> None:
    config, groups = tiny_model.model().config, MatrixFormat("int8", 8)
    of_groups, of_rows, without = (
        dataclasses.replace(config, quantization=Quantization("gguf", (("", form),), has_embedding=has_embedding))
        for form, has_embedding in ((groups, True), (MatrixFormat("int8"), True), (groups, False))
    )
    one, split = serving_mesh(1), build_mesh(jax.devices()[:2])
    assert served_config(of_groups, "auto", one) is of_groups
    assert served_config(of_groups, "xla", one) == without
    assert served_config(of_groups, "auto", split) == without
    assert served_config(of_rows, "xla", split) is of_rows
    assert served_config(config, "auto", one) is config


def test_without_the_library_xla_multiplies(no_library: None) -> None:
    assert choose_linear_backend("auto", serving_mesh(1), "loop") == "xla"
    with pytest.raises(Unsupported, match=r"cpu cannot run here: libjpaged_cpu.so was not built"):
        choose_linear_backend("cpu", serving_mesh(1), "loop")


def test_shapes_are_packed_as_arrays_are() -> None:
    model, options = tiny_model.model(), tiny_model.OPTIONS
    _, _, abstract = abstract_serving(model, options, serving_mesh(1))
    packed = pack_params(jax.tree.map(jnp.asarray, tiny_model.params()), model.config, packer())
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract)]
    assert names == [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(packed)]
    for want, got in zip(jax.tree.leaves(abstract), jax.tree.leaves(packed), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)


def test_a_leaf_is_let_go_of_when_it_is_packed() -> None:
    config = tiny_model.CONFIG
    params = tiny_model.model().init_params(jax.random.key(0), "loop")
    kernels = [weakref.ref(layer["mlp"]["down"]["kernel"]) for layer in params["layers"]]
    packed = pack_params(params, config, packer())
    assert [kernel() for kernel in kernels] == [None] * config.num_layers
    assert all(isinstance(layer["mlp"]["down"]["kernel"], matmul.PackedMatrix) for layer in packed["layers"])


@pytest.mark.long
def test_both_backends_give_the_same_tokens() -> None:
    texts = []
    for backend in ("cpu", "xla"):
        chosen = dataclasses.replace(tiny_model.OPTIONS.model, linear_backend=backend)
        options = dataclasses.replace(tiny_model.OPTIONS, model=chosen)
        executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), options)
        assert executor.step.linear_backend == backend
        executor.warm_up(tiny_model.quiet)
        driver = Driver(executor)
        texts.append(greedy(driver, driver.sequence([5, 1, 77, 30]), 20))
        executor.shutdown()
    assert texts[0] == texts[1]


def greedy(driver: Driver, sequence: Sequence, num_tokens: int) -> list[int]:
    for _ in range(num_tokens):
        row = Row(sequence, len(sequence.tokens) - sequence.num_computed)
        sequence.tokens.append(int(driver.run([row]).token_ids_rn[0, 0]))
    return sequence.tokens


def states(driver: Driver, rows: list[Row]) -> tuple[bytes, bytes, bytes]:
    """The bits of the first row's hidden state, of its logits, and of its likeliest tokens' log-probabilities."""
    executor = driver.executor
    assert isinstance(executor, JaxExecutor)
    hidden = executor.forward(driver.inputs(rows))
    model, num_rows = executor._served.step.model, driver.geometry.buckets.num_rows(len(rows))
    logits = logits_of(model, executor._runner._head_params, hidden[:num_rows])
    outputs = executor.collect(executor.sample(hidden, driver.sampling(rows, detail=Detail.TOP_LOGPROBS)))
    for row in rows:
        row.sequence.num_computed += row.num_tokens
    assert outputs.top_logprobs_rnk is not None
    return np.asarray(hidden)[0].tobytes(), np.asarray(logits)[0].tobytes(), outputs.top_logprobs_rnk[0].tobytes()


@functools.partial(jax.jit, static_argnames="model")
def logits_of(model: Model, params: Params, hidden_re: jax.Array) -> jax.Array:
    return model.logits(params, hidden_re)


def bits_of_each_token(
    driver: Driver, prompt: list[int], chunks: list[int], num_beside: int
) -> list[tuple[bytes, bytes, bytes]]:
    """What a prompt's chunks end in, each in a step with so many other rows, of one token and of several."""
    rng = np.random.default_rng(num_beside)
    others = [driver.sequence(rng.integers(3, 90, 1 + i % 3).tolist()) for i in range(num_beside)]
    sequence, found = driver.sequence(prompt), []
    for chunk in chunks:
        room = driver.geometry.buckets.tokens[-1] - chunk
        beside = [Row(other, len(other.tokens)) for other in others]
        while sum(row.num_tokens for row in beside) > room:
            beside.pop()
        for row in beside:
            row.sequence.num_computed = 0
        found.append(states(driver, [Row(sequence, chunk), *beside]))
    for each in (sequence, *others):
        driver.release(each)
    return found


def check_bits(case: str, dtype: str, tmp_path: Path, max_rows: int, num_beside: tuple[int, ...]) -> None:
    tiny = tiny_case(case)
    model = Model(from_hf(tiny.config), np.dtype(jnp.dtype(dtype)))
    params = load_params(model, write_checkpoint(tiny, tmp_path), "loop")
    check_bits_of(model, params, tiny.prompt()[:16], max_rows, num_beside)


def check_bits_of(model: Model, params: Params, prompt: list[int], max_rows: int, num_beside: tuple[int, ...]) -> None:
    options = {"max_num_seqs": max_rows, "max_num_batched_tokens": max_rows, "max_model_len": 24, "block_size": 8}
    options |= {"num_blocks": 3 * (max_rows + 2), "wait_for_all_programs": True}
    with programs_on_demand():
        executor = JaxExecutor.create(model, params, EngineConfig.load(options))
        assert executor.step.linear_backend == "cpu"
        executor.warm_up(tiny_model.quiet)
    driver = Driver(executor)
    # The prompt whole, then in chunks that end where it was cut before: the last state of each is comparable.
    alone = bits_of_each_token(driver, prompt, [1] * 16, 0)
    for count in num_beside:
        for chunks in ([1] * 16, [16], [3, 5, 8], [9, 7]):
            found = bits_of_each_token(driver, prompt, chunks, count)
            ends = np.cumsum(chunks) - 1
            for end, bits in zip(ends, found, strict=True):
                for what, got, want in zip(("state", "logits", "log-probabilities"), bits, alone[end], strict=True):
                    assert got == want, f"{what}: {count} rows beside, chunks {chunks}, position {end}"
    executor.shutdown()


CASES = [("qwen3", "float32"), ("llama3_tied", "bfloat16"), ("opt_post_norm", "float32")]


@pytest.mark.parametrize(("case", "dtype"), CASES)
@pytest.mark.thinned(3)
@pytest.mark.long
def test_neither_batch_nor_chunk_shows_in_a_bit_of_the_logits(case: str, dtype: str, tmp_path: Path) -> None:
    check_bits(case, dtype, tmp_path, 64, NUM_BESIDE[::2])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "dtype"), [("gptq_desc_act", "bfloat16"), ("w8a8", "float32")])
def test_nor_in_one_of_a_model_of_fewer_bits(layout: str, dtype: str, tmp_path: Path) -> None:
    written = next(each for each in LAYOUTS if each.name == layout)
    tiny = case_of(written)
    write_quantized(tiny, written, tmp_path)
    model = Model(read_config(tmp_path), np.dtype(jnp.dtype(dtype)))
    check_bits_of(model, load_params(model, tmp_path, "loop"), tiny.prompt()[:16], 16, (1, 4, 11))


@pytest.mark.long
def test_nor_in_one_of_a_model_whose_experts_are_quantized(tmp_path: Path) -> None:
    tiny = tiny_case("mixtral")
    model = Model(quantized_here(from_hf(tiny.config), "int8"), np.dtype(jnp.bfloat16))
    params = load_params(model, write_checkpoint(tiny, tmp_path), "loop")
    check_bits_of(model, params, tiny.prompt()[:16], 16, (1, 4, 11))


@pytest.mark.long
def test_nor_in_one_of_a_model_whose_embedding_is_quantized(tmp_path: Path) -> None:
    tiny = tiny_case("llama3_tied")
    config = quantized_here(from_hf(tiny.config), "int4-all")
    model = Model(config, np.dtype(jnp.bfloat16))
    params = load_params(model, write_checkpoint(tiny, tmp_path), "loop")
    check_bits_of(model, params, tiny.prompt()[:16], 16, (1, 4, 11))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[1:2]),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (*CASES[::2], ("qwen2", "bfloat16"), ("opt", "float32"))
        ),
    ],
)
def test_up_to_512_rows_show_in_no_bit_of_the_logits(case: str, dtype: str, tmp_path: Path) -> None:
    check_bits(case, dtype, tmp_path, 512, (*NUM_BESIDE, *NUM_BESIDE_LONG))
