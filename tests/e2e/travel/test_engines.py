"""Prefixes that travel between real engines: the same tokens, whatever the cache, the windows and the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jpaged.engine.kv_cache.blocks import root_block_hash
from jpaged.engine.kv_cache.offload.transfer import BlockPosition
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm, random_prompts, write_model
from tests.models.tiny import tiny_case, write_checkpoint

pytestmark = pytest.mark.usefixtures("quick_programs")

WAIT_S = 300.0
"""For what an engine thread answers; a busy machine takes seconds."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def carry(a: LLM, b: LLM, prompt: list[int]) -> int:
    """Takes what one knows of a prompt to the other; the blocks that it would find."""
    there, here = a._serving.engine.kv_transfer, b._serving.engine.kv_transfer
    assert there.kv_identity() == here.kv_identity()
    leaving = there.leave(there.chain(root_block_hash(""), prompt)).result(WAIT_S)
    contents: dict[BlockPosition, bytes] = {}
    for part in range(leaving.num_parts):
        leaving.when_there(part).result(WAIT_S)
        leaving.read(part, lambda place, view: contents.update({place: bytes(view)}))
    leaving.close()
    arriving = here.arrive(here.chain(root_block_hash(""), prompt))
    homes = arriving.reserve(len(contents)).result(WAIT_S)
    for home, content in zip(homes, contents.values(), strict=True):
        arriving.write(home, 0, content)
    arriving.enter(list(contents), homes)
    return arriving.close().result(WAIT_S)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2", {}),
        pytest.param("qwen2", {"kv_cache_dtype": "int8"}, marks=pytest.mark.long),
        pytest.param("gemma3", {}, marks=pytest.mark.long),
        pytest.param("llama3_tied", {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param("qwen2", {"data_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param("llama3_tied", {"context_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_tokens_are_the_same_behind_a_prefix_that_travelled(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if name == "gemma3":
        write_checkpoint(tiny_case(name), folder)
    else:
        write_model(name, folder)
    sizes = {"swap_space": 0.005, "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16}
    (prompt,) = random_prompts([42])
    wanted = [TokensPrompt(prompt_token_ids=prompt)]
    with open_llm(folder, **sizes, **options) as a, open_llm(folder, **sizes, **options) as b:
        (first,) = a.generate(wanted, GREEDY)
        assert carry(a, b, prompt) == 10
        (again,) = b.generate(wanted, GREEDY)
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 40)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.long
def test_servers_of_other_weights_or_another_cache_have_another_identity(tmp_path: Path) -> None:
    one, other = write_model("qwen2", tmp_path / "one"), write_model("qwen3", tmp_path / "other")
    sizes = {"swap_space": 0.005, "num_blocks": 64}
    identities = set()
    for folder, options in ((one, {}), (one, {"kv_cache_dtype": "int8"}), (one, {"block_size": 8}), (other, {})):
        with open_llm(folder, **sizes, **options) as llm:
            identities.add(llm._serving.engine.kv_transfer.kv_identity())
    assert len(identities) == 4
