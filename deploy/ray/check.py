"""Starts the application on this machine with two replicas, and holds it to what `LLM` generates. `make ray` runs it.

Ray's own output goes to files; a line here for each thing that was seen, and exit code 0 when all of them were.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ray
import yaml
from app import GRPC_SERVICER_FUNCTIONS, build
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeDeploySchema

from jpaged import LLM, Client, InvalidArgument, SamplingParams
from jpaged._proto.v1 import control_pb2

ENGINE = {"model": "demo", "max_num_seqs": 8, "num_blocks": 256, "max_num_batched_tokens": 64, "shutdown_timeout": 30}
ENGINE_ALONE = {name: value for name, value in ENGINE.items() if name != "shutdown_timeout"}
NUM_REPLICAS = 2
NUM_CONVERSATIONS, NUM_TURNS = 12, 2
MIN_FOUND_TOKENS = 32  # two blocks of a conversation: it shares less than one with others
PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("fox", "bear", "dragon", "cat", "crow", "hen")]
CONTINUATIONS = [" who lived", " in the wood.", "xyz"]
TOLERANCE = 1e-4
OBJECT_STORE_BYTES = 80 << 20
PATIENCE_S = 120.0


def main() -> int:
    """Runs every part; the first that fails ends it with a traceback."""
    began_s = time.monotonic()
    check_config_file()
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # this process forks later, which jax would not survive
        expected, evaluated = other.submit(run_alone).result()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        num_cpus=2,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    grpc_port, http_port = free_ports(2)
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": http_port},
            grpc_options={"port": grpc_port, "grpc_servicer_functions": GRPC_SERVICER_FUNCTIONS},
        )
        args = {"engine": ENGINE, "num_replicas": NUM_REPLICAS, "num_cpus": 0.5}
        handle = serve.run(build(args), name="jpaged")
        with Client(f"127.0.0.1:{grpc_port}", timeout_s=PATIENCE_S) as client:
            client.wait_until_ready(PATIENCE_S)
            say(f"{NUM_REPLICAS} replicas serve on port {grpc_port}")
            check_streams(client, handle, expected)
            check_evaluations(client, evaluated)
            check_prefixes(client, handle)
            check_refusal(client)
            check_cancelling(client, handle)
            check_drain(client)
    finally:
        serve.shutdown()
        ray.shutdown()
    say(f"stopped; {time.monotonic() - began_s:.0f} s in all")
    return 0


def check_config_file() -> None:
    """serve.yaml is what Ray's schema allows, and its arguments are what `build` takes."""
    text = Path(__file__).with_name("serve.yaml").read_text(encoding="utf-8")
    written = yaml.safe_load(text)
    schema = ServeDeploySchema.model_validate(written)
    require(schema.grpc_options.grpc_servicer_functions == GRPC_SERVICER_FUNCTIONS, "serve.yaml offers the same RPCs")
    require(written["applications"][0]["import_path"] == "app:build", "serve.yaml names build")
    build(written["applications"][0]["args"])
    say("serve.yaml is valid")


def sampling(number: int, max_tokens: int = 24) -> SamplingParams:
    """Every second request is greedy, the others draw with seeds of their own."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=100 + number, ignore_eos=True)


def run_alone() -> tuple[list[tuple[int, ...]], list[float]]:
    """What one engine generates by itself, and the numbers of scores and embeddings."""
    with LLM(**ENGINE_ALONE) as llm:
        outputs = llm.generate(PROMPTS, [sampling(number) for number in range(len(PROMPTS))])
        (scores,) = llm.score_continuations(PROMPTS[0], CONTINUATIONS)
        embeddings = llm.embed(PROMPTS, pooling="mean", normalize=True)
    say(f"LLM generated {len(outputs)} answers to compare with")
    numbers = [score.logprob for score in scores] + [value for one in embeddings for value in one.values]
    return [output.outputs[0].token_ids for output in outputs], numbers


def check_streams(client: Client, handle: DeploymentHandle, expected: list[tuple[int, ...]]) -> None:
    """All prompts at once, twice: the tokens are LLM's, they come one by one, and both replicas took part."""
    all_begun = threading.Barrier(len(PROMPTS))

    def stream(number: int) -> tuple[tuple[int, ...], int]:
        with client.generate(PROMPTS[number], sampling(number)) as chunks:
            first = next(chunks)
            all_begun.wait(PATIENCE_S)  # every stream has begun before any goes on
            rest = list(chunks)
        token_ids = (*first.token_ids, *(token_id for chunk in rest for token_id in chunk.token_ids))
        return token_ids, len(first.token_ids)

    for _ in range(2):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            answers = list(threads.map(stream, range(len(PROMPTS))))
        require([token_ids for token_ids, _ in answers] == expected, "the tokens are those of LLM")
        require(max(first for _, first in answers) < len(expected[0]), "answers stream")
    counts = [load.num_generation_tokens for load in loads(handle).values()]
    require(sum(counts) == 2 * sum(map(len, expected)) and min(counts) > 0, f"both replicas generated: {counts}")
    say(f"{len(PROMPTS)} streams at once, twice: tokens equal LLM's; the replicas generated {counts}")


