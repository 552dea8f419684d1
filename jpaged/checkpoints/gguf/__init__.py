"""GGUF files of llama.cpp: a model with its tokenizer in one file, or in several parts.

file.py       the file: location, mapping, metadata and tensors
config.py     metadata -> a Hugging Face config
names.py      the names of Hugging Face -> places in the file
blocks.py     the types of tensors -> values, scales and zero points
tensors.py    the file as a source of tensors
scheme.py     matrices that stay quantized, and their formats
vocabulary.py metadata -> tokens, their types, and end-of-text tokens
tokenizer.py  metadata -> a tokenizer
"""
