"""Decodes the demo model for `benchmarks.edits`, with the code of whichever tree is on the path.

It knows no module of the benchmarks: the other tree may be older than they are. A line of JSON on standard input is a
measurement, `{"way": fields, "rows": R, "num_edited": N, "steps": 0 or 1}`; the answer is a line with the processor's
seconds of a step, those of a long run less those of a short one, by their difference in steps. The first N rows of R
have the way's fields, the others are greedy.
"""

import json
import sys
import time
from typing import Any

from jpaged.llm import LLM, TokensPrompt
from jpaged.types import SamplingParams

SHORT, LONG = 16, 144


def seconds(llm: LLM, fields: dict[str, Any], num_rows: int, num_edited: int, max_tokens: int) -> float:
    """Processor's time of all threads."""
    prompts = [TokensPrompt(prompt_token_ids=[3 + row, 7, 11]) for row in range(num_rows)]
    if "logit_bias" in fields:
        fields = {**fields, "logit_bias": {int(token): bias for token, bias in fields["logit_bias"].items()}}
    ends: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    edited, others = SamplingParams(**fields, **ends, seed=1), SamplingParams(temperature=0.0, **ends)
    params = [edited if row < num_edited else others for row in range(num_rows)]
    begin = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - begin


def main() -> None:
    options: dict[str, Any] = {"enable_prefix_caching": False, "wait_for_all_programs": True}
    llms = {steps: LLM("demo", num_scheduler_steps=steps, **options) for steps in (0, 1)}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        rows = asked["way"], asked["rows"], asked["num_edited"]
        short, long = (seconds(llms[asked["steps"]], *rows, tokens) for tokens in (SHORT, LONG))
        print(json.dumps({"step_s": (long - short) / (LONG - SHORT)}), flush=True)


if __name__ == "__main__":
    main()
