"""Vision encoders of models that read images.

config.py       the shape of an encoder, read from a config.json; its leaves under the names of a checkpoint
processors.py   pixels -> patches and the tokens of an image, on the host
tower.py        the encoder and its projector: patches -> input embeddings of the language model

    pixels [h, w, 3] -> resized, normalized -> patches [P, D] -> layers [P, W] -> merged, projected [P / m^2, E]

Patches are in the order of the output rows: the m^2 patches of an output row are adjacent.
"""
