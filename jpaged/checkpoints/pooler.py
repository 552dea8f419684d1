"""Vectors and scores from hidden states: the modules of sentence-transformers, and classification heads.

    hidden states ── pooling ── matrices of the head ── vector, or one logit for each label

    modules.json                         Transformer, Pooling, Dense and Normalize, in order, each with its folder
    config_sentence_transformers.json    prompts to put before texts
    sentence_bert_config.json            maximum length
    config.json, model.safetensors       the head of *ForSequenceClassification

The matrices are small and multiply one vector for each prompt, so they are applied on the host, in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jpaged.checkpoints.gguf.file import is_gguf
from jpaged.checkpoints.hub import CONFIG_FILE, MAX_CONFIG_BYTES, override_config, read_json
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.tensor_files import TensorFiles, read_bounded, read_weight, unreadable
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import MAX_WIDTH, ModelConfig
from jpaged.models.hf_config import CLASSIFIER, FROM_TOKENS
from jpaged.types import Pooling

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"

Function = Literal["identity", "tanh", "sigmoid", "relu", "gelu", "softmax"]
_MODES: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
"""Keys of a Pooling module's config."""
_NAMES: Mapping[str, Pooling] = {"lasttoken": "last"}
"""Names of a newer Pooling module that differ from ours."""
_erf = np.vectorize(math.erf, otypes=[np.float64])


def apply_function(values: NDArray[np.float32], function: Function) -> NDArray[np.float32]:
    """Return an activation of float32 values, computed in float64."""
    x = values.astype(np.float64)
    if function == "tanh":
        x = np.tanh(x)
    elif function == "sigmoid":
        x = 0.5 * (1 + np.tanh(x / 2))
    elif function == "relu":
        x = np.maximum(x, 0)
    elif function == "gelu":
        x = x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    elif function == "softmax":
        x = np.exp(x - x.max())
        x = x / x.sum()
    return x.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A layer of a head: an activation of a product, which may be normalized.

    Attributes:
        kernel: `[in, out]`, float32.
        bias: `[out]`; None has none.
        norm: scale of a layer norm after the activation, and its epsilon; None has none.
    """

    kernel: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None
    function: Function = "identity"
    norm: tuple[NDArray[np.float32], float] | None = None

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map a vector `[in]` to `[out]`."""
        y = values @ self.kernel
        y = apply_function(y if self.bias is None else y + self.bias, self.function)
        if self.norm is None:
            return y
        scale, eps = self.norm
        centered = y - y.mean()
        normed: NDArray[np.float32] = centered / np.sqrt(np.square(centered).mean() + eps) * scale
        return normed


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointPooler:
    """Rules by which hidden states of a prompt become a vector, or the logits of labels.

    Attributes:
        pooling: of requests that name none.
        layers: applied to the pooled state.
        normalizes: vectors have length 1.
        prompts: texts to put before an input, by name.
        default_prompt: name of the one for requests that name none; None for no text.
        max_len: maximum tokens of an input; None for the model's.
        can_shorten: vectors may be cut to their first dimensions.
        labels: of a classification head; empty for vectors.
        function: of logits to probabilities or scores.
    """

    pooling: Pooling = "last"
    layers: tuple[Dense, ...] = ()
    normalizes: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_len: int | None = None
    can_shorten: bool = False
    labels: tuple[str, ...] = ()
    function: Function = "identity"

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a vector or logits from a pooled state `[E]`."""
        for layer in self.layers:
            values = layer.apply(values)
        return values

    def activate(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return probabilities or scores of logits."""
        return apply_function(logits, self.function)

    @property
    def width(self) -> int | None:
        """Numbers of a vector; None for those of a hidden state."""
        return self.layers[-1].kernel.shape[1] if self.layers else None


def read_pooler(
    folder: Path, overrides: Mapping[str, Any], model: ModelConfig, tokens: Mapping[str, int]
) -> CheckpointPooler:
    """Read how a checkpoint pools; without files that describe it, encoders take the first token, and others the last.

    Args:
        tokens: the vocabulary, for heads that are rows of the output matrix (`classifier_from_token`).

    Raises:
        InvalidArgument: a file is broken, or misses a value; names it.
        Unsupported: a module or a setting is not supported; names it.
    """
    default: Pooling = "cls" if model.is_encoder else "last"
    if is_gguf(folder):
        return CheckpointPooler(default)
    config = override_config(read_json(folder / CONFIG_FILE), overrides)
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture.endswith(CLASSIFIER):
        if not model.is_encoder:
            return _read_score(folder, config, model, tokens)
        return _read_classifier(folder, config, architecture)
    if not (folder / MODULES_FILE).is_file():
        return CheckpointPooler(default)
    return _read_modules(folder)


