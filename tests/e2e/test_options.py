"""Every option of the configuration changes what it says, or is refused because there is no server here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jpaged.build import find_source
from jpaged.chat import ChatOptions, ReasoningOptions
from jpaged.config import (
    PROCESS_OPTIONS,
    EngineConfig,
    LoraOptions,
    MediaOptions,
    ModelOptions,
    field_names,
    iter_options,
    server_field_names,
)
from jpaged.device.compilation import memory_plan
from jpaged.device.compilation.aot_bundle import CompileTarget, save_programs
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.executor import JaxExecutor
from jpaged.engine.executor import SamplingInputs, StepInputs, StepOutputs
from jpaged.engine.scheduler.multi_step import StepTimeEstimator
from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.kernels.paged_attention.api import IMPLEMENTATIONS
from jpaged.llm import LLM, TokensPrompt
from jpaged.server_load import EngineLoad
from jpaged.service.chat.template import ToolAwareTokenizer
from jpaged.types import SamplingParams
from tests.e2e.rig import chosen_logprobs, engine_of, generate, open_llm, random_prompts, write_model
from tests.server.option_values import SERVER_VALUES

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0)
BASE = {"max_model_len": 64, "num_blocks": 40}
NUM_LEAST = 10
"""Programs that a server begins with, those of swaps among them."""
OTHER_SIZES = {"max_model_len": 40, "block_size": 4, "num_blocks": 9, "max_num_seqs": 3, "max_num_batched_tokens": 11}
APART = {
    "enable_expert_parallel",
    "enable_dp_attention",
    "enable_eplb",
    "eplb_config",
    "quantization",
    "max_logprobs",
    "kv_disk_dir",
    "lossy_kv_window",
    "lossy_kv_sinks",
}
APART |= {*field_names(LoraOptions), "tool_call_parser", "reasoning_parser", "speculative_config", "kv_disk_space"}
APART |= {"kv_transfer_config", "state_checkpoint_interval", "enable_prompt_embeds", "enable_return_routed_experts"}
APART |= {*field_names(MediaOptions)}  # tests/service/test_image_inputs.py, tests/http/test_images.py
APART |= {"revision", "tokenizer_revision", "download_dir", "hf_token"}
APART.add("long_prefill_token_threshold")
APART |= {"chat_template", "trust_request_chat_template", "whitespace_pattern"}
PROCESS_VALUES: dict[str, Any] = {"coordinator": "host:1234", "num_processes": 2, "process_id": 1, "join_timeout": 9.0}
PROCESS_VALUES["cluster_secret_file"] = "secret"
PROCESS_VALUES |= {"heartbeat_interval": 2.0, "heartbeat_timeout": 9.0}

Test = TypeVar("Test", bound=Callable[..., None])
_flipped: set[str] = set()


def flips(*names: str) -> Callable[[Test], Test]:
    """Notes which options a test flips."""
    _flipped.update(names)
    return lambda test: test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama_mha", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, **BASE) as llm:
        yield llm


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, **OTHER_SIZES) as llm:
        yield llm


def device_executor_of(llm: LLM) -> JaxExecutor:
    """What runs its programs."""
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor)
    return executor


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[EngineLoad]:
    """The load after every step from now on."""
    engine, loads = engine_of(llm), []
    thread = engine._thread
    step = thread.step

    def watched() -> bool:
        did_something = step()
        loads.append(engine.load())
        return did_something

    monkeypatch.setattr(thread, "step", watched)
    return loads


def test_every_option_is_flipped_here() -> None:
    assert _flipped | set(SERVER_VALUES) | set(PROCESS_VALUES) | APART == {name for name, _, _ in iter_options()}
    assert set(SERVER_VALUES) == set(server_field_names())
    assert set(PROCESS_VALUES) == set(PROCESS_OPTIONS)


@pytest.mark.parametrize("name", PROCESS_VALUES)
def test_options_of_several_processes_are_refused(name: str) -> None:
    EngineConfig.load(PROCESS_VALUES)
    with pytest.raises(InvalidArgument, match=f"{name}: is an option of `jpaged serve`"):
        LLM("no such folder", **{name: PROCESS_VALUES[name]})


@pytest.mark.long
@flips("enable_sleep_mode")
def test_enable_sleep_mode_lets_memory_be_released(base: LLM, folder: Path) -> None:
    with pytest.raises(Unsupported, match="sleep is off: set enable_sleep_mode"):
        base.sleep()
    with open_llm(folder, enable_sleep_mode=True, **BASE) as llm:
        llm.sleep()
        llm.wake_up()
        assert len({generate(one, random_prompts([20]), GREEDY)[0].token_ids for one in (llm, base)}) == 1


@pytest.mark.long
@flips("eviction_policy")
def test_eviction_policy_ranks_what_is_cached(base: LLM, folder: Path) -> None:
    with open_llm(folder, eviction_policy="worth", **BASE) as llm:
        kinds = [type(one.prefixes.pool._free_lists[0]) for one in (engine_of(llm), engine_of(base)) if one.prefixes]
    assert [kind.__name__ for kind in kinds] == ["RankedFreeList", "LeastRecentlyUsed"]


@flips("pipeline_parallel_size")
@pytest.mark.long
def test_pipeline_parallel_size_is_how_many_devices_share_the_layers(base: LLM, folder: Path) -> None:
    num_layers = device_executor_of(base).step.layout.num_layers
    with open_llm(folder, pipeline_parallel_size=num_layers, **BASE) as llm:
        assert llm._serving.backend.num_devices == num_layers
        assert device_executor_of(llm).step.layout.local.num_layers == 1
        assert len({generate(one, random_prompts([20]), GREEDY)[0].token_ids for one in (llm, base)}) == 1


@flips("context_parallel_size")
@pytest.mark.long
def test_context_parallel_size_is_how_many_devices_share_a_context(base: LLM, folder: Path) -> None:
    with open_llm(folder, context_parallel_size=2, **BASE) as llm:
        assert (llm._serving.backend.num_devices, device_executor_of(llm).step.layout.local.block_size) == (2, 16)
        assert len({generate(one, random_prompts([20]), GREEDY)[0].token_ids for one in (llm, base)}) == 1


@pytest.mark.long
@flips("data_parallel_size")
def test_data_parallel_size_is_how_many_copies_there_are(folder: Path) -> None:
    with open_llm(folder, data_parallel_size=2, **BASE) as llm:
        assert len(llm._serving.engine.replica_loads()) == 2


@pytest.mark.parametrize(("name", "value"), SERVER_VALUES.items())
def test_options_of_the_server_are_refused(name: str, value: Any) -> None:
    EngineConfig.load({name: value})
    with pytest.raises(InvalidArgument, match=f"{name}: is an option of `jpaged serve`"):
        LLM("no such folder", **{name: value})


@pytest.mark.long
@flips("model")
def test_model_decides_who_answers(base: LLM, tmp_path: Path) -> None:
    with open_llm(write_model("llama_linear", tmp_path), **BASE) as llm:
        assert len({generate(one, random_prompts([20]), GREEDY)[0].token_ids for one in (llm, base)}) == 2


@pytest.mark.long
@flips("dtype")
def test_dtype_is_that_of_weights_and_pool(base: LLM, folder: Path) -> None:
    prompt = random_prompts([20])
    exact = chosen_logprobs(generate(base, prompt, GREEDY)[0])[0]
    with open_llm(folder, dtype="bfloat16", **BASE) as llm:
        rounded = chosen_logprobs(generate(llm, prompt, GREEDY)[0])[0]
        assert engine_of(llm).geometry.bytes_per_block * 2 == engine_of(base).geometry.bytes_per_block
    assert 1e-4 < abs(exact - rounded) < 0.2
    with open_llm(folder, dtype="half", **BASE) as llm:
        half = chosen_logprobs(generate(llm, prompt, GREEDY)[0])[0]
        assert (llm.config.model.dtype, llm.config.cache.kv_cache_dtype) == ("float16", "float16")
        assert engine_of(llm).geometry.bytes_per_block * 2 == engine_of(base).geometry.bytes_per_block
    assert 1e-6 < abs(exact - half) < 0.2 / 8
    with open_llm(folder, dtype="auto", **BASE) as llm:
        assert llm.config.model.dtype == "float32"  # the config has none


@pytest.mark.long
@flips("kv_cache_dtype")
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_kv_cache_dtype_is_that_of_the_pool_alone(base: LLM, folder: Path, name: str) -> None:
    prompt = random_prompts([20])
    exact = chosen_logprobs(generate(base, prompt, GREEDY)[0])[0]
    with open_llm(folder, kv_cache_dtype=name, **BASE) as llm:
        rounded = chosen_logprobs(generate(llm, prompt, GREEDY)[0])[0]
        assert engine_of(llm).geometry.bytes_per_block * 4 == engine_of(base).geometry.bytes_per_block
        assert (llm.config.model.dtype, llm.config.cache.kv_cache_dtype) == ("float32", name)
    assert base.config.cache.kv_cache_dtype == "float32"
    assert 1e-6 < abs(exact - rounded) < 0.2


@flips("attention_backend", "linear_backend")
@pytest.mark.long
def test_backends_are_those_that_were_named(base: LLM, folder: Path) -> None:
    with open_llm(folder, attention_backend="xla", linear_backend="xla", **BASE) as llm:
        assert (llm.config.model.attention_backend, llm.config.model.linear_backend) == ("xla", "xla")
    assert (base.config.model.attention_backend, base.config.model.linear_backend) == ("cpu", "cpu")
    with pytest.raises(Unsupported, match=r"attention_backend: pallas-tpu cannot run here: .*cpu"):
        LLM(str(folder), attention_backend="pallas-tpu")


@flips("activation_dtype")
@pytest.mark.long
def test_activation_dtype_rounds_the_rows_of_quantized_matrices(base: LLM, folder: Path) -> None:
    prompt, options = random_prompts([20]), {"quantization": "int8", **BASE}
    logprobs = {}
    for name in ("model", "int8"):
        with open_llm(folder, activation_dtype=name, **options) as llm:
            assert llm.config.model.activation_dtype == name
            logprobs[name] = chosen_logprobs(generate(llm, prompt, GREEDY)[0])[0]
    assert 1e-6 < abs(logprobs["model"] - logprobs["int8"]) < 0.05
    assert base.config.model.activation_dtype == "model"  # nothing is quantized
    for backend, reason in (("cpu", "no quantized matrices"), ("xla", "requires linear_backend cpu")):
        with pytest.raises(Unsupported, match=f"activation_dtype: int8 cannot run here: .*{reason}"):
            LLM(str(folder), activation_dtype="int8", linear_backend=backend)


def test_a_size_that_nobody_chose_is_found_and_told(base: LLM) -> None:
    assert base.config.cache.block_size == engine_of(base).geometry.block_size == 16


def test_a_kernel_that_is_passed_over_is_said_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    never = dataclasses.replace(IMPLEMENTATIONS["cpu"], unsupported_reason=lambda spec, queries: "it is Tuesday")
    monkeypatch.setitem(IMPLEMENTATIONS, "cpu", never)

    def stop(what: str, done: int, total: int) -> None:
        told.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLM(str(folder), progress=stop)
    assert told == ["attention xla, not cpu: it is Tuesday"]


@flips("tensor_parallel_size", "enable_expert_parallel", "enable_dp_attention", "enable_eplb", "eplb_config")
@pytest.mark.long
def test_tensor_parallel_size_is_how_many_devices_share_the_model(base: LLM, folder: Path) -> None:
    with open_llm(folder, tensor_parallel_size=2, **BASE) as llm:
        assert (llm._serving.backend.num_devices, base._serving.backend.num_devices) == (2, 1)
        assert len({generate(one, random_prompts([20]), GREEDY)[0].token_ids for one in (llm, base)}) == 1
    with pytest.raises(InvalidArgument, match="enable_expert_parallel: is on, but LlamaForCausalLM has no experts"):
        LLM(str(folder), tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(InvalidArgument, match="enable_dp_attention: is on, but LlamaForCausalLM has no latent cache"):
        LLM(str(folder), tensor_parallel_size=2, enable_dp_attention=True)
    with pytest.raises(InvalidArgument, match="enable_eplb: is on, but enable_expert_parallel is off; it must be on"):
        LLM(str(folder), tensor_parallel_size=2, enable_eplb=True, eplb_config={"num_redundant_experts": 2})


@flips("data_parallel_size")
@pytest.mark.long
def test_data_parallel_size_is_how_many_copies_of_the_model_serve(base: LLM, folder: Path) -> None:
    prompts = random_prompts([20, 12])
    with open_llm(folder, data_parallel_size=2, **BASE) as llm:
        assert (llm._serving.backend.num_devices, base._serving.backend.num_devices) == (2, 1)
        got, want = generate(llm, prompts, GREEDY), generate(base, prompts, GREEDY)
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        assert [load.num_requests_ended for load in llm._serving.engine.replica_loads()] == [1, 1]


@pytest.mark.long
@flips("load_format")
def test_dummy_weights_need_no_file(base: LLM, tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path)
    (folder / "model.safetensors").unlink()
    prompt = random_prompts([20])
    answers = {generate(base, prompt, GREEDY)[0].token_ids}
    for seed in (0, 1):
        with open_llm(folder, load_format="dummy", seed=seed, **BASE) as llm:
            answers.add(generate(llm, prompt, GREEDY)[0].token_ids)
    assert len(answers) == 3


@pytest.mark.long
@flips("parse_special_tokens")
def test_parse_special_tokens_is_whether_those_in_a_prompt_count() -> None:
    user, assistant = 3, 4
    one = SamplingParams(max_tokens=1)
    for is_parsing, num_plain, num_chat in ((True, 1, 2), (False, 0, 1)):
        with open_llm("demo", num_blocks=64, parse_special_tokens=is_parsing) as llm:
            (plain,) = llm.generate("<|user|>tell me a story", one)
            (chat,) = llm.chat([{"role": "user", "content": "<|user|>tell me a story"}], one)
        assert plain.prompt_token_ids.count(user) == num_plain
        assert (chat.prompt_token_ids.count(user), chat.prompt_token_ids.count(assistant)) == (num_chat, 1)


@flips("skip_tokenizer_init")
def test_skip_tokenizer_init_serves_ids_whatever_the_tokenizer_is(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("broken")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="the tokenizer cannot be loaded"), open_llm(tmp_path, **BASE):
        pass
    with open_llm(tmp_path, skip_tokenizer_init=True, **BASE) as llm:
        (completion,) = generate(llm, random_prompts([5]), GREEDY)
        assert len(completion.token_ids) == 12
        with pytest.raises(InvalidArgument, match="this model is served without a tokenizer: send token ids"):
            llm.generate("a text", GREEDY)
        with pytest.raises(Unsupported, match="has no chat template: send token ids"):
            llm.chat([{"role": "user", "content": "hello"}], GREEDY)


@pytest.mark.long
@flips("seed")
def test_seed_is_where_requests_without_one_get_theirs(folder: Path) -> None:
    sampled = []
    for seed in (7, 7, 8):
        with open_llm(folder, seed=seed, **BASE) as llm:
            sampled.append([completion.token_ids for completion in generate(llm, random_prompts([5]) * 2, UNSEEDED)])
    assert sampled[0] == sampled[1]
    assert len({*sampled[0], *sampled[2]}) == 4


@pytest.mark.long
@flips("tokenizer")
def test_tokenizer_is_that_of_another_folder(folder: Path, tmp_path: Path) -> None:
    other = write_model("llama_mha", tmp_path / "other", with_tokenizer=True)
    with pytest.raises(InvalidArgument, match=r"tokenizer: .* has no tokenizer"):
        LLM(str(other), tokenizer=str(folder))
    with pytest.raises(InvalidArgument, match=r"has token ids up to \d+; the model's vocabulary of 131 tokens ends at"):
        LLM(str(folder), tokenizer="demo")
    with open_llm(folder, tokenizer=str(other), **BASE) as llm:
        found = llm.generate(["3,4,5,"], GREEDY, use_tqdm=False)[0]
    assert found.prompt_token_ids == (3, 4, 5)
    assert found.outputs[0].text == "".join(f"{token}," for token in found.outputs[0].token_ids)


@flips("reasoning_effort_map")
@pytest.mark.long
def test_the_chat_template_gets_mapped_reasoning_efforts(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }} {{ reasoning_effort }}")
    options = ModelOptions(chat_template=str(template), reasoning_effort_map='{"medium": "low", "xhigh": "max"}')
    tokenizer = find_source(options).tokenizer
    assert isinstance(tokenizer, ToolAwareTokenizer)
    for effort, want in (("medium", "low"), ("xhigh", "max"), ("high", "high")):
        chat = ChatOptions(reasoning=ReasoningOptions(effort=effort))
        token_ids = tokenizer.chat_ids([{"role": "user", "content": "a"}], chat, max_bytes=99)
        assert tokenizer.decode(token_ids) == f"a {want}"


@flips("default_chat_template_kwargs", "chat_template_content_format")
@pytest.mark.long
def test_chat_templates_get_their_variables_and_parts(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content is string }} {{ mood }}")
    texts = []
    for options in (
        ModelOptions(),
        ModelOptions(chat_template_content_format="openai", default_chat_template_kwargs='{"mood": "glad"}'),
    ):
        tokenizer = find_source(dataclasses.replace(options, chat_template=str(template))).tokenizer
        texts.append(tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], max_bytes=99)))
    assert texts == ["True ", "False glad"]
    with pytest.raises(InvalidArgument, match="default_chat_template_kwargs: 'a b' is no name of a variable"):
        find_source(ModelOptions(default_chat_template_kwargs='{"a b": 1}'))


def test_a_chat_template_can_be_given_instead_of_its_file() -> None:
    tokenizer = find_source(ModelOptions(chat_template="{{ messages[0].content }}!")).tokenizer
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], max_bytes=99)) == "a!"
    with pytest.raises(InvalidArgument, match=r"chat_template: nowhere\.jinja cannot be read"):
        find_source(ModelOptions(chat_template="nowhere.jinja"))


@flips("hf_overrides")
@pytest.mark.long
def test_hf_overrides_change_what_an_edited_config_changes(base: LLM, folder: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(folder, edited)
    config = json.loads((edited / "config.json").read_text())
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    (edited / "config.json").write_text(json.dumps({**plain, "rope_parameters": rope}))
    with open_llm(folder, hf_overrides={"rope_parameters": rope}, **BASE) as llm, open_llm(edited, **BASE) as own:
        found, same, before = (
            chosen_logprobs(generate(one, random_prompts([20]), GREEDY)[0]) for one in (llm, own, base)
        )
        assert len({one._serving.checkpoint for one in (llm, own, base)}) == 3
    assert found == same != before


@pytest.mark.long
@flips("generation_config", "override_generation_config")
def test_the_generation_config_has_the_parameters_of_requests_without_any(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}')
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    with open_llm(folder, **BASE) as llm:
        assert llm.get_default_sampling_params() == greedy
        without, given = (
            llm.generate({"prompt_token_ids": random_prompts([5])[0]}, sampling) for sampling in (None, greedy)
        )
        assert without[0].outputs[0].token_ids == given[0].outputs[0].token_ids
        assert len(given[0].outputs[0].token_ids) == 5
    options = {"generation_config": "none", "override_generation_config": {"top_k": 3}}
    with open_llm(folder, **options, **BASE) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=3)


@pytest.mark.long
@flips("wait_for_all_programs")
def test_without_waiting_for_all_programs_the_least_set_runs_everything(
    base: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are kept back for good: what they would have computed is the same."""
    compile_rest = ProgramStore.compile_rest
    kept_back: list[ProgramStore] = []
    monkeypatch.setattr(ProgramStore, "compile_rest", lambda store, progress: kept_back.append(store))
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 20}
    requests = [
        GREEDY,
        SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=9, ignore_eos=True),
        SamplingParams(beam_width=3, max_tokens=9, ignore_eos=True),
        *[SamplingParams(temperature=0.9, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(9)],
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts(list(range(4, 28, 2)))]

    def tokens(llm: LLM) -> list[list[tuple[int, ...]]]:
        return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, requests)]

    with open_llm(folder, wait_for_all_programs=False, **sizes, **BASE) as early:
        (store,) = kept_back
        on_least, num_least = tokens(early), len(store.ready)
        assert num_least == NUM_LEAST < len(store.specs)
        compile_rest(store, lambda what, done, total: None)
    with open_llm(folder, **sizes, **BASE) as llm:
        assert len(kept_back) == 2
        assert len(kept_back[1].ready) == len(kept_back[1].specs)
        assert tokens(llm) == on_least


