"""An `LLM` under measurement: its options from the command line, the hardware limits, and the share of them reached."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Self, TextIO

from jpaged.bench.cli.probe import get_limits
from jpaged.bench.datasets import FolderVocabulary, Sample, TokenizerVocabulary
from jpaged.bench.limits import HardwareLimits, ServedModel, as_record, offline_shares
from jpaged.cli.options import add_config_flags, config_from, config_values
from jpaged.cli.startup import StartupReport
from jpaged.config import PROCESS_OPTIONS, EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.types import RequestOutput, SamplingParams

_SECTIONS = ("model", "cache", "scheduler", "parallel", "startup")


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and every option of an LLM; --seed is the data set's."""
    add_config_flags(parser, _SECTIONS, without={"seed", *PROCESS_OPTIONS})
    parser.add_argument("--disable-detokenize", action="store_true", help="skip detokenization: return only token ids")


def with_model(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with a MODEL, from the positional argument, `--model` or the default.

    Raises:
        InvalidArgument: two different models are given.
    """
    return argparse.Namespace(**{**vars(arguments), "model": config_values(arguments).get("model", "demo")})


def get_vocabulary(model: str) -> TokenizerVocabulary:
    """Return the tokens of a model by name.

    Raises:
        InvalidArgument: it has no tokenizer.
    """
    from jpaged.checkpoints.gguf.file import is_gguf
    from jpaged.checkpoints.gguf.tokenizer import read_tokenizer
    from jpaged.checkpoints.hub import find_folder  # imports the hub's client

    path = find_folder(model)
    if not is_gguf(path):
        return FolderVocabulary(path)
    found = read_tokenizer(path)
    if found is None:
        raise InvalidArgument("--tokenizer", f"{path} has no tokenizer")
    return TokenizerVocabulary(found.fast, found.vocab_size)


def _dtype_on_cpu(config: EngineConfig) -> str:
    """Return the data type in which a CPU multiplies; data sheets of accelerators have only bfloat16.

    No device is queried: a child process may have to open it first.
    """
    from jpaged.checkpoints.hub import choose_dtype, find_model, read_config  # imports the hub's client

    folder = find_model(config.model)
    return choose_dtype(config.model.dtype, read_config(folder, config.model.overrides), "cpu", folder)[0].name


class Offline:
    """A loaded model, and the devices' limits or the reason why they are unknown."""

    def __init__(self, model: str, llm: Any, limits: HardwareLimits | None, reason: str, report: StartupReport) -> None:
        self.model = model
        self.report = report
        self._llm = llm
        self._limits, self._reason = limits, reason

    @classmethod
    def start(cls, arguments: argparse.Namespace, stream: TextIO, **defaults: Any) -> Self:
        """Probe the machine while it is idle, then load the model.

        Args:
            arguments: `with_model`, of `add_offline_flags` and `add_hardware_flag`.
            stream: output of startup messages.
            defaults: options that apply unless the command line sets them.

        Raises:
            InvalidArgument: an option is out of range; named as a flag.
        """
        config = config_from(arguments)
        from jpaged.llm import LLM  # imports jax

        report = StartupReport(stream)
        values = {"wait_for_all_programs": True, **defaults, **config_values(arguments)}
        model = values.pop("model")
        num_devices = config.parallel.num_devices
        if arguments.hardware in ("auto", "cpu"):
            report.line("measuring the machine's bandwidth and FLOP/s")
        limits, reason = get_limits(arguments.hardware, _dtype_on_cpu(config), num_devices)
        report.line(f"loading {model}")
        return cls(model, LLM(model, progress=report.progress, **values), limits, reason, report)

    @property
    def options(self) -> dict[str, str]:
        """The effective options, spelled as a server reports them."""
        return {name.replace("_", "-"): str(value) for name, value, _ in self._llm.config.explain()}

    @property
    def dtype(self) -> str:
        """The type of the weights."""
        return str(self._llm.config.model.dtype)

    def generate(self, samples: Sequence[Sample], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Generate for all samples at once."""
        prompts = [
            {"prompt": sample.prompt} if isinstance(sample.prompt, str) else {"prompt_token_ids": list(sample.prompt)}
            for sample in samples
        ]
        outputs: list[RequestOutput] = self._llm.generate(prompts, list(params), use_tqdm=False)
        return outputs

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return int(self._llm.load().num_steps)

    def shares(self, lens: Sequence[tuple[int, int]], elapsed_s: float) -> dict[str, Any]:
        """Return the shares of the limits reached with `lens` (prompt tokens, generated tokens) in `elapsed_s`."""
        record = {"limits": as_record(self._limits, self._reason)}
        if self._limits is None:
            return record
        from jpaged.checkpoints.hub import find_model
        from jpaged.plan.step_times import stored_shape

        config = self._llm.config
        path, rounding = find_model(config.model), config.model.quantization
        model = ServedModel(stored_shape(path, self.dtype, config.cache.kv_cache_dtype, rounding))
        max_num_seqs = self._llm.config.scheduler.max_num_seqs * self._llm.config.parallel.data_parallel_size
        return record | offline_shares(model, self._limits, lens, max_num_seqs, elapsed_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()
