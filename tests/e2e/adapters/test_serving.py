"""Adapters from disk behind a real port: a row's tokens are those of the checkpoint that its adapter is merged into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.build import build
from jpaged.client import AsyncClient
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.llm import TokensPrompt
from jpaged.server.lifecycle import Server
from tests.e2e.rig import check_at_rest, generate, open_llm, random_prompts
from tests.models.adapters import ExpertAdapter, TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_programs")]

CASE = tiny_case("llama_gqa_bias")
ADAPTERS = (TinyAdapter(CASE, "a"), TinyAdapter(CASE, "b", 2, 7.0), TinyAdapter(CASE, "c", 5, 9.0, "q_proj|down_proj"))
NAMES = ("", "a", "b", "c")
SIZES: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_model_len": 64}
PROMPTS = random_prompts([9, 13, 5, 17])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

Tokens = Mapping[str, list[tuple[int, ...]]]
"""What comes of every prompt, by adapter."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in "base", the adapters beside it, and each of them merged."""
    folder = tmp_path_factory.mktemp("adapters")
    write_checkpoint(CASE, folder / "base")
    for adapter in ADAPTERS:
        adapter.write(folder / adapter.name)
        adapter.write_merged(folder / f"{adapter.name}-merged")
    return folder


@pytest.fixture(scope="module")
def merged(folder: Path) -> Tokens:
    """The tokens of the base and of each merged checkpoint."""
    tokens = {}
    for name in NAMES:
        with open_llm(folder / (f"{name}-merged" if name else "base"), **SIZES) as llm:
            tokens[name] = [output.token_ids for output in generate(llm, PROMPTS, GREEDY)]
    assert len({str(of_one) for of_one in tokens.values()}) == len(NAMES)
    return tokens


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client of a server that is ready; afterwards every block and slot came back, and nothing was compiled."""
    few = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 8, "port": 0}
    config = EngineConfig.load({"model": str(folder / "base"), **few, **SIZES, "enable_lora": True, **options})
    server = Server(config, lambda progress: build(config, progress))
    port = await server.start()
    run = asyncio.create_task(server.run())
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            await client.wait_until_ready(300)
            yield client
            assert (await client.load()).num_compiles_after_warm_up == 0
    finally:
        server.request_stop()
        assert await run == 0
    assert server.state.model is not None
    server.state.model.engine.check()


async def complete(client: AsyncClient, prompt: list[int], adapter: str) -> tuple[int, ...]:
    return (await client.complete(prompt_token_ids=prompt, sampling=GREEDY, adapter=adapter)).outputs[0].token_ids


async def test_rows_of_adapters_that_come_and_go(folder: Path, merged: Tokens) -> None:
    async with serving(folder, lora=[f"a={folder / 'a'}"], max_loras=2, max_lora_rank=5) as client:
        info = await client.model_info()
        assert (info.max_loras, info.max_lora_rank) == (2, 5)
        with pytest.raises(NotFound, match="no adapter 'b' is loaded"):
            await complete(client, PROMPTS[0], "b")
        with pytest.raises(NotFound, match=r"path: folder .* does not exist"):
            await client.load_adapter("b", str(folder / "nowhere"))
        with pytest.raises(InvalidArgument, match=r"path: folder .* has no adapter_config.json"):
            await client.load_adapter("b", str(folder / "base"))

        async def load() -> None:
            for name in "bc":
                assert await client.load_adapter(name, str(folder / name)) > 0

        early, _ = await asyncio.gather(
            asyncio.gather(*(complete(client, prompt, name) for prompt in PROMPTS for name in ("", "a"))), load()
        )
        assert early == [tokens for of_prompt in zip(merged[""], merged["a"], strict=True) for tokens in of_prompt]
        cases = [(i, name) for i in range(len(PROMPTS)) for name in NAMES]  # three adapters for two slots
        found = await asyncio.gather(*(complete(client, PROMPTS[i], name) for i, name in cases))
        assert found == [merged[name][i] for i, name in cases]
        await client.unload_adapter("a")
        await client.load_adapter("a", str(folder / "b"))
        output = await client.complete(prompt_token_ids=PROMPTS[3], sampling=GREEDY, adapter="a")
        assert output.outputs[0].token_ids == merged["b"][3]  # behind what "b" has cached, whose contents it has
        again = await client.complete(prompt_token_ids=PROMPTS[3], sampling=GREEDY, adapter="a")
        assert (again.outputs[0].token_ids, again.usage.cached_tokens) == (merged["b"][3], 16)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_rows_go_on_with_their_adapters(folder: Path, merged: Tokens, mode: str) -> None:
    lora = [f"{adapter.name}={folder / adapter.name}" for adapter in ADAPTERS]
    few = {**SIZES, "num_blocks": 16, "preemption_mode": mode, "swap_space": 0.001 if mode == "swap" else 0.0}
    with open_llm(folder / "base", lora=lora, max_loras=2, **few) as llm:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS for _ in NAMES]
        outputs = llm.generate(prompts, GREEDY, adapter=[name or None for _ in PROMPTS for name in NAMES])
        load = llm.load()
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [merged[name][i] for i in range(len(PROMPTS)) for name in NAMES]
    assert load.num_preemptions > 0
    assert (load.num_blocks_swapped_in > 0) == (mode == "swap")


@pytest.mark.parametrize(
    "option",
    ["data_parallel_size", "tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.long)],
)
def test_copies_and_parts_of_the_model_have_the_same_adapters(folder: Path, merged: Tokens, option: str) -> None:
    lora = [f"{adapter.name}={folder / adapter.name}" for adapter in ADAPTERS]
    size = {option: 3 if option == "pipeline_parallel_size" else 2}  # of three layers
    with open_llm(folder / "base", lora=lora, max_loras=3, **SIZES, **size) as llm:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS for _ in NAMES]
        outputs = llm.generate(prompts, GREEDY, adapter=[name or None for _ in PROMPTS for name in NAMES])
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [merged[name][i] for i in range(len(PROMPTS)) for name in NAMES]


def test_samples_and_beams_have_the_adapter_of_their_request(folder: Path) -> None:
    many = [
        SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True),
        SamplingParams(beam_width=3, n=2, max_tokens=8, ignore_eos=True),
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS[:2]]
    with open_llm(folder / "a-merged", **SIZES) as llm:
        wanted = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, many)]
    with open_llm(folder / "base", lora=[f"a={folder / 'a'}"], **SIZES) as llm:
        found = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, many, adapter="a")]
    assert found == wanted


def test_the_offline_face_loads_and_lets_go(folder: Path, merged: Tokens) -> None:
    with open_llm(folder / "base", enable_lora=True, max_loras=1, **SIZES) as llm:
        llm.load_adapter("b", str(folder / "b"))
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, adapter="b")
        assert [output.outputs[0].token_ids for output in outputs] == merged["b"]
        llm.unload_adapter("b")
        with pytest.raises(NotFound, match="'b'"):
            llm.generate(prompts, GREEDY, adapter="b")
        with pytest.raises(InvalidArgument, match="adapter: 1 given for 4 prompts"):
            llm.generate(prompts, GREEDY, adapter=["b"])
        check_at_rest(llm)


def test_adapters_of_the_start_that_cannot_be_stop_it(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"lora: x=.*nowhere.* does not exist") as error:
        LLM(str(folder / "base"), lora=[f"x={folder / 'nowhere'}"], **SIZES)
    assert error.value.field == "lora"
    ADAPTERS[0].write(folder / "dora", use_dora=True)
    with pytest.raises(Unsupported, match=r"lora: x=.*dora: .*DoRA is not supported"):
        LLM(str(folder / "base"), lora=[f"x={folder / 'dora'}"], **SIZES)
    with pytest.raises(InvalidArgument, match=r"rank 5; max_lora_rank is 4"):
        LLM(str(folder / "base"), lora=[f"c={folder / 'c'}"], max_lora_rank=4, **SIZES)


@pytest.mark.parametrize(
    ("name", "is_early", "options"),
    [
        ("mixtral", False, {}),
        ("mixtral", True, {"tensor_parallel_size": 2}),
        ("mixtral", False, {"pipeline_parallel_size": 3}),
        ("qwen3_moe", True, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("gpt_oss", False, {}),
        ("gpt_oss", False, {"tensor_parallel_size": 2}),
    ],
)
def test_experts_and_routers_have_adapters(name: str, is_early: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Rows of two adapters of experts, and rows without one, in the same steps."""
    case = tiny_case(name)
    adapters = [ExpertAdapter(case, "a", is_early=is_early), ExpertAdapter(case, "b", 4, 8.0, is_early)]
    folders = [write_checkpoint(case, tmp_path / "base")]
    folders += [adapter.write_merged(tmp_path / f"{adapter.name}-merged") for adapter in adapters]
    want = []
    for folder in folders:
        with open_llm(folder, **SIZES) as llm:
            want.append([output.token_ids for output in generate(llm, PROMPTS, GREEDY)])
    assert len({str(of_one) for of_one in want}) == len(folders), "they differ"
    lora = [f"{adapter.name}={adapter.write(tmp_path / adapter.name)}" for adapter in adapters]
    room = {"lora": lora, "max_loras": 2, "max_lora_rank": 4, "enable_expert_lora": True}
    with open_llm(folders[0], **room, **SIZES, **options) as llm:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS for _ in range(3)]
        outputs = llm.generate(prompts, GREEDY, adapter=[adapter for _ in PROMPTS for adapter in (None, "a", "b")])
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [of_one[i] for i in range(len(PROMPTS)) for of_one in want]
