"""Model name -> local folder in Hugging Face layout, or GGUF file -> config -> data type.

The `quantization_config` of a config.json selects the layout of the weights.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jpaged import json_text
from jpaged.checkpoints.gguf.file import NO_MODELS, SUFFIX, find_gguf, get_parts, is_gguf
from jpaged.checkpoints.gguf.tensors import read_model
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.orbax import PARAMS_FOLDER, is_orbax_folder, refuse_other_orbax
from jpaged.checkpoints.quantized import compressed_tensors, floats, gptq
from jpaged.checkpoints.quantized.scheme import Scheme
from jpaged.checkpoints.tensor_files import (
    DTYPES,
    INDEX_FILE,
    ORIGINAL_CONFIG,
    ORIGINAL_FILE,
    ORIGINAL_PROBLEM,
    SINGLE_FILE,
    TensorFiles,
    read_bounded,
    unreadable,
)
from jpaged.config import ModelOptions, compile_cache_dir
from jpaged.config.option import parse_json_object, shorten, without_credentials
from jpaged.demo import CAPTIONER_FOLDER, DRAFT_FOLDER, FOLDER
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.hardware import multiplies_bfloat16
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.hf_config import from_hf
from jpaged.models.json_fields import JsonFields
from jpaged.models.param_specs import EXPERT_AXES, get_module, leaf_format
from jpaged.models.registry import find_family
from jpaged.sampling_params import DEFAULT_SAMPLING_FIELDS, SamplingParams

QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""Keys of the quantization config; the second one in old checkpoints of compressed-tensors."""

_READERS: Mapping[str, Callable[[JsonFields], Scheme]] = {
    "auto-round": gptq.read_auto_round,
    "awq": gptq.read_awq,
    "compressed-tensors": compressed_tensors.read_config,
    "fp8": floats.read_fp8_config,
    "gptq": gptq.read_gptq,
    floats.MODEL_OPT: floats.read_modelopt,
    "mxfp4": floats.read_mxfp4_config,
}
MODEL_OPT_FILE = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt describes its weights and their layout, unless config.json does."""


def find_scheme(config: Mapping[str, object]) -> Scheme | None:
    """Return the layout of a checkpoint's quantized weights from its config.json; None if they are read as weights.

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
    method = fields.text("quant_method", floats.MODEL_OPT if "quant_algo" in given else None)
    if method.startswith(f"{floats.MODEL_OPT}_"):  # of vLLM
        method = floats.MODEL_OPT
    if method == floats.BITSANDBYTES:
        floats.check_bitsandbytes_config(fields)
        return None
    if method not in _READERS:
        raise Unsupported(
            f"config.json: quant_method is {method!r}; supported: {', '.join(_READERS)}, {floats.BITSANDBYTES}"
        )
    scheme = _READERS[method](fields)
    fields.finish()
    return scheme


_LOG = logging.getLogger(__name__)

DEMO = "demo"
"""Name of the packaged checkpoint; takes precedence over a folder or a hub model of that name."""

DEMO_DRAFT = "demo-draft"
"""Name of the packaged draft model of the demo, with the same precedence."""

DEMO_CAPTIONER = "demo-captioner"
"""Name of the packaged model that describes pictures, with the same precedence."""

_PACKAGED = {DEMO: FOLDER, DEMO_DRAFT: DRAFT_FOLDER, DEMO_CAPTIONER: CAPTIONER_FOLDER}

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

MAX_CONFIG_BYTES = 1 << 24
"""Limit of config.json and similar files; those that name the format of every layer have about 1 MB."""
_CACHED, _SNAPSHOTS = "models--", "snapshots"
"""Names in the hub client's cache."""

_MAX_REF_BYTES = 4096
"""Limit of the file with the commit of a branch."""
_MAX_DEPTH = 64
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096
"""Places, including the first and the last, and bytes per place that a fingerprint reads of each file."""

