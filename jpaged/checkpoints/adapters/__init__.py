"""Adapters (LoRA) in files, as PEFT writes them.

config.py  adapter_config.json: ranks and scales, and those of single modules by regular expressions
reader.py  adapter_model.safetensors -> the matrices in the layout of a model's programs
"""

from jpaged.checkpoints.adapters.reader import AdapterReader

__all__ = ["AdapterReader"]
