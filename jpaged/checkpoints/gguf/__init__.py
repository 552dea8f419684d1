"""GGUF files, as llama.cpp has them: a model with its tokenizer in one file, or in parts of one.

file.py       the file: found, mapped, its metadata and tensors
config.py     metadata -> a Hugging Face config
names.py      the names of Hugging Face -> places in the file
blocks.py     the types of tensors -> values, scales and zero points
tensors.py    the file as a source of tensors
scheme.py     which matrices stay quantised, and in what
vocabulary.py metadata -> tokens, what each is, and which end a text
tokenizer.py  metadata -> a tokenizer
"""
