"""Flags of the configuration, of SamplingParams, and of client commands for an API key and TLS.

Those of the first two are derived from their definitions, one flag per field.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged import json_text
from jpaged.config import SECTIONS, EngineConfig, api_key_from_environment, iter_options, section_help
from jpaged.config.option import is_json, option_type, parse_json
from jpaged.errors import InvalidArgument, describe_error
from jpaged.sampling_params import DEFAULT_SAMPLING_FIELDS, request_fields, with_defaults
from jpaged.structured import StructuredOutputs, get_structured_outputs
from jpaged.types import SamplingParams

if TYPE_CHECKING:
    from jpaged.client import Tls

_UNITS = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20, "g": 1000**3, "G": 1 << 30, "t": 1000**4, "T": 1 << 40}
_COUNTS_WITH_UNITS = ("max_model_len", "max_num_batched_tokens")
"""Options that accept units, as in vLLM."""
_OF_PATHS = {"file": "FILE", "folder": "DIR", "new file": "FILE", "new folder": "DIR"}
"""Metavars of paths in the help; shells complete options that have them."""
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


def to_flag(name: str) -> str:
    """Convert max_model_len to --max-model-len."""
    name, dot, key = name.partition(".")  # keys of a JSON object stay as they are
    return f"--{name.replace('_', '-')}{dot}{key}"


def add_config_flags(
    parser: argparse.ArgumentParser, sections: Collection[str] = tuple(SECTIONS), *, without: Collection[str] = ()
) -> None:
    """Add a positional MODEL, and one flag for every option of the sections except those named in `without`.

    The flags of a section form a group of the help. `--model` may replace the positional argument, as in vLLM.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, section, spec in iter_options():
        if section not in sections or name in without:
            continue
        if name == "model":
            text = f"{spec.metadata['help']} (default: {spec.default})"
            parser.add_argument("model", nargs="?", metavar="MODEL", default=None, help=_escaped(text))
            parser.add_argument(
                "--config",
                metavar="FILE",
                help="YAML file of options, by names with dashes or underscores, such as `max-model-len: 4096`; the "
                "command line overrides it",
            )
        if section not in groups:
            groups[section] = parser.add_argument_group(section, section_help(section))
        keywords: dict[str, Any] = {"dest": f"config_{name}", "default": None, "help": _get_help(spec)}
        if option_type(spec) is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif spec.metadata["unit"] == "bytes":
            keywords.update(type=_parse_bytes, metavar="BYTES")
        elif name in _COUNTS_WITH_UNITS:
            keywords.update(type=_parse_count, metavar="N")
        else:
            keywords["type"] = option_type(spec)
            keywords["metavar"] = _metavar(spec)
        if option_type(spec) is tuple:
            keywords.update(action="append", type=str)
        if spec.metadata["choices"]:
            keywords.update(choices=spec.metadata["choices"], metavar=None)
        groups[section].add_argument(to_flag(name), **keywords)


def _metavar(spec: Field[Any]) -> str:
    if option_type(spec) in (int, float):
        return "N"
    return "JSON" if is_json(spec) else _OF_PATHS.get(spec.metadata["path"], "NAME")


def merge_json_flags(words: Sequence[str], defaults: Mapping[str, Mapping[str, Any]] | None = None) -> list[str]:
    """Replace flags for single keys of JSON options, as in vLLM, by one flag with the JSON object.

        --kv-transfer-config.kv_connector A --kv-transfer-config.kv_connector_extra_config.port 9
        --kv-transfer-config '{"kv_connector": "A", "kv_connector_extra_config": {"port": 9}}'

    A value that is not JSON is a string.

    Args:
        defaults: further keys, by flag, for the objects of flags with single keys.

    Raises:
        InvalidArgument: as `split_json_flags`.
    """
    rest, given = split_json_flags(words)
    merged = [
        word
        for flag, values in given.items()
        for word in (flag, json_text.dumps(_updated((defaults or {}).get(flag, {}), values)))
    ]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *merged, *rest[end:]]


