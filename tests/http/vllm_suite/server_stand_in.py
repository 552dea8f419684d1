"""Server of jpaged in place of vLLM's in vLLM's own tests, which import this file as `tests.utils`.

Environment: JPAGED_COMMAND (a command, split at spaces), JPAGED_PYTHONPATH (its PYTHONPATH), JPAGED_MODEL (a GGUF file
or a folder), JPAGED_LOG (a file).

Encoders and classifiers that the tests name are small random models with the served model's tokenizer.

A server is kept for the next test file if its model name and arguments are the same. Only one runs at a time.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import openai
import torch
import transformers

MODEL = os.environ["JPAGED_MODEL"]
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WITH_VALUE = (
    *("--max-model-len", "--max-logprobs", "--root-path", "--tool-call-parser", "--reasoning-parser"),
    *("--chat-template", "--max-num-batched-tokens", "--stream-interval", "--api-key"),
    *("--max-lora-rank", "--max-cpu-loras"),
)
_FLAGS = (
    *("--enable-lora", "--enable-force-include-usage", "--trust-request-chat-template", "--return-tokens-as-token-ids"),
    "--enable-sleep-mode",
)
_POOLING: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "BAAI/bge-base-en-v1.5": ("BertModel", 768, ()),
    "Snowflake/snowflake-arctic-embed-m-v1.5": ("BertModel", 768, ()),
    "intfloat/multilingual-e5-small": ("XLMRobertaModel", 384, ()),
    "BAAI/bge-reranker-base": ("XLMRobertaForSequenceClassification", 64, ("LABEL_0",)),
    "jason9693/Qwen2.5-1.5B-apeach": ("Qwen2ForSequenceClassification", 64, ("Default", "Spoiled")),
}
"""Encoders and classifiers of the tests: architecture, width and labels of the random models in their place."""
_F = TypeVar("_F")
_from_pretrained = transformers.AutoTokenizer.from_pretrained
_MAX_MODEL_LEN = 8192
"""Limit of the small model."""
_MAX_TOKENS = 100
"""Tokens of a response whose request sets no limit."""
_START_S = 600
_STOP_S = 30


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def load(from_pretrained: Callable[..., Any]) -> Any:
    """Return what a function of transformers loads from the served model."""
    if MODEL.endswith(".gguf"):
        return from_pretrained(os.path.dirname(MODEL), gguf_file=os.path.basename(MODEL))
    return from_pretrained(MODEL)


@cache
def load_tokenizer() -> Any:
    """Return the tokenizer of the served model."""
    return load(_from_pretrained)


def served_model(name: str) -> str:
    """Return the file or folder of the model that is served under this name."""
    if name not in _POOLING:
        return MODEL
    architecture, width, labels = _POOLING[name]
    folder = Path(os.environ["JPAGED_LOG"]).parent / name.replace("/", "--")
    if not folder.exists():
        _write_random(folder, architecture, width, labels)
    return str(folder)


def _write_random(folder: Path, architecture: str, width: int, labels: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer()
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_MODEL_LEN,
        initializer_range=0.2,
        pad_token_id=1,
        **({"type_vocab_size": 1} if "Roberta" in architecture else {}),
        id2label=dict(enumerate(labels)) or None,
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not labels:
        modules = [{"type": f"models.{name}", "path": path} for name, path in _MODULES.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


_MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Modules of sentence-transformers of an encoder, and their folders."""


