"""Fakes for tests of one's own: an executor to compute by hand, a byte tokenizer, a clock to turn."""

from jpaged.testing.byte_tokenizer import ByteTokenizer
from jpaged.testing.fake_executor import FakeExecutor, Faults, alternatives, expected_tokens
from jpaged.testing.virtual_clock import VirtualClock

__all__ = ["ByteTokenizer", "FakeExecutor", "Faults", "VirtualClock", "alternatives", "expected_tokens"]
