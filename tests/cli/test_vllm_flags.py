"""Flags of `vllm serve`: none is unknown, and each has one of four outcomes."""

import json
import os
import re
from pathlib import Path

import pytest

from jpaged.cli.help import get_commands
from jpaged.cli.main import main, make_parser
from jpaged.cli.options import config_values, to_flag
from jpaged.cli.vllm_flags import (
    OUTCOMES,
    VERSION,
    describe_variables,
    find_flag,
    find_variable,
    read_flags,
    read_variables,
    translate,
    translate_options,
)
from jpaged.config import ENVIRONMENT, iter_options
from jpaged.errors import InvalidArgument

RECORDED = (Path(__file__).with_name(f"vllm_serve_{VERSION}.txt")).read_text().split()
"""Every spelling that `vllm serve` accepts: those that --help=all lists, and `--no-` forms that it hides."""
VARIABLES = (Path(__file__).with_name(f"vllm_variables_{VERSION}.txt")).read_text().split()
"""Every variable VLLM_* that vLLM's `envs.py` reads."""
OPTIONS = {to_flag(name) for name, _, _ in iter_options()} | {"--config"}
VALUES = {
    "--kv-events-config": '{"endpoint": "tcp://*:1"}',
    "--nnodes": "2",
    "--attention-backend": "auto",
    "--dtype": "float32",
    "--load-format": "auto",
    "--scheduling-policy": "fcfs",
    "--preemption-mode": "swap",
    "--linear-backend": "auto",
    "--quantization": "int8",
    "--kv-cache-dtype": "fp8",
    "--tool-call-parser": "hermes",
    "--reasoning-parser": "qwen3",
    "--lora-modules": "a=b",
    "--speculative-config": '{"method": "ngram"}',
    "--kv-transfer-config": "{}",
    "--hf-overrides": "{}",
    "--root-path": "/llm",
    "--default-chat-template-kwargs": "{}",
    "--reasoning-effort-map": "{}",
    "--chat-template-content-format": "openai",
    "--config": os.devnull,
}


@pytest.fixture(scope="module")
def serve():
    return get_commands(make_parser())["serve"]


def parse(parser, *words):
    """Return the options and the notes of a command line."""
    arguments = parser.parse_args(list(words))
    return config_values(arguments), arguments.notes


def test_the_table_has_every_flag_of_vllm():
    assert [name for name in RECORDED if find_flag(name) is None] == []
    recorded = {name for flag in read_flags() if flag.version == VERSION for name in flag.names}
    assert recorded <= set(RECORDED)
    negative = [name for name in RECORDED if name not in recorded]
    assert [name for name in negative if not re.match(r"--(no|enable|disable)-", name)] == []
    assert {flag.kind for name in negative if (flag := find_flag(name)) is not None} == {"switch"}


def test_the_negative_form_of_a_switch_turns_it_off(serve):
    assert parse(serve, "--disable-prefix-caching")[0] == {"enable_prefix_caching": False}
    assert parse(serve, "--enable-cascade-attn", "--disable-lora")[0] == {
        "enable_cascade_attention": True,
        "enable_lora": False,
    }
    assert parse(serve, "--disable-elastic-ep", "--enable-fastapi-docs", "m")[0] == {"model": "m"}
    for word in ("--disable-max-model-len", "--enable-block-size", "--disable-everything"):
        assert find_flag(word) is None


