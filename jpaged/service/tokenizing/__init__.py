"""Tokenizers of models, and properties of a tokenizer that are known without running it.

hf_tokenizer.py    the tokenizer of a model's folder
tokenizer_parts.py contents of the tokenizer's files, read without transformers if that gives the same result
literal_text.py    treats special tokens that users write as plain text
token_bytes.py     maximum bytes of text per token
"""
