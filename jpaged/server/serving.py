"""What the server needs of a loaded model: an engine, an intake, a tokenizer, and the facts that it reports."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.intake import Intake
from jpaged.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model as clients see it. `name` is what `GenerateRequest.model` is held against."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """Where the model runs. `attention` names the implementation that was chosen."""

    platform: str
    device_kind: str
    num_devices: int
    attention: str
    jax_version: str


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that is loaded. `config` is resolved; the engine is not started yet."""

    engine: Engine
    intake: Intake
    tokenizer: Tokenizer
    model: ModelFacts
    backend: BackendFacts
    config: EngineConfig
