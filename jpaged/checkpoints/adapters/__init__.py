"""Adapters (LoRA) in files, as PEFT writes them.

config.py   adapter_config.json: ranks and scales
patterns.py regular expressions of module names with separate ranks or scales
others.py   errors for modules that do not support adapters
reading.py  adapter_model.safetensors -> the matrices in the layout of a model's programs
"""

from jpaged.checkpoints.adapters.reading import AdapterReader

__all__ = ["AdapterReader"]