def _read_modules(folder: Path) -> CheckpointPooler:
    path = folder / MODULES_FILE
    try:
        modules = json.loads(read_bounded(path, MAX_CONFIG_BYTES).decode("utf-8-sig"))
        found = [(str(one["type"]).rpartition(".")[2], str(one.get("path") or "")) for one in modules]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, f"must be a list of modules with type and path: {error!r}") from error
    pooling: Pooling | None = None
    layers: list[Dense] = []
    normalizes = False
    for kind, name in found:
        if normalizes and kind != "Normalize":
            raise Unsupported(f"{path}: module {kind} after Normalize is not supported")
        if kind == "Pooling" and pooling is None:
            pooling = _read_pooling(_inside(folder, name) / CONFIG_FILE)
        elif kind == "Dense" and pooling is not None:
            layers.append(_read_dense(_inside(folder, name)))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise Unsupported(f"{path}: module {kind} is not supported here; supported: Pooling, Dense, Normalize")
    if pooling is None:
        raise Unsupported(f"{path}: there is no Pooling module")
    prompts, default = _read_prompts(folder / PROMPTS_FILE)
    lengths = read_json(folder / LENGTH_FILE) if (folder / LENGTH_FILE).is_file() else {}
    max_len = lengths.get("max_seq_length")
    if max_len is not None and (type(max_len) is not int or max_len < 1):
        raise InvalidArgument(str(folder / LENGTH_FILE), f"max_seq_length is {max_len!r}; it must be above 0")
    return CheckpointPooler(pooling, tuple(layers), normalizes, prompts, default, max_len, can_shorten=True)


