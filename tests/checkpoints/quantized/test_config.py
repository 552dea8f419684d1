"""Every setting of a `quantization_config` is understood, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from jpaged.checkpoints.hub import find_scheme
from jpaged.checkpoints.quantized.compressed_tensors import CompressedTensors
from jpaged.errors import InvalidArgument, Unsupported
from tests.checkpoints.quantized.layouts import LAYOUTS, compressed_config

CONFIGS = {layout.name: layout.config for layout in LAYOUTS}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
AUTO_ROUND = {
    "bits": 4,
    "data_type": "int",
    "group_size": 16,
    "sym": True,
    "iters": 0,
    "low_gpu_mem_usage": True,
    "autoround_version": "0.12.2",
    "enable_quanted_input": False,
    "provider": "auto-round",
    "to_quant_block_names": "model.layers",
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
}
REFUSED = [
    ({"quant_method": "bitsandbytes"}, Unsupported, "quant_method is 'bitsandbytes'"),
    ({**CONFIGS["gptq"], "bits": 5}, Unsupported, "bits is 5"),
    ({**CONFIGS["gptq"], "checkpoint_format": "marlin"}, Unsupported, "checkpoint_format is 'marlin'"),
    ({**CONFIGS["gptq"], "dynamic": {"-:.*": {}, "+:.*": {"bits": 5}}}, Unsupported, "dynamic +:.*: bits is 5"),
    ({**CONFIGS["gptq"], "dynamic": {"+:.*": {"new": 3}}}, Unsupported, "dynamic +:.*: unknown setting new=3"),
    ({**CONFIGS["gptq"], "dynamic": {"+:.*": {"sym": True}}}, Unsupported, "dynamic +:.*: sym is True"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, Unsupported, "group_size is 32"),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, Unsupported, "quant_algo is 'MIXED_PRECISION'"),
    ({"quant_algo": "FP8", "pre_quant_scale": True}, Unsupported, "pre_quant_scale is True"),
    ({"quant_algo": "FP8", "something_new": 1}, Unsupported, "unknown setting something_new=1"),
    ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, Unsupported, "packing_format is 'auto_round:llm_"),
    ({**AUTO_ROUND, "data_type": "mx_fp"}, Unsupported, "data_type is 'mx_fp'"),
    ({**AUTO_ROUND, "act_bits": 4}, Unsupported, "act_bits is 4"),
    ({**AUTO_ROUND, "extra_config": {"a": {"bits": 5}}}, Unsupported, "quantization_config a: bits is 5"),
    ({**CONFIGS["gptq"], "dynamic": {"-:(": {}}}, Unsupported, "'(' is not a regular expression"),
    ({**CONFIGS["gptq"], "is_marlin_format": True}, Unsupported, "is_marlin_format is True"),
    ({**CONFIGS["gptq"], "method": "qqq"}, Unsupported, "method is 'qqq'"),
    ({**CONFIGS["gptq"], "rotation": "hadamard"}, Unsupported, "unknown setting rotation='hadamard'"),
    ({**CONFIGS["gptq"], "adapter": {"name": "lora"}}, Unsupported, "unknown setting adapter="),
    ({**CONFIGS["gptq"], "something_new": 1}, Unsupported, "unknown setting something_new=1"),
    (
        {**CONFIGS["gptq"], "modules_in_block_to_quantize": "mlp"},
        InvalidArgument,
        "modules_in_block_to_quantize: is 'mlp'",
    ),
    ({**CONFIGS["gptq"], "group_size": "many"}, InvalidArgument, "group_size: is 'many'"),
    ({**CONFIGS["awq"], "version": "gemv"}, Unsupported, "version is 'gemv'"),
    ({**CONFIGS["awq"], "zero_point": False}, Unsupported, "zero_point is False"),
    ({**CONFIGS["awq"], "checkpoint_format": "gemv"}, Unsupported, "checkpoint_format is 'gemv'"),
    ({**CONFIGS["awq"], "format": "marlin"}, Unsupported, "format is 'marlin'"),
    ({**CONFIGS["awq"], "pack_dtype": "int8"}, Unsupported, "pack_dtype is 'int8'"),
    ({**CONFIGS["awq"], "desc_act": True}, Unsupported, "desc_act is True"),
    ({**CONFIGS["deepseek_fp8"], "fmt": "e5m2"}, Unsupported, "fmt is 'e5m2'"),
    ({**CONFIGS["deepseek_fp8"], "weight_block_size": [128]}, InvalidArgument, "the size of blocks is"),
    ({**CONFIGS["deepseek_fp8"], "activation_scheme": "static"}, Unsupported, "activation_scheme is 'static'"),
    (compressed_config("marlin-24", WEIGHTS), Unsupported, "format 'marlin-24'"),
    (
        compressed_config("nvfp4-pack-quantized", NVFP4 | {"group_size": 32}),
        Unsupported,
        "nvfp4-pack-quantized requires 16",
    ),
    (compressed_config("nvfp4-pack-quantized", NVFP4, {"num_bits": 8, "type": "float"}), Unsupported, "num_bits is 8"),
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
    (compressed_config("int-quantized", WEIGHTS, ignore=["re:("]), Unsupported, "is not a regular expression"),
    (
        compressed_config("int-quantized", WEIGHTS, quantization_status="calibration"),
        Unsupported,
        "quantization_status is 'calibration'",
    ),
]
READ_ALIKE = [
    ("gptq", {"hyb_act": False, "pack_impl": "cpu", "method": "gptq", "is_marlin_format": False, "adapter": None}),
    (
        "awq",
        {
            "method": "awq",
            "format": "gemm",
            "checkpoint_format": "gemm",
            "pack_dtype": "int32",
            "pack_impl": "cpu",
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "dynamic": {},
            "meta": {"quantizer": ["gptqmodel:5.0.0"]},
        },
    ),
    (
        "gptq",
        {
            "autoround_version": "0.13.0",
            "data_type": "int",
            "enable_quanted_input": True,
            "provider": "auto-round",
            "to_quant_block_names": None,
            "offload_to_disk": True,
            "gptaq": None,
            "damp_percent": 0.05,
        },
    ),
    ("w8a8", {"quantization_status": "frozen"}),
    ("deepseek_fp8", {"dequantize": False}),
]


@pytest.mark.parametrize(("config", "error", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_what_is_not_computed_is_refused_by_name(config: Mapping[str, object], error, named: str) -> None:
    with pytest.raises(error) as refusal:
        find_scheme({"quantization_config": config})
    assert named in str(refusal.value)


@pytest.mark.parametrize(("name", "more"), READ_ALIKE, ids=[name for name, _ in READ_ALIKE])
def test_what_newer_writers_add_changes_nothing(name: str, more: Mapping[str, object]) -> None:
    assert find_scheme({"quantization_config": {**CONFIGS[name], **more}}) == find_scheme(
        {"quantization_config": CONFIGS[name]}
    )


def formats(config: Mapping[str, object], *modules: str) -> list[tuple[str, int | None, bool] | None]:
    scheme = find_scheme({"quantization_config": config})
    assert scheme is not None
    forms = [scheme.quantization.get_format(module) for module in modules]
    return [None if form is None else (form.values, form.group_size, form.has_group_ids) for form in forms]


def test_modules_have_settings_of_their_own_by_gptqmodels_dynamic() -> None:
    """As GPTQModel: the first expression that matches from a name's start holds."""
    dynamic = {
        r"-:.*\.up_proj": {},
        r"+:.*layers\.0\..*proj": {"bits": 8, "group_size": 32, "desc_act": True, "mse": 2.4},
        r".*\.down_proj": {"group_size": -1},
    }
    config = {**CONFIGS["gptq"], "dynamic": dynamic}
    names = ("layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj", "layers.1.mlp.gate_proj")
    assert formats(config, *(f"model.{name}" for name in names)) == [
        None,
        ("int8", 32, True),
        ("int4", None, False),
        ("int4", 16, False),
    ]
    awq = {**CONFIGS["awq"], "dynamic": {r"+:.*\.o_proj": {"group_size": 32}}}
    assert formats(awq, "model.layers.1.self_attn.o_proj") == [("int4", 32, False)]


