"""Every setting of a `quantization_config` is understood, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from jpaged.checkpoints.quantised.config import find_scheme
from jpaged.errors import InvalidArgument, Unsupported
from tests.checkpoints.quantised.layouts import LAYOUTS, compressed_config

CONFIGS = {layout.name: layout.config for layout in LAYOUTS}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
REFUSED = [
    ({"quant_method": "bitsandbytes"}, Unsupported, "quant_method is 'bitsandbytes'"),
    ({**CONFIGS["gptq"], "bits": 3}, Unsupported, "bits is 3"),
    ({**CONFIGS["gptq"], "checkpoint_format": "marlin"}, Unsupported, "checkpoint_format is 'marlin'"),
    ({**CONFIGS["gptq"], "dynamic": {"-:.*": {}}}, Unsupported, "dynamic is"),
    ({**CONFIGS["gptq"], "something_new": 1}, Unsupported, "unknown setting something_new=1"),
    (
        {**CONFIGS["gptq"], "modules_in_block_to_quantize": "mlp"},
        InvalidArgument,
        "modules_in_block_to_quantize: is 'mlp'",
    ),
    ({**CONFIGS["gptq"], "group_size": "many"}, InvalidArgument, "group_size: is 'many'"),
    ({**CONFIGS["awq"], "version": "gemv"}, Unsupported, "version is 'gemv'"),
    ({**CONFIGS["awq"], "zero_point": False}, Unsupported, "zero_point is False"),
    ({**CONFIGS["deepseek_fp8"], "fmt": "e5m2"}, Unsupported, "fmt is 'e5m2'"),
    ({**CONFIGS["deepseek_fp8"], "weight_block_size": [128]}, InvalidArgument, "the size of blocks is"),
    ({**CONFIGS["deepseek_fp8"], "activation_scheme": "static"}, Unsupported, "activation_scheme is 'static'"),
    (compressed_config("marlin-24", WEIGHTS), Unsupported, "format 'marlin-24'"),
    (compressed_config("pack-quantized", {**WEIGHTS, "num_bits": 3}), Unsupported, "int3"),
    (compressed_config("int-quantized", {**WEIGHTS, "actorder": "random"}), Unsupported, "actorder is 'random'"),
    (compressed_config("int-quantized", {**WEIGHTS, "strategy": "block"}), Unsupported, "strategy is 'block'"),
    (compressed_config("int-quantized", WEIGHTS, {**ROWS, "symmetric": False}), Unsupported, "symmetric is False"),
    (compressed_config("int-quantized", WEIGHTS, {**ROWS, "dynamic": False}), Unsupported, "strategy of input_act"),
    (
        compressed_config("int-quantized", WEIGHTS, {**ROWS, "type": "float"}),
        Unsupported,
        "float8 with weights",
    ),
    (compressed_config("int-quantized", WEIGHTS, transform_config={"a": 1}), Unsupported, "transform_config is"),
    (compressed_config("int-quantized", WEIGHTS, ignore=["re:("]), Unsupported, "is no regular expression"),
]


@pytest.mark.parametrize(("config", "error", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_what_is_not_computed_is_refused_by_name(config: Mapping[str, object], error, named: str) -> None:
    with pytest.raises(error) as refusal:
        find_scheme({"quantization_config": config})
    assert named in str(refusal.value)


def test_modules_have_the_format_of_the_first_rule_that_finds_them() -> None:
    config = compressed_config(
        "int-quantized", WEIGHTS, ignore=["lm_head", "re:.*mlp.gate$", "model.layers.0.mlp.up_proj"]
    )
    groups = config["config_groups"]
    assert isinstance(groups, dict)
    groups["group_1"] = {"targets": ["re:.*down_proj"], "weights": {**WEIGHTS, "num_bits": 4}}
    scheme = find_scheme({"quantization_config": config})
    assert scheme is not None
    forms = {
        name: scheme.quantisation.format_of(name)
        for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj", "model.layers.1.mlp.gate")
    }
    assert [form and form.values for form in forms.values()] == [None, None, "int8", None]
    down = scheme.quantisation.format_of("model.layers.0.mlp.down_proj")
    assert down is not None and down.values == "int4"
    assert find_scheme({"architectures": ["LlamaForCausalLM"]}) is None
