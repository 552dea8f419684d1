"""The built-in configurations are the published models: parsed like a checkpoint's, and as large as the originals."""

from __future__ import annotations

import pytest

from jpaged.checkpoints.names import num_params
from jpaged.models.hf_config import from_hf
from jpaged.plan.compilation import find_config
from jpaged.plan.known_models import KNOWN_MODELS, find_known
from tests.models.tiny import tensors, tiny_cases

# As the hub counts the tensors of the repository that each is of (a tied output matrix once); OPT-175B is in no
# repository, and its number follows from the paper's table 1. Of Gemma 3 from 4B on, without vision and projector, and
# DeepSeek-V3's without the layer that drafts.
NUM_PARAMS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "qwen2-57b-a14b": 57_408_658_944,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "gemma-3n-e4b": 6_835_235_568,
    "gemma-4-e2b": 4_628_569_379,
    "gemma-4-31b": 30_697_345_340,
    "gemma-4-26b-a4b": 25_233_141_790,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 178_557_088_768,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "lfm2-350m": 354_483_968,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_930_560,
    "kimi-linear-48b-a3b": 49_122_681_728,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "mamba-codestral-7b": 7_285_403_648,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "granite-4.0-h-350m": 340_332_224,
    "granite-4.0-h-tiny": 6_939_037_248,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-7b": 7_298_617_344,
    "command-r7b": 8_028_033_024,
    "granite-3.1-1b-a400m": 1_334_628_352,
}


@pytest.mark.long
def test_every_model_has_the_published_number_of_parameters() -> None:
    assert {name: model.num_params for name, model in KNOWN_MODELS.items()} == NUM_PARAMS


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_parameters_are_counted_as_a_checkpoint_holds_them(case) -> None:
    assert num_params(from_hf(case.config)) == sum(tensor.size for tensor in tensors(case).values())


@pytest.mark.parametrize(
    ("name", "heads", "max_model_len"),
    [
        ("llama-3-8b", (32, 8, 128), 8192),
        ("llama-3.2-1b", (32, 8, 64), 131072),
        ("qwen3-0.6b", (16, 8, 128), 40960),
        ("qwen2.5-7b", (28, 4, 128), 131072),
        ("mistral-7b-v0.3", (32, 8, 128), 32768),
        ("deepseek-v2-lite", (16, 1, 576), 163840),
        ("deepseek-v3", (128, 1, 576), 163840),
        ("opt-13b", (40, 40, 128), 2048),
    ],
)
def test_a_known_model_has_its_heads_and_its_length(name: str, heads: tuple[int, int, int], max_model_len: int) -> None:
    config = KNOWN_MODELS[name].config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads
    assert config.max_model_len == max_model_len


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("facebook/opt-13b", "opt-13b"),
        ("someone/Llama-3.1-8B", None),
        ("llama-3.1-9b", None),
    ],
)
def test_a_model_is_found_by_its_name_and_its_hub_ids(name: str, found: str | None) -> None:
    known = find_known(name)
    assert (None if known is None else known.name) == found


def test_names_and_repositories_mean_their_own_models() -> None:
    for model in KNOWN_MODELS.values():
        assert find_known(model.name) is find_known(model.repository) is model


def test_a_built_in_configuration_takes_overrides() -> None:
    rope = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    name, config = find_config("Qwen/Qwen3-8B", {"rope_scaling": rope})
    assert (name, config.max_model_len) == ("qwen3-8b", 131072)
    assert find_config("qwen3-8b", {"num_hidden_layers": 2})[1].num_layers == 2
