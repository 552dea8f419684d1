"""Checkpoint files: locating, reading, checking, writing and converting; with the packages quantized/ and gguf/.

hub.py                 a model's name -> its folder -> its config and quantization
names.py               names of the tensors in a model's checkpoint
weights.py             files -> parameters on devices, one leaf at a time
finite.py              check for NaN and infinities
tensor_files.py        interface of the checkpoint readers, and the reader and writer of safetensors files
adapters.py            adapters (LoRA)
pooler.py              pooling, prompts and heads of embedding models and classifiers
orbax.py               reader of Orbax folders
conversion.py          conversion between formats
"""
