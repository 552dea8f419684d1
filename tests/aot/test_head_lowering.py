"""Programs of heads beside their models lower for TPUs and Hopper GPUs, with the plain wheels of jax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jpaged.config import EngineConfig
from jpaged.device.compilation.lowering import abstract_serving
from jpaged.device.mesh import build_mesh
from jpaged.device.speculative.dispatch import SpeculatePacking
from jpaged.device.speculative.drafter import DRAFT, abstract_states, split_params
from jpaged.device.speculative.eagle import packed_follow
from jpaged.device.speculative.step import packed_speculate
from jpaged.device.step import Step, forward_packing
from jpaged.engine.executor import Geometry
from jpaged.kernels.sampling import choose_kernel
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import DecoderConfig
from jpaged.models.eagle import mtp_config
from jpaged.models.hf_config import from_hf, head_from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.plan.known_models import KNOWN_MODELS
from tests.aot.test_step_lowering import NUM_TOKENS, OPTIONS, TARGETS, Target, on
from tests.models.eagle_heads import HeadSizes
from tests.models.test_heads import MIMO_7B

SPECULATION = {"method": "eagle3", "model": "head", "num_speculative_tokens": 1}


def eagle_head() -> tuple[Model, Model, tuple[int, ...]]:
    """Llama-3-8B, a head that takes its embedding, and the layers that it takes."""
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    sizes = HeadSizes(model.config.vocab_size, 4096, 14336, 32, 8, 128, target_hidden_size=4096)
    head = Model(head_from_hf(sizes.config(draft_vocab_size=32000)).stored_as(["d2t"]), model.dtype)
    return model, head, (2, 16, 29)


def mtp_layer(config: ModelConfig) -> tuple[Model, Model, tuple[int, ...]]:
    """A model of the last two layers, and its MTP layer."""
    assert isinstance(config, DecoderConfig)
    config = dataclasses.replace(config, num_layers=2, kinds=config.layer_kinds[-2:])
    return Model(config, jnp.dtype("bfloat16")), Model(mtp_config(config), jnp.dtype("bfloat16")), (2,)


HEADS = {
    "eagle3": eagle_head,
    "mimo": lambda: mtp_layer(from_hf(MIMO_7B)),
    "deepseek-v3": lambda: mtp_layer(KNOWN_MODELS["deepseek-v3"].config),
}


def head_step(target: Target, name: str) -> tuple[Step, Geometry, Params]:
    """A step with a head, on devices of the target."""
    model, head, watched = HEADS[name]()
    speculation = SPECULATION if name == "eagle3" else {"method": "mtp", "num_speculative_tokens": 1}
    options = EngineConfig.load({**OPTIONS, "speculative_config": speculation})
    step, geometry, _ = abstract_serving(model, options, build_mesh(jax.devices()[:1]), draft=head)
    assert step.draft is not None
    assert step.draft.watched == watched

    def on_target(step: Step) -> Step:
        sampler = choose_kernel(target.backend, 1, model.config.vocab_size)
        layout = dataclasses.replace(step.layout, form=target.form)
        return dataclasses.replace(step, layout=layout, backend=target.backend, layer_mode="scan", sampler=sampler)

    draft = dataclasses.replace(step.draft, step=on_target(step.draft.step))
    step = dataclasses.replace(on_target(step), draft=draft)
    params = step.model.abstract_params("scan")
    shared = {name: params[of_model] for name, of_model in draft.shared}
    return step, geometry, {**params, DRAFT: {**draft.step.model.abstract_params("scan"), **shared}}


@pytest.mark.parametrize("program", ["forward", "draft", "speculate"])
@pytest.mark.parametrize("name", ["v6e", "h200"])
@pytest.mark.thinned(6)
@pytest.mark.long
def test_programs_with_a_head_lower_with_their_kernels(name: str, program: str) -> None:
    check_lowering("eagle3", name, program)


@pytest.mark.parametrize("program", ["draft", "speculate"])
@pytest.mark.parametrize(("model", "name"), [("mimo", "v6e"), ("mimo", "h200"), ("deepseek-v3", "v6e")])
@pytest.mark.long
def test_programs_with_an_mtp_layer_lower_with_their_kernels(model: str, name: str, program: str) -> None:
    check_lowering(model, name, program)


def check_lowering(head: str, name: str, program: str) -> None:
    target = TARGETS[name]
    step, geometry, both = head_step(target, head)
    assert step.draft is not None
    width = len(step.draft.watched) * step.model.config.hidden_size
    params, of_head = split_params(both)
    keys, pool = (jax.ShapeDtypeStruct(one.layout.shape, one.layout.storage_dtype) for one in (step.draft.step, step))
    states = abstract_states(step.draft)
    of_draft = keys, jax.ShapeDtypeStruct(states.shape, states.dtype)
    packing, rounds = forward_packing(NUM_TOKENS, geometry), SpeculatePacking.of(8, geometry)
    last = jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32)
    words, of_rounds = (jax.ShapeDtypeStruct((size,), np.int32) for size in (packing.size, rounds.size))
    features = jax.ShapeDtypeStruct((NUM_TOKENS, width), jnp.bfloat16)
    calls: dict[str, tuple[Any, tuple[Any, ...], int]] = {
        "forward": (functools.partial(step.packed_forward, packing=packing), (params, pool, last, words), 1),
        "draft": (
            functools.partial(packed_follow, step.draft, packing=packing),
            (of_head, of_draft, last, words, features),
            1,
        ),
        "speculate": (
            functools.partial(packed_speculate, step, packing=rounds),
            (params, of_head, (pool, of_draft), last, of_rounds),
            2,
        ),
    }
    run, arguments, donated = calls[program]
    with on(target):
        checks = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
        jitted = jax.jit(run, donate_argnums=donated)
        exported = export.export(jitted, platforms=[target.platform], disabled_checks=checks)(*arguments)
    text = exported.mlir_module()
    assert target.call in text
    num_donated = {"forward": 1, "draft": 2, "speculate": 3}[program]
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == num_donated
    if program == "forward":
        assert [out.shape for out in exported.out_avals][2] == (NUM_TOKENS, width)
