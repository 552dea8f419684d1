"""Images over gRPC: in messages, and next to texts with placeholders."""

from __future__ import annotations

import base64
import io
from typing import Any

import grpc
import pytest
from PIL import Image

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import AsyncClient, convert
from jpaged.errors import InvalidArgument
from jpaged.testing import FakeVision, with_embeds
from jpaged.types import SamplingParams
from tests.http.generate.asking import text_of
from tests.http.test_images import LONG, data_uri, expected, png
from tests.server.harness import collect, error_details, failure_of, running

ONE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MARK = chr(FakeVision.placeholder_id)


def seeing(**options: Any) -> Any:
    return running(executor=with_embeds()(**LONG), vision=FakeVision(), **options)


def message(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return inference_pb2.GenerateRequest(sampling=sampling, **fields)


def chat(*parts: Any, role: str = "user", **fields: Any) -> inference_pb2.ChatPrompt:
    found = [inference_pb2.ContentPart(**({"text": one} if isinstance(one, str) else {"image": one})) for one in parts]
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role=role, parts=found, **fields)])


async def test_prompts_and_messages_with_images_give_the_tokens_of_the_text() -> None:
    async with seeing() as harness:
        messages = await collect(harness.inference.Generate(message(text=f"see {MARK}!", images=[png("ab", "cd")])))
        assert "".join(one.text for one in messages) == text_of("see ab\ncd\n!", 8)
        messages = await collect(harness.inference.Generate(message(chat=chat("see ", png("ab"), " ", png("c")))))
        assert "".join(one.text for one in messages) == expected(["see ", "ab\n c\n"])
        info = await harness.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (info.max_images, info.max_image_pixels) == (64, 1 << 26)
        async with AsyncClient(harness.target) as client:
            picture = Image.open(io.BytesIO(png("ab")))
            uri, letters = data_uri("ab"), base64.b64encode(png("ab")).decode()
            safe = "DATA:;BASE64," + letters.translate(str.maketrans("+/", "-_")).rstrip("=")
            for given in (png("ab"), [picture], picture.convert("CMYK"), uri, safe):
                data: Any = {"image": given}
                output = await client.complete({"prompt": f"see {MARK}", "multi_modal_data": data}, ONE)
                assert output.outputs[0].text == text_of("see ab\n", 8)
            url = {"type": "image_url", "image_url": {"url": data_uri("ab")}}
            output = await client.complete(None, ONE, messages=[{"role": "user", "content": [url]}])
            assert output.outputs[0].text == expected(["ab\n"])


def test_an_image_of_pillow_is_sent_with_its_orientation() -> None:
    picture = Image.open(io.BytesIO(png("ab")))
    picture.getexif()[0x0112] = 6
    (sent,) = get_images(picture)
    assert Image.open(io.BytesIO(sent)).getexif()[0x0112] == 6
    for given in ("data:;base64,A*AA", picture.convert("F")):
        with pytest.raises(InvalidArgument, match=r"multi_modal_data\.image: (is not base64|cannot be written as PNG)"):
            get_images(given)


def get_images(given: Any) -> Any:
    prompt = convert.get_prompt({"prompt": MARK, "multi_modal_data": {"image": given}})
    return convert.generate_request(prompt, ONE, request_id="a", model=None).images


@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        ({"text": "a", "images": [b"x"]}, "images[0]", "is not a picture"),
        ({"text": "a", "images": [png("a")]}, "images[0]", "0 placeholders of images (token 1)"),
        ({"chat": chat(b"x")}, "chat.messages[0].parts[0].image", "is not a picture"),
        ({"chat": chat(png("a"), content="x")}, "chat.messages[0].parts", "take the place of content"),
        ({"chat": chat(png("a"), role="assistant")}, "chat.messages[0].content[0]", "is an image in a message of"),
        ({"chat": chat(b"")}, "chat.messages[0].parts[0].image", "is not a picture"),
    ],
)
async def test_a_wrong_image_is_named(given: dict[str, Any], field: str, problem: str) -> None:
    async with seeing() as harness:
        error = await failure_of(harness.inference.Generate(message(**given)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = error_details(error)["BadRequest"].field_violations
        assert (violation.field, problem in violation.description) == (field, True), violation


async def test_a_model_that_reads_only_text_refuses_images() -> None:
    async with running() as harness:
        for given in ({"text": "a", "images": [png("a")]}, {"chat": chat(png("a"))}):
            error = await failure_of(harness.inference.Generate(message(**given)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "the model reads only text" in error.details()
