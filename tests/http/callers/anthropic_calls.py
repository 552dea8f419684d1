"""Calls of Anthropic's package, in its environment: `python anthropic_calls.py NAME [URL]` prints a JSON value.

fields         the names of the package's types: fields of bodies, types and fields of blocks, and so on
messages       what the clients get for one conversation: synchronous and asynchronous, whole and streamed
errors         the classes and statuses of errors
claude_code    the usage of each turn of an agent with the bodies and headers of Claude Code
captions       the streamed descriptions of pictures, whose PNG files are a JSON list in base64: `URL FILE`
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import anthropic
import anthropic.types as stable
from anthropic.types import beta
from pydantic import BaseModel, TypeAdapter
from typing_extensions import is_typeddict


def leaves(kind: Any) -> Iterator[Any]:
    """The classes of which a type consists."""
    if is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        yield kind
    elif get_origin(kind) not in (Literal, dict):
        for one in get_args(kind):
            yield from leaves(one)


def hints_in(kinds: Any) -> dict[str, Any]:
    """The fields of classes: name -> type."""
    found: dict[str, Any] = {}
    for one in kinds:
        is_model = isinstance(one, type) and issubclass(one, BaseModel)
        found |= (
            {name: field.annotation for name, field in one.model_fields.items()} if is_model else get_type_hints(one)
        )
    return found


def literals(kind: Any) -> set[str]:
    """The strings that a type allows."""
    if get_origin(kind) is Literal:
        return {one for one in get_args(kind) if isinstance(one, str)}
    return {text for one in get_args(kind) for text in literals(one)}


def types_of(kinds: Any) -> set[str]:
    """The values of the field `type` of classes."""
    return {text for one in kinds for text in literals(hints_in([one])["type"])}


def fields() -> dict[str, list[str]]:
    """The names of the package's types, by place."""
    bodies = [stable.message_create_params.MessageCreateParamsNonStreaming, stable.MessageCountTokensParams]
    bodies += [beta.message_create_params.MessageCreateParamsNonStreaming, beta.MessageCountTokensParams]
    results = [hints_in([one])["content"] for one in (stable.ToolResultBlockParam, beta.BetaToolResultBlockParam)]
    system = hints_in([beta.BetaSystemMessageParam])["content"]
    unions = [stable.ContentBlockParam, beta.BetaContentBlockParam, *results, system]
    blocks = [leaf for one in unions for leaf in leaves(one)]
    found = {"body": {*hints_in(bodies)}, "blocks": types_of(blocks)}
    for kind in READ_BLOCKS:
        found[kind] = {*hints_in(one for one in blocks if is_typeddict(one) and kind in types_of([one]))}
    found["body.messages[]"] = {*hints_in([beta.BetaSystemMessageParam, beta.BetaUserMessageParam])}
    found["body.tools[]"] = {*hints_in([stable.ToolParam, beta.BetaToolParam])}
    for name, union in (("tool_choice", beta.BetaToolChoiceParam), ("thinking", beta.BetaThinkingConfigParam)):
        found[f"body.{name}"] = {*hints_in(leaves(union))}
        found[f"body.{name}.type"] = types_of(leaves(union))
    found["body.output_config"] = {*hints_in([stable.OutputConfigParam, beta.BetaOutputConfigParam])}
    return {place: sorted(names) for place, names in found.items()}


READ_BLOCKS = (
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document", "search_result"),
    *("tool_reference", "tool_addition", "tool_removal"),
)
ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "adaptive"},
    "extra_body": {"temperature": 0},
}
EVENTS: TypeAdapter[Any] = TypeAdapter(stable.RawMessageStreamEvent)


def shown(message: Any) -> Any:
    """A message without what differs from call to call; it must be valid."""
    value = json.loads(stable.Message.model_validate(message.to_dict()).to_json())
    del value["id"], value["usage"]
    for block in value["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    value.pop("stop_details", None)
    return value


def messages(url: str) -> list[Any]:
    """The same message by each way of asking; then the count of tokens, and the answer to the call's result."""
    found = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**ASKED)
        found.append(shown(whole))
        found.append(shown(client.beta.messages.create(**ASKED, betas=["interleaved-thinking-2025-05-14"])))
        with client.messages.stream(**ASKED) as stream:
            found.append(shown(stream.get_final_message()))
        events = [event.to_dict() for event in client.messages.create(**ASKED, stream=True)]
        for event in events:
            EVENTS.validate_python(event)
        kinds = [event["type"] for event in events]
        counted = client.messages.count_tokens(model="fake", messages=ASKED["messages"], tools=ASKED["tools"])
        (call,) = (block for block in whole.content if block.type == "tool_use")
        results: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "sun", "is_error": False}]
        turns = [*ASKED["messages"], {"role": "assistant", "content": whole.content}]
        again = client.messages.create(**{**ASKED, "messages": [*turns, {"role": "user", "content": results}]})
        models = [one.id for one in client.models.list()]

    async def wait() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="none", max_retries=0) as client:
            found.append(shown(await client.messages.create(**ASKED)))
            async with client.messages.stream(**ASKED) as stream:
                found.append(shown(await stream.get_final_message()))

    asyncio.run(wait())
    return [found, kinds, counted.input_tokens, whole.usage.to_dict(), again.usage.to_dict(), models]


