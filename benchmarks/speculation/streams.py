"""Prompts and outputs to replay: stories that the demo model tells, and files that are written again with edits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jpaged.llm import LLM
from jpaged.types import SamplingParams

PROMPTS = (
    "Once upon a time", "One day, a little girl", "There was a small dog", "The big bear", "Tom and his mom",
    "Lily had a red ball", "In the garden", "A bird sat in a tree", "The cat was sad", "Ben wanted to help",
    "It was a sunny day", "The old man", "Sam found a box", "At the park", "A fish in the sea", "Mia and the moon",
    "The king had a hat", "Two friends", "Snow fell all night", "A frog could not sleep",
)  # fmt: skip
_MAX_TOKENS = 400
_ENGINE = Path(__file__).parents[2] / "jpaged" / "engine"
_EDITS = {
    "executor.py": {"num_tokens": "token_count"},
    "sequence.py": {"sequence": "chain", "Sequence": "Chain"},
    "stats.py": {"snapshot": "picture"},
    "core.py": {"handle": "ticket"},
    "kv_cache/blocks.py": {"block_ids": "ids_of_blocks"},
    "kv_cache/paged.py": {"table": "list_of_blocks"},
}
"""Files of the engine, and names that an edit of each changes."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One request that is known to its end."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]


def stories(temperature: float = 0.0) -> list[Stream]:
    """What the demo model makes of each prompt, greedily or with seed 1."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=_MAX_TOKENS)
    outputs = LLM("demo", max_num_seqs=len(PROMPTS), wait_for_all_programs=True).generate(
        list(PROMPTS), params, use_tqdm=False
    )
    return [Stream(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in outputs]


def code_edits() -> list[Stream]:
    """A file as the prompt, and the same with some names changed as the output; a word, sign or indent is a token."""
    vocabulary: dict[str, int] = {}

    def tokens(text: str) -> list[int]:
        pieces = re.findall(r"\w+|\n *| +|[^\w\s]", text)
        return [vocabulary.setdefault(piece, len(vocabulary)) for piece in pieces]

    streams = []
    for name, edits in _EDITS.items():
        text = (_ENGINE / name).read_text(encoding="utf-8")
        edited = text
        for old, new in edits.items():
            edited = re.sub(rf"\b{old}\b", new, edited)
        streams.append(Stream(tokens(text), tokens(edited)))
    return streams
