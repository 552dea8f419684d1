"""Documents per second of an encoder on one core: jpaged, PyTorch as in sentence-transformers, ONNX Runtime, OpenVINO.

The model has the shape of bge-base or bge-small and random weights, written once by transformers. All systems get the
same token ids and return one mean vector for each document. The others run batches of 32 documents in order of length,
padded to the longest of each batch, as sentence-transformers does. jpaged packs documents without padding.

Each system is a process of its own, pinned to one core. They take turns, A B C A B C. The time is that of the
processor, for all threads of the process, so that other processes of the machine matter less. Vectors are compared
with PyTorch's.

    python -m benchmarks.cpu.encoders [--shape base] [--documents 256] [--rounds 5] [--core 1] [--systems jpaged torch]

torch and transformers come with `make torch`; onnxruntime, onnx, onnxscript and openvino are installed by hand.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Embed = Callable[[Sequence[list[int]]], np.ndarray]

SHAPES = {
    "tiny": (2, 64, 4, 128),
    "small": (12, 384, 12, 1536),
    "base": (12, 768, 12, 3072),
}
"""Layers, width, heads, and width of the feed-forward."""
SYSTEMS = ("jpaged", "jpaged-bf16", "torch", "onnxruntime", "openvino", "openvino-bf16")
BATCH = 32
VOCAB_SIZE = 30522


def make_documents(num: int, seed: int = 0) -> list[list[int]]:
    """Return documents of 16 to 256 tokens, with as many short as long ones on a logarithmic scale."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(16), np.log(256), num)).astype(int)
    return [rng.integers(1000, VOCAB_SIZE, length).tolist() for length in lengths]


def write_model(folder: Path, shape: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    layers, width, heads, inner = SHAPES[shape]
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=inner,
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def in_batches(run: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Embed:
    """Return a function that pads batches of documents in order of length, and pools the states by their mean."""

    def embed(documents: Sequence[list[int]]) -> np.ndarray:
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        found: dict[int, np.ndarray] = {}
        for begin in range(0, len(order), BATCH):
            rows = order[begin : begin + BATCH]
            longest = max(len(documents[row]) for row in rows)
            ids, mask = (np.zeros((len(rows), longest), np.int64) for _ in range(2))
            for i, row in enumerate(rows):
                ids[i, : len(documents[row])] = documents[row]
                mask[i, : len(documents[row])] = 1
            states = run(ids, mask)
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            found |= dict(zip(rows, means, strict=True))
        return np.stack([found[i] for i in range(len(documents))])

    return embed


def load_torch(folder: Path) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()


def make_torch(folder: Path) -> Embed:
    import torch

    model = load_torch(folder)

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            return np.asarray(model(**given).last_hidden_state.numpy())

    return in_batches(run)


def make_onnxruntime(folder: Path) -> Embed:
    import torch

    onnxruntime: Any = importlib.import_module("onnxruntime")  # installed by hand

    path = folder / "model.onnx"

    class States(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    example = torch.ones(2, 8, dtype=torch.int64)
    names, axes = ["input_ids", "attention_mask"], {0: "batch", 1: "length"}
    torch.onnx.export(
        States(load_torch(folder)),
        (example, example),
        str(path),
        input_names=names,
        output_names=["states"],
        dynamic_axes=dict.fromkeys((*names, "states"), axes),
        opset_version=17,
        dynamo=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return in_batches(lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0])


def make_openvino(folder: Path, precision: str) -> Embed:
    import torch

    openvino: Any = importlib.import_module("openvino")  # installed by hand

    model, example = load_torch(folder), torch.ones(2, 8, dtype=torch.int64)
    given = {"input_ids": example, "attention_mask": example}
    converted = openvino.convert_model(model, example_input=given)
    hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": 1}
    compiled = openvino.Core().compile_model(converted, "CPU", hints)
    return in_batches(lambda ids, mask: compiled({"input_ids": ids, "attention_mask": mask})[0])


def make_jpaged(folder: Path, dtype: str) -> Embed:
    from jpaged import LLM, TokensPrompt

    llm = LLM(str(folder), dtype=dtype, skip_tokenizer_init=True, wait_for_all_programs=True)

    def embed(documents: Sequence[list[int]]) -> np.ndarray:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in documents]
        return np.array([one.values for one in llm.embed(prompts, pooling="mean", use_tqdm=False)])

    return embed


MAKERS: dict[str, Callable[[Path], Embed]] = {
    "jpaged": lambda folder: make_jpaged(folder, "float32"),
    "jpaged-bf16": lambda folder: make_jpaged(folder, "bfloat16"),
    "torch": make_torch,
    "onnxruntime": make_onnxruntime,
    "openvino": lambda folder: make_openvino(folder, "f32"),
    "openvino-bf16": lambda folder: make_openvino(folder, "bf16"),
}


def work(system: str, folder: Path, num_documents: int) -> None:
    """Run a round for each line of the input, and print its documents per second of the processor."""
    documents = make_documents(num_documents)
    embed = MAKERS[system](folder)
    vectors = embed(documents)
    np.save(folder / f"{system}.npy", vectors)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.process_time()
        embed(documents)
        print(json.dumps(num_documents / (time.process_time() - begin)), flush=True)


def main() -> None:
    """Compare the systems, or run as one of them."""
    parser = argparse.ArgumentParser(description="Documents per second of an encoder on one core.")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--worker", nargs=2, metavar=("SYSTEM", "FOLDER"))
    given = parser.parse_args()
    if given.worker:
        os.sched_setaffinity(0, {given.core})
        work(given.worker[0], Path(given.worker[1]), given.documents)
        return
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), given.shape)
        command = [sys.executable, "-m", "benchmarks.cpu.encoders", "--documents", str(given.documents)]
        command += ["--core", str(given.core)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        workers: dict[str, Any] = {}
        for system in given.systems:  # one after the other: they compile
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            workers[system] = subprocess.Popen([*command, "--worker", system, name], env=environment, **pipes)
            while (line := workers[system].stdout.readline()) and line.strip() != "ready":
                pass
        rates: dict[str, list[float]] = {system: [] for system in given.systems}
        for _ in range(given.rounds):
            for system, worker in workers.items():
                worker.stdin.write("\n")
                worker.stdin.flush()
                rates[system].append(float(worker.stdout.readline()))
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
        want = np.load(Path(name) / "torch.npy") if "torch" in workers else None
        for system, found in rates.items():
            off = "" if want is None else f"  off by {np.abs(np.load(Path(name) / f'{system}.npy') - want).max():.1e}"
            low, high = min(found), max(found)
            print(f"{system:14} {statistics.median(found):8.2f} documents/s  ({low:.2f} to {high:.2f}){off}")


if __name__ == "__main__":
    main()
