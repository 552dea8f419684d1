"""A pool is used to its last block under load: groups yield, everybody ends right, and every block comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from jpaged.errors import InvalidArgument
from jpaged.llm import LLM
from jpaged.types import SamplingParams
from tests.e2e.rig import engine_of, generate, open_llm, random_prompts, write_model
from tests.e2e.test_options import watch

NUM_BLOCKS, BLOCK_SIZE = 12, 4
SAMPLING = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=11)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.long
def test_the_last_block_is_given_away_and_all_requests_end_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    folder = write_model("llama_mha", tmp_path)
    prompts = random_prompts([5, 9, 7, 12, 3, 8, 6, 10, 4, 11])
    options = {"max_model_len": 40, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "swap_space": 0.001}
    with open_llm(folder, preemption_mode=mode, **options) as llm:
        alone = [generate(llm, [prompt], SAMPLING)[0].token_ids for prompt in prompts]
        assert engine_of(llm).load().num_preemptions == 0
        loads = watch(llm, monkeypatch)
        together = [completion.token_ids for completion in generate(llm, prompts, SAMPLING)]
    assert together == alone
    assert max(load.num_blocks_used for load in loads) == NUM_BLOCKS
    assert loads[-1].num_preemptions > 0
    assert all(len(token_ids) == 20 for token_ids in together)


def test_more_blocks_than_memory_are_refused(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path)
    with pytest.raises(
        InvalidArgument,
        match=r"num_blocks: 40000000 blocks do not fit: .* blocks of 16384 bytes; lower num_blocks to \d+",
    ):
        LLM(str(folder), num_blocks=40_000_000)
