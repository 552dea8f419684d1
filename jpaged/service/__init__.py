"""Protocol-independent core of the server: requests in, output streams out. Does not import grpc.

service.py         the operations: admit, generate, tokenize, abort, pin, load adapters; lifecycle; audit; roles
calls.py           one call: caller, record for observers, and events from the engine thread to the reader
loaded_model.py    the served model: engine, input processor, tokenizer, LoRA adapters, properties
input_processor.py a caller's input -> a request that can run, also after tokens generated on another server
images.py          pictures as callers send them, decoded to RGB pixels in child processes
image_inputs.py    images of requests: prepared, placed in prompts, encoded together, kept for later requests
image_sources.py   where pictures come from: data URIs, allowed servers, an allowed folder
prompt_embeds.py   input embeddings in place of a prompt's tokens, read from arrays and files of torch
score_embed.py     calls that score and embed
tokenizer.py       the tokenizer of a model's folder
tokenizer_parts.py contents of the tokenizer's files, read without transformers if that gives the same result
kv_protocol.py     messages of a prefix transfer, and their receiver
kv_transfer.py     save, load and fetch of prefixes
roles.py           disaggregated prefill and decode servers
handoff.py         what a prefill server hands to a decode server
chat/              chat templates, rendered in a child process; answers, parsed
structured_output/ grammars, compiled and advanced per token
"""
