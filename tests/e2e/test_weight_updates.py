"""New weights in a running model: tokens and bits are those of a model that was loaded with them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.rollouts import compare, make_trainer
from jpaged import LLM, SamplingParams
from jpaged.checkpoints.weights import LeafGroup, LeafReader
from jpaged.device.executor import JaxExecutor
from jpaged.errors import InvalidArgument, Unavailable, Unsupported
from jpaged.llm import TokensPrompt
from jpaged.local_model import parse_prompt
from jpaged.models.hf_config import from_hf
from jpaged.types import OutputEvent
from tests.e2e.rig import chosen_logprobs, engine_of, generate, open_llm, random_prompts, write_model
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint
from tests.on_demand import programs_on_demand

SIZES: dict[str, Any] = {"num_blocks": 37, "block_size": 8, "max_model_len": 64}
PROMPTS = random_prompts([9, 20, 33])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0),
]
FILE = "model.safetensors"


def outputs_of(llm: LLM) -> list[tuple[tuple[int, ...], list[float]]]:
    """Tokens and log-probabilities, greedy and seeded."""
    return [(one.token_ids, chosen_logprobs(one)) for one in generate(llm, PROMPTS, PARAMS)]


def leaves_of(llm: LLM) -> list[np.ndarray]:
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(executor._runner.params)]


def write_other(folder: Path, other: Path) -> dict[str, np.ndarray]:
    """Writes a checkpoint of the same model with other weights; returns its tensors."""
    rng, tensors = np.random.default_rng(3), load_file(folder / FILE)
    for name in sorted(tensors):
        shape = tensors[name].shape
        if tensors[name].dtype.kind == "f":
            noise = rng.standard_normal(shape).astype(tensors[name].dtype) * np.float32(0.5)
            tensors[name] = (tensors[name] * (1 + noise)).astype(tensors[name].dtype)
    if "lm_head.weight" in tensors and "model.embed_tokens.weight" in tensors and "tied" in folder.name:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    other.mkdir()
    for file in folder.iterdir():
        if file.name != FILE:
            (other / file.name).write_bytes(file.read_bytes())
    save_file(tensors, other / FILE, metadata={"format": "pt"})
    return tensors


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors as dictionaries of dictionaries."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = tensor
    return tree


def pairs(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from tensors.items()


def check_update(folder: Path, tmp_path: Path, options: dict[str, Any], forms: tuple[str, ...]) -> None:
    """Each form of new weights gives the leaves and outputs of a model that was loaded with them."""
    tensors = write_other(folder, tmp_path / "other")
    with open_llm(tmp_path / "other", **{**SIZES, **options}) as fresh:
        want, leaves = outputs_of(fresh), leaves_of(fresh)
    with open_llm(folder, **{**SIZES, **options}) as llm:
        before, old_leaves = outputs_of(llm), leaves_of(llm)
        assert before != want
        for number, form in enumerate(forms):
            given: Any = {
                "folder": tmp_path / "other",
                "numpy": tensors,
                "nested": nested(tensors),
                "jax": pairs({name: jnp.asarray(tensor) for name, tensor in tensors.items()}),
            }[form]
            assert llm.update_weights(given) == str(2 * number + 1)
            for got, leaf in zip(leaves_of(llm), leaves, strict=True):
                np.testing.assert_array_equal(got, leaf)
            assert outputs_of(llm) == want
            assert llm.update_weights(folder) == str(2 * number + 2)
            for got, leaf in zip(leaves_of(llm), old_leaves, strict=True):
                np.testing.assert_array_equal(got, leaf)
            assert outputs_of(llm) == before


def test_outputs_are_those_of_the_new_weights(tmp_path: Path) -> None:
    check_update(write_model("llama_mha", tmp_path / "model"), tmp_path, {}, ("numpy", "folder"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3_tied", {"dtype": "bfloat16"}),
        ("llama_gqa_bias", {"quantization": "int8"}),
        ("llama_mha", {"tensor_parallel_size": 2}),
        ("llama_gqa_bias", {"linear_backend": "xla", "kv_cache_dtype": "fp8"}),
        ("llama_gqa_bias", {"linear_backend": "xla", "quantization": "fp8"}),
        ("mistral_window", {"swap_space": 0.01}),
    ],
)
def test_every_form_of_weights_is_replaced(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    folder = write_model(name, tmp_path / f"model_{'tied' if 'tied' in name else ''}")
    check_update(folder, tmp_path, options, ("numpy", "folder", "nested", "jax"))


def tokens_of(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [*generate(llm, [prompt], params)[0].token_ids]


def test_a_request_in_flight_continues_with_the_new_weights_or_waits_for_a_complete_update(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    tensors, prompt = write_other(folder, tmp_path / "other"), PROMPTS[1]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    broken, name = dict(tensors), "model.layers.1.mlp.down_proj.weight"
    broken[name] = np.full_like(tensors[name], np.inf)
    sampled: list[int] = []
    with open_llm(folder, **SIZES, num_scheduler_steps=1) as llm:
        engine = engine_of(llm)
        request = llm._start_request(
            params, parse_prompt(TokensPrompt(prompt_token_ids=prompt)).prompt, is_whole=False
        )()
        has_some, has_ended = threading.Event(), threading.Event()
        ends: list[OutputEvent] = []

        def take(event: OutputEvent) -> None:
            sampled.extend(event.token_ids)
            if len(sampled) == 3:
                has_some.set()
                engine.pause("keep")  # before the next step
            if event.is_last:
                ends.append(event)
                has_ended.set()

        engine.submit(request.request, take)
        assert has_some.wait(60)
        with pytest.raises(InvalidArgument, match=f"weights: tensor {name} has .* not finite.* the weights are asleep"):
            llm.update_weights(broken)
        assert engine.asleep == {"weights"}
        with pytest.raises(Unavailable, match="asleep"):
            tokens_of(llm, prompt, 2)
        assert llm.update_weights(tensors, version="new") == "new" == llm.weight_version
        assert has_ended.wait(60)
        before, new = ends[0].weight_versions
        assert (before.version, new.version) == ("0", "new") and before.num_tokens + new.num_tokens == 12
        first = before.num_tokens
        assert sampled[first:] == tokens_of(llm, prompt + sampled[:first], 12 - first)
        assert llm.update_weights(folder) == "2"
        assert sampled[:first] == tokens_of(llm, prompt, first)


def test_the_loop_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama_mha", tmp_path / "model", with_tokenizer=True)
    page = (Path(__file__).parents[2] / "docs" / "weight_updates.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert code.count("\n") <= 20
    code = (
        code.replace("MODEL", str(folder))
        .replace('"Once upon a time"', '"7,8,9,"')
        .replace(f'LLM("{folder}")', f'LLM("{folder}", num_blocks=37, max_num_seqs=8, max_num_batched_tokens=8)')
    )

    def train_step(weights: dict[str, np.ndarray], group: Any, advantages: np.ndarray) -> dict[str, np.ndarray]:
        assert len(group.outputs) == 4 == len(advantages)
        return {name: tensor * np.float32(1.1) for name, tensor in weights.items()}

    trainer = ModuleType("my_trainer")
    trainer.train_step = train_step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_trainer", trainer)
    names: dict[str, Any] = {}
    with programs_on_demand():
        exec(code, names)
    names["llm"].close()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]


@pytest.mark.long
def test_an_adapter_is_applied_to_the_new_weights_and_can_be_replaced(tmp_path: Path) -> None:
    case = tiny_case("llama_gqa_bias")
    folder = write_checkpoint(case, tmp_path / "base")
    tensors = write_other(folder, tmp_path / "other")
    for name in "ab":
        TinyAdapter(case, name).write(tmp_path / name)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def run(llm: LLM) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter="x")]

    with open_llm(tmp_path / "other", **SIZES, lora=[f"x={tmp_path / 'a'}"]) as fresh:
        want = run(fresh)
        fresh.load_adapter("x", str(tmp_path / "b"), replaces=True)
        want_other = run(fresh)
        assert want != want_other
    with open_llm(folder, **SIZES, lora=[f"x={tmp_path / 'a'}"]) as llm:
        assert run(llm) != want
        llm.update_weights(tensors)
        assert run(llm) == want
        llm.load_adapter("x", str(tmp_path / "b"), replaces=True)
        assert run(llm) == want_other  # and no prefix of the former one


@pytest.mark.long
def test_all_replicas_have_the_new_weights(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    tensors = write_other(folder, tmp_path / "other")
    with open_llm(tmp_path / "other", **SIZES) as fresh:
        want = outputs_of(fresh)
    with open_llm(folder, **SIZES, data_parallel_size=2) as llm:
        before = outputs_of(llm)
        assert llm.update_weights(iter(tensors.items()), mode="wait", version=7) == "7"
        assert outputs_of(llm) == want
        broken = {**tensors, "model.norm.weight": np.full_like(tensors["model.norm.weight"], np.nan)}
        with pytest.raises(InvalidArgument, match="not finite"):
            llm.update_weights(broken)
        with pytest.raises(Unavailable, match="asleep"):
            tokens_of(llm, PROMPTS[0], 2)
        assert llm.wake_up() is True
        assert outputs_of(llm) == before


@pytest.mark.long
def test_a_sleep_ends_with_other_weights(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    tensors = write_other(folder, tmp_path / "other")
    with open_llm(tmp_path / "other", **SIZES) as fresh:
        want = outputs_of(fresh)
    with open_llm(folder, **SIZES, enable_sleep_mode=True) as llm:
        llm.sleep(2)
        with pytest.raises(InvalidArgument, match="must be complete"):
            llm.update_weights({"model.norm.weight": tensors["model.norm.weight"]})
        assert llm.update_weights(tmp_path / "other") == "1"
        assert llm.wake_up() is True and outputs_of(llm) == want
        llm.sleep(2)
        assert llm.wake_up() is True and outputs_of(llm) == want  # the files of the last update
        assert llm.weight_version == "2"
        llm.update_weights({"model.norm.weight": tensors["model.norm.weight"] * 2})
        assert outputs_of(llm) != want


@pytest.mark.long
def test_what_cannot_be_updated_is_refused(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    other = write_model("llama_mqa_wide", tmp_path / "other")
    with open_llm(folder, **SIZES) as llm:
        before = outputs_of(llm)
        with pytest.raises(InvalidArgument, match=r"weights: .*other has .*; the model that is served has"):
            llm.update_weights(other)
        assert outputs_of(llm) == before and llm.weight_version == "0"
    with (
        open_llm(
            folder,
            **SIZES,
            speculative_config=f'{{"method": "draft_model", "model": "{folder}", "num_speculative_tokens": 2}}',
        ) as llm,
        pytest.raises(Unsupported, match="not supported with several processes, a draft model or EPLB"),
    ):
        llm.update_weights(folder)


@pytest.mark.long
def test_an_array_that_is_deleted_during_an_update_does_not_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    tensors = write_other(folder, tmp_path / "other")
    arrays, name = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}, "model.norm.weight"
    with open_llm(folder, **SIZES) as llm:
        before = outputs_of(llm)
        read = LeafReader.read
        with monkeypatch.context() as patch:

            def delete(reader: LeafReader, group: LeafGroup) -> Any:
                arrays[name].delete()
                return read(reader, group)

            patch.setattr(LeafReader, "read", delete)
            with pytest.raises(InvalidArgument, match=f"weights: tensor {name} is a deleted .* weights are asleep"):
                llm.update_weights(arrays)

            def fail(reader: LeafReader, group: LeafGroup) -> Any:
                raise OSError("no such device")

            patch.setattr(LeafReader, "read", fail)
            with pytest.raises(Unavailable, match="OSError: no such device; the weights are asleep"):
                llm.update_weights(tensors)
        assert llm.update_weights(folder) == "1" and outputs_of(llm) == before


class CountingBar:
    """A progress bar that releases a semaphore after every so many finished requests."""

    def __init__(self, every: int) -> None:
        self.turns = threading.Semaphore(0)
        self.postfix = ""
        self._every, self._num_done = every, 0

    def __call__(self, **unused: Any) -> CountingBar:
        return self

    def update(self, count: int) -> None:
        self._num_done += count
        if self._num_done % self._every == 0:
            self.turns.release()

    def close(self) -> None:
        pass


@pytest.mark.long
def test_beams_of_one_version_are_those_of_a_run_with_it(tmp_path: Path) -> None:
    """Beams are swapped out and computed again with few blocks, while the weights change all the time."""
    folder = write_model("llama_mha", tmp_path / "model")
    weights = [load_file(folder / FILE), write_other(folder, tmp_path / "other")]
    prompts = random_prompts([5, 9, 13, 17, 21, 12] * 4)
    params = SamplingParams(beam_width=2, n=2, max_tokens=8, ignore_eos=True)
    found, lock = list[tuple[list[int], Any]](), threading.Lock()
    with open_llm(folder, num_blocks=14, block_size=8, max_model_len=64, swap_space=0.01) as llm:

        def search(number: int) -> None:
            for _ in range(2):
                outputs = llm.generate([TokensPrompt(prompt_token_ids=one) for one in prompts[number::4]], params)
                with lock:
                    found.extend(zip(prompts[number::4], outputs, strict=True))

        callers = [threading.Thread(target=search, args=(number,)) for number in range(4)]
        for caller in callers:
            caller.start()
        version = 0
        while any(caller.is_alive() for caller in callers):
            version += 1
            llm.update_weights(weights[version % 2], version=version)
            callers[version % 4].join(0.05)
        assert len(found) == 48
        num_compared = 0
        for which in range(2):
            llm.update_weights(weights[which])
            for prompt, output in found:
                versions = {run.version for one in output.outputs for run in one.weight_versions}
                if len(versions) == 1 and int(*versions) % 2 == which:
                    (alone,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params)
                    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone.outputs]
                    num_compared += 1
        assert num_compared


@pytest.mark.parametrize(
    ("num_requests", "num_updates"),
    [pytest.param(400, 8, marks=pytest.mark.long), pytest.param(10_000, 50, marks=pytest.mark.deep)],
)
def test_every_token_of_many_requests_is_of_the_version_that_is_reported(
    tmp_path: Path, num_requests: int, num_updates: int
) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    weights = [load_file(folder / FILE), write_other(folder, tmp_path / "other")]
    weights.append({name: tensor * np.float32(1.25) for name, tensor in weights[1].items()})
    shared, rng = random_prompts([17])[0], np.random.default_rng(1)
    prompts = [[*shared[: int(rng.integers(9, 18))], int(rng.integers(3, 40))] for _ in range(num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    bar, outputs = CountingBar(num_requests // (num_updates + 1)), []
    with open_llm(folder, **SIZES, num_scheduler_steps=2) as llm:
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        caller = threading.Thread(target=lambda: outputs.extend(llm.generate(given, params, use_tqdm=bar)))
        caller.start()
        for number in range(1, num_updates + 1):
            assert bar.turns.acquire(timeout=600)
            llm.update_weights(weights[number % 3], version=number)
        caller.join(600)
        assert [list(output.prompt_token_ids) for output in outputs] == prompts  # none is lost
        wanted: list[dict[tuple[int, ...], tuple[int, ...]]] = [{}, {}, {}]
        for prompt, output in zip(prompts, outputs, strict=True):
            begin, (sample,) = 0, output.outputs
            for run in sample.weight_versions:
                of_run = sample.token_ids[begin : begin + run.num_tokens]
                known = (*prompt, *sample.token_ids[:begin])
                same = wanted[int(run.version) % 3].setdefault((*known, -run.num_tokens), of_run)
                assert same == of_run
                begin += run.num_tokens
            assert begin == 6
        versions = [{run.version for run in output.outputs[0].weight_versions} for output in outputs]
        assert set.union(*versions) == {str(number) for number in range(num_updates + 1)}
        assert any(len(found) > 1 for found in versions)
        assert sum(output.usage.cached_tokens > 0 for output in outputs) > num_requests // 2
        for which, of_weights in enumerate(wanted):
            llm.update_weights(weights[which])
            contexts = list(of_weights)
            singles = generate(
                llm,
                [context[:-1] for context in contexts],
                [SamplingParams(temperature=0.0, max_tokens=-context[-1], ignore_eos=True) for context in contexts],
            )
            assert [one.token_ids for one in singles] == [of_weights[context] for context in contexts]


@pytest.mark.long
def test_the_partial_rollout_of_the_page_continues_with_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("llama_mha", tmp_path / "model", with_tokenizer=True)
    tensors, other = load_file(folder / FILE), write_other(folder, tmp_path / "other")
    page = (Path(__file__).parents[2] / "docs" / "weight_updates.md").read_text(encoding="utf-8")
    code = next(code for code in page.split("```") if "import next_weights" in code).removeprefix("python\n")
    code = (
        code.replace('LLM("MODEL")', f'LLM("{folder}", num_blocks=37, max_num_seqs=8, max_num_batched_tokens=8)')
        .replace('"Once upon a time"', '"7,8,9,"')
        .replace("max_tokens=16", "max_tokens=4, ignore_eos=True")
    )
    wholes: list[tuple[int, ...]] = []
    for is_other in (False, True):
        trainer, names = ModuleType("my_trainer"), dict[str, Any]()
        trainer.next_weights = lambda is_other=is_other: other if is_other else tensors  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "my_trainer", trainer)
        with programs_on_demand():
            exec(code, names)
        assert names["versions"] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
        whole = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
        wholes.append(generate(names["llm"], [[7, 8, 9]], whole)[0].token_ids)
        later = generate(names["llm"], [[7, 8, 9, *names["tokens"][:4]]], whole)[0].token_ids
        names["llm"].close()
        assert tuple(names["tokens"][4:]) == later[:8]
        assert (tuple(names["tokens"]) == wholes[-1]) != is_other


@pytest.mark.long
def test_importance_weights_are_one(tmp_path: Path) -> None:
    """Samples and prompts have the same bits; the gradient's forward differs by rounding, unless it is tied to them."""
    folder = write_model("llama_gqa_bias", tmp_path / "model")
    with open_llm(folder, **SIZES, max_num_batched_tokens=16) as llm:
        found = compare(llm, make_trainer(folder, "float32"), PROMPTS, 20)
    assert found["num_tokens"] == 2 * 20 * len(PROMPTS)
    assert (found["prompt_equal_share"], found["prompt_max_difference"]) == (1.0, 0.0)
    assert [found[f"{of}_weight_{end}"] for of in ("prompt", "tied") for end in ("min", "max")] == [1.0] * 4
    assert 0 < found["trainer_max_difference"] < 1e-4


