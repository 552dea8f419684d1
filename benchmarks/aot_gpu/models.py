"""A step of every architecture, in published widths and few layers, with whatever its matrices are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.aot_gpu.program import Program
from jpaged.checkpoints.quantized.quantizer import FORMATS
from jpaged.config import EngineConfig
from jpaged.device.aot.topology import compile_only_gpus
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.lowering import abstract_serving, program_lowerings
from jpaged.device.mesh import build_mesh
from jpaged.device.sampling import SamplingStages
from jpaged.engine.executor import Detail
from jpaged.kernels.matrix_format import NUM_BITS, MatrixFormat
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model, placed_leaves
from jpaged.models.param_specs import EXPERT_AXES, leaf_format
from jpaged.plan.known_models import KNOWN_MODELS

Numbers = Literal["bfloat16", "int8", "int8-rows", "int4", "fp8", "fp8-blocks", "mxfp4"]
_FORMATS: dict[Numbers, MatrixFormat] = {
    "int8": FORMATS["int8"],
    "int8-rows": MatrixFormat("int8", activations="int8"),
    "int4": FORMATS["int4"],
    "fp8": FORMATS["fp8"],
    "fp8-blocks": MatrixFormat("fp8", 128, activations="fp8-groups"),
    "mxfp4": MatrixFormat("mxfp4", 32),
}
_CUBLAS: dict[str, str] = {"int8": "__cublas$lt$matmul", "fp8": "__cublas$lt$matmul$f8"}
"""What multiplies numbers of 8 bits with rows of 8 bits as they are."""
_MODULES = {"mxfp4": r"\.experts\."}
"""Which modules have numbers of a kind, where not all do."""


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A step of a published model with fewer layers, or what runs behind it."""

    model: str
    numbers: Numbers = "bfloat16"
    program: Literal["forward", "sample", "edited", "count", "tell"] = "forward"
    num_tokens: int = 64
    num_parts: int = 1
    gpu: str = "h200"
    expected_error: str = ""
    stages: SamplingStages = SamplingStages.ALL
    detail: Detail = Detail.TOKENS
    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    @property
    def name(self) -> str:
        """Model, numbers, parts, program, its size and its variant."""
        numbers = self.numbers if self.dtype == "bfloat16" else self.numbers.replace("bfloat16", self.dtype)
        parts = f"-in-{self.num_parts}" if self.num_parts > 1 else ""
        variant = "" if self.program == "tell" else "".join(f"-{word}" for word in self.spec().variant)
        return f"model-{self.gpu}-{self.model}-{numbers}{parts}-{self.program}-{self.num_tokens}{variant}"

    def spec(self) -> ProgramSpec:
        """The program in the list of a server."""
        return ProgramSpec(self.program, self.num_tokens, self.detail, stages=self.stages)

    def config(self) -> ModelConfig:
        """The published one with two layers; where dense layers come before those of experts, with one more."""
        fields = dict(KNOWN_MODELS[self.model].fields)
        depth = "n_layer" if "n_layer" in fields else "num_hidden_layers"
        fields[depth] = 2
        if "first_k_dense_replace" in fields:
            fields |= {"first_k_dense_replace": 1, depth: 3}
        if self.model.startswith("mistral"):
            fields["sliding_window"] = 1024  # as the first one had it, and less than a sequence
        if "sliding_window_pattern" in fields:
            fields |= {"sliding_window_pattern": 2}
        if self.numbers != "bfloat16":
            rule = (_MODULES.get(self.numbers, ""), _FORMATS[self.numbers])
            return dataclasses.replace(from_hf(fields), quantization=Quantization(self.numbers, (rule,)))
        return from_hf(fields)

    def calls(self) -> dict[str, int]:
        """The kernels that a step has to call, so often: none of what they do may be left to XLA."""
        config = self.config()
        calls = Counter(paged_attention=config.num_layers)
        calls["grouped_product"] = 3 * sum(kind.is_sparse for kind in config.layer_kinds)
        for path, (leaf, *_) in placed_leaves(config, "loop"):
            form = leaf_format(config.quantization, leaf)
            if form is None or path[0] != "layers" or not EXPERT_AXES.isdisjoint(leaf.axes):
                continue
            if form.group_size is not None or NUM_BITS[form.values] == 4:
                calls["grouped_product"] += 1
            elif form.activations is not None:
                calls[_CUBLAS[form.values]] += 1
        return dict(+calls)

    def lower(self, mesh: jax.sharding.Mesh) -> Program:
        mesh = build_mesh(compile_only_gpus(self.num_parts, self.gpu))
        model = Model(self.config(), jnp.dtype(self.dtype))
        options: dict[str, Any] = {
            "max_num_seqs": min(64, self.num_tokens),
            "max_num_batched_tokens": self.num_tokens,
            "max_model_len": min(2048, model.config.max_model_len),
            "num_blocks": 2048,
            "tensor_parallel_size": self.num_parts,
        }
        step, geometry, params = abstract_serving(model, EngineConfig.load(options), mesh)
        lowerings = program_lowerings(step, params, geometry)
        is_step, is_counting = self.program == "forward", self.program in ("edited", "count")
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = lowerings[self.spec()]()
        layout, counts = step.layout, step.abstract_counts(geometry.max_num_seqs).counts_pv
        in_place = layout.local.shape
        num_bytes = layout.num_bytes // self.num_parts if is_step else 0
        if is_counting:
            in_place = counts.sharding.shard_shape(counts.shape)
            num_bytes = math.prod(in_place) * counts.dtype.itemsize
        return Program(
            lowered,
            num_bytes,
            in_place,
            frozenset(),
            512 << 20,
            0,
            model.config.num_layers if is_step else int(is_counting),
            has_weights=True,
            calls=self.calls() if is_step else {},
        )


