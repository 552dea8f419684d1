"""A server whose fake model calls the tool `weather`, and answers with a text after it has the result."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from jpaged.testing import scripted
from jpaged.testing.fake_executor import FakeExecutor
from jpaged.testing.fake_model import SeenTokens
from tests.http.test_messages import QWEN
from tests.server.harness import Harness, running

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
RESULT = "rain in Oslo"
ANSWER = "It rains in Oslo."
FIELD = f"[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"
"""The format of DSPy."""


def sampled(seen: SeenTokens, row: np.void, vocab_size: int) -> int:
    """Return the next token of the call, or of the answer if the prompt contains the result."""
    prompt = bytes(token for token in seen.context if token < 256)
    text = FIELD if b"[[ ## answer ## ]]" in prompt else ANSWER if RESULT.encode() in prompt else CALL
    return scripted(text).sampled(seen, row, vocab_size)


class WeatherExecutor(FakeExecutor):
    """Fake of a model that calls the tool first."""

    sampled = staticmethod(sampled)


def serve_weather(**options: Any) -> AbstractAsyncContextManager[Harness]:
    """Return a running server of the model `fake`, with HTTP."""
    size = {"max_num_seqs": options["max_num_seqs"]} if "max_num_seqs" in options else {}
    executor = WeatherExecutor(num_blocks=4096, max_model_len=16_384, **size)
    return running(executor=executor, answer_format=QWEN, http_port=0, **options)
