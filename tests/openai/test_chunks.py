"""Chunks of a stream: what each event becomes, and what comes before the first and behind the last."""

import json
from typing import Any

import pytest

from jpaged.chat import ToolCallPiece, text_of_parts
from jpaged.errors import InvalidArgument
from jpaged.openai.request import Job, chat_job, completion_job
from jpaged.openai.response import DONE, AnswerSize, ChunkBuilder, ResponseMetadata, ShownToken, TextOffsets
from jpaged.openai.responses import parse_responses_request
from jpaged.types import (
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    SamplingParams,
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


def test_usage_so_far_counts_no_token_before_the_first() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(chat(stream_options=options))
    usages = [one["usage"] for one in read(chunks.of(0, OutputEvent("r", text="a", token_ids=(1,), usage=Usage(3, 2))))]
    assert [(one["prompt_tokens"], one["completion_tokens"]) for one in usages] == [(3, 0), (3, 2)]
    (more,) = read(chunks.of(0, OutputEvent("r", text="b", token_ids=(1,), usage=Usage(3, 3))))
    assert more["usage"]["total_tokens"] == 6


def test_a_token_is_shown_by_its_name_its_bytes_or_alone() -> None:
    assert ShownToken(b"\xe2\x82", "?").text == "\ufffd"
    assert ShownToken("é".encode(), "?").text == "é"
    assert ShownToken(None, " a").text == " a"
    assert ShownToken(b"a", "a", name="token_id:97").text == "token_id:97"


def offsets(body: dict[str, Any], prompt: list[ShownToken], *tokens: ShownToken) -> list[int]:
    job = completion_job({"prompt": "x", "logprobs": 0, **body})
    found = TextOffsets.of_answer(job, 0, range(len(prompt)), prompt.__getitem__)
    return [found.add(token) for token in tokens]


BEGIN, A, SPACED = ShownToken(b"<s>", "<s>", is_special=True), ShownToken(b"a", "a"), ShownToken(b" a", "a")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"echo": True}, [0, 0, 1]),  # a prompt that is a text has no special tokens
        ({"echo": True, "prompt": [0, 1]}, [0, 3, 4]),
        ({"echo": True, "skip_special_tokens": False}, [0, 3, 4]),
        ({}, [0, 0, 1]),
    ],
)
def test_special_tokens_move_others_where_the_text_has_them(body: dict[str, Any], wanted: list[int]) -> None:
    assert offsets(body, [BEGIN, A], BEGIN, A, A) == wanted
    last = wanted[-1] + 1 + 3 * (body.get("skip_special_tokens") is False)
    assert offsets(body, [BEGIN, A], BEGIN, A, A, BEGIN, A)[-1] == last


def test_a_text_begins_without_the_space_of_its_first_token() -> None:
    assert offsets({"echo": True}, [SPACED], SPACED, SPACED, A) == [0, 1, 3]
    assert offsets({}, [A], SPACED, SPACED, A) == [0, 2, 4]


def test_a_character_may_begin_in_the_prompt() -> None:
    bytes_of_euro = [ShownToken("€".encode()[i : i + 1], "?") for i in range(3)]
    assert offsets({}, [A, *bytes_of_euro[:1]], *bytes_of_euro[1:], A) == [0, 0, 1]


@pytest.mark.parametrize(
    ("sampling", "how", "num_bytes"),
    [
        ({"logprobs": 3, "n": 2, "max_tokens": 10}, {}, 2 * 4 * 40 * 10),
        ({"logprobs": 3, "n": 2, "max_tokens": 10}, {"is_chat": True}, 2 * 4 * 80 * 10),
        ({"logprobs": 3, "max_tokens": 10}, {"num_prompts": 3}, 3 * 4 * 40 * 10),
        ({"logprobs": -1, "max_tokens": 10}, {}, 101 * 40 * 10),
        ({"logprobs": 0, "max_tokens": 10}, {}, 40 * 10),
        ({"logprob_token_ids": [5, 6], "max_tokens": 10}, {}, 2 * 40 * 10),
    ],
)
def test_an_answer_may_be_as_large_as_its_limit(sampling: dict[str, Any], how: dict[str, Any], num_bytes: int) -> None:
    def size(max_bytes: int, **more: Any) -> AnswerSize:
        return AnswerSize(
            SamplingParams(**sampling), vocab_size=100, **{"is_chat": False, **how, **more}, max_bytes=max_bytes
        )

    a_token = num_bytes // 10 // how.get("num_prompts", 1)
    assert size(num_bytes).max_filled == num_bytes // a_token
    with pytest.raises(InvalidArgument, match=r"x 10 tokens \(max_tokens\) make an answer of") as error:
        size(num_bytes - 1)
    assert error.value.field == "logprobs"
    assert size(1, counts_generated=False).max_filled is None


@pytest.mark.parametrize(("has_echo", "field", "most"), [(False, "prompt_logprobs", 10), (True, "logprobs", 20)])
def test_prompts_count_towards_an_answer_as_they_come(has_echo: bool, field: str, most: int) -> None:
    sampling = SamplingParams(prompt_logprobs=0, max_tokens=10)
    size = AnswerSize(sampling, vocab_size=100, is_chat=False, has_echo=has_echo, max_bytes=800)
    assert size.max_filled is None
    size.add_prompt(4)
    size.add_prompt(most - 4)
    with pytest.raises(InvalidArgument, match=f"^{field}: those of {most + 1} prompt tokens make an answer of"):
        size.add_prompt(1)
    AnswerSize(SamplingParams(max_tokens=10), vocab_size=100, is_chat=False, max_bytes=1).add_prompt(1000)


def test_parts_of_a_content_may_be_texts() -> None:
    assert text_of_parts("content", ["a", {"type": "text", "text": "b"}, "c"]) == "abc"


def test_ids_of_biases_that_are_none_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"^logit_bias: 'a' is not a token id$"):
        completion_job({"prompt": "x", "logit_bias": {"a": 1, "5": 1}})
    with pytest.raises(InvalidArgument, match=r"^logit_bias: 'a', 'b' are not token ids$"):
        completion_job({"prompt": "x", "logit_bias": {"a": 1, "b": 1}})
    with pytest.raises(InvalidArgument, match=r"^logit_bias: has a token id twice$"):
        completion_job({"prompt": "x", "logit_bias": {"5": 1, "05": 1}})


def test_limits_of_a_response_are_named_as_its_body_names_them() -> None:
    text = {"format": {"type": "json_object"}}
    names = parse_responses_request({"input": "a", "max_output_tokens": 5, "text": text}).job.names
    assert (names["max_tokens"], names["structured_outputs"]) == ("max_output_tokens", "text.format")
