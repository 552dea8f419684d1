"""Head shapes of real models, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention in a published configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float | None = None


SHAPES: dict[str, AttentionShape] = {
    "demo": AttentionShape(8, 4, 32),
    "qwen2.5-0.5b": AttentionShape(14, 2, 64),
    "smollm2-135m": AttentionShape(9, 3, 64),
    "tinyllama-1.1b": AttentionShape(32, 4, 64),
    "llama-2-7b": AttentionShape(32, 32, 128),
    "llama-3-8b": AttentionShape(32, 8, 128),
    "mistral-7b-v0.1": AttentionShape(32, 8, 128, sliding_window=4096),
    "gemma-2-2b": AttentionShape(8, 4, 256, sliding_window=4096, soft_cap=50.0),
}
