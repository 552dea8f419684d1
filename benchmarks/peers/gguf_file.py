"""A checkpoint in llama.cpp's format: GGUF, from the safetensors file of `checkpoints.make`.

llama.cpp's own converter refuses tokenizers that it does not know. Runs where its package `gguf` is installed:

    python -m benchmarks.peers.gguf_file CHECKPOINT_FOLDER GGUF_FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder: Path, path: Path) -> None:
    """Writes the GGUF file of a checkpoint, in the checkpoint's own precision."""
    config = json.loads((folder / "config.json").read_text())
    is_half = config["dtype"] == "bfloat16"
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_shape(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if is_half else gguf.LlamaFileType.ALL_F32)
    _write_tokens(writer, config, json.loads((folder / "tokenizer.json").read_text()))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, values in _read_weights(folder / "model.safetensors").items():
        place, kind = _renamed(name)
        ordered = np.ascontiguousarray(_interleaved(values, heads[kind]) if kind in heads else values)
        if ordered.dtype == np.float32:
            writer.add_tensor(f"{place}{kind}.weight", ordered)
        elif ordered.ndim == 1:  # norms are float32 there
            writer.add_tensor(f"{place}{kind}.weight", (ordered.astype(np.uint32) << 16).view(np.float32))
        else:
            bfloat16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(f"{place}{kind}.weight", ordered.view(np.uint8), raw_dtype=bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokens(writer: gguf.GGUFWriter, config: dict, tokenizer: dict) -> None:
    ids = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([control if index in special else normal for index in range(len(ids))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def _read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file; bfloat16 as uint16, which NumPy has."""
    data = np.memmap(path, np.uint8, "r")
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:begin]))
    dtypes = {"F32": np.float32, "BF16": np.uint16}
    return {
        name: data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        .view(dtypes[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _renamed(name: str) -> tuple[str, str]:
    """Returns a tensor's place and kind in GGUF: (`blk.3.`, `attn_q`)."""
    name = name.removesuffix(".weight")
    if name in _OTHER_NAMES:
        return "", _OTHER_NAMES[name]
    layer, _, kind = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.", _LAYER_NAMES[kind]


def _interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of a query or key matrix: llama.cpp rotates neighbours, Hugging Face halves."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
