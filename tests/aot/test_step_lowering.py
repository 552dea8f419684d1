"""A step of Llama-3-8B lowers for TPUs and Hopper GPUs, its attention kernel included, with the plain wheels of jax.

Neither Mosaic nor XLA has compiled it then: `test_tpu_models.py` has libtpu do it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

# How an abstract mesh says which device it is of has no public name yet.
from jax._src.mesh import AbstractDevice
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, Mesh

from jpaged.config import Backend, EngineConfig
from jpaged.device.aot.topology import GENERATIONS
from jpaged.device.compilation.lowering import abstract_serving, packed_decode
from jpaged.device.lora import AdapterRoom, fill_slot
from jpaged.device.mesh import MESH_AXES, build_mesh
from jpaged.device.model_runner import EDIT_WORDS, NUM_COUNT_WORDS, ROW_WORDS, DecodePacking
from jpaged.device.speculative.dispatch import SpeculatePacking
from jpaged.device.speculative.step import packed_speculate
from jpaged.device.step import Step, forward_packing
from jpaged.engine.executor.aux_io import AUX_IDS, AuxKind
from jpaged.engine.executor.io import NUM_SINGLES, num_mask_words
from jpaged.kernels.kv_layout import KVForm
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.sampling import choose_kernel
from jpaged.models.config import Quantization
from jpaged.models.decoder.config import apply_lossy_window
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.plan.known_models import KNOWN_MODELS

NUM_TOKENS = 16
TRITON_CALL = "__gpu$xla.gpu.triton"
NUM_WORDS = {
    "rows": 8 * ROW_WORDS,
    "edits": 8 * EDIT_WORDS + 1,
    "count": NUM_COUNT_WORDS + 256,
    "tell": 64 * (1 + AUX_IDS),
}
OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": NUM_TOKENS,
    "num_blocks": 64,
    "block_size": 32,
    "max_model_len": 512,
    "attention_backend": "xla",
}


@dataclass(frozen=True)
class Target:
    """A device that is not here, and what its attention kernel is called in a module."""

    device: AbstractDevice
    platform: str
    backend: Backend
    form: KVForm
    call: str


TARGETS = {
    **{
        name: Target(AbstractDevice(one.device_kind, 1, "tpu"), "tpu", "pallas-tpu", "tpu", "@tpu_custom_call")
        for name, one in GENERATIONS.items()
    },
    "h200": Target(AbstractDevice("NVIDIA H200", 132, "gpu"), "cuda", "pallas-gpu", "gpu", "@mosaic_gpu_v2"),
}

A100 = Target(AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu"), "cuda", "pallas-triton", "gpu", f"@{TRITON_CALL}")


def on(target: Target) -> AbstractContextManager[object]:
    """What is lowered inside is for this device."""
    mesh = AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), abstract_device=target.device)
    return jax.sharding.use_abstract_mesh(mesh)


def primitives(jaxpr: Jaxpr) -> Iterator[str]:
    """The operations of a program, those of the programs within it included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner)


LOSSY = {**OPTIONS, "lossy_kv_window": 256}


def model_of(options: EngineConfig) -> Model:
    """Llama-3-8B, exact or lossy."""
    return Model(apply_lossy_window(KNOWN_MODELS["llama-3-8b"].config, options), jnp.dtype("bfloat16"))


