"""What a turn of a long conversation costs the host before its prompt runs, and the share of its prompt that is cached.

    parse      the bytes of an HTTP body -> a job
    render     its messages -> text, by the chat template in its process
    tokenize   text -> ids
    request    the other checks of a request
    admit      on the engine thread: block hashes, look-up, and the blocks of the prompt

Each turn is served twice in turn: `whole` tokenizes the whole text and hashes every block, `cached` is what a server
does. Both start with nothing cached, and get the same turns. The engine has the real memory manager and no device.

The second table is the share of each prompt that the prefix cache has, for templates that keep reasoning in history, or
drop it before the last message of the user.

The line of the agent is the last of its requests: 18 tools, and two calls with their results per turn, with as many
tokens of four bytes. `--agent-template` renders them with another template than the one here.

With `--templates`, a third table has the time to render the same conversation with each template of a folder.

Times are processor time of the thread and of the process that renders, so that other processes of the machine do not
count: right where it is pinned to one core.

    taskset -c 1 python -m benchmarks.serving.multi_turn [--turns 20] [--tokens 30000] [--rounds 9]
        [--models demo FILE.gguf] [--agent-template FILE.jinja] [--templates FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.record import machine, save
from jpaged import json_text
from jpaged.build import _gguf_parts
from jpaged.chat import ChatOptions, Tool
from jpaged.demo import FOLDER
from jpaged.engine.executor import BucketTable, Geometry
from jpaged.engine.kv_cache.blocks import BlockHash
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import JpagedError
from jpaged.openai.request import chat_job
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.service.chat.formats import parser_for
from jpaged.service.chat.output_config import ChatOutputConfig
from jpaged.service.chat.sandbox import template_process
from jpaged.service.chat.template import ChatTemplate, for_template, read_messages
from jpaged.service.input_processor import InputProcessor
from jpaged.service.tokenizer import HuggingFaceTokenizer, SegmentCache, SegmentedTokenizer
from jpaged.types import Request

STAGES = ("parse", "render", "tokenize", "request", "admit")
GOAL_MS = 10.0
BLOCK_SIZE = 16
ANSWER_TOKENS = 200
REASONING_SHARE = 3
"""Tokens of reasoning for each token of an answer."""
_TEXTS = Path(__file__).parents[2] / "docs"
_ROLES = {"user": "<|user|>", "assistant": "<|assistant|>"}, "<|endoftext|>"
_CHAT_ML = {"user": "<|im_start|>user\n", "assistant": "<|im_start|>assistant\n"}, "<|im_end|>\n"


def cpu_s() -> float:
    """Return the processor time of this thread and of the process that renders chat templates."""
    child = os.pread(_child_times(template_process()._child.process.pid), 100, 0)
    return time.thread_time() + int(child.split()[0]) / 1e9


@functools.cache
def _child_times(pid: int) -> int:
    return os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)


@dataclass(slots=True)
class Clock:
    """Seconds of each stage of one turn."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the context to a stage."""
        begin = cpu_s()
        yield
        self.seconds[stage] += cpu_s() - begin


class TimedTokenizer(HuggingFaceTokenizer):
    """The tokenizer that a server has, with a clock around two of its parts."""

    clock = Clock()

    def _render(self, messages: Any, options: ChatOptions, max_bytes: int, literal: Any) -> str:
        with self.clock.time("render"):
            return super()._render(messages, options, max_bytes, literal)

    def cached_chat_ids(self, *given: Any, **options: Any) -> list[int]:
        begin, rendered_s = cpu_s(), self.clock.seconds["render"]
        ids = super().cached_chat_ids(*given, **options)
        rendered_s = self.clock.seconds["render"] - rendered_s
        self.clock.seconds["tokenize"] += cpu_s() - begin - rendered_s
        return ids


def each_block(parent: BlockHash, tokens: bytes, block_size: int) -> list[BlockHash]:
    """Return what `hash_blocks` does, without hashes of earlier turns."""
    keys = []
    for begin in range(0, len(tokens) - 4 * block_size + 1, 4 * block_size):
        parent = hashlib.sha256(parent + tokens[begin : begin + 4 * block_size]).digest()
        keys.append(parent)
    return keys


