"""The embedded models: checkpoint folders in Hugging Face layout, for `demo`, `demo-draft` and `demo-captioner`.

checkpoint/    config, weights in bfloat16, tokenizer
draft/         the same for a far smaller draft model of the first one
captioner/     the same for a model that describes pictures, and the image processor's settings
MODEL_CARD.md  description and training of all three (benchmarks/demo_model, benchmarks/captioner)
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "checkpoint"
DRAFT_FOLDER = Path(__file__).parent / "draft"
CAPTIONER_FOLDER = Path(__file__).parent / "captioner"
