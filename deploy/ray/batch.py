"""A batch over a Ray cluster: blocks of lines go to workers, each of which holds an engine, and come back as files.

    python batch.py requests.jsonl results --num-workers 2 --engine '{"model": "demo"}'
    cat results/part-*.jsonl                                 every result, in the order of the input

    input ──> Block: some lines of a file ──Ray Data──> Worker: engine, pool, programs ──> part-000007-<digest>.jsonl

The input is what `jpaged batch` takes, a file of JSON lines or Parquet, or a folder of such files; the results are what
it writes. Both are on storage that all nodes see under the same path. A part is named by the content of its block, and
is there whole or not at all: a block that runs twice, because its worker was lost, writes the same part again, and a
second run leaves out the blocks whose parts are there. So each line has one result.

RAY_ADDRESS names the cluster; without it one is started on this machine. jpaged is installed on every node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import blocks
import ray
from blocks import Block, Part, Parts, Reader, Span, blocks_of, files_in, spans_of
from ray import cloudpickle

from jpaged.chat import ChatOptions
from jpaged.client import convert
from jpaged.client.channel import Backoff
from jpaged.client.convert import CallOptions, embed_call, score_call
from jpaged.client.errors import build_error
from jpaged.config import PROCESS_OPTIONS, EngineConfig, server_field_names
from jpaged.errors import InternalError, InvalidArgument, JpagedError, QueueFull, describe_error
from jpaged.openai.lines import Answers, BadLine, Line, failure_line
from jpaged.outputs import Evaluated
from jpaged.server.replica import Refused, Replica
from jpaged.types import ModelInfo, Pooling, RequestOutput, SamplingParams, Score

_T = TypeVar("_T")

_MAX_TRIES = 8
"""So often in a run workers begin with a block before its lines fail: they may be what ends them."""
_OBJECT_STORE_BYTES = 80 << 20
"""The object store of a Ray that is started here: blocks are named in it, not carried."""
_AGENT_TIMEOUT_MS = "300000"
_MAX_STARTS = 3
_EXIT_DEAD_ENGINE = 70
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 15.0


class Local:
    """An engine of this process, with the methods of a client that lines need: a `Server`."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        from jpaged import build as build_module  # imports jax, which the process that starts the run does not need

        model = build_module.build(EngineConfig.load(dict(engine)))
        self.model: ModelInfo = model.model
        self.num_rows = model.engine.geometry.max_num_seqs
        self._replica = Replica(model)

    def require_alive(self) -> None:
        """Raise Unavailable when the engine has died."""
        self._replica.serving()

    async def complete(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        adapter: str = "",
    ) -> RequestOutput:
        """See `AsyncClient.complete`; it waits while the queue is full."""
        what = convert.get_prompt(prompt, prompt_token_ids, messages, chat_options)

        async def run() -> RequestOutput:
            request = convert.generate_request(what, sampling, request_id=None, model=None, whole=True, adapter=adapter)
            assembler = convert.Assembler(what, sampling)
            async with aclosing(self._replica.generate(request)) as answers:
                async for answer in answers:
                    assembler.add(convert.parse_chunk(answer))
            return assembler.output()

        return await _in_time(run)

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[Score]:
        """See `AsyncClient.score`; it waits while the queue is full."""
        call = score_call(prompt, continuations, CallOptions(None, adapter, cache_salt, priority))
        return call.read(await _in_time(lambda: self._replica.score(call.request)))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]:
        """See `AsyncClient.embed`; it waits while the queue is full."""
        asker = CallOptions(None, adapter, cache_salt, priority)
        call = embed_call(inputs, asker, pooling=pooling, normalize=normalize)
        return call.read(await _in_time(lambda: self._replica.embed(call.request)))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
    ) -> tuple[int, ...]:
        """See `AsyncClient.tokenize`."""
        call = convert.tokenize_call(
            convert.get_prompt(text, None, messages, chat_options), add_special_tokens=None, model=None
        )
        with _translated():
            return call.read(await self._replica.tokenize(call.request))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `AsyncClient.detokenize`."""
        call = convert.detokenize_call(token_ids, skip_special_tokens=skip_special_tokens, model=None)
        with _translated():
            return call.read(await self._replica.detokenize(call.request))

    async def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[bytes, ...]:
        """See `AsyncClient.token_bytes`."""
        call = convert.token_bytes_call(token_ids, skip_special_tokens=skip_special_tokens, model=None)
        with _translated():
            return call.read(await self._replica.detokenize(call.request))


async def _in_time(run: Callable[[], Awaitable[_T]]) -> _T:
    """What a call comes to, which is made again while the queue is full."""
    backoff = Backoff(_FIRST_BACKOFF_S, 2.0, _MAX_BACKOFF_S)
    while True:
        try:
            with _translated():
                return await run()
        except QueueFull as error:
            await asyncio.sleep(backoff.next_s(error.retry_after_s))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Refused as refusal:
        raise build_error(refusal.code, refusal.details, refusal.trailing_metadata) from refusal


class Worker:
    """A stateful actor: it loads the model once, and then runs block after block, several at a time.

    Args:
        engine: options of the engine.
        folder: where parts are written.
    """

    def __init__(self, engine: Mapping[str, Any], folder: str) -> None:
        self._folder = Path(folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._reader = Reader()
        self._in_loop(self._begin(engine))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Run a block, write its part, and tell what it holds."""
        block = Block(int(row["index"]), Span(**row["span"]))
        part = Part(self._folder, block)
        lines = self._reader.lines(block.span)
        if (num_tries := part.begin()) > _MAX_TRIES:
            error = InternalError(f"{num_tries - 1} workers were lost that ran these lines")
            results = [failure_line(line.custom_id, error) for line in lines]
        else:
            results = self._in_loop(self._run(lines))
        part.write(results)
        return {"index": block.index, "num_lines": len(results), "process": os.getpid()}

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, engine: Mapping[str, Any]) -> None:
        self._local = Local(engine)
        self._answers = Answers(self._local.model)
        self._places = asyncio.Semaphore(2 * self._local.num_rows)

    async def _run(self, lines: Sequence[Line | BadLine]) -> list[str]:
        return await asyncio.gather(*(self._answer(line) for line in lines))

    async def _answer(self, line: Line | BadLine) -> str:
        if isinstance(line, BadLine):
            return failure_line(line.custom_id, line.error)
        async with self._places:
            try:
                return (await self._answers.answer(self._local, line)).text
            except JpagedError as error:
                self._end_with_engine()
                return failure_line(line.custom_id, error)

    def _end_with_engine(self) -> None:
        """Ends this process if its engine has died: Ray starts another, which runs what this one had."""
        try:
            self._local.require_alive()
        except JpagedError as error:
            print(f"the engine has died: {error}", file=sys.stderr, flush=True)
            os._exit(_EXIT_DEAD_ENGINE)