@pytest.mark.long
@flips("compiled")
def test_compiled_is_where_programs_come_from(
    base: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_cache:
        without_cache.setenv("JPAGED_CACHE_DIR", "")
        with open_llm(folder, **BASE) as llm:
            executor = device_executor_of(llm)
            save_programs(
                tmp_path / "programs",
                CompileTarget.of(executor._served.step, executor.geometry),
                executor._programs.ready,
            )
    with open_llm(folder, compiled=str(tmp_path / "programs"), **BASE) as llm:
        assert {program.origin for program in device_executor_of(llm)._programs.ready.values()} == {"saved"}
        prompt, uncached = random_prompts([20]), dataclasses.replace(GREEDY, use_prefix_cache=False)
        assert generate(llm, prompt, uncached) == generate(base, prompt, uncached)
    with pytest.raises(
        InvalidArgument, match=r"compiled: the programs in .* are for num_blocks 40, but this server has 41"
    ):
        LLM(str(folder), compiled=str(tmp_path / "programs"), max_model_len=64, num_blocks=41)


@flips("max_model_len")
def test_max_model_len_ends_what_may_be_asked_for(base: LLM, folder: Path) -> None:
    assert len(generate(base, random_prompts([52]), GREEDY)[0].token_ids) == 12
    with pytest.raises(RequestTooLong, match=r"53 prompt tokens and 12 to generate make 65, over max_model_len \(64\)"):
        generate(base, random_prompts([53]), GREEDY)
    with pytest.raises(InvalidArgument, match="max_model_len: 257 is above the limit of the model, 256"):
        LLM(str(folder), max_model_len=257)


@pytest.mark.long
@flips("block_size", "num_blocks")
def test_a_pool_below_max_model_len_serves_what_fits(other: LLM, base: LLM) -> None:
    """Nine blocks of four: 36 tokens, in a model of 40."""
    assert len(generate(other, random_prompts([24]), GREEDY)[0].token_ids) == 12
    load = engine_of(other).load()
    assert (load.block_size, load.num_blocks, load.peak_blocks_used) == (4, 9, 9)
    with pytest.raises(RequestTooLong, match=r"make 37, over the whole pool \(36: 9 blocks of 4\)"):
        generate(other, [*random_prompts([5, 25])], GREEDY)
    assert engine_of(base).load().block_size == 16


@pytest.mark.long
@flips("kv_cache_memory_bytes")
@pytest.mark.parametrize("size", [{"num_blocks": 1}, {"kv_cache_memory_bytes": 2 * 16384 + 7}])
def test_a_pool_of_one_block_is_enough(folder: Path, size: dict[str, int]) -> None:
    with open_llm(folder, max_model_len=64, **size) as llm:
        completions = generate(llm, random_prompts([4, 4, 3]), GREEDY)
        assert [len(completion.token_ids) for completion in completions] == [12, 12, 12]
        with pytest.raises(RequestTooLong, match=r"over the whole pool \(16: 1 blocks of 16\)"):
            generate(llm, random_prompts([5]), GREEDY)


@flips("max_num_seqs")
def test_max_num_seqs_is_how_many_run(base: LLM, other: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for llm, num_rows in ((base, 8), (other, 3)):
        loads = watch(llm, monkeypatch)
        generate(llm, random_prompts([1] * 10), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        assert max(load.num_running for load in loads) == num_rows


@flips("max_num_batched_tokens")
def test_max_num_batched_tokens_is_how_much_prompt_a_step_takes(base: LLM, other: LLM) -> None:
    one = SamplingParams(temperature=0.0, max_tokens=1)
    for llm, num_steps in ((base, 3), (other, 2)):  # 22 tokens, 8 or 11 a step
        before = engine_of(llm).load().num_steps
        generate(llm, random_prompts([22], seed=22), one)
        engine_of(llm).call_soon(lambda: None).result()  # the step has ended
        assert engine_of(llm).load().num_steps - before == num_steps


@flips("memory_utilization")
@pytest.mark.long
def test_memory_utilization_is_the_share_that_weights_programs_and_pool_must_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "available_host_bytes", lambda: 100 << 20)
    with (
        pytest.raises(InvalidArgument, match=r"memory_utilization: 0\.02 of 0\.10 GiB"),
        open_llm(folder, memory_utilization=0.02),
    ):
        pass
    with open_llm(folder, memory_utilization=0.9) as llm:
        assert engine_of(llm).geometry.num_blocks == 8 * 16


@pytest.mark.long
@flips("policy", "enable_prefix_caching")
def test_priority_serves_lower_numbers_first_and_no_cache_finds_nothing(
    folder: Path, base: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: TokensPrompt = {"prompt_token_ids": random_prompts([20])[0]}
    sampling = [SamplingParams(max_tokens=2, ignore_eos=True, priority=number) for number in (3, 1, 2, 0)]
    options = {**BASE, "max_num_seqs": 1}
    with open_llm(folder, policy="priority", enable_prefix_caching=False, **options) as llm:
        results, ended = engine_of(llm)._loop._results, []
        release = results.release

        def watched(group: SequenceGroup) -> None:
            ended.append(group.request.sampling.priority)
            release(group)

        monkeypatch.setattr(results, "release", watched)
        outputs = llm.generate([prompt] * 4, sampling)
    assert ended == [0, 1, 2, 3]
    assert [output.usage.cached_tokens for output in outputs] == [0] * 4
    base.generate(prompt, sampling[0])
    assert base.generate(prompt, sampling[0])[0].usage.cached_tokens > 0


@flips("enable_cascade_attention")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.long
def test_a_prefix_that_rows_share_is_read_once_or_by_each(folder: Path, enabled: bool) -> None:
    options = {"max_model_len": 160, "num_blocks": 40, "block_size": 16, "max_num_batched_tokens": 32}
    with open_llm(folder, enable_cascade_attention=enabled, attention_backend="xla", **options) as llm:
        prompt: TokensPrompt = {"prompt_token_ids": random_prompts([140])[0]}
        llm.generate(prompt, SamplingParams(n=8, seed=1, max_tokens=4, ignore_eos=True))
        load = engine_of(llm).load()
    assert load.num_cascade_steps == (3 if enabled else 0)
    assert load.num_cascade_tokens == (3 * 7 * 128 if enabled else 0)


@pytest.mark.long
@flips("kv_policy", "batching")
def test_the_baselines_keep_room_for_a_whole_sequence_and_a_batch_to_its_end(
    folder: Path, base: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1] * 7 + [12] + [1]

    def steps_until_nobody_waits(llm: LLM) -> int:
        loads = watch(llm, monkeypatch)
        before = engine_of(llm).load().num_steps
        prompts: list[TokensPrompt] = [{"prompt_token_ids": ids} for ids in random_prompts([1] * 9)]
        llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
        return max(load.num_steps for load in loads if load.num_waiting) - before

    with open_llm(folder, kv_policy="reserve-max", batching="static", **BASE) as llm:
        geometry = engine_of(llm).geometry
        assert steps_until_nobody_waits(llm) >= 12
        assert engine_of(llm).load().peak_blocks_used == 8 * geometry.max_blocks_per_seq
    assert steps_until_nobody_waits(base) < 6
    assert engine_of(base).load().peak_blocks_used < 8 * geometry.max_blocks_per_seq


@pytest.mark.long
@flips("preemption_mode", "swap_space")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_goes_the_way_it_is_told(folder: Path, mode: str) -> None:
    options = {**BASE, "max_model_len": 32, "block_size": 4, "num_blocks": 9}
    swap_space = 0.001 if mode == "swap" else 0.0
    with open_llm(folder, preemption_mode=mode, swap_space=swap_space, enable_prefix_caching=False, **options) as llm:
        generate(llm, random_prompts([5] * 4), SamplingParams(max_tokens=20, ignore_eos=True))
        load = engine_of(llm).load()
        assert (engine_of(llm).geometry.num_host_blocks > 0) == (mode == "swap")
    assert load.num_preemptions > 0
    assert (load.num_blocks_swapped_out > 0) == (mode == "swap")
    assert (load.num_recomputed_tokens > 0) == (mode == "recompute")


@pytest.mark.long
@flips("overlap")
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_dispatches_before_it_collects(folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    calls: list[str] = []
    with open_llm(folder, overlap=overlap, **BASE) as llm:
        executor = engine_of(llm)._executor
        forward, sample, decode, collect = executor.forward, executor.sample, executor.decode, executor.collect

        def spied_forward(inputs: StepInputs) -> Any:
            calls.append("f")
            return forward(inputs)

        def spied_sample(hidden: Any, inputs: SamplingInputs) -> Any:
            calls.append("s")
            return sample(hidden, inputs)

        def spied_decode(*inputs: Any) -> Any:
            calls.append("fs")  # both in one program
            return decode(*inputs)

        def spied_collect(handle: Any) -> StepOutputs:
            calls.append("c")
            return collect(handle)

        monkeypatch.setattr(executor, "forward", spied_forward)
        monkeypatch.setattr(executor, "sample", spied_sample)
        monkeypatch.setattr(executor, "decode", spied_decode)
        monkeypatch.setattr(executor, "collect", spied_collect)
        generate(llm, [[5]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert "".join(calls) == ("fsfscfscc" if overlap else "fscfscfsc")


@pytest.mark.long
@flips("num_scheduler_steps")
def test_num_scheduler_steps_go_in_one_dispatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(folder, num_scheduler_steps=4, wait_for_all_programs=True, **BASE) as llm:
        loads = watch(llm, monkeypatch)
        generate(llm, [[5, 6]], dataclasses.replace(GREEDY, logprobs=None))
    assert max(after.num_steps - before.num_steps for before, after in itertools.pairwise(loads)) == 4


@flips("max_inter_token_latency")
@pytest.mark.long
def test_max_inter_token_latency_bounds_steps_of_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimeEstimator, "seconds", lambda times, num_padded, num_pairs: float(num_padded))
    options = {**BASE, "max_num_batched_tokens": 64, "wait_for_all_programs": True, "enable_prefix_caching": False}
    tokens, largest = {}, {}
    for bound_s, is_streamed in ((0.0, True), (32.0, False), (32.0, True)):
        monkeypatch.setattr(SequenceGroup, "is_streamed", is_streamed)  # what an LLM generates is told whole
        with open_llm(folder, max_inter_token_latency=bound_s, **options) as llm:
            sizes: list[int] = []
            executor = engine_of(llm)._executor
            forward = executor.forward

            def spied(inputs: StepInputs, forward: Any = forward, sizes: list[int] = sizes) -> Any:
                sizes.append(inputs.num_tokens)
                return forward(inputs)

            monkeypatch.setattr(executor, "forward", spied)
            outputs = generate(llm, random_prompts([4, 50, 50, 50]), GREEDY)
        tokens[bound_s, is_streamed] = [output.token_ids for output in outputs]
        first, *others = sizes  # two of the prompts come to their end in the first
        largest[bound_s, is_streamed] = (first, max(others))
    assert largest == {(0.0, True): (64, 64), (32.0, False): (64, 64), (32.0, True): (64, 32)}
    assert tokens[0.0, True] == tokens[32.0, False] == tokens[32.0, True]


@pytest.mark.long
@flips("max_num_queued_reqs")
def test_max_num_queued_reqs_is_how_many_wait(folder: Path, base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are kept back, and run all the same."""
    prompts, uncached = random_prompts([3] * 15), dataclasses.replace(GREEDY, use_prefix_cache=False)
    with open_llm(folder, max_num_queued_reqs=2, **BASE) as llm:
        few = watch(llm, monkeypatch)
        assert len(generate(llm, prompts, uncached)) == 15
    many = watch(base, monkeypatch)
    generate(base, prompts, uncached)
    assert max(load.num_waiting for load in many) == 12  # a step admits as many as its 8 tokens hold
    assert 2 <= max(load.num_waiting for load in few) <= 7
    assert max(load.num_running for load in few) == 8