def kept_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of a vLLM server that matter to its answers and that jpaged has."""
    kept = []
    for name in _WITH_VALUE:
        if name in arguments:
            value = arguments[arguments.index(name) + 1]
            kept += [name, str(min(int(value), _MAX_MODEL_LEN)) if name == "--max-model-len" else value]
    kept += [name for name in _FLAGS if name in arguments]
    if "--lora-modules" in arguments:
        given = arguments[arguments.index("--lora-modules") + 1 :]
        kept += ["--lora-modules", *takewhile(lambda one: not one.startswith("--"), given)]
    if "--served-model-name" in arguments:
        kept += ["--served-model-aliases", arguments[arguments.index("--served-model-name") + 1]]
    return kept


class _Server:
    """One process of `jpaged serve`."""

    running: _Server | None = None

    def __init__(self, key: tuple[Any, ...], model: str, arguments: list[str], variables: dict[str, str]) -> None:
        self.key = key
        self.port = free_port()
        command = [*shlex.split(os.environ.get("JPAGED_COMMAND", "jpaged")), "serve", served_model(model)]
        command += ["--port", str(free_port()), "--http-port", str(self.port), "--served-model-name", model]
        command += ["--max-num-seqs", "16", "--kv-cache-memory-bytes", "400M", "--dtype", "float32"]
        command += ["--override-generation-config", f'{{"max_new_tokens": {_MAX_TOKENS}}}', *arguments]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.environ.get("JPAGED_PYTHONPATH", ""),
            **variables,
        }
        with open(os.environ.get("JPAGED_LOG", "server.log"), "a") as log:
            log.write(f"{shlex.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            self._wait(command)
        except BaseException:  # pytest's timeout, too
            self.stop()
            raise

    def _wait(self, command: list[str]) -> None:
        until_s = time.monotonic() + _START_S
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"jpaged exited with {self.process.returncode}: {shlex.join(command)}")
            if time.monotonic() > until_s:
                raise RuntimeError(f"jpaged is not ready after {_START_S} s: {shlex.join(command)}")
            time.sleep(0.2)

    @classmethod
    def start(cls, model: str, arguments: list[str], variables: dict[str, str]) -> _Server:
        """Return the running server if it has this name and these arguments, else a new one."""
        key = (model, *arguments, *sorted(variables.items()))
        if cls.running is not None and cls.running.key == key and cls.running.process.poll() is None:
            return cls.running
        cls.stop_running()
        cls.running = cls(key, model, arguments, variables)
        return cls.running

    @classmethod
    def stop_running(cls) -> None:
        if cls.running is not None:
            cls.running.stop()
            cls.running = None

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False


atexit.register(_Server.stop_running)


class RemoteOpenAIServer:
    """Interface of vLLM's class of this name, for the tests that run."""

    DUMMY_API_KEY = "token-abc123"
    host = "127.0.0.1"

    def __init__(
        self, model: str, arguments: list[str], *, env_dict: dict[str, str] | None = None, **_: object
    ) -> None:
        variables = {} if env_dict is None else env_dict
        kept = kept_arguments(arguments)
        if "VLLM_API_KEY" in variables:
            kept += ["--api-key", variables["VLLM_API_KEY"]]
        self.port = _Server.start(model, kept, {}).port

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the server to the next test file."""

    @property
    def url_root(self) -> str:
        """Address without a path."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def _options(self, url: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60, **given}

    def get_client(self, **given: Any) -> openai.OpenAI:
        """Return a client of OpenAI's package."""
        return openai.OpenAI(**self._options(self.url_for("v1"), given))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        """Return an asynchronous client of OpenAI's package."""
        return openai.AsyncOpenAI(**self._options(self.url_for("v1"), given))

    def get_client_anthropic(self, **given: Any) -> anthropic.Anthropic:
        """Return a client of Anthropic's package."""
        return anthropic.Anthropic(**self._options(self.url_root, given))

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        """Return an asynchronous client of Anthropic's package."""
        return anthropic.AsyncAnthropic(**self._options(self.url_root, given))


def multi_gpu_only(**_: object) -> Callable[[_F], _F]:
    """Return a decorator that leaves a test as it is; vLLM's skips it without GPUs."""
    return lambda test: test


def requires_fp8(test: _F) -> _F:
    """Return a test unchanged; vLLM's decorator skips it on old GPUs."""
    return test
