"""The embedded model end to end: tokens of this device against those of the CPU, in every mode of the engine.

`python -m benchmarks.first_contact.demo FILE` writes the CPU's tokens; the check starts it with JAX_PLATFORMS=cpu while
the device computes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.first_contact.cells import Cells, Values, WrongNumbers
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import SamplingParams

Tokens = list[list[int]]

_VOCAB_SIZE = 3072
_PROMPT_LENS = {"full": (3, 17, 40, 64, 90, 100, 120, 128), "tiny": (3, 17, 40, 60)}
_MAX_TOKENS = {"full": 48, "tiny": 40}
_OPTIONS: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "block_size": 16,
    "enable_prefix_caching": False,
}
_NUM_BLOCKS = {"full": 36, "tiny": 10}
"""Too few for the ends of the sequences whose prompts fit, so that some are preempted."""
_CHUNKED = {"max_num_batched_tokens": 16}
_SWAPPED = {"preemption_mode": "swap", "swap_space": 0.05}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_LEAST_SHARE = 0.5
"""Share of bfloat16 tokens that must be equal: after the first that differs, the rest of a text differs too."""


def check(cells: Cells, size: str) -> None:
    """Compare tokens in float32 exactly, and in bfloat16 for the most part."""
    draft = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
    modes: dict[str, tuple[str | None, dict[str, Any]]] = {
        "float32": (None, {}),
        "swapped": ("num_blocks_swapped_out", _SWAPPED),
        "n-gram drafts": ("num_draft_tokens", {"speculative_config": _NGRAM}),
        "bfloat16": (None, {"dtype": "bfloat16"}),
        "chunks of 16": (None, _CHUNKED),
        "draft model": ("num_draft_tokens", {"speculative_config": draft}),
    }
    modes = modes if size == "full" else dict(list(modes.items())[:3])
    cells.plan(list(modes))
    with tempfile.TemporaryDirectory() as folder, _tokens_of_cpu(Path(folder), size) as wait:
        for name, (needed, options) in modes.items():
            cells.run(name, functools.partial(_compare, wait, size, needed, options))


def generate(size: str, options: Mapping[str, Any]) -> tuple[Tokens, dict[str, Any]]:
    """Return the tokens of all prompts, and the engine's counters and choices."""
    rng = np.random.default_rng(7)
    prompts = [TokensPrompt(prompt_token_ids=rng.integers(3, _VOCAB_SIZE, n).tolist()) for n in _PROMPT_LENS[size]]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=_MAX_TOKENS[size], ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM("demo", **{"dtype": "float32", "num_blocks": _NUM_BLOCKS[size], **_OPTIONS, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        load = llm.load()
        facts = {
            "attention_backend": llm.config.model.attention_backend,
            "num_blocks_swapped_out": load.num_blocks_swapped_out,
            "num_draft_tokens": load.speculation.num_draft_tokens,
        }
    return [list(output.outputs[0].token_ids) for output in outputs], facts


def _compare(wait: Callable[[], Tokens], size: str, needed: str | None, options: Mapping[str, Any]) -> Values:
    got, facts = generate(size, options)
    want = wait()
    if needed is not None and not facts[needed]:
        raise WrongNumbers(f"{needed} is 0: nothing was compared")
    share = equal_share(got, want)
    limit = _LEAST_SHARE if options.get("dtype") == "bfloat16" else 1.0
    if share < limit:
        raise WrongNumbers(
            f"{share:.1%} of the tokens are those of the CPU; the limit is {limit:.0%}: {got} and {want}"
        )
    return {"equal_share": share, **facts}


def equal_share(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that are equal, up to the first of each text that differs."""
    total, same = 0, 0
    for ours, theirs in zip(got, want, strict=True):
        total += max(len(ours), len(theirs))
        pairs = list(zip(ours, theirs, strict=False))
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return same / total


@contextlib.contextmanager
def _tokens_of_cpu(folder: Path, size: str) -> Any:
    """Start a process that computes the tokens on the CPU; yield a function that waits for them."""
    path = folder / "tokens.json"
    command = [sys.executable, "-m", "benchmarks.first_contact.demo", str(path), size]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment) as process:

        def wait() -> Tokens:
            if process.wait() != 0:
                raise RuntimeError(f"the process on the CPU ended with {process.returncode}")
            found: Tokens = json.loads(path.read_text())
            return found

        try:
            yield wait
        finally:
            process.kill()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(generate(sys.argv[2], {})[0]))
