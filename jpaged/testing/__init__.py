"""Fakes for tests: an executor whose tokens can be computed by hand, a byte tokenizer, a manual clock.

fake_executor.py   an executor without a model: host memory, logits processors, log-probabilities
fake_model.py      the next token of a context, a tokenizer of bytes, images of tokens, a grammar over token ids
fake_steps.py      several steps in one dispatch, rounds of proposals, a manual clock
"""

from jpaged.testing.fake_executor import (
    FakeAdapter,
    FakeExecutor,
    FakeUpdate,
    Faults,
    FedExecutor,
    SeveralStepsExecutor,
    SpeculatingExecutor,
    scripted,
    seeing,
    top_logprobs,
    with_adapters,
    with_embeds,
)
from jpaged.testing.fake_model import ByteTokenizer, FakeVision, expected_tokens
from jpaged.testing.fake_steps import VirtualClock

__all__ = [
    "ByteTokenizer",
    "FakeAdapter",
    "FakeExecutor",
    "FakeUpdate",
    "FakeVision",
    "Faults",
    "FedExecutor",
    "SeveralStepsExecutor",
    "SpeculatingExecutor",
    "VirtualClock",
    "expected_tokens",
    "scripted",
    "seeing",
    "top_logprobs",
    "with_adapters",
    "with_embeds",
]