@pytest.mark.parametrize("packing", ["auto_gptq", "auto_awq"])
def test_auto_round_is_the_layout_that_it_names(packing: str) -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r".*mlp\.gate_proj.*": {"bits": 16, "act_bits": 16},
        "model.layers.0.mlp.down_proj": {"bits": 4, "group_size": 32, "data_type": "int", "sym": True},
    }
    config = {**AUTO_ROUND, "packing_format": f"auto_round:{packing}", "extra_config": extra}
    names = ("layers.0.mlp.up_proj", "layers.1.mlp.gate_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj")
    got = formats(config, *(f"model.{name}" for name in names), "lm_head")
    assert got == [None, None, ("int4", 32, False), ("int4", 16, False), None]
    scheme = find_scheme({"quantization_config": config})
    assert type(scheme).__name__ == {"auto_gptq": "Gptq", "auto_awq": "Awq"}[packing]


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_config_may_say_that_the_output_matrix_is_quantized(name: str) -> None:
    scheme = find_scheme({"quantization_config": {**CONFIGS[name], "lm_head": True}})
    assert scheme is not None and scheme.quantization.has_output


@pytest.mark.parametrize("name", ["deepseek_fp8", "fp8_static"])
def test_rows_are_not_rounded_for_weights_that_shall_be_dequantized(name: str) -> None:
    scheme = find_scheme({"quantization_config": {**CONFIGS[name], "dequantize": True}})
    form = None if scheme is None else scheme.quantization.get_format("model.layers.0.mlp.up_proj")
    assert form is not None and form.activations is None and not form.has_input_scale


