"""Texts to tokens: the tokenizer of a model, and what is told of one without running it.

hf_tokenizer.py    the tokenizer of a model's folder
tokenizer_parts.py what its files say, read without transformers where that makes no difference
literal_text.py    special tokens that users write, taken as text
token_bytes.py     how many bytes of text a token can stand for
"""