@pytest.mark.parametrize("options", [OPTIONS, LOSSY], ids=["exact", "lossy"])
@pytest.mark.thinned(2)
def test_layers_on_a_tpu_find_the_lists_of_rows_made(options: dict[str, Any]) -> None:
    target, config = TARGETS["v6e"], EngineConfig.load(options)
    step, geometry, _ = abstract_serving(model_of(config), config, build_mesh(jax.devices()[:1]))
    layout = dataclasses.replace(step.layout, form=target.form)
    step = dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan")
    packing = forward_packing(NUM_TOKENS, geometry)
    with on(target):
        program = jax.make_jaxpr(functools.partial(step.packed_forward, packing=packing))(
            step.model.abstract_params("scan"),
            jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
            jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
            jax.ShapeDtypeStruct((packing.size,), np.int32),
        )
    (layers,) = (equation for equation in program.eqns if equation.primitive.name == "scan")
    assert "cumsum" in set(primitives(program.jaxpr)), "segments are counted"
    (layer,) = jaxprs_in_params(layers.params)
    assert "pallas_call" in set(primitives(layer))
    assert "turn_heads" in str(layer), "heads are turned by a kernel"
    for_lists = {"cumsum", "cos", "sin"}
    assert not for_lists & set(primitives(layer)), "made in every layer"


@pytest.mark.long
@pytest.mark.parametrize("program", ["forward", "decode"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_step_lowers_with_its_attention_kernel(name: str, program: str) -> None:
    target = TARGETS[name]
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    step, geometry, _ = abstract_serving(model, EngineConfig.load(OPTIONS), build_mesh(jax.devices()[:1]))
    layout = dataclasses.replace(step.layout, form=target.form)
    sampler = choose_kernel(target.backend, 1, model.config.vocab_size)
    step = dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan", sampler=sampler)
    packing = forward_packing(NUM_TOKENS, geometry)
    several = DecodePacking(forward_packing(8, geometry), 8)
    arguments = (
        step.model.abstract_params("scan"),
        jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
        jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
        jax.ShapeDtypeStruct((packing.size if program == "forward" else several.size,), np.int32),
    )
    forward = functools.partial(step.packed_forward, packing=packing)
    decode = functools.partial(packed_decode, step, packing=several)
    jitted = jax.jit(forward if program == "forward" else decode, donate_argnums=1)
    with on(target):
        # The sampler says how its logits lie; a file that lasts must not, and this is none.
        checks = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
        text = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(*arguments).mlir_module()
    assert target.call in text
    assert text.count("stablehlo.while") >= (2 if program == "decode" else 1), "layers, and the steps around them"
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["v6e", "h200", "a100"])
def test_a_step_in_stages_lowers_with_each_devices_kernel(name: str) -> None:
    """A stage has half of the layers; a turn calls the kernel on what a device has, and passes hidden states on."""
    target = A100 if name == "a100" else TARGETS[name]
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    options = EngineConfig.load({**OPTIONS, "pipeline_parallel_size": 2, "tensor_parallel_size": 2})
    step, geometry, params = abstract_serving(model, options, build_mesh(jax.devices()[:4], 1, 2))
    mesh = AbstractMesh((2, 1, 2), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), abstract_device=target.device)
    layout = dataclasses.replace(step.layout, form=target.form)
    assert (layout.num_layers, layout.local.num_layers, layout.local.num_kv_heads) == (32, 16, 4)
    step = dataclasses.replace(step, layout=layout, backend=target.backend, mesh=cast("Mesh", mesh))
    packing = forward_packing(NUM_TOKENS, geometry)
    jitted = jax.jit(functools.partial(step.packed_forward, packing=packing), donate_argnums=1)
    with jax.sharding.use_abstract_mesh(mesh):
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in ("LayoutConstraint", TRITON_CALL)]
        text = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params),
            jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
            jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
            jax.ShapeDtypeStruct((packing.size,), np.int32),
        ).mlir_module()
    assert target.call in text
    num_states = 2 if name == "v6e" else 1  # on TPUs states have the sums of their squares with them
    assert text.count("stablehlo.collective_permute") == num_states
    assert text.count("stablehlo.all_reduce") == 1, "the hidden states of the last stage"