# Weights, configs and tokenizers at the top of a repository, and modules of sentence-transformers, such as 1_Pooling;
# not the duplicates in other formats.
_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "merges.txt", "vocab.txt")
_WANTED_FILES = (*_TOKENIZER_FILES, "*.safetensors")
_UNWANTED_FILES = ("[!0-9]*/*", "consolidated*")
_GGUF_ID = re.compile(r"([^/:]+/[^/:]+):([\w.-]+)")
"""A repository with GGUF files, and the type of one of its models."""


def find_folder(
    model: str, *, revision: str | None = None, download_dir: str | None = None, token: str | None = None
) -> Path:
    """Return the folder of a checkpoint: a local one, or a snapshot of a hub id, downloaded if it is not cached.

    A name that exists as a folder or as a GGUF file, or that is written as a path (beginning with `.`, `/` or `~`, or
    ending in `.gguf`), is local. `user/name:Q4_K_M` is the GGUF model of that type in a repository, in one file or in
    parts. The environment variables of the hub client (token, cache, offline mode) apply. A URL such as
    `s3://bucket/model` is a folder or a GGUF file in storage that fsspec reads.

    Args:
        revision: branch, tag or commit on the hub; main if None.
        download_dir: cache folder of the hub's client, and of URLs; their own if None.
        token: for the hub; the client's own if None.

    Raises:
        InvalidArgument: a local folder without config.json, an Orbax checkpoint of another program, or a revision of a
            local folder.
        NotFound: no such folder exists, or the hub or the storage does not provide the model.
    """
    if "://" in model:
        _refuse_revision("revision", revision, without_credentials(model))
        return _download_url(model, download_dir)
    folder = find_local(model)
    if folder is not None:
        _refuse_revision("revision", revision, folder)
        return folder
    if (of_type := _GGUF_ID.fullmatch(model)) is not None:
        return _download_gguf(of_type[1], of_type[2], revision, download_dir, token)
    return _download("model", model, _WANTED_FILES, revision, download_dir, token)


def _download_gguf(name: str, kind: str, revision: str | None, download_dir: str | None, token: str | None) -> Path:
    """Return the first part of a repository's GGUF model of a type; other types are not downloaded.

    Raises:
        NotFound: the hub does not provide the repository, or it has no such model.
        InvalidArgument: it has several.
    """
    ends = [f"[-.]{each}{end}" for each in dict.fromkeys((kind, kind.upper(), kind.lower())) for end in ("", "-*")]
    patterns = [f"{folder}*{end}{SUFFIX}" for end in ends for folder in ("", "*/")]
    unwanted = [f"{folder}{prefix}*" for prefix in NO_MODELS for folder in ("", "*/")]
    snapshot = _download("model", name, patterns, revision, download_dir, token, unwanted=unwanted)
    files = {path for pattern in patterns for path in snapshot.glob(pattern) if not path.name.startswith(NO_MODELS)}
    found = sorted({first for path in files if (first := find_gguf(path)) is not None})
    if not found:
        raise NotFound(f"model: {name} has no GGUF file of type {kind}: no file matches {patterns[0]}")
    if len(found) > 1:
        listed = ", ".join(str(path.relative_to(snapshot)) for path in found)
        raise InvalidArgument("model", f"{name}:{kind} matches {len(found)} GGUF models: {listed}")
    return found[0]


