"""The `quantization_config` of a config.json -> the layout of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jpaged.checkpoints.quantised import awq, compressed_tensors, fp8, gptq, mxfp4
from jpaged.checkpoints.quantised.scheme import Scheme
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.json_fields import JsonFields

QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""Keys of the quantization config; the second one in old checkpoints of compressed-tensors."""

_READERS: Mapping[str, Callable[[JsonFields], Scheme]] = {
    "auto-round": gptq.read_auto_round,
    "awq": awq.read_config,
    "compressed-tensors": compressed_tensors.read_config,
    "fp8": fp8.read_config,
    "gptq": gptq.read_config,
    "mxfp4": mxfp4.read_config,
}


_MODEL_OPT = "modelopt"
MODEL_OPT_FILE = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt describes its weights and their layout."""
MODEL_OPT_PROBLEM = (
    f"weights quantized by NVIDIA's ModelOpt ({MODEL_OPT_FILE}) are not supported; use the original weights, or "
    f"weights of another method: {', '.join(_READERS)}"
)


def find_scheme(config: Mapping[str, object]) -> Scheme | None:
    """Return the layout of a checkpoint's quantized weights from its config.json; None if not quantized.

    Raises:
        Unsupported: the method or a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    given = next((config[key] for key in QUANTISATION_KEYS if config.get(key) is not None), None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidArgument("config.json quantization_config", f"is {given!r}; it must be an object")
    fields = JsonFields(given, "quantization_config")
    method = fields.text("quant_method", _MODEL_OPT if "quant_algo" in given else None)
    if method == _MODEL_OPT or "quant_algo" in given:
        raise Unsupported(MODEL_OPT_PROBLEM)
    if method not in _READERS:
        raise Unsupported(f"config.json: quant_method is {method!r}; supported: {', '.join(_READERS)}")
    scheme = _READERS[method](fields)
    fields.finish()
    return scheme