def errors(url: str) -> list[Any]:
    """The class, the status and the type of each error."""
    found = []
    bad: list[dict[str, Any]] = [
        {"model": "other"},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"container": "c"},
    ]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for fields in bad:
            for streams in (False, True):
                try:
                    client.messages.create(**{**ASKED, **fields}, stream=streams)
                except anthropic.APIStatusError as error:
                    body: Any = error.body
                    kind = body["error"]["type"] if error.request_id == body["request_id"] else ""
                    found.append([type(error).__name__, error.status_code, kind])
    return found


BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05"
)
HEADERS = {"anthropic-beta": BETAS, "x-app": "cli", "user-agent": "claude-cli/2.1.37 (external, cli)"}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}


def agent_body(turn: int, turns: list[Any]) -> dict[str, Any]:
    """A body in the form of Claude Code's."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={turn:05x};"},
        {"type": "text", "text": "You are an agent in a terminal.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Answer briefly. Use the tools. " * 40, "cache_control": EPHEMERAL},
    ]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string", "description": "Path."}},
        "required": ["file_path"],
        "additionalProperties": False,
    }
    tools = [{"name": name, "description": f"{name} a file. " * 9, "input_schema": schema} for name in ("Read", "Edit")]
    return {
        "model": "fake",
        "max_tokens": 32_000,
        "system": system,
        "tools": tools,
        "messages": turns,
        "metadata": {"user_id": f"user_{'a' * 64}_account__session_00000000-0000-4000-8000-000000000000"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }


def claude_code(url: str) -> list[Any]:
    """For each turn: the count of tokens, and the three counts of input tokens in the usage."""
    reminder = {"type": "text", "text": "<system-reminder>\nNo files are open.\n</system-reminder>\n"}
    first = {"type": "text", "text": "Mend the test.", "cache_control": {"type": "ephemeral"}}
    turns: list[Any] = [{"role": "user", "content": [reminder, first]}]
    found = []
    options: Any = {"extra_headers": HEADERS, "extra_query": {"beta": "true"}}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        probe = client.beta.messages.create(
            model="fake", max_tokens=1, messages=[{"role": "user", "content": "quota"}], **options
        )
        assert probe.stop_reason == "max_tokens"
        for turn in range(6):
            body = agent_body(turn, turns)
            counted = client.beta.messages.count_tokens(
                **{name: body[name] for name in ("model", "system", "tools", "messages", "thinking")}, **options
            )
            with client.beta.messages.stream(**body, **options, extra_body={"temperature": 1}) as stream:
                message = stream.get_final_message()
            usage = message.usage
            parts = [usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens]
            found.append([counted.input_tokens, *parts, message.stop_reason])
            assert message.context_management is not None and message.context_management.applied_edits == []
            results: list[Any] = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": f"line {turn}\n" * 5}],
                    "is_error": turn == 3,
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            results[-1]["cache_control"] = {"type": "ephemeral"}
            for one in turns:
                for block in one["content"]:
                    if isinstance(block, dict):
                        block.pop("cache_control", None)
            turns += [
                {"role": "assistant", "content": [block.to_dict() for block in message.content]},
                {"role": "user", "content": results},
            ]
            if turn == 2:
                turns.append({"role": "system", "content": [{"type": "text", "text": "The user is waiting."}]})
    return found


def captions(url: str, pictures: str) -> list[str]:
    """The description of each picture, one after another."""
    found = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for picture in json.loads(Path(pictures).read_text()):
            source = {"type": "base64", "media_type": "image/png", "data": picture}
            content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is in the picture?"}]
            with client.messages.stream(
                model="demo-captioner",
                max_tokens=12,
                messages=[{"role": "user", "content": content}],
                extra_body={"temperature": 0},
            ) as stream:
                found.append("".join(stream.text_stream))
    return found


if __name__ == "__main__":
    name, *urls = sys.argv[1:]
    print(json.dumps(globals()[name](*urls)))
