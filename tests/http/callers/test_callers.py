"""Programs that others wrote, unmodified, against the HTTP face of the demo model: `make callers` runs them alone."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.evaluation.stories import TASKS
from jpaged.client import Client
from jpaged.client.batch import BatchOptions, run_batch
from jpaged.demo import FOLDER
from jpaged.llm import LLM
from jpaged.types import SamplingParams
from tests.http.callers.conftest import NUM_BLOCKS
from tests.processes import WAIT_S

pytestmark = pytest.mark.long

BIN = Path(sys.prefix) / "callers" / "bin"
"""Where `make callers` has put them."""
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
NUM_DOCUMENTS = 24


def run(words: Sequence[str], folder: Path) -> str:
    """What a command prints; fails with it where the command does."""
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        check=False,
        cwd=folder,
        env={**ENVIRONMENT, "HF_HOME": str(folder / "hf"), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


IN_TURN = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""
"""Runs console scripts in one process, which imports their packages once."""


def run_in_turn(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run commands of the environment; fail with what they print if one fails."""
    done = subprocess.run(
        [str(BIN / "python"), "-c", IN_TURN, json.dumps([[str(BIN / one[0]), *one[1:]] for one in commands])],
        check=False,
        cwd=folder,
        env={**ENVIRONMENT, "HF_HOME": str(folder / "hf"), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * WAIT_S * len(commands),
    )
    assert done.returncode == 0, done.stdout[-6000:]


BACKENDS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}


