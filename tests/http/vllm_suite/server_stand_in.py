"""Server of jpaged in place of vLLM's in vLLM's own tests, which import this file as `tests.utils`.

Environment: JPAGED_COMMAND (a command, split at spaces), JPAGED_PYTHONPATH (its PYTHONPATH), JPAGED_MODEL (a GGUF file
or a folder), JPAGED_LOG (a file).

A server is kept for the next test file if its model name and arguments are the same. Only one runs at a time.
"""

from __future__ import annotations

import atexit
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from itertools import takewhile
from typing import Any, TypeVar

import anthropic
import openai

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
_F = TypeVar("_F")
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
        command = [*shlex.split(os.environ.get("JPAGED_COMMAND", "jpaged")), "serve", MODEL]
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
        return "/".join((self.url_root, *parts))

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
