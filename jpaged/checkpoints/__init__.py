"""Weights in files: found, read, checked, written, converted; quantised/ and gguf/ are rooms of their own.

hub.py                 a model's name -> its folder -> its config
names.py               which tensors a checkpoint of a model holds
weights.py             files -> parameters on devices, a leaf at a time
finite.py              whether they are numbers
tensor_source.py       what tensors are read from
tensor_files.py        safetensors files, read
safetensors_writer.py  safetensors files, written
adapters/              adapters (LoRA)
orbax.py               Orbax folders, read
orbax_writer.py        Orbax folders, written
conversion.py          one format -> another
"""