@pytest.mark.long
@pytest.mark.parametrize("has_runs", [True, False])
@pytest.mark.parametrize("name", ["v6e", "h200", "a100"])
def test_a_step_over_contexts_in_parts_lowers_with_each_devices_kernel(name: str, has_runs: bool) -> None:
    """Rows are taken apart once; a layer calls the kernel on what a device has, and merges what the two found."""
    target = A100 if name == "a100" else TARGETS[name]
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    sizes = {"block_size": 64, "context_parallel_size": 2, "tensor_parallel_size": 2}
    options = EngineConfig.load({**OPTIONS, **sizes, "enable_cascade_attention": has_runs})
    step, geometry, _ = abstract_serving(model, options, build_mesh(jax.devices()[:4], 2))
    mesh = AbstractMesh((1, 2, 2), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), abstract_device=target.device)
    layout = dataclasses.replace(step.layout, form=target.form)
    assert (layout.local.block_size, layout.local.num_kv_heads) == (32, 4)
    step = dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan", mesh=cast("Mesh", mesh))
    packing = forward_packing(NUM_TOKENS, geometry)
    jitted = jax.jit(functools.partial(step.packed_forward, packing=packing), donate_argnums=1)
    with jax.sharding.use_abstract_mesh(mesh):
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in ("LayoutConstraint", TRITON_CALL)]
        text = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(
            step.model.abstract_params("scan"),
            jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
            jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
            jax.ShapeDtypeStruct((packing.size,), np.int32),
        ).mlir_module()
    assert target.call in text
    assert text.count("stablehlo.all_gather") == 1, "the log-sum-exps of a layer"
    assert text.count("stablehlo.all_reduce") == 1, "its outputs; XLA adds the sums of the model's parts"
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


@pytest.mark.long
@pytest.mark.parametrize(("name", "num_more"), [("v6e", 2), ("h200", 0)])
def test_a_lossy_step_lowers_with_a_second_pass_or_one_launch(name: str, num_more: int) -> None:
    """On a TPU rows of one query and of more are a call each in both passes; on Hopper both are lists of one launch."""
    target, texts = TARGETS[name], []
    for options in (OPTIONS, LOSSY):
        config = EngineConfig.load({**options, "enable_cascade_attention": False})
        step, geometry, _ = abstract_serving(model_of(config), config, build_mesh(jax.devices()[:1]))
        layout = dataclasses.replace(step.layout, form=target.form)
        step = dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan")
        packing = forward_packing(NUM_TOKENS, geometry)
        arguments = (
            step.model.abstract_params("scan"),
            jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
            jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
            jax.ShapeDtypeStruct((packing.size,), np.int32),
        )
        jitted = jax.jit(functools.partial(step.packed_forward, packing=packing), donate_argnums=1)
        with on(target):
            texts.append(export.export(jitted, platforms=[target.platform])(*arguments).mlir_module())
    exact, both = (text.count(target.call) for text in texts)
    assert (both - exact, exact > 0) == (num_more, True)
    assert "tf.aliasing_output" in texts[1] or "jax.buffer_donor" in texts[1]


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_rounds_of_a_draft_model_lower_with_both_attention_kernels(name: str) -> None:
    target, dtype = TARGETS[name], jnp.dtype("bfloat16")
    config = {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 3}
    options = EngineConfig.load({**OPTIONS, "max_num_batched_tokens": 32, "speculative_config": config})
    model, drafting = Model(KNOWN_MODELS["llama-3-8b"].config, dtype), Model(KNOWN_MODELS["llama-3.2-1b"].config, dtype)
    step, geometry, _ = abstract_serving(model, options, build_mesh(jax.devices()[:1]), draft=drafting)

    def for_target(step: Step) -> Step:
        layout = dataclasses.replace(step.layout, form=target.form)
        sampler = choose_kernel(target.backend, 1, step.vocab_size)
        return dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan", sampler=sampler)

    assert step.draft is not None
    draft = dataclasses.replace(step.draft, step=for_target(step.draft.step))
    step, packing = dataclasses.replace(for_target(step), draft=draft), SpeculatePacking.of(8, geometry)
    pools = tuple(jax.ShapeDtypeStruct(one.layout.shape, one.layout.storage_dtype) for one in (step, draft.step))
    arguments = (
        step.model.abstract_params("scan"),
        draft.step.model.abstract_params("scan"),
        pools,
        jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
        jax.ShapeDtypeStruct((packing.size,), np.int32),
    )
    jitted = jax.jit(functools.partial(packed_speculate, step, packing=packing), donate_argnums=2)
    with on(target):
        checks = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
        text = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(*arguments).mlir_module()
    # The draft's first step of a round, the others, what is missing behind the last; and the model's.
    assert text.count(target.call) >= 4
    assert text.count("stablehlo.while") >= 6, "layers, proposals, rounds"
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2, "both pools"