class Host:
    """The parts of a server that a request passes before its prompt runs.

    Args:
        keeps: keep and use the ids and hashes of earlier turns.
    """

    def __init__(self, model: Path | None, max_model_len: int, *, keeps: bool, template: str | None = None) -> None:
        parts = None if model is None else _gguf_parts(model)
        self.tokenizer = TimedTokenizer(model or FOLDER, parts=parts, chat_template=template)
        if not self.tokenizer.has_chat_template:
            raise SystemExit(f"{model} has no chat template")
        self._keeps = keeps
        if not keeps:
            self.tokenizer._segmented = SegmentedTokenizer(self.tokenizer._fast, [], SegmentCache(0))
        self._geometry = Geometry(
            num_blocks=4 * max_model_len // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            bytes_per_block=1,
            buckets=BucketTable.build(max_num_batched_tokens=2048, max_num_seqs=4),
        )
        answering = ChatOutputConfig(self.tokenizer, parser_for(self.tokenizer.chat_template, ""))
        self._processor = InputProcessor(self.tokenizer, self._geometry, answering=answering)
        self._memory = PagedKVCacheManager(self._geometry)
        self._number = 0

    def serve(self, body: bytes, answer: str) -> tuple[Clock, Request, int]:
        """Serve one turn; return its times, its request, and how many tokens of its prompt were cached."""
        clock = self.tokenizer.clock = Clock()
        with clock.time("parse"):
            fields = json_text.load_object("body", body)
            json_text.check_values("body", fields)
            job = chat_job(fields, NO_DEFAULTS)
        with clock.time("request"):
            self._number += 1
            request = self._processor.make_request(
                request_id=str(self._number), sampling=job.sampling, prompt=job.prompts[0]
            )
        clock.seconds["request"] -= clock.seconds["render"] + clock.seconds["tokenize"]
        group = SequenceGroup(request, self._number, 0.0, lambda event: None, self._geometry.max_blocks_per_seq)
        hashes = mock.patch("jpaged.engine.kv_cache.blocks.hash_blocks", each_block)
        if not self._keeps:
            hashes.start()
        with clock.time("admit"):
            is_admitted = self._memory.can_admit(group, 0)
            num_cached = self._memory.admit(group)
            sequence = group.live[0]
            self._memory.grow(sequence, sequence.num_tokens - num_cached)
        if not self._keeps:
            hashes.stop()
        if not is_admitted:
            raise SystemExit("the pool is too small for the conversation")
        self._run(sequence, answer)
        return clock, request, num_cached

    def _run(self, sequence: Any, answer: str) -> None:
        """Compute the prompt and generate the answer; its blocks are then free, and cached."""
        generated = self.tokenizer.encode(answer, add_special_tokens=False)
        sequence.append_forced(generated)
        num_computed = len(sequence.token_ids) - len(generated)
        sequence.set_num_computed_tokens(num_computed)
        self._memory.grow(sequence, len(generated))
        sequence.set_num_computed_tokens(num_computed + len(generated) - 1)
        self._memory.release(sequence)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client sends, and what the model answers."""

    body: bytes
    answer: str


def conversation(tokenizer: HuggingFaceTokenizer, num_turns: int, num_tokens: int, offset: int) -> list[Turn]:
    """Return turns of documentation, the last of which has about `num_tokens` tokens before its answer."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_TEXTS.glob("*.md")))
    per_token = 1e5 / len(tokenizer.encode(text[:100_000]))
    num_user = (num_tokens - (num_turns - 1) * ANSWER_TOKENS) / num_turns
    messages: list[dict[str, str]] = []
    turns, place = [], offset * 997

    def take(count: float) -> str:
        nonlocal place
        begin, place = place, place + int(count * per_token)
        return (text[begin % len(text) :] + text)[: place - begin]

    for _ in range(num_turns):
        messages.append({"role": "user", "content": take(num_user)})
        body = {"model": "m", "messages": messages, "stream": True, "max_tokens": 2 * ANSWER_TOKENS}
        reasoning, content = take(REASONING_SHARE * ANSWER_TOKENS), take(ANSWER_TOKENS)
        turns.append(Turn(json_text.dumps(body).encode(), f"{reasoning}</think>{content}"))
        messages = [*messages, {"role": "assistant", "content": content, "reasoning_content": reasoning}]
    return turns


