"""The embedded models: checkpoint folders in Hugging Face layout, for the names `demo` and `demo-draft`.

checkpoint/    config, weights in bfloat16, tokenizer
draft/         the same for a far smaller draft model of the first one
MODEL_CARD.md  description and training of both (benchmarks/demo_model)
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "checkpoint"
DRAFT_FOLDER = Path(__file__).parent / "draft"