def test_names_go_before_expressions_and_those_before_the_class() -> None:
    config = compressed_config("int-quantized", WEIGHTS)
    groups = config["config_groups"]
    assert isinstance(groups, dict)
    groups["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS, "input_activations": ROWS}
    groups["group_2"] = {"targets": ["model.layers.0.self_attn.q_proj"], "weights": {**WEIGHTS, "num_bits": 4}}
    scheme = find_scheme({"quantization_config": config})
    assert scheme is not None
    layer = "model.layers.0"
    forms = [scheme.quantization.get_format(f"{layer}.{module}") for module in ("self_attn.q_proj", "self_attn.k_proj")]
    assert [(form.values, form.activations) for form in forms if form] == [("int4", None), ("int8", "int8")]
    other = scheme.quantization.get_format(f"{layer}.mlp.up_proj")
    assert other is not None and other.activations is None


def test_expressions_may_begin_with_flags() -> None:
    config = compressed_config("int-quantized", WEIGHTS, ignore=["re:(?i).*UP_PROJ|nothing"])
    scheme = find_scheme({"quantization_config": config})
    assert scheme is not None
    assert scheme.quantization.get_format("model.layers.0.mlp.up_proj") is None
    assert scheme.quantization.get_format("model.layers.0.mlp.down_proj") is not None


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("model.decoder.layers.0.fc1", "decoder.layers.0.fc1"),
        ("transformer.h.0.mlp.c_fc", "h.0.mlp.c_fc"),
    ],
)
def test_a_module_has_the_same_format_by_any_of_its_names(own: str, other: str) -> None:
    for ignored in (own, other, f"re:{own.replace('.', '[.]')}", f"re:{other.replace('.', '[.]')}"):
        scheme = find_scheme({"quantization_config": compressed_config("int-quantized", WEIGHTS, ignore=[ignored])})
        assert scheme is not None
        assert [scheme.quantization.get_format(name) for name in (own, other)] == [None, None]
        assert scheme.quantization.get_format(own.replace("0", "1")) is not None


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
        name: scheme.quantization.get_format(name)
        for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj", "model.layers.1.mlp.gate")
    }
    assert [form and form.values for form in forms.values()] == [None, None, "int8", None]
    down = scheme.quantization.get_format("model.layers.0.mlp.down_proj")
    assert down is not None and down.values == "int4"
    assert find_scheme({"architectures": ["LlamaForCausalLM"]}) is None


@pytest.mark.parametrize(("written", "weights"), [("nvfp4-pack-quantized", NVFP4), ("int-quantized", WEIGHTS)])
def test_a_format_that_takes_more_memory_than_in_the_file_states_it(written: str, weights: dict[str, object]) -> None:
    scheme = find_scheme({"quantization_config": compressed_config(written, weights)})
    assert isinstance(scheme, CompressedTensors)
    cost = scheme.widening()
    assert cost is None if weights is WEIGHTS else str(cost).startswith("nvfp4-pack-quantized: 4.5 bits per weight")
