"""The embedded model: a checkpoint folder in Hugging Face layout, which the name `demo` stands for.

checkpoint/    config, weights in bfloat16, tokenizer
MODEL_CARD.md  what it is, and how it was made (benchmarks/demo_model)
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "checkpoint"