def run(arguments: argparse.Namespace) -> int:
    """Run what the command line asks for; returns 0 when every line has succeeded, 1 when some failed."""
    began_s = time.monotonic()
    source, folder = arguments.input.resolve(), arguments.output.resolve()
    _check_engine(arguments.engine)
    files = [str(file) for file in files_in(source)]
    _start_ray()
    cloudpickle.register_pickle_by_value(blocks)  # a worker on another node has no such file
    found = blocks_of(_scanned(files, arguments.block_lines), source)
    with Parts(folder, found) as parts:
        missing = parts.missing()
        say(f"{len(found)} blocks of {len(files)} files, {len(found) - len(missing)} of them done before")
        for number, done in enumerate(_results(missing, arguments, folder), start=1):
            what = f"block {done['index']}: {done['num_lines']} lines by process {done['process']}"
            say(f"{what} ({number} of {len(missing)})")
        total = parts.total()
    num_lines = total.num_succeeded + total.num_failed
    counts = f"{total.num_succeeded} succeeded, {total.num_failed} failed"
    say(f"{num_lines} requests: {counts}; {time.monotonic() - began_s:.1f} s")
    return 1 if total.num_failed else 0


def _scanned(files: Sequence[str], block_lines: int) -> list[tuple[list[Span], bytes]]:
    """The spans of each file, which are found where there is a CPU."""

    def scan(file: str) -> tuple[list[Span], bytes] | tuple[str, str]:
        try:
            return spans_of(file, block_lines)
        except InvalidArgument as error:  # as what it is made of: Ray would pack it, and could not unpack it
            return error.field, error.problem

    task = ray.remote(num_cpus=0.1)(scan)
    found: list[tuple[list[Span], bytes]] = []
    for one in ray.get([task.remote(file) for file in files]):
        if isinstance(one[0], str):
            raise InvalidArgument(*one)
        found.append(one)
    return found