@pytest.mark.parametrize("program", ["edited", "count", "tell"])
@pytest.mark.parametrize("name", ["v6e", "h200"])
@pytest.mark.thinned(5)
def test_what_edits_and_tells_lowers_and_counts_in_place(name: str, program: str) -> None:
    target = TARGETS[name]
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    step, _, _ = abstract_serving(model, EngineConfig.load(OPTIONS), build_mesh(jax.devices()[:1]))
    step = dataclasses.replace(step, sampler=choose_kernel(target.backend, 1, model.config.vocab_size))
    counts = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), step.abstract_counts(8))
    params = {key: tree for key, tree in step.model.abstract_params("scan").items() if key != "layers"}
    hidden = jax.ShapeDtypeStruct((step.max_sample_rows + step.num_aux, 4096), model.dtype)
    words = {name: jax.ShapeDtypeStruct((size,), np.int32) for name, size in NUM_WORDS.items()}
    singles = jax.ShapeDtypeStruct((8, NUM_SINGLES, 3), np.int32)
    mask = jax.ShapeDtypeStruct((8, num_mask_words(model.config.vocab_size)), np.int32)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "edited": (
            jax.jit(step.packed_edited_sample, donate_argnums=1),
            (params, counts, hidden, words["rows"], words["edits"], singles, mask),
        ),
        "count": (jax.jit(step.count, donate_argnums=0), (counts, words["count"])),
        "tell": (jax.jit(functools.partial(step.tell, tell=AuxKind.LOGPROBS)), (params, hidden, words["tell"])),
    }
    jitted, arguments = calls[program]
    with on(target):
        checks = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
        text = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(*arguments).mlir_module()
    in_place = text.count("tf.aliasing_output") + text.count("jax.buffer_donor")
    assert in_place == (0 if program == "tell" else 2)
    if program == "edited":
        # Counts and last tokens; a TPU adds single tokens in passes, for it scatters one number after the other.
        assert text.count('"stablehlo.scatter"') == 2 + (name == "h200")


# Of a layer's four matrices each has one product with A, and one with B of each part: 3 + 1 + 2 + 1.
NUM_ADAPTED = 4 + 7


@pytest.mark.parametrize("form", [None, "int4"], ids=["bfloat16", "int4"])
@pytest.mark.thinned(2)
@pytest.mark.long
def test_a_step_with_adapters_lowers_and_multiplies_with_all_of_them_at_once(form: str | None) -> None:
    target, config = TARGETS["h200"], KNOWN_MODELS["llama-3-8b"].config
    if form is not None:
        config = dataclasses.replace(config, quantization=Quantization(form, (("", MatrixFormat("int4", 128)),)))
    model = Model(config, jnp.dtype("bfloat16"))
    mesh, options = build_mesh(jax.devices()[:1]), EngineConfig.load({**OPTIONS, "enable_lora": True})
    step, geometry, _ = abstract_serving(model, options, mesh)
    assert step.slots == AdapterRoom(8, 16)
    layout = dataclasses.replace(step.layout, form=target.form)
    step = dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan")
    packing, params = forward_packing(NUM_TOKENS, geometry), step.model.abstract_params("scan")
    adapted = AdapterRoom(8, 16).add_to(params, step.model, "scan", mesh)

    def text_of(params: Params) -> str:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        jitted = jax.jit(functools.partial(step.packed_forward, packing=packing), donate_argnums=1)
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in ("LayoutConstraint", TRITON_CALL)]
        with on(target):
            exported = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(
                shapes,
                jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
                jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
                jax.ShapeDtypeStruct((packing.size,), np.int32),
            )
        return exported.mlir_module()

    without, text = text_of(params), text_of(adapted)
    assert target.call in text
    assert text.count("stablehlo.dot_general") == without.count("stablehlo.dot_general") + NUM_ADAPTED
    assert text.count("custom_call") == without.count("custom_call"), "no product with the base is another"
    assert (TRITON_CALL in text) == (form is not None)