def _inside(folder: Path, name: str) -> Path:
    """Return a module's folder, which must be inside the checkpoint's."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidArgument(str(folder / MODULES_FILE), f"path {name!r} is not inside the folder")
    return folder / name


def _read_pooling(path: Path) -> Pooling:
    config = read_json(path)
    if config.get("include_prompt", True) is not True:
        raise Unsupported(f"{path}: include_prompt is false; only pooling over prompts is supported")
    given = config.get("pooling_mode")
    chosen = [_MODES[key] for key in _MODES if config.get(key) is True]
    if isinstance(given, str):
        name: Any = _NAMES.get(given, given)
        chosen = [name] if name in _MODES.values() else []
    if len(chosen) != 1:
        raise Unsupported(f"{path}: one pooling mode is supported, of {', '.join(_MODES.values())}")
    return chosen[0]


def _read_dense(folder: Path) -> Dense:
    path = folder / CONFIG_FILE
    config = read_json(path)
    widths = config.get("in_features"), config.get("out_features")
    if not all(type(width) is int and 0 < width <= MAX_WIDTH for width in widths):
        raise InvalidArgument(str(path), f"in_features and out_features are {widths}; each must be 1 to {MAX_WIDTH}")
    function = _read_function(path, config.get("activation_function", "Tanh"))
    has_bias = bool(config.get("bias", True))
    with ExitStack() as opened:
        files = TensorFiles(folder, opened)
        return _dense(files, "linear", (int(str(widths[0])), int(str(widths[1]))), function, has_bias=has_bias)


def _read_function(path: Path, given: object) -> Function:
    """Read the name of a class of PyTorch, such as `torch.nn.modules.activation.Tanh`."""
    name: Any = str(given).rpartition(".")[2].lower()
    if name not in get_args(Function):
        raise Unsupported(f"{path}: activation {given!r} is not supported; supported: {', '.join(get_args(Function))}")
    function: Function = name
    return function


def _dense(
    files: TensorFiles, name: str, widths: tuple[int, int], function: Function = "identity", *, has_bias: bool = True
) -> Dense:
    kernel = read_weight(files, f"{name}.weight", widths[::-1]).astype(np.float32)
    bias = read_weight(files, f"{name}.bias", widths[1:]).astype(np.float32) if has_bias else None
    return Dense(np.ascontiguousarray(kernel.T), bias, function)


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    if not path.is_file():
        return {}, None
    config = read_json(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InvalidArgument(str(path), "prompts must map names to texts")
    if default is not None and default not in prompts:
        raise InvalidArgument(str(path), f"default_prompt_name {default!r} is not one of {', '.join(prompts)}")
    return {str(name): text for name, text in prompts.items()}, None if default is None else str(default)


def _read_classifier(folder: Path, config: Mapping[str, Any], architecture: str) -> CheckpointPooler:
    path, width = folder / CONFIG_FILE, int(config["hidden_size"])
    labels = _read_labels(path, config)
    out = width, len(labels)
    pooling: Any = "cls"
    with ExitStack() as opened:
        files = TensorFiles(folder, opened)
        if architecture.startswith("Bert"):
            layers = (_dense(files, "bert.pooler.dense", (width, width), "tanh"), _dense(files, "classifier", out))
        elif architecture.startswith("ModernBert"):
            has_bias, eps = bool(config.get("classifier_bias", False)), float(config.get("norm_eps", 1e-5))
            function = _read_function(path, config.get("classifier_activation", "gelu"))
            dense = _dense(files, "head.dense", (width, width), function, has_bias=has_bias)
            norm = read_weight(files, "head.norm.weight", (width,)).astype(np.float32)
            layers = (replace(dense, norm=(norm, eps)), _dense(files, "classifier", out))
            pooling = config.get("classifier_pooling", "cls")
            if pooling not in ("cls", "mean"):
                raise Unsupported(f"{path}: classifier_pooling is {pooling!r}; supported: cls, mean")
        else:
            dense = _dense(files, "classifier.dense", (width, width), "tanh")
            layers = (dense, _dense(files, "classifier.out_proj", out))
    return CheckpointPooler(pooling, layers, labels=labels, function=_read_label_function(path, config, len(labels)))


def _read_score(
    folder: Path, config: Mapping[str, Any], model: ModelConfig, tokens: Mapping[str, int]
) -> CheckpointPooler:
    """Read the head of a model whose layers can generate: a matrix, or rows of the output matrix.

    Of two rows, such as those of "no" and "yes", the head is the difference: its sigmoid is the softmax of the second.
    """
    path, width, names = folder / CONFIG_FILE, model.hidden_size, config.get(FROM_TOKENS)
    with ExitStack() as opened:
        files = TensorFiles(folder, opened)
        if names is None:
            labels = _read_labels(path, config)
            head = _dense(files, "score", (width, len(labels)), has_bias="score.bias" in files.names)
        else:
            if not isinstance(names, list) or not names or any(name not in tokens for name in names):
                raise InvalidArgument(str(path), f"{FROM_TOKENS} is {names!r}; it must be a list of tokens")
            leaves = model_leaves(model, files.names).outer
            name = next(leaf.tensors[0][0] for leaf in leaves[::-1] if leaf.path[0] in ("embed", "lm_head"))
            shape = model.vocab_size, width
            rows = [
                read_weight(files, name, shape, (slice(token, token + 1), slice(None))).astype(np.float32)[0]
                for token in (tokens[one] for one in names)
            ]
            rows = [rows[1] - rows[0]] if len(rows) == len(("no", "yes")) else rows
            labels = tuple(map(str, names if len(rows) == len(names) else names[1:]))
            head = Dense(np.ascontiguousarray(np.stack(rows, axis=1)))
    return CheckpointPooler("last", (head,), labels=labels, function=_read_label_function(path, config, len(labels)))


def _read_labels(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    names, num_labels = config.get("id2label"), config.get("num_labels")
    if names is None:
        num_labels = 2 if num_labels is None else num_labels
        if type(num_labels) is not int or not 0 < num_labels <= MAX_WIDTH:
            raise InvalidArgument(str(path), f"num_labels is {num_labels!r}; it must be from 1 to {MAX_WIDTH}")
        return tuple(f"LABEL_{number}" for number in range(num_labels))
    try:
        by_number = {int(number): str(name) for number, name in names.items()}
    except (AttributeError, ValueError) as error:
        raise InvalidArgument(str(path), f"id2label must map numbers to names: {error}") from error
    if sorted(by_number) != list(range(len(by_number))) or not by_number:
        raise InvalidArgument(str(path), "id2label must have the numbers from 0 on")
    return tuple(by_number[number] for number in range(len(by_number)))


def _read_label_function(path: Path, config: Mapping[str, Any], num_labels: int) -> Function:
    """Return the function of logits: that of a cross-encoder, or of the config's kind of problem."""
    nested = config.get("sentence_transformers")
    given = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    given = given or config.get("sbert_ce_default_activation_function")
    if given is not None:
        return _read_function(path, given)
    kinds: Mapping[object, Function] = {"regression": "identity", "multi_label_classification": "sigmoid"}
    return kinds.get(config.get("problem_type"), "sigmoid" if num_labels == 1 else "softmax")
