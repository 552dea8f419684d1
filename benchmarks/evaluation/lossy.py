"""What forgetting old tokens costs the demo model: perplexity of stories that it has not learnt, under several windows.

python -m benchmarks.evaluation.lossy

A story of a seed that no corpus has is scored token by token, at once; what is counted are the tokens from --from on,
where most windows have lost something. Blocks are those that a sequence of 1024 tokens holds at most, from the engine.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import Tokenizer

from benchmarks.demo_model.data import Lesson, encode
from benchmarks.record import put_on_page, save
from jpaged.demo import FOLDER
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import Score

SEED = 90_210  # apart from the corpus's own, and from those of other measurements
BLOCK_SIZE = 16
STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One window: what it holds, and how well the stories go on.

    Attributes:
        window, sinks: as the options; 0 windows are the exact model.
        blocks: that a sequence of the model's length holds at most.
        perplexity: of the counted tokens.
        greedy: share of them that the model finds likeliest.
    """

    window: int
    sinks: int
    blocks: int
    perplexity: float
    greedy: float


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation.lossy",
        description="Perplexity of the demo model that forgets old tokens, beside the exact one.",
    )
    parser.add_argument("--window", type=int, nargs="+", default=[16, 32, 64, 128], metavar="N")
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 4], metavar="M")
    parser.add_argument("--stories", type=int, default=20, help="(default: 20)")
    parser.add_argument("--from", type=int, default=128, dest="first", help="token that counts (default: 128)")
    arguments = parser.parse_args()
    rows = [*stories(arguments.stories, arguments.first)]
    found = [measured(rows, arguments.first, 0, 0)]
    print(line(found[0]), flush=True)
    for window, sinks in itertools.product(arguments.window, arguments.sinks):
        found.append(measured(rows, arguments.first, window, sinks))
        print(line(found[-1]), flush=True)
    facts = {"stories": len(rows), "tokens": sum(len(row) - arguments.first for row in rows), "from": arguments.first}
    print(save("lossy", "python -m benchmarks.evaluation.lossy", {**facts, "rows": [asdict(row) for row in found]}))
    put_on_page({"lossy": table(found)})


def stories(number: int, first: int) -> Iterator[list[int]]:
    """Stories of twice as many tokens as do not count, and more."""
    tokenizer, left = Tokenizer.from_file(str(FOLDER / "tokenizer.json")), number
    for index in itertools.count():
        token_ids, _ = encode(tokenizer, SEED, index, Lesson())
        if 2 * first <= len(token_ids) < 1024:
            yield token_ids
            left -= 1
        if not left:
            return


def measured(rows: Sequence[Sequence[int]], first: int, window: int, sinks: int) -> Row:
    """Scores what the stories have from `first` on."""
    options: dict[str, Any] = {"lossy_kv_window": window, "lossy_kv_sinks": sinks} if window else {}
    with LLM("demo", block_size=BLOCK_SIZE, max_num_batched_tokens=STEP_TOKENS, **options) as llm:
        prompts = [TokensPrompt(prompt_token_ids=list(row[:first])) for row in rows]
        each = llm.score_continuations(prompts, [[list(row[first:])] for row in rows], use_tqdm=False)
        geometry = llm._serving.engine.geometry
    scores: list[Score] = [score for (score,) in each]
    num_tokens = sum(len(score.tokens) for score in scores)
    logprob = math.fsum(score.logprob for score in scores)
    num_greedy = sum(token.rank == 1 for score in scores for token in score.tokens)
    blocks = geometry.num_blocks_of_longest
    return Row(window, sinks, blocks, math.exp(-logprob / num_tokens), num_greedy / num_tokens)


def line(row: Row) -> str:
    """One row of the table."""
    what = f"| {row.window} | {row.sinks} |" if row.window else "| exact | |"
    return f"{what} {row.blocks} | {row.perplexity:.3f} | {100 * row.greedy:.1f} % |"


def table(rows: Sequence[Row]) -> str:
    """All of them, for a page."""
    head = "| window | first tokens | blocks of 1024 tokens | perplexity | likeliest token |\n|---|---|---|---|---|"
    return "\n".join([head, *map(line, rows)])


if __name__ == "__main__":
    main()
