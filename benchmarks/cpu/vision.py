"""Vision encoders on one core: jpaged beside transformers on torch and the same graph in OpenVINO.

A picture of published width, with fewer layers, is encoded by each system in turn, A B C A B C; the median of the turns
counts, in processor's time. jpaged's time includes the packing of patches on the host and the projector, which the
others leave out. `openvino` must be importable for its column.

    taskset -c 0 python -m benchmarks.cpu.vision [--shapes siglip] [--dtypes bfloat16] [--turns 5]
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from jpaged.device.vision import JaxVisionEncoder, packs_matrices, random_params
from jpaged.models.config import VisionConfig
from jpaged.types import PreparedImage

DTYPES = ("float32", "bfloat16")
SYSTEMS = ("jpaged", "transformers", "openvino")
SHAPES: Mapping[str, VisionConfig] = {
    "siglip": VisionConfig(  # of Gemma 3, with 2 of 27 layers
        kind="siglip",
        hidden_size=1152,
        intermediate_size=4304,
        num_layers=2,
        num_heads=16,
        patch_size=14,
        image_size=896,
        merge_size=4,
        out_size=2560,
        activation="gelu_tanh",
        norm_eps=1e-6,
        image_token_id=0,
        projector_eps=1e-6,
    ),
    "pixtral": VisionConfig(  # of Mistral Small 3.1, with 2 of 24 layers
        kind="pixtral",
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=2,
        num_heads=16,
        patch_size=14,
        image_size=672,
        merge_size=2,
        out_size=5120,
        activation="silu",
        norm_eps=1e-5,
        image_token_id=0,
        projector_eps=1e-5,
        rope_theta=1e4,
    ),
    "qwen2_5_vl": VisionConfig(  # of Qwen2.5-VL-7B, with 4 of 32 layers, one of which is full
        kind="qwen2_5_vl",
        hidden_size=1280,
        intermediate_size=3420,
        num_layers=4,
        num_heads=16,
        patch_size=14,
        temporal_size=2,
        image_size=672,
        merge_size=2,
        out_size=3584,
        activation="silu",
        norm_eps=1e-6,
        image_token_id=0,
        projector_eps=1e-6,
        projector_bias=True,
        rope_theta=1e4,
        window_size=112,
        full_layers=(3,),
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One encoder in one type, in seconds of a picture; None if a system cannot run it."""

    shape: str
    dtype: str
    num_patches: int
    num_layers: int
    seconds: Mapping[str, float | None]
    speedup: float


def make_jpaged(config: VisionConfig, dtype: str) -> Callable[[], object]:
    edge = config.image_size // config.patch_size
    values = np.random.default_rng(0).standard_normal((edge**2, config.patch_dim), np.float32)
    num_tokens = edge**2 // config.num_merged
    image = PreparedImage(values, (edge, edge), (0,) * num_tokens, np.ones(num_tokens, np.bool_), b"", None)
    params = random_params(config, np.dtype(jnp.dtype(dtype)), jax.devices()[0], 0)
    encoder = JaxVisionEncoder(config, params, edge**2)
    return lambda: encoder.encode([image])


def make_theirs(config: VisionConfig, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """The encoder of transformers, without its projector where that is another class, and its inputs."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(1)
    of_type: Any = getattr(torch, dtype)
    edge = config.image_size // config.patch_size
    sizes: dict[str, Any] = {
        name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "patch_size", "image_size")
    }
    pixels: Any = torch.randn(1, 3, config.image_size, config.image_size).to(of_type)
    options: dict[str, Any] = {"dtype": of_type, "attn_implementation": "sdpa"}
    if config.kind == "qwen2_5_vl":
        qwen = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
        given: Any = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
            depth=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            out_hidden_size=config.out_size,
            fullatt_block_indexes=list(config.full_layers),
        )
        model = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(given, **options)
        inputs = torch.randn(edge**2, config.patch_dim).to(of_type), torch.tensor([[1, edge, edge]])
        return model.eval(), inputs
    sizes |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    if config.kind == "pixtral":
        given = transformers.PixtralVisionConfig(**sizes, hidden_act="silu")
        model = transformers.PixtralVisionModel._from_config(given, **options)
        return model.eval(), (pixels, torch.tensor([[config.image_size, config.image_size]]))
    given = transformers.SiglipVisionConfig(**sizes, vision_use_head=False)
    return transformers.SiglipVisionModel._from_config(given, **options).eval(), (pixels,)


def make_transformers(config: VisionConfig, dtype: str) -> Callable[[], object]:
    torch = importlib.import_module("torch")
    model, inputs = make_theirs(config, dtype)

    def run() -> object:
        with torch.no_grad():
            return model(*inputs)

    return run


def make_openvino(config: VisionConfig, dtype: str) -> Callable[[], object]:
    """The encoder of transformers, converted in float32; OpenVINO rounds to the type by itself."""
    openvino, torch = importlib.import_module("openvino"), importlib.import_module("torch")
    model, inputs = make_theirs(config, "float32")
    with torch.no_grad():
        converted = openvino.convert_model(model, example_input=inputs)
    hint = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    request = openvino.compile_model(converted, "CPU", options).create_infer_request()
    arrays = [each.numpy() for each in inputs][: len(converted.inputs)]
    return lambda: request.infer(arrays)


MAKERS = {"jpaged": make_jpaged, "transformers": make_transformers, "openvino": make_openvino}


def measure(shape: str, dtype: str, systems: list[str], num_turns: int) -> Point:
    config, runs = SHAPES[shape], {}
    for name in systems:
        try:
            runs[name] = MAKERS[name](config, dtype)
            runs[name]()
        except Exception as error:  # another program, of any version
            Console(stderr=True).print(f"{name} cannot run {shape} in {dtype}: {type(error).__name__}: {error}"[:300])
            runs.pop(name, None)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_turns):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            spent[name].append(time.process_time() - begin)
    seconds = {name: median(spent[name]) if name in spent else None for name in systems}
    others = [median(times) for name, times in spent.items() if name != "jpaged"]
    speedup = round(min(others) / median(spent["jpaged"]), 2) if others and "jpaged" in spent else 0.0
    num_patches = (config.image_size // config.patch_size) ** 2
    return Point(shape, dtype, num_patches, config.num_layers, seconds, speedup)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.vision", description="Vision encoders on a core.")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    points = [measure(s, d, options.systems, options.turns) for s in options.shapes for d in options.dtypes]
    table = Table("encoder", "type", "patches", "layers", *options.systems, "times the better other")
    for point in points:
        numbers = ("-" if each is None else f"{each:.3f} s" for each in point.seconds.values())
        counts = str(point.num_patches), str(point.num_layers)
        table.add_row(point.shape, point.dtype, *counts, *numbers, f"{point.speedup:.2f}")
    Console().print(table)
    command = f"python -m benchmarks.cpu.vision {' '.join(sys.argv[1:])}".rstrip()
    facts = {
        "num_cpus": len(os.sched_getaffinity(0)),
        "has_kernels": packs_matrices(jax.devices()[0]),
        "unit": "seconds of processor time",
    }
    path = save("cpu_vision", command, {**facts, "points": [asdict(point) for point in points]})
    Console().print(f"saved to {path}")


if __name__ == "__main__":
    main()