def _updated(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the keys of two, recursively; values of `new` replace those of `old`."""
    both = {**old, **new}
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            both[key] = _updated(old[key], new[key])
    return both


def split_json_flags(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the words without flags for single keys of JSON options, and the objects with these keys, by flag.

    Raises:
        InvalidArgument: a key has no value or two, or is added to what is no object; names the flag.
    """
    flags = {to_flag(name) for name, _, spec in iter_options() if is_json(spec)}
    given: dict[str, dict[str, Any]] = {}
    rest, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        flag, _, path = name.partition(".")
        if word == "--":
            rest += [word, *left]
            break
        if not path or flag not in flags:
            rest.append(word)
            continue
        if not equals:
            if not left:
                raise InvalidArgument(name, "has no value")
            value = left.pop(0)
        target, keys = given.setdefault(flag, {}), path.split(".")
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise InvalidArgument(name, f"conflicts with a value for {key}")
        if keys[-1] in target:
            raise InvalidArgument(name, "is given twice")
        target[keys[-1]] = _json_or_text(value)
    for flag, single in given.items():
        whole = _take_object(flag, rest)
        if both := sorted(whole.keys() & single.keys()):
            raise InvalidArgument(f"{flag}.{both[0]}", f"is given twice: also in the JSON object of {flag}")
        given[flag] = whole | single
    return rest, given


def _take_object(flag: str, words: list[str]) -> dict[str, Any]:
    """Return the JSON object that a flag has, and remove both from the words; empty if it is not there."""
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == flag), None)
    if place is None:
        return {}
    _, equals, text = words[place].partition("=")
    num_words = 1 if equals else 2
    value = _json_or_text(text if equals else "".join(words[place + 1 : place + 2]))
    if not isinstance(value, dict):
        raise InvalidArgument(flag, f"is {str(value)[:80]!r}, no JSON object: {flag}.KEY cannot be added")
    del words[place : place + num_words]
    if any(word.partition("=")[0] == flag for word in words[place:]):
        raise InvalidArgument(flag, f"is given twice: {flag}.KEY can be added to one object")
    return value


def _json_or_text(word: str) -> Any:
    try:
        return parse_json(word)
    except (ValueError, RecursionError):
        return word


def config_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options, by name."""
    given = vars(arguments)
    values = {name: given.get(f"config_{name}") for name, _, _ in iter_options()}
    if (positional := given.get("model")) is not None:
        if values["model"] not in (None, positional):
            raise InvalidArgument(
                "model", f"{positional} conflicts with --model {values['model']}: give only one of them"
            )
        values["model"] = positional
    return {name: value for name, value in values.items() if value is not None}


def config_from(arguments: argparse.Namespace) -> EngineConfig:
    """Return the configuration of a command line.

    Raises:
        InvalidArgument: a value is out of range; named as a flag.
    """
    try:
        return EngineConfig.load(config_values(arguments))
    except InvalidArgument as error:
        name = "MODEL" if error.field == "model" else to_flag(error.field)
        raise InvalidArgument(name, error.problem) from error


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for every field of SamplingParams; list flags may be repeated."""
    group = parser.add_argument_group("sampling", "Sampling and stop conditions.")
    for spec in request_fields():
        text = f"{spec.metadata['help']} (default: {_default_text(spec.default)})"
        keywords: dict[str, Any] = {"dest": f"sampling_{spec.name}", "default": None, "help": _escaped(text)}
        if spec.name == "early_stopping":
            keywords.update(type=_early_stopping, metavar="|".join(_EARLY_STOPPING))
        elif spec.name == "logit_bias":
            keywords.update(action="append", type=_bias, metavar="ID=NUMBER")
        elif spec.name == "structured_outputs":
            keywords.update(type=_structured_outputs, metavar="JSON")
        elif isinstance(spec.default, bool):
            keywords["action"] = argparse.BooleanOptionalAction
        elif isinstance(spec.default, str):
            keywords.update(type=str, metavar="TEXT")
        elif isinstance(spec.default, tuple) or spec.name == "allowed_token_ids":
            is_ids = spec.name.endswith("token_ids")
            keywords.update(action="append", type=int if is_ids else str, metavar="ID" if is_ids else "TEXT")
        else:
            keywords.update(type=float if isinstance(spec.default, float) else int, metavar="N")
        group.add_argument(to_flag(spec.name), **keywords)


def _structured_outputs(word: str) -> StructuredOutputs | None:
    try:
        given = json.loads(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{word!r} is not a JSON object")
    try:
        return get_structured_outputs(given)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sampling_from(arguments: argparse.Namespace, model: SamplingParams | None = None) -> SamplingParams:
    """Return the sampling parameters of a command line.

    Args:
        model: the model's defaults, for flags that are not given, except --max-tokens.

    Raises:
        InvalidArgument: a value is out of range; named as a flag.
    """
    given = {spec.name: getattr(arguments, f"sampling_{spec.name}") for spec in request_fields()}
    given["logit_bias"] = given["logit_bias"] and dict(given["logit_bias"])
    try:
        defaults = {} if model is None else {name: getattr(model, name) for name in DEFAULT_SAMPLING_FIELDS}
        known = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**with_defaults(known, defaults))
    except InvalidArgument as error:
        raise InvalidArgument(to_flag(error.field.removeprefix("sampling.")), error.problem) from error


def _get_help(spec: Field[Any]) -> str:
    notes = default_and_limits(spec)
    return _escaped(f"{spec.metadata['help']} ({notes})" if notes else spec.metadata["help"])