@pytest.mark.long
def test_an_fp8_cache_takes_the_scales_of_a_checkpoint(tmp_path: Path) -> None:
    """Scales so small that all keys saturate change logits; an update brings other scales, or measures them again."""
    folder = write_checkpoint(tiny_case("llama_mha"), tmp_path / "plain")
    scaled, again = tmp_path / "scaled", tmp_path / "again"
    plain = load_file(folder / FILE)
    for target, scale in ((scaled, 1e-5), (again, 0.01)):
        target.mkdir()
        (target / "config.json").write_bytes((folder / "config.json").read_bytes())
        scales = {
            f"model.layers.{layer}.self_attn.{part}_scale": np.full(1, scale * (1 + layer), np.float32)
            for layer in range(from_hf(tiny_case("llama_mha").config).num_layers)
            for part in "kv"
        }
        save_file({**plain, **scales}, target / FILE, metadata={"format": "pt"})
    with open_llm(folder, kv_cache_dtype="fp8", **SIZES) as llm:
        measured = outputs_of(llm)
    with open_llm(scaled, kv_cache_dtype="fp8", **SIZES) as llm:
        saturated = outputs_of(llm)
        llm.update_weights(again)
        other = outputs_of(llm)
        llm.update_weights(folder)
        assert outputs_of(llm) == measured
        llm.update_weights(load_file(scaled / FILE))
        assert outputs_of(llm) == saturated
    with open_llm(again, kv_cache_dtype="fp8", **SIZES) as llm:
        assert outputs_of(llm) == other
    assert measured != saturated != other
    with open_llm(scaled, **SIZES) as llm, open_llm(folder, **SIZES) as same:
        assert outputs_of(llm) == outputs_of(same)
