"""Experts that tokens were routed to, against a pass over the whole sequence without a cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jpaged import LLM, TokensPrompt
from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument
from jpaged.kernels.experts.routing import route
from jpaged.models.decoder import modules, shared_kv
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.models.tokens import TokenBatch
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import engine_of, open_llm, random_prompts
from tests.models import dense
from tests.models.tiny import TinyCase, tiny_case, write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "granitemoe", "glm4_moe"),
    *("minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "phimoe", "llama4_text", "glm4_moe_lite", "mistral4"),
    *("kimi_linear", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "gemma4_moe", "nemotron_h_moe"),
)


@dataclasses.dataclass(frozen=True)
class Uncached:
    """A pass without a cache, layer by layer."""

    model: Model
    params: Any
    folder: Path

    @classmethod
    def of(cls, case: TinyCase, folder: Path) -> Uncached:
        write_checkpoint(case, folder)
        model = Model(from_hf(case.config), np.dtype(np.float32))
        return cls(model, load_params(model, folder, "loop"), folder)

    def experts(self, token_ids: Sequence[int], num_prompt: int) -> NDArray[np.integer[Any]]:
        """The experts of each token in every layer, as `route` returns them."""
        seen: list[NDArray[Any]] = []

        def watched(*args: Any) -> Any:
            routes = route(*args)
            seen.append(np.asarray(routes.ids_tk))
            return routes

        ids_t, positions_t = jnp.array(token_ids), jnp.arange(len(token_ids))
        tokens = TokenBatch(ids_t, positions_t, jnp.maximum(positions_t + 1, num_prompt))
        with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
            patch.setattr(modules, "route", watched)
            patch.setattr(shared_kv, "route", watched)
            self.model.run(self.params, tokens, dense.attend, (), "loop")
        found = iter(seen)
        layers = self.model.config.layer_kinds
        blank = np.zeros_like(seen[0])
        return np.stack([next(found) if kind.is_sparse else blank for kind in layers], axis=1)

    def check(self, prompt: Sequence[int], one: CompletionOutput, start: int = 0) -> None:
        """The experts of an output are those of this pass."""
        token_ids = [*prompt, *one.token_ids]
        assert one.routed_experts is not None
        assert one.routed_experts.dtype == np.uint8
        want = self.experts(token_ids[:-1], len(prompt))[start:]
        np.testing.assert_array_equal(one.routed_experts, want)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Uncached:
    return Uncached.of(tiny_case("qwen3_moe"), tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def llm(qwen: Uncached) -> Iterator[LLM]:
    with open_llm(qwen.folder, enable_return_routed_experts=True, max_model_len=128, block_size=8) as llm:
        yield llm


def run(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[CompletionOutput]]:
    wrapped = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    return [list(output.outputs) for output in llm.generate(wrapped, params)]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Prompts in chunks, next to others, and cached prefixes."""
    uncached, prompts = Uncached.of(tiny_case(family), tmp_path), random_prompts([3, 21, 40], seed=1)
    with open_llm(tmp_path, enable_return_routed_experts=True, max_model_len=128, block_size=8) as llm:
        for _ in range(2):
            for prompt, (one,) in zip(prompts, run(llm, prompts, GREEDY), strict=True):
                uncached.check(prompt, one)


@pytest.mark.long
def test_samples_share_the_prompt(llm: LLM, qwen: Uncached) -> None:
    """Forks, and blocks that are copied when samples write to them."""
    prompt = random_prompts([21], seed=2)[0]
    (outputs,) = run(llm, [prompt], dataclasses.replace(GREEDY, temperature=1.0, n=4, seed=1))
    assert len({one.token_ids for one in outputs}) > 1
    for one in outputs:
        qwen.check(prompt, one)


@pytest.mark.long
def test_prompt_start(llm: LLM, qwen: Uncached) -> None:
    prompt = random_prompts([21], seed=3)[0]
    for start in (1, 8, 19, 21):
        ((one,),) = run(llm, [prompt], dataclasses.replace(GREEDY, routed_experts_prompt_start=start))
        qwen.check(prompt, one, start)
    with pytest.raises(InvalidArgument, match=r"routed_experts_prompt_start: 22 is over the 21 tokens of the prompt"):
        run(llm, [prompt], dataclasses.replace(GREEDY, routed_experts_prompt_start=22))


@pytest.mark.long
def test_beams_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="beam_width"):
        run(llm, [[5, 6]], SamplingParams(beam_width=2, n=2, max_tokens=3))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption(qwen: Uncached, mode: str) -> None:
    """A pool that is too small for all requests."""
    options: dict[str, Any] = {"preemption_mode": mode, "swap_space": 0.01, "num_blocks": 17, "block_size": 4}
    prompts = random_prompts([17, 18, 19, 11], seed=4)
    params = dataclasses.replace(GREEDY, max_tokens=24)
    with open_llm(qwen.folder, enable_return_routed_experts=True, max_model_len=64, **options) as llm:
        for prompt, (one,) in zip(prompts, run(llm, prompts, params), strict=True):
            qwen.check(prompt, one)
        load = llm.load()
        assert load.num_preemptions > 0


@pytest.mark.long
def test_prefixes_in_host_memory(qwen: Uncached) -> None:
    """Prefixes that leave the device come back with their experts."""
    options: dict[str, Any] = {"swap_space": 0.01, "num_blocks": 12, "block_size": 4}
    prompts = random_prompts([30, 31, 29], seed=5)
    with open_llm(qwen.folder, enable_return_routed_experts=True, max_model_len=48, **options) as llm:
        for _ in range(3):
            for prompt in prompts:
                ((one,),) = run(llm, [prompt], dataclasses.replace(GREEDY, max_tokens=6))
                qwen.check(prompt, one)
        assert llm.load().num_host_hit_tokens > 0


@pytest.mark.long
def test_draft_tokens(qwen: Uncached) -> None:
    """Drafts that are rejected leave no experts."""
    prompt = random_prompts([7], seed=6)[0] * 3
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    with open_llm(qwen.folder, enable_return_routed_experts=True, max_model_len=96, speculative_config=config) as llm:
        ((one,),) = run(llm, [prompt], dataclasses.replace(GREEDY, max_tokens=30))
        qwen.check(prompt, one)


@pytest.mark.long
def test_new_weights(tmp_path: Path) -> None:
    """After an update, no experts of former weights are returned."""
    case, prompt = tiny_case("qwen3_moe"), random_prompts([21], seed=7)[0]
    first = Uncached.of(case, tmp_path / "first")
    second = Uncached.of(dataclasses.replace(case, name="qwen3_moe_other"), tmp_path / "second")
    with open_llm(first.folder, enable_return_routed_experts=True, max_model_len=64) as llm:
        for weights in (first, second):
            if weights is second:
                llm.update_weights(second.folder)
            ((one,),) = run(llm, [prompt], GREEDY)
            weights.check(prompt, one)


@pytest.mark.long
def test_off(qwen: Uncached) -> None:
    """Nothing is stored or returned."""
    with open_llm(qwen.folder, max_model_len=64) as llm:
        ((one,),) = run(llm, [[5, 6, 7]], GREEDY)
        assert one.routed_experts is None
        assert engine_of(llm)._executor.routed_experts is None
