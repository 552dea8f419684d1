"""What the command line takes, and what it says to what it does not."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli.main import COMMANDS, _normalized, main, make_parser
from jpaged.cli.options import config_from, sampling_from, to_flag
from jpaged.cli.startup import StartupReport
from jpaged.config import SECTIONS, EngineConfig, iter_options
from jpaged.sampling_params import request_fields
from jpaged.structured import StructuredOutputs
from jpaged.types import CompletionOutput, RequestOutput, SamplingParams, Usage
from jpaged.version import __version__

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [(name, spec) for name, _, spec in iter_options() if name != "model"]
VALUES: dict[str, Any] = {"int": 99, "float": 0.5, "str": "name"}
VALUES |= {"lora": ("name=path",), "max_cpu_loras": 300}
VALUES |= {"coordinator": "host:1234", "join_timeout": 2.5, "num_scheduler_steps": 9}
VALUES |= {"step_timeout": 99.5, "heartbeat_timeout": 9.5}
VALUES |= {"http_cors_origins": ("https://example.com",), "tuple[str, ...]": ("localhost:1234",)}
VALUES |= {"default_chat_template_kwargs": '{"enable_thinking": false}'}
VALUES |= {"reasoning_effort_map": '{"medium": "low"}', "root_path": "/llm"}
VALUES |= {"hf_overrides": '{"rope_theta": 2e6}'}
VALUES |= {"override_generation_config": '{"top_k": 9}'}
VALUES |= {"limit_mm_per_prompt": '{"image": 4}', "allowed_media_domains": ("example.com",)}
VALUES |= {"speculative_config": '{"method": "suffix"}', "eplb_config": '{"num_redundant_experts": 2}'}
VALUES |= {"kv_transfer_config": '{"kv_connector": "A", "kv_connector_module_path": "b"}'}
TOGETHER = (
    {"coordinator": "host:1234", "num_processes": "100", "process_id": "0"},
    {"kv_disk_space": "1", "kv_disk_dir": "folder"},
    {"lossy_kv_window": "99", "lossy_kv_sinks": "99"},
)
"""What goes with each other, so that they make sense."""


@pytest.mark.parametrize("spelling", ["dashes", "underscores", "equals"])
def test_every_option_has_a_flag(spelling):
    parser = make_parser()
    for name, spec in OPTIONS:
        flag = to_flag(name) if spelling != "underscores" else f"--{name}"
        kind = str(spec.type).removesuffix(" | None")
        if kind == "bool":
            words, value = [flag.replace("--", "--no-", 1) if spec.default else flag], not spec.default
        else:
            value = spec.metadata["choices"][-1] if spec.metadata["choices"] else VALUES.get(name) or VALUES[kind]
            word = value[0] if isinstance(value, tuple) else str(value)
            words = [f"{flag}={word}"] if spelling == "equals" else [flag, word]
        for others in (others for others in TOGETHER if name in others):
            words += [word for other in others.keys() - {name} for word in (to_flag(other), others[other])]
        config = config_from(parser.parse_args(_normalized(["serve", *words])))
        sections = [getattr(config, section) for section in SECTIONS]
        found = [getattr(section, name) for section in sections if name in dataclasses.asdict(section)]
        assert found == [value], name


@pytest.mark.parametrize("words", [["a"], ["--model", "a"], ["a", "--model=a"]])
def test_the_model_is_given_by_position_or_by_name(words):
    assert config_from(make_parser().parse_args(["serve", *words])).model.model == "a"


def test_two_models_are_refused(capsys):
    assert main(["serve", "a", "--model", "b"]) == 2
    assert capsys.readouterr().err == "jpaged serve: error: MODEL: a conflicts with --model b: give only one of them\n"


@pytest.mark.parametrize(
    ("word", "value"),
    [("4096", 4096), ("2k", 2000), ("2K", 2048), ("1.5G", 3 << 29), ("25.6m", 25_600_000), ("1T", 1 << 40)],
)
def test_bytes_may_be_told_in_larger_units(word, value):
    arguments = make_parser().parse_args(["serve", "--kv-cache-memory-bytes", word])
    assert config_from(arguments).cache.kv_cache_memory_bytes == value


@pytest.mark.parametrize("word", ["", "G", "1.5", "2X", "nanG", "infG", "1e9999999G", "1GG"])
def test_no_number_of_bytes_is_refused(word, capsys):
    assert main(["serve", "--kv-cache-memory-bytes", word]) == 2
    assert f"argument --kv-cache-memory-bytes: {word!r} is not a number of bytes" in capsys.readouterr().err


def test_underscores_reach_the_flag_and_not_its_value(capsys):
    assert main(["serve", "--max_model_len=a_b"]) == 2
    assert "argument --max-model-len: invalid int value: 'a_b'" in capsys.readouterr().err


def test_keys_of_json_are_named_as_they_are_given():
    assert to_flag("kv_transfer_config.kv_connector") == "--kv-transfer-config.kv_connector"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (
            "--kv-transfer-config.kv_connector A_B --kv_transfer_config.kv_connector_module_path=c.d",
            {"kv_connector": "A_B", "kv_connector_module_path": "c.d"},
        ),
        (
            "--kv-transfer-config.kv_connector_extra_config.dir /m --kv-transfer-config.kv_connector_extra_config.n 9 "
            "--kv-transfer-config.kv_connector_extra_config.deep.is_on true -- model",
            {"kv_connector_extra_config": {"dir": "/m", "n": 9, "deep": {"is_on": True}}},
        ),
        (
            '--kv-transfer-config.kv_connector A --kv-transfer-config {"kv_connector_module_path":"c"} model',
            {"kv_connector": "A", "kv_connector_module_path": "c"},
        ),
    ],
)
def test_keys_of_json_may_be_flags_as_in_vllm(words, value):
    arguments = make_parser().parse_args(_normalized(["serve", *words.split()]))
    assert json.loads(arguments.config_kv_transfer_config) == value
    assert arguments.model == ("model" if "model" in words.split() else None)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--speculative-config.method", "--speculative-config.method: has no value"),
        ("--speculative-config.method a --speculative-config.method=b", "--speculative-config.method: is given twice"),
        (
            "--speculative-config.a 1 --speculative-config.a.b 2",
            "--speculative-config.a.b: conflicts with a value",
        ),
        (
            '--speculative-config.a 1 --speculative-config {"a":2}',
            "--speculative-config.a: is given twice: also in the",
        ),
        (
            '--speculative-config {"b":1} --speculative-config={"c":1} --speculative-config.a 1',
            "--speculative-config: is given twice",
        ),
        ("--speculative-config.a 1 --speculative-config=b", "--speculative-config: is 'b', no JSON object"),
        ('--rope-scaling {} --hf-overrides {"rope_scaling":{}}', "--hf-overrides.rope_scaling: is given twice"),
        ("--kv-transfer-config.kv_conector a", "--kv-transfer-config.kv_conector: is unknown: must be one of"),
    ],
)
def test_keys_of_json_are_given_once(words, problem, capsys):
    assert main(["serve", *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_no_flag_is_the_default_configuration():
    assert config_from(make_parser().parse_args(["serve"])) == EngineConfig.load({})
    assert config_from(make_parser().parse_args(["serve", "folder"])).model.model == "folder"


SAMPLING: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["7"], 7),
    "min_tokens": (["2"], 2),
    "temperature": (["0.5"], 0.5),
    "top_k": (["-1"], -1),
    "top_p": (["0.5"], 0.5),
    "min_p": (["0.1"], 0.1),
    "seed": (["18446744073709551615"], 2**64 - 1),
    "logprobs": (["0"], 0),
    "stop": (["END"], ("END",)),
    "stop_token_ids": (["5"], (5,)),
    "ignore_eos": ([], True),
    "skip_special_tokens": (["no"], False),
    "n": (["3"], 3),
    "best_of": (["4"], 4),
    "beam_width": (["2"], 2),
    "length_penalty": (["0.5"], 0.5),
    "early_stopping": (["never"], "never"),
    "priority": (["-2"], -2),
    "cache_salt": (["salt"], "salt"),
    "use_prefix_cache": (["no"], False),
    "detokenize": (["no"], False),
    "typical_p": (["0.5"], 0.5),
    "top_n_sigma": (["1.5"], 1.5),
    "presence_penalty": (["-0.5"], -0.5),
    "frequency_penalty": (["0.5"], 0.5),
    "repetition_penalty": (["1.2"], 1.2),
    "logit_bias": (["42=-1.5"], {42: -1.5}),
    "allowed_token_ids": (["5"], (5,)),
    "bad_words": (["bad"], ("bad",)),
    "include_stop_str_in_output": ([], True),
    "logprob_token_ids": (["5"], (5,)),
    "sampling_logprobs": ([], True),
    "prompt_logprobs": (["-1"], -1),
    "truncate_prompt_tokens": (["7"], 7),
    "thinking_token_budget": (["6"], 6),
    "structured_outputs": (['{"regex": "a+"}'], StructuredOutputs(regex="a+")),
    "routed_experts_prompt_start": (["3"], 3),
}


def test_every_sampling_field_is_tried_here():
    assert SAMPLING.keys() == {spec.name for spec in request_fields()}


@pytest.mark.parametrize("name", SAMPLING)
def test_every_sampling_field_has_a_flag(name):
    words, value = SAMPLING[name]
    flag = to_flag(name) if words != ["no"] else to_flag(f"no_{name}")
    given = [flag, *(words if words != ["no"] else [])]
    if name in ("length_penalty", "early_stopping"):
        given += ["--beam-width", "2"]
    arguments = make_parser().parse_args(["generate", "--prompt", "x", *given])
    assert getattr(sampling_from(arguments), name) == value


def test_stops_may_come_several_times():
    words = ["generate", "--stop", "a", "--stop", "b", "--stop-token-ids", "1", "--stop-token-ids", "2"]
    params = sampling_from(make_parser().parse_args(words))
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs: 0 is below the limit of 1"),
        (["serve", "--port", "70000"], "--port: 70000 is above the limit of 65535"),
        (["serve", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens: 8 is below"),
        (["serve", "--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (["serve", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["serve", "--max-num-sequences", "4"], "unrecognized arguments: --max-num-sequences"),
        (["serve", "--max-num-seq", "4"], "unrecognized arguments: --max-num-seq"),
        (["serve", "one", "two"], "unrecognized arguments: two"),
        (["generate"], "--prompt: is missing"),
        (["generate", "--prompt", "x", "--lora", "a=b", "--adapter", "c"], "--adapter: 'c' is not one of --lora (a)"),
        (["generate", "--prompt", "x", "--lora", "a"], "--lora: 'a' is not NAME=PATH"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "--temperature: -1.0 is out of range"),
        (["generate", "--prompt", "x", "--top-p", "0"], "--top-p: 0.0 is out of range: must be a number above 0"),
        (["generate", "--prompt", "x", "--early-stopping", "soon"], "'soon' is not one of true, false, never"),
        (["generate", "--prompt", "x", "--length-penalty", "2"], "--length-penalty: 2.0 is out of range"),
        (["generate", "--prompt", "x", "--n", "3", "--best-of", "2"], "--best-of: 2 is out of range"),
        (["serve", "--metrics-port", "70000"], "--metrics-port: 70000 is above the limit of 65535"),
        (["serve", "--pin-prefix", "/no/such/file"], "--pin-prefix: /no/such/file cannot be read"),
        (["generate", "--prompt-token-ids", "1,x"], "'1,x' is not a list of integers"),
        (["generate", "--prompt-token-ids", "1", "--chat"], "--chat: requires --prompt"),
        (["generate", "--prompt", "x", "--port", "1"], "unrecognized arguments: --port"),
        (["batch", "--target", "x:1"], "--input: is missing"),
        (["batch", "-i", __file__, "--target", "x:1"], "--output: is missing"),
        (["batch", __file__, "--target", "x:1"], "FILE: 1 given: give input and output, without -i and -o"),
        (["batch", __file__, "o", "-i", "x", "--target", "x:1"], "FILE: 2 given: give input and output, without"),
        (["batch", __file__, "o", "--target", "x:1,y:2", "--target", "x:1"], "--target: x:1 is given twice"),
        (["batch", "-i", "nowhere", "-o", "out", "--target", "x:1"], "--input: nowhere is not a file"),
        (["batch", "-i", __file__, "-o", "/no/such/out", "--target", "x:1"], "--output: there is no folder /no/such"),
        (
            ["batch", "-i", __file__, "-o", "o", "--target", "x:1", "--max-concurrency", "0"],
            "--max-concurrency: 0 is",
        ),
        (["demo", "--num-prompts", "99"], "argument --num-prompts: invalid choice: 99"),
        (["fly"], "invalid choice: 'fly'"),
        (["run-batch", "-i", "x"], "jpaged: error: run-batch: is a command of vLLM: use jpaged batch"),
        (["collect-env"], "use jpaged doctor"),
        (["chat"], "use jpaged generate"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_is_wrong_is_named_without_a_traceback(words, message, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("words", [["--version"], ["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_version_and_help_are_answered(words, capsys):
    assert main(words) == 0
    said = capsys.readouterr().out
    assert __version__ in said if words == ["--version"] else "usage: jpaged" in said


def test_python_dash_m_is_the_same_program():
    command = [sys.executable, "-m", "jpaged", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"jpaged {__version__}\n")


class FakeLLM:
    """Answers each prompt with itself in capitals, and remembers how it was made."""

    made: dict[str, Any]
    cumulative_logprob = -1.5

    def __init__(self, model: str, *, progress: Any, **options: Any) -> None:
        FakeLLM.made = {"model": model, **options}
        progress("weights", 1, 1)

    def __enter__(self):
        return self

    def __exit__(self, *failure: object) -> None:
        """Nothing to close."""

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.5)

    def generate(self, prompts, sampling, adapter=None):
        return [self._output(p.get("prompt"), p.get("prompt_token_ids", [7]), sampling) for p in prompts]

    def chat(self, conversations, sampling, adapter=None):
        return [self._output(f"chat:{turns[0]['content']}", [8], sampling) for turns in conversations]

    def _output(self, prompt, token_ids, sampling):
        completions = tuple(
            CompletionOutput(i, str(prompt).upper(), (1, 2), self.cumulative_logprob, None, "length")
            for i in range(sampling.n)
        )
        return RequestOutput("r", prompt, tuple(token_ids), completions, Usage(1, sampling.max_num_tokens, 0))


@pytest.mark.long
def test_generate_prints_json_in_the_order_of_the_prompts(capsys, monkeypatch):
    monkeypatch.setattr("jpaged.llm.LLM", FakeLLM)
    words = ["generate", "folder", "--prompt", "a", "--prompt-token-ids", "3,4", "--json", "--max-num-seqs", "4"]
    assert main([*words, "--max-tokens", "5", "--seed", "3"]) == 0
    said = capsys.readouterr()
    first, second = (json.loads(line) for line in said.out.splitlines())
    assert first == {
        "prompt": "a",
        "prompt_token_ids": [7],
        "outputs": [
            {
                "index": 0,
                "text": "A",
                "token_ids": [1, 2],
                "finish_reason": "length",
                "matched_stop": None,
                "cumulative_logprob": -1.5,
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 5, "cached_tokens": 0, "image_tokens": 0},
    }
    assert (second["prompt"], second["prompt_token_ids"]) == (None, [3, 4])
    assert FakeLLM.made == {"model": "folder", "max_num_seqs": 4}
    assert "weights" in said.err


def test_generate_prints_null_for_what_is_not_finite(capsys, monkeypatch):
    monkeypatch.setattr("jpaged.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "cumulative_logprob", -math.inf)
    assert main(["generate", "folder", "--prompt", "a", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["outputs"]
    assert one["cumulative_logprob"] is None


def test_generate_prints_text(capsys, monkeypatch):
    monkeypatch.setattr("jpaged.llm.LLM", FakeLLM)
    assert main(["generate", "--chat", "--prompt", "a", "--prompt", "b"]) == 0
    assert capsys.readouterr().out == "--- 1: a\nCHAT:A\n\n--- 2: b\nCHAT:B\n"
    assert main(["generate", "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "A\n"


def test_generate_shows_every_sequence_by_its_index(capsys, monkeypatch):
    monkeypatch.setattr("jpaged.llm.LLM", FakeLLM)
    assert main(["generate", "--prompt", "a", "--n", "2"]) == 0
    assert capsys.readouterr().out == "[0] A\n[1] A\n"
    assert main(["generate", "--prompt", "a", "--n", "2", "--json"]) == 0
    assert [one["index"] for one in json.loads(capsys.readouterr().out)["outputs"]] == [0, 1]


class Stream:
    """A stream that is a terminal, or is not."""

    def __init__(self, is_terminal: bool) -> None:
        self.text = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def test_startup_is_one_line_on_a_terminal_and_few_lines_elsewhere():
    terminal, pipe = Stream(True), Stream(False)
    for stream in (terminal, pipe):
        report = StartupReport(stream)  # type: ignore[arg-type]
        for done in range(1, 51):
            report.progress("compiling", done, 50)
        report.line("ready")
    assert terminal.text.count("\n") == 2
    assert terminal.text.count("\r") == 50
    assert [line[10:] for line in pipe.text.splitlines()] == ["compiling: 1 of 50", "compiling: 50 of 50", ""]
    assert pipe.text.endswith("ready\n")
