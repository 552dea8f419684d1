"""Progress bar on stderr, in the style of vLLM's `LLM`: finished prompts, and tokens per second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from jpaged.types import Usage

MakeBar = Callable[..., Any]
"""Creates a bar like `tqdm(total=..., desc=..., dynamic_ncols=...)`, with `update`, `postfix` and `close`."""


class ProgressBar:
    """A bar over requests, or none.

    By default there is a bar only on a terminal, because a library should not write into its user's logs and pipes.

    Args:
        use_tqdm: True shows a bar if stderr is a terminal, a callable creates the bar, False shows none.
        num_requests: total number of requests.
    """

    def __init__(self, use_tqdm: bool | MakeBar, num_requests: int) -> None:
        self._bar: Any = None
        self._start_s = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0
        if use_tqdm is False:
            return
        if use_tqdm is True:
            from tqdm.auto import tqdm  # a notebook would draw a widget

            use_tqdm = functools.partial(tqdm, disable=None)
        self._bar = use_tqdm(total=num_requests, desc="Processed prompts", dynamic_ncols=True)

    def note_done(self, usage: Usage) -> None:
        """Count one more finished request, with its tokens."""
        if self._bar is None:
            return
        self._num_prompt_tokens += usage.prompt_tokens
        self._num_output_tokens += usage.completion_tokens
        seconds = max(time.perf_counter() - self._start_s, 1e-9)
        inputs, outputs = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.postfix = f"input: {inputs:.1f} tok/s, output: {outputs:.1f} tok/s"
        self._bar.update(1)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