def _download_url(url: str, download_dir: str | None) -> Path:
    """Return the copy of a folder or a GGUF file in storage; files that have not changed are not copied again.

    The copy's name is a digest of what the storage reports about each file. A file has its name once it is complete.

    Raises:
        InvalidArgument: fsspec does not know the URL's scheme or lacks its package, or there is no place for the copy.
        NotFound: the storage does not provide the model.
    """
    import fsspec  # slow to import, and only needed here

    shown, programs = without_credentials(url), compile_cache_dir()
    if download_dir is None and programs is None:
        raise InvalidArgument("download_dir", f"must be set for {shown} if JPAGED_CACHE_DIR is empty")
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InvalidArgument("model", f"{shown}: {error}") from error
    root = root.rstrip("/")
    top, name = root.rpartition("/")[::2] if root.endswith(SUFFIX) else (root, None)
    wanted = _WANTED_FILES if name is None else [glob.escape(part.name) for part in get_parts(Path(name))]
    try:
        listed = files.find(top, maxdepth=None if name is None else 1)  # not a whole bucket for a file
        found = {path[len(top) :].lstrip("/"): path for path in listed}
        kept = {path: found[path] for path in sorted(found) if _is_wanted(path, wanted)}
        if not kept:
            raise FileNotFoundError("no file of a model is there")
        if hostile := next((path for path in kept if ".." in path.split("/")), None):
            raise ValueError(f"{hostile} leads out of the folder")
        states = [(path, files.ukey(source), _read_state(files.info(source))) for path, source in kept.items()]
        digest = hashlib.sha256(repr((url, states)).encode()).hexdigest()[:32]
    except Exception as error:  # each client of storage has other types
        raise NotFound(f"model: {shown}: {type(error).__name__}: {shorten(str(error))}") from error
    cache = programs.parent / "models" if download_dir is None and programs else expand_home(str(download_dir), "")
    for path, source in kept.items():
        _copy(files, source, cache / digest / path, f"{shown}: {path}")
    return cache / digest if name is None else find_gguf(cache / digest / name) or cache / digest / name


_STATES = ("size", "etag", "contentmd5", "digest", "lastmodified", "mtime", "created", "updated", "generation")
"""What storage reports that changes with a file's contents, as lower-case letters and digits.

The client for HTTP identifies a file by its URL alone.
"""


def _read_state(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = {re.sub(r"[^a-z0-9]", "", key.lower()): str(value) for key, value in info.items()}
    return [(key, named[key]) for key in _STATES if key in named]


def _is_wanted(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path, each) for each in patterns) and not any(fnmatch(path, each) for each in _UNWANTED_FILES)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _copy(files: Any, source: str, path: Path, shown: str) -> None:
    """Copy a file from storage unless it is there.

    Raises:
        NotFound: the storage does not provide it.
        InvalidArgument: the folder of the copy cannot be written, or is full.
    """
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent)
    except OSError as error:
        raise InvalidArgument("download_dir", f"{path.parent} cannot be written: {error}") from error
    with folder:
        partial = Path(folder.name) / path.name
        try:
            files.get_file(source, str(partial))
        except Exception as error:  # each client of storage has other types
            if isinstance(error, OSError) and error.errno in _FULL:
                raise InvalidArgument("download_dir", f"{path.parent} has no room for {shown}: {error}") from error
            raise NotFound(f"model: {shown}: {type(error).__name__}: {shorten(str(error))}") from error
        partial.replace(path)
    _LOG.info("copied %s, %d bytes", path.name, path.stat().st_size)


def find_model(options: ModelOptions) -> Path:
    """Return the folder of the model that the options name; see `find_folder`."""
    return find_folder(
        options.model, revision=options.revision, download_dir=options.download_dir, token=options.hf_token
    )


def find_tokenizer(options: ModelOptions, folder: Path) -> Path:
    """Return the folder or the GGUF file of the tokenizer.

    Args:
        folder: that of the model, with its own tokenizer.

    Raises:
        InvalidArgument: a revision of a local folder.
        NotFound: no such folder exists, or the hub does not provide the tokenizer.
    """
    is_own = options.tokenizer in (None, options.model)
    revision = options.tokenizer_revision or (options.revision if is_own else None)
    if is_own and revision == options.revision:
        return folder
    name = options.tokenizer or options.model
    path = expand_home(name, "tokenizer")
    found = _PACKAGED.get(name) or (path if path.is_dir() else find_gguf(path))
    if found is not None:
        _refuse_revision("tokenizer_revision", options.tokenizer_revision, found)
        return found if list(found.glob("*token*")) else find_gguf(found) or found
    return _download("tokenizer", name, _TOKENIZER_FILES, revision, options.download_dir, options.hf_token)


_MAIN = "main"


def _refuse_revision(field: str, revision: str | None, folder: Path | str) -> None:
    if revision not in (None, _MAIN):
        what = "local" if isinstance(folder, Path) else "a URL"
        raise InvalidArgument(
            field, f"{revision}: {folder} is {what}; only models on the Hugging Face Hub have revisions"
        )


