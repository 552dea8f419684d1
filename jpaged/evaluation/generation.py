"""Conversion of a task's generation_kwargs to `SamplingParams`, and truncation of texts.

The keys are those of transformers' `generate` that tasks use, and the fields of `SamplingParams`.
https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md describes the options of tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.errors import InvalidArgument
from jpaged.types import SamplingParams
from jpaged.types.sampling import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The first one present is used."""
_STOP_NAMES = ("until", "stop")
_OTHER_NAMES = {"num_beams": "beam_width", "min_new_tokens": "min_tokens"}
_SET_HERE = frozenset(
    (
        "max_tokens",
        "temperature",
        "stop",
        "detokenize",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "n",
        "best_of",
    )
)
_TAKEN = frozenset(one.name for one in dataclasses.fields(SamplingParams)) - _SET_HERE


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampling parameters of one text, and the texts that end it, which may exceed what the engine supports."""

    sampling: SamplingParams
    until: tuple[str, ...]


def generation_of(
    asked: Mapping[str, Any], *, max_tokens: int, eos_token_id: int | None, is_thinking: bool = False
) -> Generation:
    """Parse the generation_kwargs of a task.

    Without `do_sample` a temperature above 0 samples. `do_sample: false` is greedy regardless of the temperature. The
    default temperature of a sampled text is 1.

    Args:
        max_tokens: default if the task has none.
        eos_token_id: the tokenizer's, which ends a text as the model's ending tokens do.
        is_thinking: the texts of `until` end the answer, not the thinking before it.

    Raises:
        InvalidArgument: a key is unknown, or a value out of range.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    limits = [given.pop(name) for name in _MAX_TOKENS_NAMES if name in given]
    until = _texts(given)
    stops = () if is_thinking or given.get("num_beams", 1) > 1 else until
    fields: dict[str, Any] = {
        "max_tokens": int(limits[0]) if limits else max_tokens,
        "temperature": _temperature(given.pop("do_sample", None), given.pop("temperature", None)),
        "skip_special_tokens": False,  # a special token may end the text
    }
    fields["stop"] = [text for text in stops if len(text) <= MAX_STOP_STRING_CHARS][:MAX_STOP_STRINGS]
    fields["detokenize"] = bool(fields["stop"])
    for name, value in given.items():
        own = _OTHER_NAMES.get(name, name)
        if own not in _TAKEN:
            raise InvalidArgument(f"gen_kwargs.{name}", f"is unknown: must be one of {', '.join(sorted(_TAKEN))}")
        fields[own] = value
    if fields.get("beam_width") == 1:
        del fields["beam_width"]
    if eos_token_id is not None and not fields.get("ignore_eos"):
        fields["stop_token_ids"] = sorted({*fields.get("stop_token_ids", ()), eos_token_id})
    return Generation(SamplingParams(**fields), until)


def seeded(sampling: SamplingParams, seed: int, place: int) -> SamplingParams:
    """Set the seed of a sampled text, from the seed of the task or the run and the text's index in the run."""
    if sampling.is_greedy or sampling.beam_width:
        return sampling
    digest = hashlib.sha256(f"{seed if sampling.seed is None else sampling.seed}/{place}".encode()).digest()
    return dataclasses.replace(sampling, seed=int.from_bytes(digest[:8], "little"))


def cut(text: str, until: Sequence[str]) -> str:
    """Cut a text at the first occurrence of each of these, one after the other."""
    for end in until:
        text = text.partition(end)[0]
    return text


def _texts(given: dict[str, Any]) -> tuple[str, ...]:
    texts: dict[str, None] = {}
    for name in _STOP_NAMES:
        value = given.pop(name, [])
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, list | tuple) or not all(isinstance(text, str) for text in many):
            raise InvalidArgument(f"gen_kwargs.{name}", f"{value!r} is neither a string nor a list of strings")
        texts.update(dict.fromkeys(text for text in many if text))
    return tuple(texts)


def _temperature(do_sample: object, temperature: object) -> float:
    if temperature is not None and not isinstance(temperature, int | float):
        raise InvalidArgument("gen_kwargs.temperature", f"{temperature!r} is not a number")
    if do_sample is None:
        return float(temperature or 0.0)
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else float(temperature)