def _results(missing: Sequence[Block], arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What the workers tell of the blocks, as they end them."""
    if not missing:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"index": block.index, "span": asdict(block.span)} for block in missing]
    pool = ray.data.ActorPoolStrategy(
        size=min(arguments.num_workers, len(missing)),
        max_tasks_in_flight_per_actor=arguments.blocks_in_flight,
        max_concurrent_calls_per_actor=arguments.blocks_in_flight,
        enable_true_multi_threading=True,
    )
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        Worker,
        fn_constructor_args=(arguments.engine, str(folder)),
        compute=pool,  # whose actors are started again, and their blocks run again, whenever they are lost
        num_cpus=arguments.num_cpus,
        num_gpus=arguments.num_gpus,
        resources=arguments.resources,
    )
    yield from done.iter_rows()


def _check_engine(engine: Mapping[str, Any]) -> None:
    for name in (*server_field_names(), *PROCESS_OPTIONS):
        if name in engine:
            raise InvalidArgument(f"--engine: {name}", "is an option of `jpaged serve`, but a batch starts no server")
    EngineConfig.load(dict(engine))


def _start_ray() -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts one of this machine.

    On a busy machine a Ray that starts gives up on itself: its raylet waits so long for an agent, which a setting
    changes, and Python waits 30 s for the raylet, which none does. So it is started a few times.
    """
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
        return
    os.environ.setdefault("RAY_agent_register_timeout_ms", _AGENT_TIMEOUT_MS)
    for tries_left in reversed(range(_MAX_STARTS)):
        try:
            ray.init(
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
            return
        except Exception as error:  # Ray raises no type of its own here
            if not tries_left:
                raise
            print(f"Ray did not start, {tries_left} tries are left: {error}", file=sys.stderr, flush=True)
            ray.shutdown()


def say(what: str) -> None:
    """One line, at once."""
    print(what, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="batch.py", description="Run an OpenAI batch file over a Ray cluster.")
    made.add_argument("input", type=Path, metavar="INPUT", help="a .jsonl or .parquet file, or a folder of such")
    made.add_argument("output", type=Path, metavar="OUTPUT", help="folder of the results; taken up again if it exists")
    made.add_argument("--num-workers", type=int, default=1, metavar="N", help="engines (default: 1)")
    made.add_argument(
        "--engine",
        type=json.loads,
        default={"model": "demo"},
        metavar="JSON",
        help="options as in jpaged.LLM (default: the demo)",
    )
    made.add_argument(
        "--block-lines", type=int, default=256, metavar="N", help="lines that a worker takes together (default: 256)"
    )
    made.add_argument(
        "--blocks-in-flight", type=int, default=2, metavar="N", help="blocks that a worker runs at a time (default: 2)"
    )
    made.add_argument("--num-cpus", type=float, default=1.0, metavar="N", help="of each worker (default: 1)")
    made.add_argument("--num-gpus", type=float, default=0.0, metavar="N", help="of each worker (default: 0)")
    made.add_argument(
        "--resources", type=json.loads, default={}, metavar="JSON", help='of each worker, such as {"TPU": 4}'
    )
    return made


def main() -> int:
    """Returns 0 when every line has succeeded, 1 when some failed, 2 when nothing could run."""
    try:
        arguments = parser().parse_args()
        for name in ("num_workers", "block_lines", "blocks_in_flight"):
            if getattr(arguments, name) < 1:
                option = name.replace("_", "-")
                raise InvalidArgument(f"--{option}", f"{getattr(arguments, name)} is below the limit of 1")
        return run(arguments)
    except JpagedError as error:
        print(f"batch.py: {describe_error(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
