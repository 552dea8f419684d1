"""Fakes for tests: an executor whose tokens can be computed by hand, a byte tokenizer, a manual clock.

fake_executor.py   an executor without a model
fake_host.py       host memory as bytes
fake_model.py      the next token of a context
fake_edits.py      logits processors, and checked token counts
fake_feed.py       several steps in one dispatch, which may wait for masks
fake_grammar.py    a grammar over token ids
fake_rounds.py     rounds of proposals, some of which count as accepted
fake_rows.py       properties of a row of step inputs
fake_tells.py      log-probabilities and hidden states of tokens
single_steps.py    the single steps of a multi-step decode
byte_tokenizer.py  a token is a byte
virtual_clock.py   a clock that only moves by calls
"""

from jpaged.testing.byte_tokenizer import ByteTokenizer
from jpaged.testing.fake_executor import (
    FakeAdapter,
    FakeExecutor,
    Faults,
    FedExecutor,
    SeveralStepsExecutor,
    SpeculatingExecutor,
    scripted,
    seeing,
    top_logprobs,
    with_adapters,
)
from jpaged.testing.fake_model import expected_tokens
from jpaged.testing.virtual_clock import VirtualClock

__all__ = [
    "ByteTokenizer",
    "FakeAdapter",
    "FakeExecutor",
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
]
