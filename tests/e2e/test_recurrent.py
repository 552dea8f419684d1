"""Recurrent state after random forks, preemptions, cuts, drafts and aborts: answers equal those without a cache.

Greedy answers are held against passes that recompute the whole sequence, without a pool or a state. Sampled answers and
searches are held against the same request alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged import LoRARequest, TokensPrompt
from jpaged.checkpoints.weights import load_params
from jpaged.device.executor import JaxExecutor
from jpaged.engine.engine import Engine
from jpaged.engine.speculative.draft_model import DraftModelSpeculation
from jpaged.engine.speculative.drafter import SpecDecodeController
from jpaged.errors import InvalidArgument
from jpaged.models.hf_config import from_hf
from jpaged.models.layer_kinds import count_state_bytes
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.types import SamplingParams
from tests.e2e.rig import engine_of, open_llm, random_prompts
from tests.e2e.sharing_rig import VOCAB_SIZE, Rig, make_executor
from tests.engine.proposing import Always, Guesses, InTurn
from tests.models import dense
from tests.models.adapters import TinyAdapter
from tests.models.eagle_heads import HeadSizes, random_head
from tests.models.eagle_heads import write as write_head
from tests.models.tiny import tiny_case, write_checkpoint
from tests.parity import cases

NUM_TOKENS = 14
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True),
    "three": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    "counted": SamplingParams(temperature=0.0, presence_penalty=1.5, max_tokens=NUM_TOKENS, ignore_eos=True),
    "told": SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=NUM_TOKENS, ignore_eos=True),
    "beams": SamplingParams(beam_width=3, n=3, max_tokens=NUM_TOKENS),
}
PROMPTS = random_prompts([1, 2, 3, 7, 8, 9, 24, 41], seed=3)
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 4})


@dataclass(frozen=True, eq=False, repr=False)
class Served:
    """A model, its executor, and the answers of requests alone."""

    executor: JaxExecutor
    model: Model
    params: Params
    known: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)

    def alone(self, kind: str, prompt: int) -> list[list[int]]:
        if (kind, prompt) not in self.known:
            rig = Rig(self.executor, cascade=None)
            self.known[kind, prompt] = rig.answer(PROMPTS[prompt], KINDS[kind]).sequences
        return self.known[kind, prompt]

    def recomputed(self, prompt: int) -> list[list[int]]:
        if ("", prompt) not in self.known:
            self.known["", prompt] = [dense.greedy(self.model, self.params, PROMPTS[prompt], NUM_TOKENS)]
        return self.known["", prompt]


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next", "kimi_linear", "granitemoehybrid"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, quick_programs: None
) -> Iterator[Served]:
    case, folder = tiny_case(request.param), tmp_path_factory.mktemp("recurrent")
    executor = make_executor(case, folder, max_model_len=128, state_checkpoint_interval=8)
    model = Model(from_hf(case.config), np.dtype(np.float32))
    yield Served(executor, model, load_params(model, write_checkpoint(case, folder), "loop"))
    executor.shutdown()


def draft(rig: Rig, served: Served) -> Always:
    """Run drafts that are mostly right, whether or not that pays."""
    assert isinstance(rig.engine, Engine)
    drafting = rig.engine._loop._drafter
    assert isinstance(drafting, SpecDecodeController)
    drafting._proposer = Guesses(lambda: itertools.chain.from_iterable(served.known.values()), VOCAB_SIZE)
    drafting._adaptation = always = Always(4)
    return always


@pytest.mark.long
@pytest.mark.parametrize("is_cached", [False, True])
def test_drafts_leave_the_state_of_the_last_accepted_token(served: Served, is_cached: bool) -> None:
    """In mixed batches and chunks, with samples that share a state, and with checkpoints in the way."""
    kinds = ("greedy", "seeded", "three", "told", "greedy", "seeded", "three", "greedy")
    want = [served.alone(kind, prompt) for prompt, kind in enumerate(kinds)]
    rig = Rig(served.executor, enable_prefix_caching=is_cached, speculative_config=NGRAM)
    always = draft(rig, served)
    for _ in range(2):
        answers = [rig.submit(PROMPTS[prompt], KINDS[kind]) for prompt, kind in enumerate(kinds)]
        load = rig.run()
        assert [answer.sequences for answer in answers] == want
    assert load.speculation.num_draft_tokens > always.num_accepted > 30


jobs = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, len(PROMPTS) - 1), st.integers(0, 20), st.booleans())


@pytest.mark.long
def test_requests_alone_equal_passes_without_a_cache(served: Served) -> None:
    for prompt in range(len(PROMPTS)):
        assert served.alone("greedy", prompt) == served.recomputed(prompt)


@pytest.mark.long
@given(
    work=st.lists(jobs, min_size=2, max_size=7),
    num_blocks=st.integers(12, 40),
    num_tokens=st.sampled_from([8, 11, 32]),
    overlap=st.booleans(),
    is_cached=st.booleans(),
    is_drafted=st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_fork_preemption_cut_draft_or_abort_changes_a_token(
    served: Served,
    work: list[tuple[str, int, int, bool]],
    num_blocks: int,
    num_tokens: int,
    overlap: bool,
    is_cached: bool,
    is_drafted: bool,
) -> None:
    mode = "swap" if is_cached else "recompute"
    options: dict[str, Any] = {
        "overlap": overlap,
        "enable_prefix_caching": is_cached,
        "preemption_mode": mode,
        "num_host_blocks": 30,
        "speculative_config": NGRAM if is_drafted else None,
    }
    rig = Rig(served.executor, num_blocks=num_blocks, max_num_batched_tokens=num_tokens, **options)
    if is_drafted:
        draft(rig, served)
    answers = []
    for index, (kind, prompt, num_steps, aborts) in enumerate(work):
        answers.append((kind, prompt, aborts, rig.submit(PROMPTS[prompt], KINDS[kind])))
        for _ in range(num_steps):
            rig.engine.step()
            rig.engine.check()
        if aborts:
            rig.engine.abort(str(index))
    rig.run()
    for kind, prompt, aborts, answer in answers:
        if not aborts:
            assert answer.sequences == (served.recomputed(prompt) if kind == "greedy" else served.alone(kind, prompt))


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_each_turn_of_a_chat_hits_the_one_before(served: Served, overlap: bool) -> None:
    """And so do samples, and other questions after its first prompt: every token is the one without a cache."""
    plain, chat, asked = Rig(served.executor), list(PROMPTS[6]), list[tuple[str, list[int], list[list[int]]]]()
    for turn in range(4):
        for kind in ("three", "greedy"):
            asked.append((kind, list(chat), plain.answer(chat, KINDS[kind]).sequences))
        chat += [*asked[-1][2][0], turn + 1, turn + 2]
    other = [*PROMPTS[6], 5, 6, 7]
    asked.append(("seeded", other, plain.answer(other, KINDS["seeded"]).sequences))
    # The rigs share slots of one executor, so that one must have answered everything before the other begins.
    cached, num_cached = Rig(served.executor, overlap=overlap, enable_prefix_caching=True), []
    for kind, prompt, sequences in asked:
        answer = cached.answer(prompt, KINDS[kind])
        assert answer.sequences == sequences
        num_cached.append(answer.num_cached_tokens)
    assert num_cached == [0, 16, 32, 32, 48, 48, 64, 64, 24]


@pytest.mark.long
def test_memory_for_less_than_all_preempts(served: Served) -> None:
    """What the random workloads rely on: groups of several sequences are preempted, and swapped."""
    rig = Rig(served.executor, num_blocks=14, overlap=True, preemption_mode="swap", num_host_blocks=30)
    answers = [rig.submit(PROMPTS[7], KINDS[kind]) for kind in ("three", "greedy", "beams")]
    load = rig.run()
    assert load.num_preemptions > 0
    assert load.num_blocks_swapped_out > 0
    assert [answer.sequences for answer in answers] == [served.alone(k, 7) for k in ("three", "greedy", "beams")]


@pytest.mark.long
def test_a_model_with_state_is_served_with_what_it_supports(tmp_path: Path) -> None:
    """Two replicas of LFM2: their plan has the state, and options that would need a copy of it are off."""
    case = tiny_case("lfm2")
    folder, golden = write_checkpoint(case, tmp_path / "lfm2"), cases.read("lfm2")
    options = {"skip_tokenizer_init": True, "swap_space": 0.01, "data_parallel_size": 2, "num_blocks": 60}
    with open_llm(folder, **options) as llm:
        serving = llm._serving
        state_bytes = count_state_bytes(from_hf(case.config).layer_kinds, np.dtype(np.float32))
        assert serving.model.state_bytes_per_sequence == state_bytes
        assert (serving.config.cache.enable_prefix_caching, serving.config.cache.swap_space) == (True, 0.01)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in (golden["prompt"], *PROMPTS)]
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert list(outputs[0]) == golden["tokens"][:24]
    with pytest.raises(InvalidArgument, match="context_parallel_size: is 2, but Lfm2ForCausalLM has recurrent state"):
        open_llm(folder, **{**options, "data_parallel_size": 1, "context_parallel_size": 2}).__enter__()


@pytest.mark.long
@pytest.mark.parametrize(("name", "num_devices"), [("qwen3_5_text", 1), ("qwen3_5_text", 2), ("lfm2", 2)])
def test_rows_of_several_adapters_have_their_own_state(name: str, num_devices: int, tmp_path: Path) -> None:
    """Tokens are those of merged checkpoints: in mixed batches, in chunks, preempted, and behind cached prefixes."""
    case = tiny_case(name)
    adapters = [TinyAdapter(case, "all"), TinyAdapter(case, "some", 5, 2.0, "in_proj|q_proj")]
    model, cached = Model(from_hf(case.config), np.dtype(np.float32)), list[int]()
    folders = [write_checkpoint(case, tmp_path / "base")]
    folders += [adapter.write_merged(tmp_path / f"{adapter.name}-merged") for adapter in adapters]
    tree = [load_params(model, folder, "loop") for folder in folders]
    asked = list(itertools.product(range(3), (3, 6, 7)))
    want = [dense.greedy(model, tree[own], PROMPTS[prompt], NUM_TOKENS) for own, prompt in asked]
    assert len(set(map(tuple, want))) == len(asked)
    options: dict[str, Any] = {"num_blocks": 20, "max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 8}
    options |= {"enable_lora": True, "max_lora_rank": 5, "max_loras": 2, "state_checkpoint_interval": 8}
    options |= {"max_model_len": 128, "skip_tokenizer_init": True, "tensor_parallel_size": num_devices}
    with open_llm(folders[0], **options) as llm:
        written = [one.write(tmp_path / one.name) for one in adapters]
        requests = [None, *(LoRARequest(path, i, path) for i, path in enumerate(written, 1))]
        prompts = [TokensPrompt(prompt_token_ids=PROMPTS[prompt]) for _, prompt in asked]
        outputs = llm.generate(prompts, KINDS["greedy"], lora_request=[requests[own] for own, _ in asked])
        assert [list(output.outputs[0].token_ids) for output in outputs] == want
        for i in (5, 8, 5):  # the same prompt with one adapter, with another, and again
            (output,) = llm.generate(prompts[i], KINDS["greedy"], lora_request=requests[asked[i][0]])
            assert list(output.outputs[0].token_ids) == want[i]
            cached.append(output.num_cached_tokens)
        assert cached[2] > 0
        assert llm._serving.engine.load().num_preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nemotron_h_moe", {}),
        ("mamba2", {"num_blocks": 20}),
        ("granitemoehybrid_rope", {"tensor_parallel_size": 2}),
        ("lfm2_moe", {"enable_prefix_caching": False}),
    ],
)
def test_rounds_of_a_draft_model_keep_the_state_of_the_last_accepted_token(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The draft has the vocabulary of the model, and knows nothing of it."""
    case, small = tiny_case(name), tiny_case("llama_mha")
    config = {**small.config, "vocab_size": case.config["vocab_size"], "max_position_embeddings": 256}
    of_draft = write_checkpoint(dataclasses.replace(small, config=config), tmp_path / "draft")
    num_tokens = 20 if name == "lfm2_moe" else 2
    speculation = {"method": "draft_model", "model": str(of_draft), "num_speculative_tokens": num_tokens}
    check_rounds(write_checkpoint(case, tmp_path / name), speculation, options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_rounds_of_an_eagle_head_keep_the_state_of_the_last_accepted_token(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    sizes = HeadSizes(VOCAB_SIZE, 64, 48, 4, 2, 16, from_hf(case.config).hidden_size)
    head = sizes.config(eagle_aux_hidden_state_layer_ids=[1, 2, 3], max_position_embeddings=256)
    of_head = write_head(tmp_path / "head", head, random_head(sizes, VOCAB_SIZE))
    speculation = {"method": "eagle3", "model": str(of_head), "num_speculative_tokens": 3}
    check_rounds(write_checkpoint(case, tmp_path / name), speculation, {})


def check_rounds(folder: Path, speculation: dict[str, Any], options: dict[str, Any]) -> None:
    """Tokens in rounds of a draft, next to other steps, are those without."""
    num_tokens = speculation["num_speculative_tokens"]
    sizes: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "num_blocks": 96,
        "block_size": 8,
        "max_model_len": 128,
        "max_num_seqs": 8,
    }
    sizes["max_num_batched_tokens"] = max(64, 8 * (num_tokens + 1))
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    params = [dataclasses.replace(KINDS[("greedy", "seeded")[index % 2]], max_tokens=30) for index in range(8)]
    params[3] = dataclasses.replace(KINDS["three"], max_tokens=9)
    with open_llm(folder, **sizes) as llm:
        want = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
    with open_llm(folder, **{**sizes, **options}, speculative_config=speculation) as llm:
        rounds = engine_of(llm)._loop._drafter
        assert isinstance(rounds, DraftModelSpeculation)
        rounds._rule = rule = InTurn(3, 0, 1, 16)
        for _ in range(2):
            got = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
            assert got == want
        assert rule.num_dispatches > 3
        load = llm.load()
        assert load.num_state_slots >= (8 + 8 * num_tokens if options.get("enable_prefix_caching", True) else 0)
        assert load.num_preemptions > 0 or "num_blocks" not in options
