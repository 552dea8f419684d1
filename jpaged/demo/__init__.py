"""The embedded models: checkpoint folders in Hugging Face layout, which the names `demo` and `demo-draft` stand for.

checkpoint/    config, weights in bfloat16, tokenizer
draft/         the same of a far smaller model that guesses what the first one writes
MODEL_CARD.md  what they are, and how they were made (benchmarks/demo_model)
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "checkpoint"
DRAFT_FOLDER = Path(__file__).parent / "draft"
