"""Shows on stderr how far a call is, the way vLLM's `LLM` does: prompts that are done, and tokens a second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from jpaged.types import Usage

MakeBar = Callable[..., Any]
"""Makes a bar like `tqdm(total=..., desc=..., dynamic_ncols=...)`: it has `update`, `postfix` and `close`."""


class ProgressBar:
    """A bar over requests, or none.

    A library does not write into the logs and pipes of whoever uses it: without further word there is a bar on a
    terminal alone.

    Args:
        use_tqdm: True is a bar where stderr is a terminal, a callable makes the bar itself, False is none.
        num_requests: how many there are.
    """

    def __init__(self, use_tqdm: bool | MakeBar, num_requests: int) -> None:
        self._bar: Any = None
        self._start_s = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0
        if use_tqdm is False:
            return
        if use_tqdm is True:
            from tqdm.auto import tqdm  # a notebook has bars of its own

            use_tqdm = functools.partial(tqdm, disable=None)
        self._bar = use_tqdm(total=num_requests, desc="Processed prompts", dynamic_ncols=True)

    def note_done(self, usage: Usage) -> None:
        """Takes one request more, with the tokens that it had."""
        if self._bar is None:
            return
        self._num_prompt_tokens += usage.prompt_tokens
        self._num_output_tokens += usage.completion_tokens
        seconds = max(time.perf_counter() - self._start_s, 1e-9)
        inputs, outputs = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.postfix = f"input: {inputs:.1f} tok/s, output: {outputs:.1f} tok/s"
        self._bar.update(1)

    def close(self) -> None:
        """Leaves the terminal to others."""
        if self._bar is not None:
            self._bar.close()