def _download(
    field: str,
    name: str,
    patterns: Sequence[str],
    revision: str | None,
    download_dir: str | None,
    token: str | None,
    *,
    unwanted: Sequence[str] = _UNWANTED_FILES,
) -> Path:
    """Return the folder of a snapshot with the files of these patterns.

    Raises:
        NotFound: the name is a path, or the hub does not provide the files.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(SUFFIX):
        raise NotFound(f"{field}: folder {name} does not exist")
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    cache = None if download_dir is None else expand_home(download_dir, "download_dir")
    given = {"revision": revision, "cache_dir": cache, "token": token}
    keywords: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    try:
        snapshot = snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(unwanted), **keywords)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = "" if revision is None else f" at revision {revision}"
        problem = f"is not a local folder, and the hub did not return it: {type(error).__name__}: {reason}"
        raise NotFound(f"{field}: {name}{at} {problem}") from error
    return Path(snapshot)


def find_local(model: str) -> Path | None:
    """Return the folder of a local checkpoint: a packaged one, or one at that path; None if there is none.

    For a GGUF model it is the file, or the first part. This also applies to a folder that holds a GGUF model and no
    weights in Hugging Face layout.

    Raises:
        InvalidArgument: it has no config.json and no GGUF model, or is an Orbax checkpoint of another program.
    """
    if model in _PACKAGED:
        return _PACKAGED[model]
    folder = expand_home(model, "model")
    if not folder.is_dir():
        return find_gguf(folder)
    if not is_orbax_folder(folder) and not list(folder.glob("*.safetensors")):
        file = find_gguf(folder)
        if file is not None:
            return file
    if not (folder / CONFIG_FILE).is_file():
        if (folder / _SNAPSHOTS).is_dir() or folder.name.startswith(_CACHED):
            return _find_snapshot(folder)
        if (folder / CONFIG_FILE).is_symlink():
            raise unreadable(folder / CONFIG_FILE, "is missing")
        if (folder / ORIGINAL_CONFIG).is_file() and (folder / ORIGINAL_FILE).is_file():
            raise Unsupported(f"folder {model}: {ORIGINAL_PROBLEM}")
        refuse_other_orbax(folder)
        raise InvalidArgument("model", f"folder {model} has no {CONFIG_FILE}; it must be in Hugging Face layout")
    return folder


def _find_snapshot(folder: Path) -> Path:
    """Return the snapshot in a model's folder of a hub cache: the one that `refs/main` names, or the only one.

    Raises:
        InvalidArgument: there is none, there are several, or `refs/main` is too large for a commit's name.
    """
    snapshots = sorted(path for path in (folder / _SNAPSHOTS).glob("*") if (path / CONFIG_FILE).exists())
    main = folder / "refs" / "main"
    named = read_bounded(main, _MAX_REF_BYTES).decode(errors="replace").strip() if main.is_file() else None
    found = [path for path in snapshots if path.name == named] or snapshots
    if len(found) == 1:
        return found[0]
    name = folder.name.removeprefix(_CACHED).replace("--", "/")
    problem = f"has {len(found)} snapshots: choose one of them" if found else "has no snapshot of a complete model"
    raise InvalidArgument("model", f"folder {folder} is in a hub cache and {problem}; `{name}` downloads the model")


def expand_home(path: str, field: str) -> Path:
    """Expand `~` or `~user` at the start of a path.

    Args:
        field: option that the path was given for.

    Raises:
        InvalidArgument: the user does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidArgument(field, f"{path} begins with an unknown user: write the path from /") from error


