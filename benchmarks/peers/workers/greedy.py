"""One engine of `benchmarks.peers.greedy`, run by its own Python: greedy tokens with the model's own defaults.

argv    jpaged or vllm, and the folder of the model
stdin   a list of prompts
stdout  {"version": the engine's, "defaults": {...}, "token_ids": one list for each prompt}
"""

from __future__ import annotations

import importlib
import json
import os
import sys

NAMES = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")


def main() -> None:
    engine, folder = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # logs
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # vLLM would fill nearly all of the machine's memory
    module = importlib.import_module(engine)
    llm = module.LLM(model=folder)
    params = llm.get_default_sampling_params()
    defaults = {name: getattr(params, name) for name in NAMES}
    params.temperature = 0.0
    outputs = llm.generate(json.load(sys.stdin), params)
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"version": module.__version__, "defaults": defaults, "token_ids": token_ids}), file=out)
    out.flush()


if __name__ == "__main__":
    main()
