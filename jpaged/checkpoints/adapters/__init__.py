"""Adapters (LoRA) in files, as PEFT writes them.

config.py   adapter_config.json: ranks and scales
patterns.py ... of the modules whose names match regular expressions
others.py   the modules that take none, and why
reading.py  adapter_model.safetensors -> the matrices as a model's programs take them
"""

from jpaged.checkpoints.adapters.reading import AdapterReader

__all__ = ["AdapterReader"]
