"""A model that is served from an Orbax folder says what it says from safetensors, on any number of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from jpaged.checkpoints.conversion import ConversionOptions, convert_folder
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import local_bytes
from jpaged.llm import LLM
from jpaged.types import SamplingParams
from tests.e2e.rig import assert_same, engine_of, generate, open_llm, random_prompts, write_model

pytestmark = pytest.mark.usefixtures("quick_programs")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)


def bytes_of_a_device(llm: LLM) -> int:
    """What of the parameters one device holds."""
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor)
    return local_bytes(executor._runner._params)


def check_same(name: str, sizes: list[int], folder: Path) -> None:
    source = write_model(name, folder / "once", with_tokenizer=True)
    convert_folder(source, folder / "orbax", ConversionOptions("orbax"))
    prompts = random_prompts([5, 9, 30])
    with open_llm(source, num_blocks=40) as llm:
        want = generate(llm, prompts, GREEDY)
    for size in sizes:
        with open_llm(source, num_blocks=40, tensor_parallel_size=size) as llm:
            num_bytes = bytes_of_a_device(llm)
        with open_llm(folder / "orbax", num_blocks=40, tensor_parallel_size=size) as llm:
            assert bytes_of_a_device(llm) == num_bytes
            assert_same(generate(llm, prompts, GREEDY), want)


@pytest.mark.long
def test_an_orbax_folder_is_a_model(tmp_path: Path) -> None:
    """Two key/value heads on four devices: each is kept twice; 131 tokens are padded."""
    check_same("llama3_tied", [4], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "sizes"), [("llama3_tied", [1, 8]), ("qwen3_tied", [1, 4]), ("opt", [1, 2])])
def test_any_number_of_devices_serves_it(name: str, sizes: list[int], tmp_path: Path) -> None:
    check_same(name, sizes, tmp_path)
