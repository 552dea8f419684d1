"""Device memory that is released and restored: the same tokens, from the same programs, and no array that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.device.executor import DeviceSleeper, JaxExecutor
from jpaged.errors import InvalidArgument, Unavailable, Unsupported
from jpaged.llm import TokensPrompt
from jpaged.types import RequestOutput
from tests.e2e.rig import engine_of, generate, open_llm, random_prompts, write_model
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint

SIZES: dict[str, Any] = {"num_blocks": 37, "block_size": 8, "max_model_len": 64, "enable_sleep_mode": True}
PROMPTS = random_prompts([9, 20, 33])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def sleeper_of(llm: LLM, *, is_on_host: bool) -> DeviceSleeper:
    """What releases its memory, as on a device that uses host memory or has its own."""
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor) and executor.sleeper is not None
    executor.sleeper._is_on_host = is_on_host
    return executor.sleeper


def num_pool_bytes(llm: LLM) -> int:
    """Bytes of the live arrays in the shape of its pool."""
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor)
    layout = executor.step.layout
    like = [array for array in jax.live_arrays() if array.shape == layout.shape and array.dtype == layout.storage_dtype]
    return sum(array.nbytes for array in like)


def leaves_of(llm: LLM) -> list[jax.Array]:
    """Its parameters."""
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor)
    return jax.tree.leaves(executor._runner._params)


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    return [one.token_ids for one in generate(llm, PROMPTS, GREEDY)]


def check_sleep(llm: LLM, level: int, *, is_on_host: bool) -> None:
    """One night: afterwards tokens are equal, though blocks, and weights unless they stay, were gone."""
    sleeper, before = sleeper_of(llm, is_on_host=is_on_host), tokens_of(llm)
    weights, num_bytes = leaves_of(llm), num_pool_bytes(llm)
    assert num_bytes > 0
    stays = is_on_host and level == 1
    llm.sleep(level)
    assert num_pool_bytes(llm) == 0
    assert [leaf.is_deleted() for leaf in weights] == [not stays] * len(weights)
    copies = jax.tree.leaves(sleeper._offloaded)
    assert [type(copy) for copy in copies] == ([] if stays or level == 2 else [np.ndarray] * len(weights))
    assert llm.wake_up(["weights"]) is False and num_pool_bytes(llm) == 0
    assert len(leaves_of(llm)) == len(weights)
    assert llm.wake_up(["kv_cache"]) is True and num_pool_bytes(llm) == num_bytes
    assert tokens_of(llm) == before


@pytest.mark.parametrize(
    ("level", "is_on_host"),
    [(1, False), pytest.param(1, True, marks=pytest.mark.long), pytest.param(2, True, marks=pytest.mark.long)],
)
def test_tokens_are_equal_after_a_sleep(tmp_path: Path, level: int, *, is_on_host: bool) -> None:
    with open_llm(write_model("llama3_tied", tmp_path), **SIZES) as llm:
        check_sleep(llm, level, is_on_host=is_on_host)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_mha", {"tensor_parallel_size": 2}),
        ("llama_mha", {"quantization": "int8"}),
        ("llama_mha", {"linear_backend": "xla", "kv_cache_dtype": "fp8"}),
        ("mistral_window", {"swap_space": 0.01}),
    ],
)
def test_every_form_of_weights_and_blocks_sleeps(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    with open_llm(write_model(name, tmp_path), **{**SIZES, **options}) as llm:
        for level in (1, 2, 1):
            check_sleep(llm, level, is_on_host=False)


@pytest.mark.long
def test_the_memory_of_a_level_shrinks_and_never_grows(tmp_path: Path) -> None:
    with open_llm(write_model("llama_mha", tmp_path), **SIZES) as llm:
        before, sleeper = tokens_of(llm), sleeper_of(llm, is_on_host=False)
        for levels in ((1, 1), (1, 2), (2, 1)):
            for level in levels:
                llm.sleep(level)
            assert sleeper._offloaded is not None
            assert bool(sleeper._offloaded) == (levels == (1, 1))
            with pytest.raises(Unavailable, match="the weights are asleep"):
                sleeper._runner.params  # noqa: B018
            llm.wake_up()
            assert tokens_of(llm) == before


@pytest.mark.long
def test_discarded_weights_are_those_of_the_files_at_the_end_of_a_sleep(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path)
    with open_llm(folder, **SIZES) as llm:
        before = tokens_of(llm)
        file = folder / "model.safetensors"
        weights = file.read_bytes()
        llm.sleep(2)
        file.unlink()
        with pytest.raises(InvalidArgument, match="safetensors"):
            llm.wake_up()
        assert llm.is_sleeping()
        file.write_bytes(weights)
        assert llm.wake_up() is True and tokens_of(llm) == before


@pytest.mark.long
def test_adapters_are_in_their_slots_after_a_sleep(tmp_path: Path) -> None:
    folder, adapter = (
        write_checkpoint(tiny_case("llama_gqa_bias"), tmp_path / "base"),
        TinyAdapter(tiny_case("llama_gqa_bias"), "a"),
    )
    adapter.write(tmp_path / "a")
    with open_llm(folder, **SIZES, lora=[f"a={tmp_path / 'a'}"]) as llm:

        def run() -> list[RequestOutput]:
            return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS], GREEDY, adapter="a")

        before = [output.outputs[0].token_ids for output in run()]
        assert before != tokens_of(llm)
        for level in (1, 2):
            sleeper_of(llm, is_on_host=False)
            llm.sleep(level)
            llm.wake_up()
            assert [output.outputs[0].token_ids for output in run()] == before


@pytest.mark.long
def test_several_replicas_sleep_without_discarding(tmp_path: Path) -> None:
    with open_llm(write_model("llama_mha", tmp_path), **SIZES, data_parallel_size=2) as llm:
        before = tokens_of(llm)
        llm.sleep()
        llm.wake_up()
        assert tokens_of(llm) == before
        with pytest.raises(Unsupported, match="level 2 is not supported with several replicas"):
            llm.sleep(2)
