"""The two models that every peer serves: Llamas with random weights, the same bytes at every call.

    S   15.7 million parameters, float32: 6 layers of 384, untied, 8192 tokens
    M   386.5 million, bfloat16: 24 layers of 896, tied, 32000 tokens (the shape of a 0.5B model)

Matrices have a deviation of 0.05, so that greedy tokens depend on every part, and norms are 1 + 0.1 noise, so that a
wrong norm shows. The tokenizer has a token for each byte and for strings of two and three printable characters.
"""

from __future__ import annotations

import itertools
import json
import os
import string
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.peers.environments import Home
from benchmarks.peers.workloads import FIRST_ID, VOCAB_SIZES

HEAD_DIM = 64
MAX_POSITIONS = 4096
ROPE_THETA = 10000.0
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
_DTYPES = {"float32": (np.dtype(np.float32), "F32"), "bfloat16": (np.dtype(ml_dtypes.bfloat16), "BF16")}
_PRINTABLE = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation


@dataclass(frozen=True, slots=True)
class Shape:
    """What a checkpoint is made of.

    Attributes:
        dtype: of the weights, and the one that peers compute in.
    """

    name: str
    dtype: str
    num_layers: int
    width: int
    feed_forward_width: int
    num_heads: int
    num_kv_heads: int
    is_tied: bool
    seed: int

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZES[self.name]

    @property
    def bytes_per_value(self) -> int:
        return _DTYPES[self.dtype][0].itemsize

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Yields name, shape and deviation of each tensor; a norm has deviation 0.1 around 1."""
        kv_width = self.num_kv_heads * HEAD_DIM
        matrices = {
            "self_attn.q_proj": (self.num_heads * HEAD_DIM, self.width),
            "self_attn.k_proj": (kv_width, self.width),
            "self_attn.v_proj": (kv_width, self.width),
            "self_attn.o_proj": (self.width, self.num_heads * HEAD_DIM),
            "mlp.gate_proj": (self.feed_forward_width, self.width),
            "mlp.up_proj": (self.feed_forward_width, self.width),
            "mlp.down_proj": (self.width, self.feed_forward_width),
        }
        yield "model.embed_tokens.weight", (self.vocab_size, self.width), 0.02
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield from ((f"{prefix}{name}.weight", shape, 0.05) for name, shape in matrices.items())
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{norm}.weight", (self.width,), 0.1
        yield "model.norm.weight", (self.width,), 0.1
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab_size, self.width), 0.02

    @property
    def num_parameters_read(self) -> int:
        """Parameters that a step reads whole: all but an embedding that is not the output matrix too."""
        sizes = [int(np.prod(dims)) for _, dims, _ in self.tensors()]
        return sum(sizes) - (0 if self.is_tied else self.num_output_parameters)

    @property
    def num_output_parameters(self) -> int:
        """Parameters of the output matrix."""
        return self.vocab_size * self.width

    def config(self) -> dict[str, object]:
        """Returns what `config.json` says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.feed_forward_width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.is_tied,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S", "float32", 6, 384, 1024, 6, 2, False, seed=1234),
        Shape("M", "bfloat16", 24, 896, 4864, 14, 2, True, seed=4321),
    )
}


def make(shape: Shape, folder: Path) -> None:
    """Writes the checkpoint with its tokenizer into a folder in Hugging Face layout; config.json is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(shape, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab_size)))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))


def make_files(shape: Shape, home: Home, weights: Sequence[str], report: Callable[[str], None]) -> None:
    """Writes a checkpoint into its place, and a GGUF file for each type of weights; nothing that is there already.

    Args:
        weights: llama.cpp's names of types, as its llama-quantize takes them; "" is the checkpoint's own type.
    """
    folder = home.folder / "models" / shape.name
    if not (folder / "config.json").exists():
        report(f"making model {shape.name}")
        make(shape, folder)
    for kind in weights:
        path = home.gguf(shape.name, kind)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(".new")
        if kind:
            make_files(shape, home, ("",), report)
            command = [str(home.llama_quantize), str(home.gguf(shape.name)), str(made), kind, "1"]
        else:
            command = [str(home.python("lcpp")), "-P", "-m", "benchmarks.peers.gguf_file", str(folder), str(made)]
        with home.log(f"gguf_{shape.name}{kind}").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
        made.rename(path)


def _write_weights(shape: Shape, path: Path) -> None:
    """Writes one tensor after the other in the safetensors format: an 8-byte length, a header in JSON, the values."""
    dtype, code = _DTYPES[shape.dtype]
    header, end = {}, 0
    for name, dims, _ in shape.tensors():
        begin, end = end, end + int(np.prod(dims)) * dtype.itemsize
        header[name] = {"dtype": code, "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(shape.seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, dims, deviation in shape.tensors():
            values = rng.standard_normal(dims, dtype=np.float32) * np.float32(deviation)
            file.write((values + (len(dims) == 1)).astype(dtype).tobytes())


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """Returns a byte-level BPE: special tokens, the 256 bytes, then pairs and triples of printable characters."""
    pairs = [a + b for a, b in itertools.product(_PRINTABLE, repeat=2)]
    merges = [(pair[0], pair[1]) for pair in pairs]
    merges += [(pair, last) for pair, last in itertools.product(pairs, _PRINTABLE[:26])]
    merges = merges[: vocab_size - FIRST_ID - 256]
    tokens = [*SPECIAL_TOKENS, *_byte_characters(), *(left + right for left, right in merges)]
    special = [
        {"id": index, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }


def _byte_characters() -> list[str]:
    """Returns the character by which byte-level BPE writes each byte: itself where printable, else from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = itertools.count(256)
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