def test_rows_are_complete_and_unique():
    names = [name for flag in read_flags() for name in flag.names]
    assert len(names) == len(set(names))
    assert names[0] == min(names)
    for flag in read_flags():
        assert flag.kind in ("switch", "value", "optional", "list", "json")
        assert flag.version in (VERSION, "older")
        assert flag.reason or flag.outcome in ("same", "alias"), flag.name
        option = flag.option.lstrip("!").partition(".")[0]
        assert option in OPTIONS or (not option and flag.outcome != "alias"), flag.name
        assert flag.outcome != "same" or flag.name in OPTIONS


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_flag_has_the_outcome_of_its_row(serve, outcome):
    wrong = []
    for flag in read_flags():
        if flag.outcome != outcome:
            continue
        for name in flag.names:
            values = [] if flag.kind == "switch" else [VALUES.get(flag.name, "7")]
            try:
                words, notes = translate(serve, [name, *values])
                _, unknown = super(type(serve), serve).parse_known_args(words)
            except InvalidArgument as error:
                found = "unsupported" if error.field == name and flag.reason in error.problem else str(error)
            else:
                is_dropped = any(f"{name} has no effect" in re.sub(r" \S+ has", " has", note) for note in notes)
                is_dropped = is_dropped or any(note.startswith(f"{name} has no effect") for note in notes)
                renamed = "alias" if notes and name not in OPTIONS and flag.outcome == "alias" else "same"
                found = str(unknown) if unknown else "unnecessary" if is_dropped else renamed
            if found != outcome:
                wrong.append((name, found))
    assert wrong == []


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--gpu-memory-utilization 0.8", {"memory_utilization": 0.8}),
        ("--device-memory-utilization=0.8", {"memory_utilization": 0.8}),
        ("-tp 2 -dp=3 -ep", {"tensor_parallel_size": 2, "data_parallel_size": 3, "enable_expert_parallel": True}),
        ("-pp 2 m", {"pipeline_parallel_size": 2, "model": "m"}),
        ("-tp=2 m", {"tensor_parallel_size": 2, "model": "m"}),
        ("--no-async-scheduling", {"overlap": False}),
        ("--disable-cascade-attn", {"enable_cascade_attention": False}),
        ("--no-disable-cascade-attn", {"enable_cascade_attention": True}),
        ("--lora-modules a=b c=d m", {"lora": ["a=b", "c=d"], "model": "m"}),
        ('--lora-modules {"name":"a","path":"b","base_model_name":"c"} m', {"lora": ["a=b"], "model": "m"}),
        ('--allowed-origins ["https://a","https://b"]', {"http_cors_origins": ["https://a", "https://b"]}),
        (
            "--nnodes 2 --node-rank 1 --master-addr h",
            {"coordinator": "h:29501", "num_processes": 2, "process_id": 1},
        ),
        ("--nnodes 1 --node-rank 0 --master-port 5", {}),
        (
            "--spec-method ngram --spec-tokens 3",
            {"speculative_config": '{"method":"ngram","num_speculative_tokens":3}'},
        ),
        ("-q auto_gptq --load-format bitsandbytes", {"quantization": "gptq", "load_format": "auto"}),
        ("m --multi-step-stream-outputs", {"model": "m"}),
        ('--structured-outputs-config {"backend":"auto","enable_in_reasoning":false} m', {"model": "m"}),
        ("-sc.method suffix", {"speculative_config": '{"method":"suffix"}'}),
        (
            '--kv-events-config {"publisher":"zmq","endpoint":"tcp://*:7","topic":"t","buffer_steps":9}',
            {"kv_events_endpoint": "tcp://*:7", "kv_events_topic": "t", "kv_events_buffer": 9},
        ),
        ("--kv-events-config.replay_endpoint tcp://*:8", {"kv_events_replay_endpoint": "tcp://*:8"}),
        ('--kv-events-config {"enable_kv_cache_events":false}', {}),
        ("--kv-cache-dtype fp8_e4m3 --load-format safetensors", {"kv_cache_dtype": "fp8", "load_format": "auto"}),
        ("--attention-backend FLASH_ATTN", {"attention_backend": "auto"}),
        ("--attention-backend=flashinfer", {"attention_backend": "auto"}),
        ("--attention-backend pallas-tpu", {"attention_backend": "pallas-tpu"}),
        ("--load-format instanttensor m", {"load_format": "auto", "model": "m"}),
        ('--media-io-kwargs {"video":{"num_frames":-1}} m', {"model": "m"}),
        ("--reasoning-config.reasoning_end_str </think> m", {"model": "m"}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1 m", {"model": "m"}),
        ("--max-model-len=32k", {"max_model_len": 32000}),
        ("--max-model-len 1.5K --max-num-batched-tokens 8K", {"max_model_len": 1536, "max_num_batched_tokens": 8192}),
        ("-q gptq_marlin", {"quantization": "gptq_marlin"}),
        ("--max-model-len=32", {"max_model_len": 32}),
        (
            '--rope-scaling {"rope_type":"yarn","factor":4} --rope-theta 1e6',
            {"hf_overrides": '{"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1000000.0}'},
        ),
        ("--hf-token t --revision r m", {"hf_token": "t", "revision": "r", "model": "m"}),
        ("m --hf-token --tokenizer=x", {"tokenizer": "x", "model": "m"}),
        ("--enforce-eager --cudagraph-capture-sizes 1 2 4 --swap-space 4", {"swap_space": 4.0}),
        ("-O3 m", {"model": "m"}),
        ("-O 2 -cc.mode 3 --compilation-config {} m", {"model": "m"}),
        (
            "--prefill-context-parallel-size 1 --runner generate --no-enable-elastic-ep --reasoning-config {} m",
            {"model": "m"},
        ),
        ('--structured-outputs-config {"backend":"xgrammar"} --engram-config {} m', {"model": "m"}),
        ("m --api-key a b", {"model": "m", "api_key": ["a", "b"]}),
        (
            "m --served-model-name a b c",
            {"model": "m", "served_model_name": "a", "served_model_aliases": ["b", "c"]},
        ),
        ("--api-key a --served-model-name n m", {"model": "m", "api_key": ["a"], "served_model_name": "n"}),
        ("--seed 1 -- --enforce-eager", {"seed": 1, "model": "--enforce-eager"}),
    ],
)
def test_flags_of_vllm_set_options(serve, words, values):
    found, _ = parse(serve, *words.split())
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()} == {
        name: value.replace(":", ": ").replace(',"', ', "') if name == "speculative_config" else value
        for name, value in values.items()
    }


