"""The same comparisons with transformers in this process: lengths, configs and searches that no golden holds."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.demo_model.saving import save_params
from jpaged import demo
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.device.executor import JaxExecutor
from jpaged.models.decoder import DecoderConfig
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.model import Model
from jpaged.models.rope import cos_sin
from jpaged.types import SamplingParams
from tests.e2e.rig import generate, only, open_llm
from tests.models import dense
from tests.models.tiny import TinyCase, tiny_case, write_checkpoint
from tests.parity import cases
from tests.parity.cases import BeamCase, check_search

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
make: Any = importlib.import_module("tests.parity.make")
FLOAT32 = np.dtype(jnp.float32)


def random_ids(num_tokens: int, vocab_size: int = 131) -> np.ndarray:
    return np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens).astype(np.int32)


# --- models -----------------------------------------------------------------------------------------------------------


def check_logits(logits: np.ndarray, theirs: Any, token_ids: np.ndarray) -> None:
    """Compare with transformers' model; one that magnifies rounding may differ by twice its own distance to float64."""
    want, most = make.logits(theirs, token_ids), 1e-4
    if np.abs(logits - want).max() > most:
        theirs.set_experts_implementation("eager")  # the grouped product of PyTorch has no float64
        most = 2 * np.abs(make.logits(theirs.double(), token_ids) - want).max()
    np.testing.assert_allclose(logits, want, rtol=0, atol=min(most, 1e-3))


@pytest.mark.parametrize("case", cases.MODELS.values(), ids=lambda case: case.name)
def test_logits_equal_those_of_transformers_at_any_length(case: TinyCase, tmp_path: Path) -> None:
    """At 131 tokens after each of them, and where the length itself turns positions at short ones, too."""
    write_checkpoint(case, tmp_path)
    model = Model(read_config(tmp_path), FLOAT32)
    params = load_params(model, tmp_path, "loop")
    for num_tokens in (2, 63, 131) if "dynamic" in case.name else (131,):
        token_ids = random_ids(num_tokens)
        check_logits(dense.logits(model, params, token_ids, num_tokens), make.load(tmp_path), token_ids)


@pytest.mark.parametrize("name", ["mistral_yarn", "qwen2_tied_yarn", "opt_post_norm", *cases.FAMILIES])
def test_a_checkpoint_that_we_write_is_read_by_transformers_to_the_same_logits(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    model = Model(from_hf(case.config), FLOAT32)
    params = load_params(model, write_checkpoint(case, tmp_path / "theirs"), "loop")
    save_params(params, model.config, tmp_path / "ours")
    token_ids = np.array(case.prompt(), np.int32)
    expected = dense.logits(model, params, token_ids, len(token_ids))
    check_logits(expected, make.load(tmp_path / "ours"), token_ids)


@pytest.mark.parametrize("name", cases.FAMILIES)
def test_a_checkpoint_that_transformers_writes_is_read_to_its_logits(name: str, tmp_path: Path) -> None:
    """As its own `save_pretrained` lays it out: config, names and types of tensors."""
    case = tiny_case(name)
    theirs = make.load(write_checkpoint(case, tmp_path / "ours"))
    theirs.save_pretrained(tmp_path / "theirs")
    model = Model(read_config(tmp_path / "theirs"), FLOAT32)
    token_ids = np.array(case.prompt(), np.int32)
    ours = dense.logits(model, load_params(model, tmp_path / "theirs", "loop"), token_ids, len(token_ids))
    check_logits(ours, theirs, token_ids)


def test_a_gemma_that_reads_images_answers_texts(tmp_path: Path) -> None:
    """Its language model is served out of the whole checkpoint, as transformers lays that out.

    Whether the embedding is tied is said of the whole: what text_config says of it is passed over.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    sight: dict[str, object] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sight |= {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    text = {key: value for key, value in tiny_case("gemma3").config.items() if key != "architectures"}
    text["tie_word_embeddings"] = False
    whole = AutoConfig.for_model("gemma3", text_config=text, vision_config=sight, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(whole, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    token_ids = random_ids(40)
    model = Model(read_config(tmp_path), FLOAT32)
    ours = dense.logits(model, load_params(model, tmp_path, "loop"), token_ids, len(token_ids))
    np.testing.assert_allclose(ours, make.logits(theirs, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("mistral3", "mistral_window"),
        ("mistral3", "ministral3"),
        ("mistral3", "mistral4"),
        ("llama4", "llama4_text"),
    ],
)
def test_a_model_that_reads_images_answers_texts(model_type: str, text: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    sight: dict[str, object] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sight |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    if model_type == "llama4":
        sight |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    else:
        sight |= {"model_type": "pixtral", "head_dim": 16}
    inner = {key: value for key, value in tiny_case(text).config.items() if key != "architectures"}
    whole = AutoConfig.for_model(model_type, text_config=inner, vision_config=sight, tie_word_embeddings=False)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(whole, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    token_ids = random_ids(40)
    model = Model(read_config(tmp_path), FLOAT32)
    language = dataclasses.replace(model.config, vision=None)
    assert from_hf(to_hf(model.config)) == language
    ours = dense.logits(model, load_params(model, tmp_path, "loop"), token_ids, len(token_ids))
    np.testing.assert_allclose(ours, make.logits(theirs, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["phimoe", "llama4_text"])
def test_published_ropes_that_no_checkpoint_has_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """At lengths up to that of pretraining: beyond it, transformers keeps the short factors of Phi-3.5-MoE."""
    case = tiny_case(name)
    head_dim = from_hf(case.config).head_dim
    factors = np.linspace(1, 3, head_dim // 2)
    phimoe: dict[str, object] = {"rope_type": "longrope", "short_mscale": 1.2, "long_mscale": 1.2}
    phimoe |= {"short_factor": factors.tolist(), "long_factor": (2 * factors).tolist()}
    llama4 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    rope = {"phimoe": phimoe, "llama4_text": llama4}[name] | {"original_max_position_embeddings": 48}
    write_checkpoint(case, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**case.config, "rope_parameters": rope}), encoding="utf-8")
    model = Model(read_config(tmp_path), FLOAT32)
    token_ids = random_ids(40)
    ours = dense.logits(model, load_params(model, tmp_path, "loop"), token_ids, len(token_ids))
    np.testing.assert_allclose(ours, make.logits(make.load(tmp_path), token_ids), rtol=0, atol=1e-4)


def test_positions_far_out_keep_their_frequencies(tmp_path: Path) -> None:
    """At position 100 000 a rounding of the frequencies in another way would turn heads by hundredths of a radian."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    write_checkpoint(tiny_case("llama3_new_style"), tmp_path)
    positions = np.arange(99_000, 100_000, dtype=np.int32)
    cos, sin = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))(
        torch.zeros(1), torch.tensor(positions[None].astype(np.int64))
    )
    half = cos.shape[-1] // 2
    config = read_config(tmp_path)
    assert isinstance(config, DecoderConfig)
    ours = cos_sin(config.ropes[0], config.head_dim, jnp.asarray(positions), jnp.asarray(positions) + 1)
    np.testing.assert_allclose(ours[0], cos[0, :, :half].numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours[1], sin[0, :, :half].numpy(), rtol=0, atol=1e-5)