def check_evaluations(client: Client, expected: list[float]) -> None:
    """Scores and embeddings are LLM's."""
    scores = client.score(PROMPTS[0], CONTINUATIONS)
    vectors = client.embed(PROMPTS, pooling="mean", normalize=True)
    found = [score.logprob for score in scores] + [value for vector in vectors for value in vector]
    require(len(found) == len(expected), f"{len(found)} numbers, not {len(expected)}")
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    require(difference < TOLERANCE, f"scores and embeddings differ from LLM's by {difference}")
    say(f"{len(scores)} scores and {len(vectors)} vectors differ from LLM's by {difference:.0e} at most")


def check_prefixes(client: Client, handle: DeploymentHandle) -> None:
    """What begins alike goes to one replica: every turn of a conversation but the first finds its beginning cached."""

    def counts() -> tuple[int, dict[str, int]]:
        found = loads(handle)
        hits = sum(load.num_prefix_hit_tokens for load in found.values())
        return hits, {name: load.num_prompt_tokens for name, load in found.items()}

    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    story = "The fox and the crow lived in the wood, and were friends. " * 3
    prompts = [f"Conversation {number}. {story}" for number in range(NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(len(prompts)) as threads:  # all at once, so that both replicas have some
        list(threads.map(lambda prompt: client.complete(prompt, greedy), prompts))
    num_missed, served = 0, set[str]()
    for prompt in prompts:
        for turn in range(NUM_TURNS):
            before, prompts_before = counts()
            client.complete(prompt + f"Then came the {turn}. " * (turn + 1), greedy)
            after, prompts_after = counts()
            num_missed += after - before < MIN_FOUND_TOKENS
            served |= {name for name, count in prompts_after.items() if count > prompts_before[name]}
    num_turns = NUM_CONVERSATIONS * NUM_TURNS
    require(num_missed == 0, f"{num_missed} of {num_turns} turns did not find what they begin with")
    require(len(served) == NUM_REPLICAS, f"{len(served)} of {NUM_REPLICAS} replicas had conversations")
    say(f"{NUM_CONVERSATIONS} conversations stay where they began: all {num_turns} turns found their beginning cached")


def check_refusal(client: Client) -> None:
    """A request that can never run comes back as the error that jpaged serve gives."""
    try:
        client.complete(PROMPTS[0], SamplingParams(max_tokens=1_000_000))
    except InvalidArgument as error:
        require("max_tokens" in str(error), f"the refusal names the field: {error}")
        say(f"refused: {error}")
    else:
        raise AssertionError("a request for 1000000 tokens was taken")


def check_cancelling(client: Client, handle: DeploymentHandle) -> None:
    """A stream that its reader closes gives its blocks back, long before it would have ended."""
    before = sum(load.num_generation_tokens for load in loads(handle).values())
    num_asked = 400
    with client.generate(PROMPTS[0], sampling(1, num_asked)) as chunks:
        next(chunks)
        require(any(load.num_blocks_used for load in loads(handle).values()), "a running request holds blocks")
    eventually(lambda: all(load.num_blocks_used == 0 for load in loads(handle).values()))
    num_drawn = sum(load.num_generation_tokens for load in loads(handle).values()) - before
    require(num_drawn < num_asked, f"{num_drawn} tokens were drawn of {num_asked}")
    say(f"a closed stream: {num_drawn} of {num_asked} tokens drawn, no block is held")


def check_drain(client: Client) -> None:
    """What runs when the application is taken away still gets all of its tokens."""
    num_asked = 200
    with client.generate(PROMPTS[2], sampling(2, num_asked)) as chunks:
        num_tokens = len(next(chunks).token_ids)
        deleting = threading.Thread(target=serve.delete, args=("jpaged",))
        deleting.start()
        num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
    deleting.join()
    require(num_tokens == num_asked, f"{num_tokens} of {num_asked} tokens came through the drain")
    say(f"deleted while it streamed: all {num_tokens} tokens came")


def loads(handle: DeploymentHandle) -> dict[str, Any]:
    """The load of every replica; the router picks one a call, so it is asked until all have answered."""
    found: dict[str, Any] = {}

    def ask() -> bool:
        name, message = handle.load.remote().result(timeout_s=PATIENCE_S)
        found[name] = control_pb2.GetLoadResponse.FromString(message)
        return len(found) == NUM_REPLICAS

    eventually(ask)
    return found


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until it holds."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        require(time.monotonic() < until_s, f"{condition} did not come to hold in {PATIENCE_S:.0f} s")
        time.sleep(0.02)


def free_ports(count: int) -> Iterator[int]:
    """Ports that nobody has, for the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return iter(ports)


def require(condition: bool, what: str) -> None:
    """Fails with what was expected."""
    if not condition:
        raise AssertionError(what)


def say(what: str) -> None:
    """One line, at once."""
    print(f"ray: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