FLOAT16_MODELS = {
    "llama-2-7b": None,
    "mixtral-8x7b": None,
    "deepseek-v2-lite": None,
    "llama-2-7b-int4": MatrixFormat("int4", 128, has_zeros=True),
    "mixtral-8x7b-int4": MatrixFormat("int4", 128, has_zeros=True),
}


@pytest.mark.long
@pytest.mark.parametrize("program", ["forward", "decode"])
@pytest.mark.parametrize("name", FLOAT16_MODELS)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_a_step_in_float16_has_no_bfloat16_and_adds_in_float32(gpu: str, name: str, program: str) -> None:
    target, form = A100 if gpu == "a100" else TARGETS[gpu], FLOAT16_MODELS[name]
    config = KNOWN_MODELS[name.removesuffix("-int4")].config
    if form is not None:
        config = dataclasses.replace(config, quantization=Quantization("int4", (("", form),)))
    model = Model(config, jnp.dtype("float16"))
    step, geometry, _ = abstract_serving(model, EngineConfig.load(OPTIONS), build_mesh(jax.devices()[:1]))
    assert step.layout.dtype == jnp.float16, "of the KV pool, by default"
    # Hopper's kernel has no latents.
    has_latents = step.layout.value_dim is not None
    backend, call = (A100.backend, A100.call) if has_latents else (target.backend, target.call)
    layout = dataclasses.replace(step.layout, form=target.form)
    step = dataclasses.replace(step, layout=layout, backend=backend, layer_mode="scan")
    packing = forward_packing(NUM_TOKENS, geometry)
    several = DecodePacking(forward_packing(8, geometry), 8)
    forward = functools.partial(step.packed_forward, packing=packing)
    decode = functools.partial(packed_decode, step, packing=several)
    jitted = jax.jit(forward if program == "forward" else decode, donate_argnums=1)
    with on(target):
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in ("LayoutConstraint", TRITON_CALL)]
        text = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(
            step.model.abstract_params("scan"),
            jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
            jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
            jax.ShapeDtypeStruct((packing.size if program == "forward" else several.size,), np.int32),
        ).mlir_module()
    assert call in text
    assert TRITON_CALL in text or form is None, "groups are dequantized by the kernel"
    assert "bf16" not in text
    products = re.findall(r"stablehlo\.dot_general .*-> tensor<(?:\d+x)*(\w+)>", text)
    assert set(products) <= {"f32"}
    assert products or form is not None


def test_a_slot_is_filled_in_place() -> None:
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    mesh, room = build_mesh(jax.devices()[:1]), AdapterRoom(8, 16)
    by_path, one = (room.shapes(model, "loop", mesh, has_slots=has_slots) for has_slots in (True, False))
    index = jax.ShapeDtypeStruct((), np.int32)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (list(by_path.values()), index, list(one.values())),
    )
    with on(TARGETS["h200"]):
        text = export.export(jax.jit(fill_slot, donate_argnums=0), platforms=["cuda"])(*arguments).mlir_module()
    num_stacks = 32 * NUM_ADAPTED
    assert "stablehlo.dynamic_update_slice" in text
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == num_stacks
