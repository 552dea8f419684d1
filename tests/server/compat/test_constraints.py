"""Constraints of requests hold on every service: real grammars of the packaged tokenizer, over the fake executor."""

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from jpaged.demo import FOLDER
from jpaged.engine.engine import Engine
from jpaged.service.structured_output.compiler import ServedGrammars
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.testing import FakeExecutor
from tests.server import harness as harnesses
from tests.server.compat import test_vllm_engine as vllm_engine
from tests.server.compat.triton import client_of, inputs, strings, tensor
from tests.server.harness import Harness, collect, running

CHOICES = ["a red ball", "the blue one"]


@asynccontextmanager
async def constrained(**options: Any) -> AsyncIterator[Harness]:
    """A server whose grammars are real."""
    tokenizer: Any = HuggingFaceTokenizer(FOLDER)
    plain = harnesses.make_serving
    eos = tokenizer.eos_token_ids

    def with_grammars(executor, config, *others):
        grammars = ServedGrammars(tokenizer, executor.geometry.vocab_size, eos)
        engine = Engine(executor, tokenizer, config, eos_token_ids=eos, make_masks=grammars.make_masks)
        return dataclasses.replace(plain(executor, config, *others), engine=engine, grammars=grammars)

    executor = FakeExecutor(vocab_size=tokenizer.vocab_size)
    with patch.object(harnesses, "make_serving", with_grammars):
        async with running(executor=executor, tokenizer=tokenizer, **options) as harness:
            yield harness


@pytest.fixture
async def harness():
    async with constrained() as harness:
        yield harness


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        ({"choice": vllm_engine_pb2.ChoiceConstraint(choices=CHOICES)}, CHOICES),
        ({"regex": "(a red ball|the blue one)"}, CHOICES),
        ({"json_schema": '{"enum": ["x", "y"]}'}, ['"x"', '"y"']),
        ({"grammar": 'root ::= "yes" | "no"'}, ["yes", "no"]),
    ],
)
async def test_a_constraint_of_the_vllm_engine_holds(harness, constraint, texts):
    asked = vllm_engine.request("once", ignore_eos=False, max_tokens=60, grammar_from_first_token=True, **constraint)
    (end,) = vllm_engine.ends(await collect(vllm_engine.stub_of(harness).Generate(asked)))
    assert harness.serving.tokenizer.decode(end.output_ids) in texts
    assert end.finish_reason == "stop"


@pytest.mark.long
async def test_a_constraint_in_parameters_of_the_open_inference_protocol_holds(harness):
    given = {"max_tokens": 60, "temperature": 0, "structured_outputs": {"choice": CHOICES}}
    async with client_of(harness) as client:
        of_tensor = tensor("sampling_parameters", "BYTES", json.dumps(given).encode())
        named = await client.infer("fake", [*inputs("once", exclude_input_in_output=True), of_tensor])
        as_text = {**given, "structured_outputs": json.dumps(given["structured_outputs"])}
        written = await client.infer("fake", inputs("once", exclude_input_in_output=True), parameters=as_text)
    assert strings(named, "text_output")[0] in CHOICES
    assert strings(written, "text_output") == strings(named, "text_output")
