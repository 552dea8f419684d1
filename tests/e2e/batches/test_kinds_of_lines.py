"""A batch file of every kind of line against a server of a tiny model in this process, and what `LLM` makes of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.build import build
from jpaged.client.batch import BatchOptions, BatchSummary, run_batch
from jpaged.config import EngineConfig
from jpaged.llm import LLM
from jpaged.openai.lines import compute_seed
from jpaged.server.lifecycle import Server
from jpaged.service.loaded_model import LoadedModel
from jpaged.types import SamplingParams
from tests.e2e.rig import write_model
from tests.server.harness import eventually

pytestmark = pytest.mark.usefixtures("quick_programs")

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "max_model_len": 64,
    "num_blocks": 128,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}9,"
PROMPTS = ["5,6,7,", "8,9,", "1,2,3,4,5,6,7,8,9,"]
CONTINUATIONS = ["8,9,", "1,", "2,3,4,"]
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "3,4,"}], "max_tokens": 6, "temperature": 0, "ignore_eos": True},
    ),
    "greedy": ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}),
    "drawn": ("/v1/completions", {"prompt": PROMPTS[1], "max_tokens": 8, "ignore_eos": True}),
    "score": ("/v1/score", {"prompt": PROMPTS[0], "continuations": CONTINUATIONS}),
    "embed": ("/v1/embeddings", {"input": PROMPTS}),
    "embed-mean": ("/v1/embeddings", {"input": [[5, 6, 7], [8, 9]], "pooling": "mean", "normalize": True}),
    "similar": ("/v1/score", {"text_1": PROMPTS[0], "text_2": [PROMPTS[0], PROMPTS[2]]}),
    "too long": ("/v1/score", {"prompt": "1," * 60, "continuations": ["2," * 4]}),
    "unknown": ("/v1/embeddings", {"input": [999]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model("qwen3_tied", tmp_path_factory.mktemp("model"), with_tokenizer=True)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}), encoding="utf-8")
    return folder


async def served(folder: Path, source: Path, target: Path) -> BatchSummary:
    """Serve the model while the file runs."""
    config = EngineConfig.load({"model": str(folder), "port": 0, **OPTIONS})
    loaded: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
    server = Server(
        config, lambda progress: build(config, progress), on_serving=lambda port, model: loaded.set_result(model)
    )
    port = await server.start()
    run = asyncio.create_task(server.run())
    try:
        model = await loaded
        summary = await run_batch(BatchOptions(source, target, f"127.0.0.1:{port}"), lambda summary: None)
        await eventually(lambda: model.engine.load().num_blocks_used == 0)
    finally:
        server.request_stop()
        assert await run == 0
    model.engine.check()
    assert model.engine.load().num_compiles_after_warm_up == 0
    return summary


@pytest.mark.long
async def test_a_file_of_all_kinds_of_lines_is_what_an_llm_makes_of_it(folder: Path, tmp_path: Path) -> None:
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in LINES.items()]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    summary = await served(folder, source, target)
    assert (summary.num_succeeded, summary.num_failed) == (7, 2)
    found = {line["custom_id"]: line for line in map(json.loads, target.read_text(encoding="utf-8").splitlines())}
    assert found.keys() == LINES.keys()
    failed = {name for name, line in found.items() if line["response"]["status_code"] == 400}
    told = {name: found[name]["response"]["body"]["error"]["message"] for name in failed}
    assert told["unknown"].startswith("inputs[0]: 999 is not a token id from 0 to")
    assert told["too long"] == "prompt: with the prompt, 64 tokens are not below max_model_len (64)"
    bodies = {name: line["response"]["body"] for name, line in found.items() if name not in failed}
    with LLM(str(folder), **OPTIONS) as llm:
        check_texts(llm, bodies)
        check_numbers(llm, bodies)


def check_texts(llm: LLM, bodies: dict[str, Any]) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=8, seed=compute_seed("drawn"), ignore_eos=True)
    outputs = llm.generate(PROMPTS[:2], [greedy, drawn])
    (chat,) = llm.chat(
        [{"role": "user", "content": "3,4,"}], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    )
    assert [bodies[name]["choices"][0]["text"] for name in ("greedy", "drawn")] == [
        one.outputs[0].text for one in outputs
    ]
    assert bodies["chat"]["choices"][0]["message"]["content"] == chat.outputs[0].text
    assert bodies["chat"]["usage"]["prompt_tokens"] == 3


def check_numbers(llm: LLM, bodies: dict[str, Any]) -> None:
    (scores,) = llm.score_continuations(PROMPTS[0], CONTINUATIONS)
    data = bodies["score"]["data"]
    assert [entry["logprob"] for entry in data] == pytest.approx([score.logprob for score in scores], abs=1e-4)
    assert [entry["is_greedy"] for entry in data] == [score.is_greedy for score in scores]
    assert [[token["token_id"] for token in entry["tokens"]] for entry in data] == [[8, 9], [1], [2, 3, 4]]
    assert bodies["score"]["usage"]["prompt_tokens"] == 3 * 3 + 6
    vectors = [embedding.values for embedding in llm.embed(PROMPTS)]
    for entry, vector in zip(bodies["embed"]["data"], vectors, strict=True):
        assert entry["embedding"] == pytest.approx(vector, abs=1e-4)
    assert bodies["embed"]["usage"]["prompt_tokens"] == 3 + 2 + 9
    means = llm.embed(PROMPTS[:2], pooling="mean", normalize=True)
    for entry, mean in zip(bodies["embed-mean"]["data"], means, strict=True):
        assert entry["embedding"] == pytest.approx(mean.values, abs=1e-4)
    same, other = (entry["score"] for entry in bodies["similar"]["data"])
    assert same == pytest.approx(1.0)
    assert -1 <= other < 1