def reasoning_template(model: Path | None, *, keeps: bool) -> str:
    """Return a chat template that keeps the reasoning of all turns, or only that after the user's last message."""
    roles, end = _ROLES if model is None else _CHAT_ML
    shown = "true" if keeps else "loop.index0 > last.index"
    return (
        "{%- set last = namespace(index=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- set last.index = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}"
        f"{{{{- {json_text.dumps(roles)}[m.role] -}}}}"
        f"{{%- if m.reasoning_content and ({shown}) -%}}{{{{- m.reasoning_content + '</think>' -}}}}{{%- endif -%}}"
        f"{{{{- m.content + {json_text.dumps(end)} -}}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- {json_text.dumps(roles['assistant'])} -}}}}{{%- endif -%}}"
    )


def measure(
    model: Path | None, options: argparse.Namespace, template: str | None = None
) -> dict[str, list[list[dict[str, float]]]]:
    """Return the seconds of each stage: by kind, round and turn.

    Args:
        template: of an agent, whose requests are measured; None measures a chat with the model's template.
    """
    found: dict[str, list[list[dict[str, float]]]] = {"whole": [], "cached": []}
    for number in range(options.rounds):
        keeps = {kind: kind == "cached" for kind in found}
        hosts = {kind: Host(model, 4 * options.tokens, keeps=keeps[kind], template=template) for kind in found}
        turns = agent_turns(options.turns, options.tokens)
        if template is None:
            turns = conversation(hosts["whole"].tokenizer, options.turns, options.tokens, number)
        order = sorted(found, reverse=number % 2 == 1)
        times: dict[str, list[dict[str, float]]] = {kind: [] for kind in found}
        for turn in turns:
            ids = set()
            for kind in order:
                clock, request, _ = hosts[kind].serve(turn.body, turn.answer)
                times[kind].append({**clock.seconds, "total": sum(clock.seconds.values())})
                ids.add(request.prompt_token_ids)
            if len(ids) > 1:
                raise SystemExit("the two kinds made different prompts")
        for kind, of_turns in times.items():
            found[kind].append(of_turns)
    return found


def cached_shares(model: Path | None, options: argparse.Namespace, *, keeps: bool) -> list[float]:
    """Return the share of each turn's prompt that the prefix cache has."""
    host = Host(model, 4 * options.tokens, keeps=True, template=reasoning_template(model, keeps=keeps))
    shares = []
    for turn in conversation(host.tokenizer, options.turns, options.tokens, 0):
        _, request, num_cached = host.serve(turn.body, turn.answer)
        shares.append(num_cached / len(request.prompt_token_ids))
    return shares


