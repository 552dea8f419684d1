"""GGUF files of llama.cpp: a model with its tokenizer in one file, or in several parts.

file.py       the file: location, mapping, metadata and tensors
config.py     metadata -> a Hugging Face config
blocks.py     the types of tensors -> values, scales and zero points
tensors.py    the file as a source of tensors, under the names of Hugging Face; matrices that stay quantized
tokenizer.py  metadata -> tokens, end-of-text tokens, and a tokenizer
"""