# --- the packaged model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 100, 384])
def test_logits_of_the_packaged_model_equal_those_of_transformers(num_tokens: int) -> None:
    config = read_config(demo.FOLDER)
    model = Model(config, FLOAT32)
    token_ids = random_ids(num_tokens, config.vocab_size)
    logits = dense.logits(model, load_params(model, demo.FOLDER, "loop"), token_ids, num_tokens)
    np.testing.assert_allclose(logits, make.logits(make.load(demo.FOLDER), token_ids), rtol=0, atol=1e-4)


def test_the_name_the_folder_and_transformers_are_one_model_to_their_ends() -> None:
    """By its name, by its folder, and as transformers tells it, the story ends at the same token."""
    messages = [{"role": "user", "content": "Please tell me a bedtime story about a little star."}]
    how = SamplingParams(temperature=0.0, max_tokens=200, logprobs=0)
    options = {"max_model_len": 256, "num_blocks": 32}
    with open_llm("demo", **options) as llm:
        (output,) = llm.chat(messages, how)
    by_name, prompt = only(output), list(output.prompt_token_ids)
    with open_llm(demo.FOLDER, **options) as llm:
        by_folder = generate(llm, [prompt], how)[0]
    assert (by_folder.token_ids, by_folder.text) == (by_name.token_ids, by_name.text)
    theirs, _ = make.continue_greedily(make.load(demo.FOLDER), prompt, 200, ignore_eos=False)
    assert theirs == list(by_name.token_ids)


# --- beam searches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_random_search_finds_what_transformers_finds_now(executor: JaxExecutor, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    width = int(rng.integers(2, 7))
    rules: list[bool | Literal["never"]] = [True, False, "never"]
    case = BeamCase(
        prompt_seed=int(rng.integers(3, 20)),
        width=width,
        n=int(rng.integers(1, width + 1)),
        max_tokens=int(rng.integers(2, 25)),
        eos_token_ids=tuple(sorted(rng.choice(np.arange(3, 131), 3, replace=False).tolist())),
        length_penalty=float(rng.choice([-1.0, 0.0, 0.7, 1.0, 2.0])),
        early_stopping=rules[seed % 3],
    )
    check_search(executor, case, make.search(make.load_for_beams(cases.BEAMS_CHECKPOINT, tmp_path), case))