_DENSE = (
    *("llama-3-8b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b", "gemma-3-4b", "phi-3-mini-4k"),
    *("gpt2-xl", "pythia-6.9b", "falcon-7b", "starcoder2-7b", "opt-13b"),
)
_EXPERTS = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3")
_QUANTISED: tuple[tuple[str, Numbers], ...] = (
    *(("llama-3-8b", numbers) for numbers in ("int8", "int8-rows", "int4", "fp8", "fp8-blocks")),
    *(("qwen3-30b-a3b", numbers) for numbers in ("int4", "fp8")),
    ("gpt-oss-20b", "mxfp4"),
    ("deepseek-v3", "fp8-blocks"),
)
_GREEDY, _RANDOM = SamplingStages.GREEDY, SamplingStages.RANDOM


def _variants(gpu: str) -> tuple[ModelCase, ...]:
    """Variants that a server on this GPU runs: float16, log-probabilities, and the sampling stages on two devices."""
    case = functools.partial(ModelCase, "llama-3-8b", gpu=gpu)
    return (
        *(case(dtype="float16", program=program) for program in ("forward", "sample", "edited")),
        *(case(program="sample", detail=detail) for detail in (Detail.LOGPROBS, Detail.TOP_LOGPROBS)),
        *(case(program="sample", num_parts=2, stages=stages) for stages in SamplingStages),
        case(program="sample", num_parts=2, detail=Detail.LOGPROBS),
        case(program="edited", num_parts=2),
        case(num_parts=2),
    )


MODEL_CASES: tuple[ModelCase, ...] = (
    *(ModelCase(model) for model in (*_DENSE, *_EXPERTS)),
    *(ModelCase(model, numbers) for model, numbers in _QUANTISED),
    *(ModelCase(model, num_parts=2) for model in ("llama-3-8b", "mixtral-8x7b")),
    *(ModelCase("llama-3-8b", numbers, num_parts=2) for numbers in ("int4", "fp8", "fp8-blocks")),
    *(ModelCase(model, num_tokens=8) for model in ("deepseek-v2-lite", "falcon-7b")),
    ModelCase("qwen3-30b-a3b", num_tokens=2048),
    *(ModelCase(model, program="sample") for model in ("llama-3-8b", "gemma-2-9b", "gpt2-xl")),
    *(ModelCase("llama-3-8b", program="edited", num_parts=num_parts) for num_parts in (1, 2)),
    *(
        ModelCase("llama-3-8b", program=program, gpu=gpu)
        for program in ("sample", "edited")
        for gpu in ("h100", "a100")
    ),
    *(ModelCase("llama-3-8b", program="sample", stages=stages) for stages in (_GREEDY, _RANDOM)),
    ModelCase("llama-3-8b", program="edited", stages=_RANDOM),
    ModelCase("llama-3-8b", program="sample", detail=Detail.TOP_LOGPROBS),
    ModelCase("llama-3-8b", program="edited", detail=Detail.TOP_LOGPROBS),
    ModelCase("llama-3-8b", program="sample", num_parts=2),
    *(case for gpu in ("h100", "a100") for case in _variants(gpu)),
    ModelCase("llama-3-8b", program="count", num_tokens=256),
    ModelCase("llama-3-8b", program="tell"),
)
