"""Perplexity with int8 activations next to exact ones, of the same quantized weights on one CPU.

    python -m benchmarks.quantisation.activations [MODEL ...] [--dtype bfloat16] [--num-prompts 16]

The packaged model reads stories of its own grammar that it was not trained on, with `--quantization` int8 and int4. Any
other model, a folder or a GGUF file with quantized weights, reads jpaged's documentation.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.evaluation.stories import rows
from benchmarks.record import save
from jpaged import LLM, SamplingParams

_PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
_LEN = 1500
"""Characters of a prompt; a token is predicted from the earlier ones of its prompt."""
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Quality:
    """One model, read with each type of activations.

    Attributes:
        num_tokens: tokens that were predicted.
        change: relative change of the perplexity by int8 activations.
    """

    model: str
    weights: str
    num_tokens: int
    exact: float
    int8: float

    @property
    def change(self) -> float:
        """Relative change of the perplexity by int8 activations."""
        return self.int8 / self.exact - 1


def measure(model: str, quantization: str, dtype: str, prompts: Sequence[str]) -> Quality:
    """Measure the perplexity of a model over prompts, with each type of activations."""
    found = [_perplexity(model, quantization, dtype, name, prompts) for name in ("model", "int8")]
    (count, exact), (_, int8) = found
    return Quality(Path(model).name, quantization, count, exact, int8)


def _perplexity(
    model: str, quantization: str, dtype: str, activations: str, prompts: Sequence[str]
) -> tuple[int, float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(
        model,
        quantization=quantization,
        dtype=dtype,
        activation_dtype=activations,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=8,
        enable_prefix_caching=False,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    positions = (position for output in outputs for position in output.prompt_logprobs or ())
    logprobs = [position.chosen.logprob for position in positions if position is not None]
    return len(logprobs), math.exp(-sum(logprobs) / len(logprobs))


def _prompts(text: str, num_prompts: int) -> list[str]:
    """Return the first prompts of a text."""
    return [text[at : at + _LEN] for at in range(0, min(len(text), num_prompts * _LEN), _LEN)]


def main() -> None:
    """Print a line per model and kind of weights, and save them in results/activations.json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantisation.activations", description="Perplexity with int8 activations."
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folder or GGUF file with quantized weights")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of what is not quantized")
    parser.add_argument("--num-prompts", type=int, default=16, help=f"prompts of {_LEN} characters")
    options = parser.parse_args()
    stories = _prompts("\n\n".join(row["story"] for row in rows()), options.num_prompts)
    pages = _prompts("".join(page.read_text(encoding="utf-8") for page in _PAGES), options.num_prompts)
    cases = [("demo", quantization, stories) for quantization in ("int8", "int4")]
    cases += [(model, "auto", pages) for model in options.models]
    print(f"{'model':40} {'weights':8} {'tokens':>7} {'exact':>9} {'int8':>9} {'change':>8}")
    found = []
    for model, quantization, prompts in cases:
        quality = measure(model, quantization, options.dtype, prompts)
        found.append({**asdict(quality), "change": quality.change})
        numbers = f"{quality.num_tokens:7} {quality.exact:9.4f} {quality.int8:9.4f} {quality.change:8.3%}"
        print(f"{quality.model:40} {quality.weights:8} {numbers}", flush=True)
    names = " ".join(Path(model).name for model in options.models)
    command = f"python -m benchmarks.quantisation.activations {names} --dtype {options.dtype}"
    save("activations", command, {"models": found})


if __name__ == "__main__":
    main()