def report(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Measure a model's host costs, print them, and return them for the record."""
    model = None if name == "demo" else Path(name)
    columns, rows = (*STAGES, "total"), list[dict[str, object]]()
    print(f"{name}\n{'turn':>5} {'':6} " + " ".join(f"{stage + ' ms':>12}" for stage in columns) + "   min .. max")
    chat = measure(model, options)
    template = AGENT_TEMPLATE if options.agent_template is None else options.agent_template.read_text()
    if model is None:
        template = template.replace("<|im_start|>", "<|user|>").replace("<|im_end|>", "<|endoftext|>")
    agent = measure(model, options, template)
    last = len(agent["cached"][0])
    shown_turns = [(chat, turn, f"{turn}") for turn in sorted({1, 2, options.turns // 2, options.turns})]
    for found, turn, label in [*shown_turns, (agent, last, "agent")]:
        for kind, rounds in found.items():
            samples = [of_turns[turn - 1] for of_turns in rounds]
            medians = {stage: 1e3 * statistics.median(one[stage] for one in samples) for stage in columns}
            low, high = (1e3 * pick(one["total"] for one in samples) for pick in (min, max))
            rows.append({"turn": label, "kind": kind, "median_ms": medians, "min_ms": low, "max_ms": high})
            shown = " ".join(f"{medians[stage]:>12.2f}" for stage in columns)
            print(f"{label:>5} {kind:6} {shown}   {low:.2f} .. {high:.2f}")
    shares = {way: cached_shares(model, options, keeps=way == "keeps") for way in ("keeps", "drops")}
    for way, of_turns in shares.items():
        print(f"cached share, template {way} reasoning: " + " ".join(f"{share:.3f}" for share in of_turns))
    return {"model": name if model is None else model.name, "turns": rows, "cached_share": shares}


_BYTES_PER_TOKEN = 4
_TOOLS = 18
_MAX_BYTES = 1 << 24


AGENT_TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
<|im_start|>system
{{ messages[0].content + '\n' if messages[0].role == 'system' }}<tools>
{%- for tool in tools or [] -%}{{ '\n' + tool | tojson }}{%- endfor %}
</tools><|im_end|>
{% for m in messages -%}
{%- set content = m.content if m.content is string else '' -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
<tool_response>
{{ content }}
</tool_response>{{ '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content is string and loop.index0 > last.user -%}
<think>{{ m.reasoning_content.strip('\n') }}</think>{%- endif -%}
{{ content }}{%- for call in m.tool_calls or [] -%}{%- set call = call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% elif m.role == 'user' or not loop.first -%}
{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def agent_turns(num_turns: int, num_tokens: int) -> list[Turn]:
    """Return the requests of an agent: one after each message of the user, and one after each result of a tool."""
    messages, tools = agent_messages(num_turns, num_tokens)
    turns = []
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("user", "tool"):
            body = {"model": "m", "messages": messages[:number], "tools": tools, "stream": True, "max_tokens": 400}
            turns.append(Turn(json_text.dumps(body).encode(), "Done."))
    return turns


def agent_messages(num_turns: int, num_tokens: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages and tools of an agent, of about `num_tokens` tokens of four bytes."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_TEXTS.glob("*.md")))
    parts = iter(range(0, len(text), 100))

    def take(num_chars: int) -> str:
        begin = next(parts)
        return text[begin : begin + num_chars]

    properties = [{f"a{i}": {"type": "string", "description": take(90)} for i in range(5)} for _ in range(_TOOLS)]
    tools = [
        Tool(f"tool_{i}", take(800), {"type": "object", "properties": one}).as_json()
        for i, one in enumerate(properties)
    ]
    share = (_BYTES_PER_TOKEN * num_tokens - len(json_text.dumps(tools))) // num_turns
    messages: list[dict[str, Any]] = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": take(share // 4)})
        for number in range(2 * (turn < num_turns - 1)):
            call_id, arguments = f"abcd{turn:02}{number:03}", json_text.dumps({"a1": take(share // 32)})
            call = {"id": call_id, "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
            messages.append({"role": "assistant", "content": take(share // 32), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": take(share // 4)})
        if turn < num_turns - 1:
            messages.append({"role": "assistant", "content": take(share // 8)})
    return messages, tools


def template_times(folder: Path, options: argparse.Namespace) -> dict[str, float | str]:
    """Return the ms to render an agent's conversation with each template, or why it cannot be rendered."""
    messages, tools = agent_messages(options.turns, options.tokens)
    messages = for_template(read_messages(messages), max_bytes=_MAX_BYTES)
    print(f"{len(messages)} messages, {len(tools)} tools, {len(json_text.dumps(messages))} bytes")
    found: dict[str, float | str] = {}
    for path in sorted(folder.glob("*.jinja")):
        try:
            variables = {"bos_token": "<s>", "eos_token": "</s>"}
            template = ChatTemplate(template_process(), path.read_text(), variables, is_for_tools=True)
            times = []
            for _ in range(options.rounds + 1):
                begin = cpu_s()
                template.render(messages, max_bytes=_MAX_BYTES, tools=tools)
                times.append(1e3 * (cpu_s() - begin))
            found[path.stem] = statistics.median(times[1:])
            print(f"{path.stem:60} {found[path.stem]:6.2f} ms, {min(times[1:]):.2f} .. {max(times[1:]):.2f}")
        except JpagedError as error:
            found[path.stem] = str(error)
            print(f"{path.stem:60} {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.multi_turn",
        description="What a turn of a long conversation costs the host before its prompt runs.",
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=["demo"], help="demo, or GGUF files with a tokenizer")
    parser.add_argument("--agent-template", type=Path, help="chat template of the agent")
    parser.add_argument("--templates", type=Path, help="folder of chat templates (*.jinja) to render as well")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    models = [report(name, options) for name in options.models]
    command = f"python -m benchmarks.serving.multi_turn --turns {options.turns} --tokens {options.tokens}"
    path = save("multi_turn", command, {"goal_ms": GOAL_MS, "rounds": options.rounds, "models": models})
    print(f"written to {path.relative_to(path.parents[2])}")
    if options.templates is not None:
        found = {"rounds": options.rounds, "render_ms": template_times(options.templates, options)}
        path = save("render_templates", f"{command} --templates FOLDER", found)
        print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