FILE = """\
# as for `vllm serve --config`
model: m
port: 0
max_model_len: 1k
gpu-memory-utilization: 0.5
http-cors-origins: [https://a, https://b]
served-model-name: [x, y]
lora-modules:
  - {name: a, path: b}
  - c=d
speculative-config:
  method: ngram
  num_speculative_tokens: 3
kv-events-config: {endpoint: "tcp://*:7"}
master-addr: h
nnodes: 2
num_scheduler_steps: -1
enable-prefix-caching: false
disable-lora: false
enforce-eager: true
chat-template:
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_a_file_sets_options(serve, file):
    found, notes = parse(serve, "--config", str(file), "--node-rank", "1")
    assert found == {
        "model": "m",
        "port": 0,
        "max_model_len": 1000,
        "memory_utilization": 0.5,
        "http_cors_origins": ["https://a", "https://b"],
        "served_model_name": "x",
        "served_model_aliases": ["y"],
        "lora": ["a=b", "c=d"],
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
        "kv_events_endpoint": "tcp://*:7",
        "coordinator": "h:29501",
        "num_processes": 2,
        "process_id": 1,
        "num_scheduler_steps": -1,
        "enable_prefix_caching": False,
        "enable_lora": True,
    }
    assert f"{file}: --gpu-memory-utilization is --memory-utilization here" in notes
    assert "--node-rank is --process-id here" in notes


def test_the_command_line_overrides_a_file(serve, file):
    words = "n --memory-utilization=0.25 --http-cors-origins q --served-model-name z --enable-prefix-caching"
    found, _ = parse(serve, f"--config={file}", *words.split(), "-sc.method", "suffix", "--nnodes", "1")
    assert (found["model"], found["memory_utilization"], found["http_cors_origins"]) == ("n", 0.25, ["q"])
    assert (found["served_model_name"], found["enable_prefix_caching"]) == ("z", True)
    assert found["speculative_config"] == '{"method": "suffix"}'
    assert found["max_model_len"] == 1000
    assert {"served_model_aliases", "coordinator"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("text", "words", "want"),
    [
        (
            "speculative-config.method: ngram\nspec-tokens: 3",
            "-sc.method suffix -sc.prompt_lookup_max 4",
            {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
        ("hf-overrides.a.b: 1\nhf_overrides.a.c: [2]", "--hf-overrides.a.c=3", {"a": {"b": 1, "c": 3}}),
        ("hf-overrides.a: {b: 1, c: 2}", "--hf-overrides.a.c 3", {"a": {"b": 1, "c": 3}}),
        ("hf-overrides.a.b: 1", "--hf-overrides.a 3", {"a": 3}),
        ("hf-overrides.a: 1", '--hf-overrides={"b":2}', {"b": 2}),
        ("hf-overrides: {a: 1}", "--hf-overrides.b 2", {"b": 2}),  # as in vLLM
        ("hf-overrides: {a: 1}", '--hf-overrides={"b":2}', {"b": 2}),
    ],
)
def test_single_keys_of_the_command_line_override_those_of_a_file(serve, file, text, words, want):
    file.write_text(text)
    found, _ = parse(serve, "--config", str(file), *words.split(), "m")
    assert [json.loads(value) for name, value in found.items() if name != "model"] == [want]


def test_a_value_that_is_not_json_is_text(serve):
    found, _ = parse(serve, "--hf-overrides.a", "NaN", "--hf-overrides.b=-Infinity", "--hf-overrides.c=1e400", "m")
    assert json.loads(found["hf_overrides"]) == {"a": "NaN", "b": "-Infinity", "c": "1e400"}


def test_commands_share_a_file(file):
    file.write_text("model: m\nport: 0\nallowed-origins: [a]\nmax-num-seqs: 4\n")
    generate = get_commands(make_parser())["generate"]
    arguments = generate.parse_args(["--config", str(file), "--prompt", "x", "--max-tokens", "4"])
    assert config_values(arguments) == {"model": "m", "max_num_seqs": 4}
    assert arguments.notes == [
        f"{file}: --port is not an option of `jpaged generate`",
        f"{file}: --allowed-origins is not an option of `jpaged generate`",
    ]
    file.write_text("")
    assert config_values(generate.parse_args(["--config", str(file), "--prompt", "x"])) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max-model-length: 5", "max-model-length: is not an option; did you mean --max-model-len?"),
        ("gpu_memory_utilisation: 5", "gpu_memory_utilisation: is not an option; did you mean --memory-utilization?"),
        ("nothing: 1", "nothing: is not an option"),
        ("7: 1", "7: is not an option"),
        ("config: other.yaml", "config: is an option of the command line only"),
        ("port: 1\nport: 2", "port: is given twice"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "max_num_seqs: is given twice"),
        ("max_num_seqs: 1\nmax_num_seqs: 2", "max_num_seqs: is given twice"),
        ("max-num-seqs: many", "max-num-seqs: invalid int value: 'many'"),
        ("max-num-seqs: [1, 2]", "max-num-seqs: invalid int value: '[1, 2]'"),
        ("max-num-seqs: true", "max-num-seqs: takes a value; true is none"),
        ("policy: lottery", "policy: invalid choice: 'lottery'"),
        ("enable-prefix-caching: 'no'", "enable-prefix-caching: 'no' is not true or false"),
        ("prefill-context-parallel-size: 2", "--prefill-context-parallel-size: 2 is not supported, only 1"),
        ("speculative-config: {method: ngram}\nspeculative-config.method: suffix", "is given twice: also in the JSON"),
        ("port.x: 1", "port.x: is not an option: the value of --port is not a JSON object"),
        ("swap-space.x: 1", "swap-space.x: is not an option: the value of --swap-space is not a JSON object"),
        ("gpu-memory-utilization.x: 1", "gpu-memory-utilization.x: is not an option"),
        ("spec-tokens.x: 1\nspec-tokens: 1", "--speculative-config.num_speculative_tokens"),
        (
            "gpu-memory-utilization: 0.5\nmemory-utilization: 0.6",
            "memory-utilization: sets the same option as gpu-memory-utilization: give only one of them",
        ),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "max_num_seqs: is given twice, also as max-num-seqs"),
        ("lora: [a=b]\nlora-modules: [c=d]", "lora-modules: sets the same option as lora: give only one of them"),
        ("enable-lora: true\nno-enable-lora: true", "no-enable-lora: sets the same option as enable-lora"),
        ("spec-method: ngram\nspeculative_config.method: suffix", "sets the same option as spec-method"),
        ("kv-events-config: {topic: a}\nkv-events-topic: b", "sets the same option as kv-events-config"),
        ("coordinator: h:1\nnnodes: 2\nmaster-addr: h", "coordinator: sets the same option as master-addr"),
        ("node-rank: 1\nprocess-id: 1", "process-id: sets the same option as node-rank"),
        ("api-key: [a, ~]", "api-key: has an item without a value"),
        ("hf-overrides: {a: .nan}", "hf-overrides: is not JSON: Out of range float values"),
        ("hf-overrides: {a: [-.inf]}", "hf-overrides: is not JSON: Out of range float values"),
        ("hf-overrides.a: .inf", "hf-overrides.a: is not JSON: Out of range float values"),
        ("memory-utilization: .nan", "memory-utilization: invalid float value: '.nan'"),
        ("hf-overrides: {a: {b: 2024-01-01}}", "hf-overrides: is not JSON"),
        ("hf-overrides: &a {b: *a}", "hf-overrides: is not JSON"),
        ("<<: {api-key: 0123}", "<<: merge keys of YAML are not supported"),
        ("- port", "--config: is not a YAML mapping of options, such as `max-model-len: 4096`"),
        ("port: [", "--config: is not YAML"),
    ],
)
def test_a_file_with_a_wrong_option_is_rejected_by_key(serve, file, text, problem):
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(problem)) as error:
        parse(serve, "--config", str(file))
    assert error.value.field.startswith(str(file))


DEPLOYMENTS = (
    "--model=/mnt/models/ --download-dir=/cache --port=8080 --distributed-executor-backend=mp --tensor-parallel-size=2 "
    "--max-model-len=2048 --enable-chunked-prefill --gpu-memory-utilization=0.95 --max-num-seqs=512",
    "m --max-num-batched-tokens 8192 --kv-cache-dtype fp8 --trust-remote-code --disable-uvicorn-access-log "
    '--no-enable-flashinfer-autotune --compilation-config {"cudagraph_mode":"FULL_AND_PIECEWISE"}',
    "m --async-scheduling --max-cudagraph-capture-size 2048 --stream-interval 20 --no-enable-prefix-caching",
    "m --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3 -ep -tp 8",
    'm --speculative-config {"num_speculative_tokens":1,"method":"deepseek_mtp"} --enable-reasoning',
    'm --kv-transfer-config {"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"} --block-size 128',
    'm --kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv@p"} '
    "--prefix-caching-hash-algo sha256_cbor",
    'm --limit-mm-per-prompt {"image":4} --mm-processor-cache-type shm --allowed-local-media-path /data',
    "m --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 -tp 8 -pp 2",
    "m --enable-lora --lora-modules a=/a b=/b --max-loras 4 --max-lora-rank 64 --lora-extra-vocab-size 256",
    "m --swap-space 16 --disable-log-stats --disable-log-requests --uvicorn-log-level warning --enable-prefix-caching",
    "m --quantization awq --dtype half --enforce-eager --max-model-len 4k --guided-decoding-backend xgrammar",
    "m --kv-offloading-size 64 --kv-offloading-backend native --disable-hybrid-kv-cache-manager",
    "m --numa-bind --all2all-backend deepep_low_latency --enable-eplb --enable-dbo --disable-custom-all-reduce",
    "m --num-scheduler-steps=8 --use-v2-block-manager --max-seq-len-to-capture 8192 --num-gpu-blocks-override 4096",
)
"""Command lines of charts, recipes and manifests."""


@pytest.mark.parametrize("line", DEPLOYMENTS)
def test_command_lines_of_deployments_are_accepted(serve, line):
    found, notes = parse(serve, *line.split())
    assert found["model"] in ("m", "/mnt/models/")
    assert len(found) + len(notes) > 2


def test_digits_of_a_file_stay_as_they_are_written(serve, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: 0123456701234567012345\nrevision: 0012345\nmax-model-len: 64\n")
    found, _ = parse(serve, "--config", str(file))
    assert (found["api_key"], found["revision"]) == (["0123456701234567012345"], "0012345")
    assert found["max_model_len"] == 64
    file.write_text(
        "api-key: [0123, 1_0, '07', yes, 1.50]\nserved-model-name: [0012, on]\ntokenizer-revision: 2024-1-02\n"
    )
    found, _ = parse(serve, "--config", str(file))
    assert found["api_key"] == ["0123", "1_0", "07", "yes", "1.50"]
    assert (found["served_model_name"], found["served_model_aliases"]) == ("0012", ["on"])
    assert found["tokenizer_revision"] == "2024-1-02"


def test_a_file_of_options_must_exist_once(serve, file):
    with pytest.raises(InvalidArgument, match=r"nowhere\.yaml: --config: .*nowhere"):
        parse(serve, "--config", "nowhere.yaml")
    with pytest.raises(InvalidArgument, match="--config: is given twice"):
        parse(serve, "--config", str(file), f"--config={file}")
    with pytest.raises(InvalidArgument, match="--config: has no value; it takes a YAML file of options"):
        parse(serve, "--config")


def test_every_replaced_flag_is_logged_once(serve):
    words = ["--gpu-memory-utilization", "0.8", "--enforce-eager", "--enforce-eager", "--http-port", "0"]
    _, notes = parse(serve, *words)
    assert notes == [
        "--gpu-memory-utilization is --memory-utilization here",
        "--enforce-eager has no effect: every step runs a compiled program, on every device",
    ]
    _, notes = parse(serve, "-tp", "2", "--port", "8000")
    assert notes == [
        "-tp is --tensor-parallel-size here",
        "--port is the gRPC port; the OpenAI API has its own (--http-port, 8000 by default)",
    ]
    assert parse(serve, "--port", "1", "--max-num-seqs=4")[1] == []


def test_notes_are_lines_of_standard_error(capsys):
    assert main(["generate", "--enforce_eager", "--gpu_memory_utilization=2", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "jpaged generate: --enforce-eager has no effect: every step runs a compiled program, on every device",
        "jpaged generate: --gpu-memory-utilization is --memory-utilization here",
        "jpaged generate: error: --memory-utilization: 2.0 is above the limit of 1.0",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--prefill-context-parallel-size 2",
            "--prefill-context-parallel-size: 2 is not supported, only 1: contexts are split for prefill and decode; "
            "the nearest option is --context-parallel-size",
        ),
        ("--enable-prompt-adapter", "--enable-prompt-adapter: this flag of vLLM is not supported: adapters are"),
        ("--grpc-port 1", "the nearest option is --http-port"),
        ('--reasoning-config {"a":1}', "--reasoning-config: this flag of vLLM is not supported: the reasoning parser"),
        ("--hf-overrides {", "--hf-overrides: { is not JSON"),
        ("--hf-overrides 7", "--hf-overrides: 7 is not a JSON object, such as"),
        ("--structured-outputs-config.disable_any_whitespace true", "the nearest option is --whitespace-pattern"),
        ("--revision", "argument --revision: expected one argument"),
        ("--code-revision", "--code-revision: has no value"),
        ("--pin-prefix --enforce-eager", "argument --pin-prefix: expected one argument"),
        ("--kv-events-config 7", "--kv-events-config: 7 is not a JSON object"),
        ("--kv-events-config {", "--kv-events-config: { is not JSON"),
        ("--kv-events-config.port 7", "--kv-events-config.port: is unknown: must be one of endpoint"),
        ("--allowed-origins [", "--allowed-origins: [ is not a JSON list"),
        ('--lora-modules {"name":"a"}', '--lora-modules: {"name":"a"} has no name or no path'),
        ("--attention-backend FLASH", "argument --attention-backend: invalid choice: 'FLASH'"),
        ("--served-model-name", "argument --served-model-name: expected one argument"),
        ("--load-format", "argument --load-format: expected one argument"),
        ("--max-model-length 5", "unrecognized arguments: --max-model-length; did you mean --max-model-len?"),
        ("--gpu-memory-utilisation 5", "did you mean --memory-utilization?"),
        ("--tp 2", "unrecognized arguments: --tp; did you mean --tensor-parallel-size?"),
        ("--gpu-memory 0.9", "did you mean --memory-utilization?"),
        ("--tool-parser hermes", "did you mean --tool-call-parser?"),
        ("--quant fp8", "did you mean --quantization?"),
        ("--enforce-eagr --max-num-seq=4", "did you mean --enforce-eager, --max-num-seqs?"),
        ("--nothing-of-the-kind", "unrecognized arguments: --nothing-of-the-kind\n"),
    ],
)
def test_other_flags_are_rejected_by_name(capsys, words, message):
    assert main(["serve", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_mistyped_option_shows_the_usage_of_its_command(capsys):
    assert main(["bench", "serve", "--request-rat", "5"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: jpaged bench serve ")
    assert "jpaged bench serve: error: unrecognized arguments: --request-rat; did you mean --request-rate?" in said
    assert main(["plan", "--tensor-parallel", "5", "--topology", "v5e:1x1"]) == 2
    assert "did you mean --tensor-parallel-size?" in capsys.readouterr().err


def test_the_pooling_may_be_named(serve):
    for words in (['{"pooling_type": "LAST"}'], ['{"seq_pooling_type": "LAST"}'], ["{}"]):
        _, notes = translate(serve, ["--pooler-config", *words])
        assert any("--pooler-config" in note and "has no effect" in note for note in notes)
    assert translate(serve, ["--pooler-config.pooling_type", "LAST"])[1]
    for words in (["--pooler-config", '{"pooling_type": "CLS"}'], ["--pooler-config.pooling_type", "MEAN"]):
        with pytest.raises(InvalidArgument, match="the files of the checkpoint decide"):
            translate(serve, words)
    with pytest.raises(InvalidArgument, match="the files of the checkpoint decide"):
        translate(serve, ["--pooler-config", '{"pooling_type": "LAST", "dimensions": 8}'])


def test_the_table_has_every_variable_of_vllm():
    assert [name for name in VARIABLES if find_variable(name) is None] == []
    names = [name for row in read_variables() for name in row.names]
    assert len(names) == len(set(names)) and all(name.startswith("VLLM_") for name in names)
    for row in read_variables():
        assert (
            row.reason and row.outcome in ("alias", "unnecessary", "unsupported") and row.version in (VERSION, "older")
        )
        option = (
            f"--{row.option.removeprefix('--no-').removeprefix('--')}" if row.option.startswith("--") else row.option
        )
        assert option in OPTIONS | {"", *ENVIRONMENT}, row.option
        assert option or row.outcome != "alias"


def test_the_key_of_vllm_is_that_of_the_server_unless_the_command_line_has_one(serve, tmp_path):
    key = {"VLLM_API_KEY": "an-old-key-of-vllm "}
    file = tmp_path / "options.yaml"
    file.write_text("api-key: [a-key-of-the-file]")
    for words, api_key in (
        ((), "--api-key=an-old-key-of-vllm"),
        (("--api-key", "another"), None),
        (("--api-keys", "keys.toml"), None),
        (("--config", str(file)), None),
    ):
        found, notes = translate(serve, words, key)
        assert ("VLLM_API_KEY is --api-key here" in notes) == (api_key is not None)
        assert [word for word in found if "an-old-key" in word] == [api_key][: api_key is not None]
    assert translate(serve, ["m"], {"VLLM_API_KEY": " "}) == (["m"], [])
    generate = get_commands(make_parser())["generate"]
    assert translate(generate, ["m"], key) == (["m"], [])


def test_variables_that_are_not_read_have_a_line_each():
    notes = describe_variables(
        {
            "VLLM_USE_V1": "1",
            "VLLM_CACHE_ROOT": "/cache",
            "VLLM_XLA_CACHE_PATH": "/cache/xla",
            "VLLM_ENABLE_COHERE_API": "False",
            "VLLM_SERVER_DEV_MOD": "1",
            "VLLM_QWEN_PORT": "tcp://10.0.0.1:80",
            "VLLM_API_KEY": "secret",
        }
    )
    assert notes == [
        "VLLM_CACHE_ROOT, VLLM_XLA_CACHE_PATH: not read: compiled programs have a separate folder; "
        "use JPAGED_CACHE_DIR",
        "VLLM_QWEN_PORT: no effect: Kubernetes sets it for a service of this name",
        "not read, and no variables of vLLM 0.33: VLLM_SERVER_DEV_MOD; did you mean VLLM_SERVER_DEV_MODE?",
        "VLLM_USE_V1: no effect: a part of vLLM's engine that jpaged does not have",
    ]


def test_a_command_reads_the_variables_of_its_environment(serve, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-sixteen-or-more")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    arguments = serve.parse_args(["m"])
    assert config_values(arguments) == {"model": "m", "api_key": ["a-key-of-sixteen-or-more"]}
    assert arguments.notes == ["VLLM_API_KEY is --api-key here"]


def test_an_argument_that_is_a_key_of_an_object_is_joined_with_the_object() -> None:
    options, _ = translate_options({"rope_theta": 5.0, "hf_overrides": {"sliding_window": 8}})
    assert json.loads(options["hf_overrides"]) == {"sliding_window": 8, "rope_theta": 5.0}
    untouched = {"hf_overrides": {"sliding_window": 8}, "max_model_len": 5}
    assert translate_options(untouched) == (untouched, [])
    with pytest.raises(InvalidArgument) as error:
        translate_options({"rope_theta": 5.0, "hf_overrides": {"rope_theta": 1.0}})
    assert error.value.field == "hf_overrides.rope_theta"