def default_and_limits(spec: Field[Any]) -> str:
    """Return a text with the default and the limits of an option; "" if there is nothing to state."""
    meta = spec.metadata
    limits = [
        f"{word} {_number(meta[key])}" for word, key in (("from", "low"), ("to", "high")) if meta[key] is not None
    ]
    unit = f" {meta['unit']}" if meta["unit"] and spec.default is not None else ""
    default = f"default: {_default_text(spec.default)}{unit}"
    if meta["by_platform"]:
        of_each = [f"{value} on {platform.upper()}s" for platform, value in meta["by_platform"].items()]
        default = f"default: {', '.join(of_each)}"
    return ", ".join(limits if default == "default: none" else [default, *limits])


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, (), "") else str(value)


def _bias(word: str) -> tuple[int, float]:
    token_id, separator, bias = word.partition("=")
    try:
        if separator:
            return int(token_id), float(bias)
    except ValueError:
        """Reported below."""
    raise argparse.ArgumentTypeError(f"{word!r} is not a token id and a number, such as 42=-1.5")


def _early_stopping(word: str) -> bool | str:
    if word not in _EARLY_STOPPING:
        raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(_EARLY_STOPPING)}")
    return _EARLY_STOPPING[word]


def _parse_number(word: str) -> int:
    """Parse a number as vLLM does: 4096, 512M (1024), 512m (1000), 1.5G; a fraction of the result is dropped.

    Raises:
        ValueError, ArithmeticError: it is not a number.
    """
    factor = _UNITS.get(word[-1:], 1)
    return int(word) if factor == 1 else int(Decimal(word[:-1]) * factor)


def _parse_count(word: str) -> int:
    try:
        return _parse_number(word)
    except (ValueError, ArithmeticError):
        raise argparse.ArgumentTypeError(f"invalid int value: {word!r}; such as 4096 or 32k") from None


def _parse_bytes(word: str) -> int:
    try:
        return _parse_number(word)
    except (ValueError, ArithmeticError):
        units = ", ".join(_UNITS)
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a number of bytes, such as 4096 or 1.5G; units: {units}"
        ) from None


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # argparse formats help texts


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a client."""

    api_key: str = ""
    tls: Tls | None = None
    proxy: str | None = None


def add_credential_flags(parser: argparse.ArgumentParser, *, prefix: str = "", title: str = "access") -> None:
    """Add a flag group for a key and for TLS.

    Args:
        prefix: prefix of the flags' names, for a command that is also a server.
    """
    group = parser.add_argument_group(title)
    group.add_argument(
        f"--{prefix}api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key for the server (default: JPAGED_API_KEY from the environment, if set)",
    )
    tls = f"--{prefix}tls"
    group.add_argument(tls, action="store_true", help="use TLS and trust the system's certificate authorities")
    group.add_argument(
        f"{tls}-ca", metavar="FILE", help="use TLS and trust only the certificate authorities in this PEM file"
    )
    group.add_argument(f"{tls}-cert", metavar="FILE", help="use TLS and present this client certificate (PEM)")
    group.add_argument(f"{tls}-key", metavar="FILE", help=f"private key of {tls}-cert (PEM)")
    if not prefix:
        group.add_argument(
            "--proxy",
            metavar="URL",
            help="HTTP proxy, http://HOST:PORT, or none; loopback addresses are reached directly (default: for "
            "gRPC the one in grpc_proxy, https_proxy, http_proxy and no_proxy, for HTTP none)",
        )


def credentials_from(arguments: argparse.Namespace, *, prefix: str = "") -> Credentials:
    """Return the credentials of the flags, or else of the environment.

    Args:
        prefix: as in `add_credential_flags`.

    Raises:
        InvalidArgument: a file cannot be read, or two flags conflict; names the flag.
    """
    from jpaged.client.channel import Tls, require_proxy  # imports grpc, which the help does not need

    tls, given, start = None, vars(arguments), prefix.replace("-", "_")
    files = tuple(given[f"{start}tls_{name}"] for name in ("ca", "cert", "key"))
    if given[f"{start}tls"] or any(files):
        try:
            tls = Tls(*files)
            tls.credentials()
        except InvalidArgument as error:
            raise InvalidArgument(f"--{prefix}{error.field.replace('.', '-')}", error.problem) from error
    flag, path = f"--{prefix}api-key-file", given[f"{start}api_key_file"]
    proxy = None if prefix else given["proxy"]
    if proxy is not None:
        require_proxy("--proxy", proxy)
    if path is None:
        return Credentials(api_key_from_environment(), tls, proxy)
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = describe_error(error) if isinstance(error, OSError) else f"{path} is not ASCII"
        raise InvalidArgument(flag, f"cannot be read: {problem}") from None
    if not key:
        raise InvalidArgument(flag, f"{path} is empty")
    if " " in key or not key.isprintable():
        raise InvalidArgument(flag, f"{path} must contain one API key without spaces")
    return Credentials(key, tls, proxy)