@pytest.fixture(scope="module")
def benchmarks(served: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of `vllm bench serve`, by backend."""
    folder = tmp_path_factory.mktemp("bench")
    commands = []
    for backend, path in BACKENDS.items():
        words = ["vllm", "bench", "serve", "--backend", backend, "--base-url", served[1], "--endpoint", path]
        words += ["--model", "demo", "--tokenizer", str(FOLDER), "--dataset-name", "random", "--num-prompts", "16"]
        words += ["--random-input-len", "32", "--random-output-len", "8", "--seed", "1", "--max-concurrency", "8"]
        words += ["--temperature", "0"]  # sampled, an answer may be special tokens alone, without a text to time
        words += ["--ignore-eos", "--save-result", "--save-detailed", "--result-filename", f"{backend}.json"]
        commands.append(words)
    run_in_turn(commands, folder)
    return folder


@pytest.mark.parametrize(("backend", "path"), BACKENDS.items())
def test_vllm_bench_serve_completes_without_an_error(benchmarks: Path, backend: str, path: str) -> None:
    result = json.loads((benchmarks / f"{backend}.json").read_text())
    assert (result["completed"], result["failed"]) == (16, 0)
    assert result["total_output_tokens"] == 16 * 8 == sum(result["output_lens"])
    assert not any(result["errors"])
    assert len(set(result["generated_texts"])) > 8


CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look up", "arguments": '{"name": "Tom'},
}
AGENT: list[Any] = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "Who is Tom?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
    {"role": "tool", "tool_call_id": "call_1", "content": ""},
]
FOLLOW_UPS = ["And where?", "Why?", "Then?", "The end?"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def chatted(client: Any, talk: list[Any]) -> Any:
    """The message that OpenAI's client returns, with all of its fields."""
    asked: Any = {"model": "demo", "messages": talk, "max_tokens": 6, "temperature": 0}
    return client.chat.completions.create(**asked).choices[0].message.model_dump()


def spoken(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def batched(target: str, talk: list[Any], folder: Path) -> Any:
    """The message of a batch file's only line."""
    body = {"messages": talk, "max_tokens": 6, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source, answers = folder / f"{len(talk)}.jsonl", folder / f"{len(talk)}.out.jsonl"
    source.write_text(json.dumps(line) + "\n")
    asyncio.run(run_batch(BatchOptions(source, answers, target), lambda summary: None))
    return json.loads(answers.read_text())["response"]["body"]["choices"][0]["message"]


def test_a_conversation_of_four_turns_goes_back_through_each_api(
    served: tuple[str, str], template: Path, tmp_path: Path
) -> None:
    theirs = openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0)
    options: Any = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "chat_template": str(template)}
    with Client(served[0]) as client, LLM("demo", **options) as llm:
        ways: dict[str, Callable[[list[Any]], Any]] = {
            "http": lambda talk: chatted(theirs, talk),
            "grpc": lambda talk: spoken(client.chat(talk, GREEDY).outputs[0].text),
            "batch": lambda talk: batched(served[0], talk, tmp_path),
            "llm": lambda talk: spoken(llm.chat(talk, GREEDY, use_tqdm=False)[0].outputs[0].text),
        }
        told = {}
        for name, answer in ways.items():
            talk = list(AGENT)
            for follow_up in FOLLOW_UPS:
                talk += [answer(talk), {"role": "user", "content": follow_up}]
            told[name] = [one["content"] for one in talk[len(AGENT) :: 2]]
        assert all(one == told["http"] for one in told.values()), told
        items: list[Any] = [
            *AGENT[:2],
            {"type": "function_call", "call_id": "call_1", **CALL["function"]},
            {"type": "function_call_output", "call_id": "call_1", "output": ""},
        ]
        said = []
        for follow_up in FOLLOW_UPS:
            response = theirs.responses.create(model="demo", input=items, max_output_tokens=6, temperature=0)
            said.append(response.output_text)
            items += [*(one.to_dict() for one in response.output), {"role": "user", "content": follow_up}]
        assert said == told["http"]
    text = "Who is Tom?"
    for follow_up in FOLLOW_UPS:
        asked: Any = {"model": "demo", "max_tokens": 6, "temperature": 0}
        text += theirs.completions.create(prompt=text, **asked).choices[0].text + follow_up


def evaluated(model: str, url: str, task: str, folder: Path, *more: str) -> dict[str, Any]:
    """The results of a task as lm_eval writes them."""
    arguments = f"base_url={url},model=demo,tokenizer={FOLDER},num_concurrent=4,max_length=1023,max_retries=1"
    words = ["lm_eval", "--model", model, "--tasks", task, "--include_path", str(TASKS), "--output_path", "out"]
    (folder / "stories.jsonl").symlink_to(TASKS / "stories.jsonl")
    run([*words, "--model_args", arguments, "--limit", str(NUM_DOCUMENTS), "--log_samples", *more], folder)
    (path,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())["results"][task]
    (path,) = (folder / "out").rglob("samples_*.jsonl")
    return {**found, "samples": [json.loads(line) for line in path.read_text().splitlines()]}


def documents() -> list[dict[str, Any]]:
    lines = (TASKS / "stories.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:NUM_DOCUMENTS]]


def test_lm_eval_scores_as_our_own_client_does(served: tuple[str, str], tmp_path: Path) -> None:
    found = evaluated("local-completions", f"{served[1]}/v1/completions", "jpaged_endings", tmp_path)
    num_right, told = 0, {sample["doc_id"]: sample for sample in found["samples"]}
    with Client(served[0]) as client:
        for number, document in enumerate(documents()):
            scores = client.score(document["beginning"], [f" {ending}" for ending in document["endings"]])
            theirs = [float(one[0]) for one in told[number]["filtered_resps"]]
            assert theirs == pytest.approx([one.logprob for one in scores], abs=2e-3)
            assert [str(one[1]) == "True" for one in told[number]["filtered_resps"]] == [
                one.is_greedy for one in scores
            ]
            likeliest = max(range(len(scores)), key=lambda i: scores[i].logprob)
            num_right += likeliest == document["answer"]
    assert found["acc,none"] == pytest.approx(num_right / NUM_DOCUMENTS)


def test_lm_eval_generates_through_chats_as_our_own_client_does(served: tuple[str, str], tmp_path: Path) -> None:
    url = f"{served[1]}/v1/chat/completions"
    found = evaluated("local-chat-completions", url, "jpaged_next", tmp_path, "--apply_chat_template")
    told = {sample["doc_id"]: sample for sample in found["samples"]}
    greedy = SamplingParams(max_tokens=32, temperature=0.0, stop=[".", "!", "?", ","])
    with Client(served[0]) as client:
        for number, document in enumerate(documents()):
            messages = [{"role": "user", "content": document["begun"]}]
            ours = client.chat(messages, greedy).outputs[0].text
            assert told[number]["resps"][0][0] == ours
