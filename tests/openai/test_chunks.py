"""Chunks of a stream: what each event becomes, and what comes before the first and behind the last."""

import json
from typing import Any

from jpaged.chat import ToolCallPiece
from jpaged.openai.request import Job, chat_job, completion_job
from jpaged.openai.response import DONE, ChunkBuilder, ResponseMetadata, ShownToken
from jpaged.types import (
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    SequenceFinish,
    TokenLogprob,
    Usage,
)

HEADING = ResponseMetadata("r", "m", 7)


def shown(token_id: int) -> ShownToken:
    return ShownToken(chr(token_id).encode(), chr(token_id))


def chunks_of(job: Job) -> ChunkBuilder:
    return ChunkBuilder(HEADING, job, shown)


def read(sent: bytes) -> list[Any]:
    """The values of server-sent events."""
    assert not sent or sent.endswith(b"\n\n")
    return [json.loads(one.removeprefix("data: ")) for one in sent.decode().split("\n\n")[:-1]]


def chat(**more: Any) -> Job:
    return chat_job({"messages": [{"role": "user", "content": "x"}], "stream": True, **more})


def test_pieces_of_one_call_in_one_event_are_one_entry() -> None:
    chunks = chunks_of(chat())
    pieces = (
        ToolCallPiece(0, '{"a', "id0", "f"),
        ToolCallPiece(0, '": 1'),
        ToolCallPiece(0, "}"),
        ToolCallPiece(1, "{}", "id1", "g"),
    )
    role, told = read(
        chunks.of(0, OutputEvent("r", text="So", reasoning_content="hm", token_ids=(1,), tool_calls=pieces))
    )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    delta = told["choices"][0]["delta"]
    assert list(delta) == ["reasoning_content", "reasoning", "content", "tool_calls"]
    assert delta["tool_calls"] == [
        {"index": 0, "function": {"arguments": '{"a": 1}', "name": "f"}, "id": "id0", "type": "function"},
        {"index": 1, "function": {"arguments": "{}", "name": "g"}, "id": "id1", "type": "function"},
    ]
    (last,) = read(chunks.of(0, OutputEvent("r", finish=SequenceFinish(FinishReason.TOOL_CALLS), is_last=True)))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")


def test_a_text_is_written_as_json_whichever_it_is() -> None:
    for job in (completion_job({"prompt": "x", "stream": True}), chat()):
        chunks = chunks_of(job)
        chunks.of(0, OutputEvent("r", text="a", token_ids=(1,)))
        for text in ('"quoted" \\ back', "\x00\x1f\u2028", "é漢🏔", "</script>"):
            (told,) = read(chunks.of(0, OutputEvent("r", text=text, token_ids=(1,))))
            choice = told["choices"][0]
            assert (choice["delta"]["content"] if job.is_chat else choice["text"]) == text
            assert (told["id"], told["model"], told["created"], choice["index"]) == (
                "chatcmpl-r" if job.is_chat else "cmpl-r",
                "m",
                7,
                0,
            )


def test_a_plain_chunk_has_the_fields_of_any_other() -> None:
    for job in (completion_job({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}), chat()):
        chunks = chunks_of(job)
        sent = [read(chunks.of(0, OutputEvent("r", text="a", token_ids=(1,))))[-1] for _ in range(2)]
        assert sent[0] == sent[1]


def test_what_is_held_back_makes_no_chunk_and_no_role_before_it_comes() -> None:
    chunks = chunks_of(completion_job({"prompt": "x", "stream": True}))
    assert chunks.of(0, OutputEvent("r", token_ids=(5,))) == b""
    assert chunks.end() == DONE


def test_the_usage_of_several_prompts_is_of_all_together() -> None:
    job = completion_job({"prompt": ["x", "y"], "stream": True, "stream_options": {"include_usage": True}, "n": 2})
    chunks = chunks_of(job)
    (told,) = read(chunks.of(1, OutputEvent("r", 1, "a", (1,), usage=Usage(3, 5, 1))))
    assert told["choices"][0]["index"] == 3 and told["usage"] is None
    chunks.of(0, OutputEvent("r", 0, "a", (1,), usage=Usage(2, 4, 0)))
    end = chunks.end()
    assert end.endswith(DONE)
    (usage,) = read(end.removesuffix(DONE))
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 14
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_echo_is_told_once_for_each_choice_with_what_came_of_the_prompt() -> None:
    body = {"prompt": "ab", "stream": True, "echo": True, "logprobs": 0, "n": 2}
    chunks = chunks_of(completion_job(body))
    position = PositionLogprobs(TokenLogprob(98, -2.0))
    assert chunks.of(0, OutputEvent("r", prompt_logprobs=(position,)), (97, 98), "ab") == b""
    for index in (1, 0):
        said = PositionLogprobs(TokenLogprob(99, -1.0))
        event = OutputEvent("r", index, "c", (99,), (said,))
        echo, told = read(chunks.of(0, event, (97, 98), "ab"))
        assert echo["choices"][0]["text"] == "ab" and echo["choices"][0]["index"] == index
        assert echo["choices"][0]["logprobs"]["token_logprobs"] == [None, -2.0]
        assert told["choices"][0]["logprobs"]["text_offset"] == [2]
        assert len(read(chunks.of(0, event, (97, 98), "ab"))) == 1


def test_what_a_prompt_was_told_is_freed_once_every_choice_has_begun() -> None:
    freed: list[int] = []

    class Watched(PositionLogprobs):
        def __del__(self) -> None:
            freed.append(self.chosen.token_id)

    body = {"prompt": ["ab", "cd"], "stream": True, "echo": True, "logprobs": 0, "n": 2}
    chunks = chunks_of(completion_job(body))
    for number in (0, 1):
        told = (Watched(TokenLogprob(98 + number, -2.0)),)
        chunks.of(number, OutputEvent("r", prompt_logprobs=told), (97, 98 + number), "ab")
    del told
    for number, index, expected in ((1, 0, []), (0, 1, []), (1, 1, [99]), (0, 0, [99, 98])):
        event = OutputEvent("r", index, "c", (99,), (PositionLogprobs(TokenLogprob(99, -1.0)),))
        chunks.of(number, event, (97, 98 + number), "ab")
        assert freed == expected