def read_config(folder: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> ModelConfig:
    """Return the config of a checkpoint folder; end-of-sequence tokens are those of transformers' generate.

    Args:
        overrides: values that replace those of config.json, as `override_config` takes them.

    Raises:
        InvalidArgument: a file is missing or malformed, or an overriding value is.
        Unsupported: the model needs an unsupported feature.
    """
    try:
        return _read_config(folder, overrides)
    except InvalidArgument as error:
        if not overrides or error.field.startswith(_OVERRIDES):
            raise
        raise InvalidArgument(error.field, f"{error.problem} ({_OVERRIDES}: {', '.join(overrides)})") from error
    except Unsupported as error:
        if not overrides:
            raise
        raise Unsupported(f"{error} ({_OVERRIDES}: {', '.join(overrides)})") from error


def _read_config(folder: Path, overrides: Mapping[str, Any]) -> ModelConfig:
    if is_gguf(folder):
        found = read_model(folder)
        if not overrides:
            return found.config
        return replace(from_hf(override_config(found.hf, overrides)), quantization=found.config.quantization)
    generation, config = folder / GENERATION_CONFIG_FILE, read_json(folder / CONFIG_FILE)
    scheme = _find_scheme(folder, config)
    plain = {key: value for key, value in override_config(config, overrides).items() if key not in QUANTISATION_KEYS}
    result = from_hf(plain, read_json(generation) if generation.is_file() else None)
    if scheme is None:
        is_widened = any(config.get(key) is not None for key in QUANTISATION_KEYS)
        return replace(result, widened_method=floats.BITSANDBYTES) if is_widened else result
    return replace(result, quantization=_without_mixed_orders(folder, result, scheme))


_OVERRIDES = "hf_overrides"
_ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of rotary embedding in transformers 4 and 5."""
_ROPE_GEOMETRY = ("rope_theta", "partial_rotary_factor")
"""Keys that may be in such a section or next to it; the section takes precedence."""


def override_config(
    config: Mapping[str, Any], overrides: Mapping[str, Any], where: str = _OVERRIDES
) -> Mapping[str, Any]:
    """Return a config.json with other values.

    A value replaces the one with the same key; only a nested `*_config` is merged. A new section of rotary embedding
    replaces the one there, in the layout of either version of transformers, and keeps its base and fraction unless it
    has others.

    Args:
        where: name of the overrides in errors.

    Raises:
        InvalidArgument: a key cannot be overridden; names it.
    """
    result = dict(config)
    for key, value in overrides.items():
        if key in QUANTISATION_KEYS:
            raise InvalidArgument(f"{where}.{key}", "cannot be overridden: it describes the stored weights")
        old: Any = config.get(key)
        is_nested = key.endswith("_config") and isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = override_config(old, value, f"{where}.{key}") if is_nested else value
    before: Mapping[str, Any] = next((config[key] for key in _ROPE_SECTIONS if config.get(key)), {})
    given = [key for key in _ROPE_SECTIONS if key in overrides]
    if len(given) == 1 and (overrides[given[0]] is None or isinstance(overrides[given[0]], Mapping)):
        kept = {key: before[key] for key in _ROPE_GEOMETRY if key in before}
        for key in _ROPE_SECTIONS:
            result.pop(key, None)
        result[given[0]] = {**kept, **(overrides[given[0]] or {})}
    for key in _ROPE_SECTIONS:
        section: Any = result.get(key)
        for name in _ROPE_GEOMETRY if isinstance(section, Mapping) else ():
            if name not in overrides or name in (overrides.get(key) or {}):
                continue
            if any(isinstance(value, Mapping) for value in section.values()):
                raise InvalidArgument(f"{where}.{name}", f"{key} has one for each kind of layer: override {key}")
            if name in section:
                result[key] = section = {**section, name: overrides[name]}
    return result


_NO_GENERATION_CONFIG = ("none", "vllm")


def read_default_sampling(folder: Path, options: ModelOptions) -> dict[str, Any]:
    """Return the sampling defaults of a checkpoint: fields of SamplingParams, as its generation config has them.

    An invalid value of the checkpoint's own file is logged and left out.

    Raises:
        InvalidArgument: the file that generation_config names is missing or invalid, or override_generation_config is.
    """
    name = options.generation_config
    found: dict[str, Any] = {}
    if name == "auto":
        path = folder / GENERATION_CONFIG_FILE
        if not is_gguf(folder) and path.is_file():
            found = _parse_default_sampling(read_json(path), GENERATION_CONFIG_FILE, is_own=True)
    elif name not in _NO_GENERATION_CONFIG:
        path = expand_home(name, "generation_config")
        path = path / GENERATION_CONFIG_FILE if path.is_dir() else path
        if not path.is_file():
            problem = f"{path} does not exist: give auto, none, a file or a folder with {GENERATION_CONFIG_FILE}"
            raise InvalidArgument("generation_config", problem)
        found = _parse_default_sampling(read_json(path), "generation_config", is_own=False)
    if options.override_generation_config is not None:
        field = "override_generation_config"
        given = parse_json_object(field, options.override_generation_config, '{"temperature": 0.6}')
        unknown = [key for key in given if _SAMPLING_NAMES.get(key, key) not in DEFAULT_SAMPLING_FIELDS]
        if unknown:
            known = ", ".join((*DEFAULT_SAMPLING_FIELDS, *_SAMPLING_NAMES))
            raise InvalidArgument(f"{field}.{unknown[0][:80]}", f"is unknown: must be one of {known}")
        found |= _parse_default_sampling(given, field, is_own=False)
    return found


_SAMPLING_NAMES = {"max_new_tokens": "max_tokens"}
"""Keys of a generation config whose fields of SamplingParams have other names."""


def _parse_default_sampling(values: Mapping[str, Any], where: str, *, is_own: bool) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        name = _SAMPLING_NAMES.get(key, key)
        if name not in DEFAULT_SAMPLING_FIELDS or value is None:
            continue
        try:
            found[name] = getattr(SamplingParams(**{name: value}), name)
        except InvalidArgument as error:
            if not is_own:
                raise InvalidArgument(f"{where}.{key}", error.problem) from error
            _LOG.warning("%s: %s %s; it is ignored", where, key, error.problem)
    return found


_SERVED_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_LARGEST_FLOAT16 = 65504


def choose_dtype(
    chosen: str, config: ModelConfig, platform: str, folder: Path | None = None
) -> tuple[np.dtype, str | None]:
    """Resolve the option `dtype` for a model on a platform.

    `auto` is the checkpoint's type if the device multiplies it. float16 runs in bfloat16 on TPUs, on CPUs, and for
    families that overflow it; both run in float32 on a CPU without instructions for bfloat16. A config without a type
    means float32 on CPUs, as in Hugging Face transformers, and bfloat16 elsewhere. The packaged models run in float32
    on all CPUs, so that their outputs are the same.

    Args:
        folder: of the checkpoint, if there is one.

    Returns:
        the type, and a line for the log: the reason if `auto` is not the checkpoint's, a warning if float16 is not.

    Raises:
        InvalidArgument: the chosen type is not supported, on this platform or for this model.
    """
    problem = _float16_problem(config, platform)
    if chosen != "auto":
        name = _DTYPE_ALIASES.get(chosen, chosen)
        if name not in _SERVED_DTYPES:
            raise InvalidArgument("dtype", f"is {chosen}; supported: {', '.join(_SERVED_DTYPES)}")
        if name != "float16":
            return DTYPES[name], None
        if problem is not None:
            raise InvalidArgument("dtype", f"is {chosen}, but {problem}; choose bfloat16")
        if config.checkpoint_dtype == name:
            return DTYPES[name], None
        return DTYPES[name], (
            f"dtype float16, not {config.checkpoint_dtype or 'no type'} as in the checkpoint: float16 ends at "
            f"{_LARGEST_FLOAT16}, and a request whose activations exceed that ends with an error"
        )
    is_cpu = platform == "cpu"
    name = config.checkpoint_dtype or ("float32" if is_cpu else "bfloat16")
    if name == "float32" or (is_cpu and folder in _PACKAGED.values()):
        return DTYPES["float32"], None
    if is_cpu and not multiplies_bfloat16():
        return DTYPES["float32"], (
            f"dtype float32, not {name} as in the checkpoint: this processor has neither AVX512_BF16 nor AMX"
        )
    if is_cpu:
        problem = "this processor multiplies bfloat16 natively, and float16 only as float32"
    if name == "bfloat16" or problem is None:
        return DTYPES[name], None
    return DTYPES["bfloat16"], f"dtype bfloat16, not {name} as in the checkpoint: {problem}"


def _float16_problem(config: ModelConfig, platform: str) -> str | None:
    """Return why a model does not run in float16 on a platform; None if it does."""
    if platform == "tpu":
        return "TPUs have no float16 arithmetic in their matrix unit"
    if find_family(config.architecture).overflows_float16:
        return f"hidden states of {config.architecture} exceed {_LARGEST_FLOAT16}, the largest float16"
    return None


def read_scheme(folder: Path, *, keeps_embedding: bool = True) -> Scheme | None:
    """Return the quantization scheme of a checkpoint folder; None if it is not quantized.

    Args:
        keeps_embedding: see `read_model`; it must be the same for the tensors.

    Raises:
        InvalidArgument, Unsupported: as `read_config`.
    """
    if is_gguf(folder):
        return read_model(folder, keeps_embedding=keeps_embedding).scheme
    return _find_scheme(folder, read_json(folder / CONFIG_FILE))


def _find_scheme(folder: Path, config: Mapping[str, object]) -> Scheme | None:
    scheme = find_scheme(config)
    if scheme is None and (folder / MODEL_OPT_FILE).is_file():
        described = JsonFields(read_json(folder / MODEL_OPT_FILE), MODEL_OPT_FILE).mapping("quantization")
        return find_scheme({QUANTISATION_KEYS[0]: {**described, "quant_method": floats.MODEL_OPT}})
    return scheme


def _without_mixed_orders(folder: Path, config: ModelConfig, scheme: Scheme) -> Quantization:
    """Return the rules for memory: matrices that share inputs but order their groups differently stay unquantized.

    Query, key and value are one matrix here, whose rows have one order of groups.
    """
    quantization = scheme.quantization
    if not any(form is not None and form.has_group_ids for _, form in quantization.rules):
        return quantization
    if is_orbax_folder(folder) or not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return quantization
    mixed: dict[str, None] = {}
    with ExitStack() as opened:
        files = TensorFiles(folder, opened)
        for leaves in model_leaves(config, files.names).layers:
            for leaf in leaves:
                form = leaf_format(quantization, leaf)
                if form is None or not form.has_group_ids or leaf.axes[0] in EXPERT_AXES or len(leaf.tensors) < 2:
                    continue
                parts = [scheme.parts(get_module(name), shape, form) for name, shape in leaf.tensors]
                names = [(each.get("g_idx") or each["ids"]).name for each in parts]
                orders = {files.read(name, files.shape(name)).tobytes() for name in names if name in files.names}
                if len(orders) > 1:
                    mixed |= dict.fromkeys(".".join(get_module(name).split(".")[-2:]) for name, _ in leaf.tensors)
    return replace(quantization, rules=(*((rf"\.{re.escape(end)}$", None) for end in mixed), *quantization.rules))


def fingerprint(folder: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a digest of a checkpoint, and of the values that override its config, without reading all weights.

    It covers the config, and each file's name, size and contents at some places, which change if a model is trained
    further.
    """
    if is_gguf(folder):
        digest, files = hashlib.sha256(repr(read_model(folder).config).encode()), get_parts(folder)
    else:
        digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
        of_orbax = (path for path in (folder / PARAMS_FOLDER).rglob("*") if path.is_file())
        files = sorted(of_orbax if is_orbax_folder(folder) else folder.glob("*.safetensors"))
    if overrides:
        digest.update(json_text.dumps(overrides, sort_keys=True).encode())
    for path in files:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        with path.open("rb", buffering=0) as file:
            for place in range(_NUM_SAMPLES):
                file.seek(max(0, num_bytes - _SAMPLE_BYTES) * place // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> Mapping[str, object]:
    """Return the JSON object in a file. Raise InvalidArgument with the file's name if it holds none.

    Args:
        limit: maximum size of the file in bytes; JSON takes many times its size in memory.
    """
    try:
        value = json.loads(read_bounded(path, limit).decode("utf-8-sig"))
    except InvalidArgument:
        raise
    except RecursionError as error:
        raise _too_deep(path) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(str(path), "must hold a JSON object")
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise _too_deep(path)
    return value


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(path: Path) -> InvalidArgument:
    return InvalidArgument(str(path), f"is nested deeper than the limit of {_MAX_DEPTH}")
