"""The sections of an engine: frozen dataclasses whose fields carry help and limits.

`LossyOptions` trade accuracy for memory: off by default, and no other option enables them. With disaggregated prefill a
server computes whole requests, only prompts, or only the decode part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jpaged.config.kv_transfer import DataPortOptions, KVTransferOptions
from jpaged.config.option import JsonText, checked_keys, option, parse_json_object, shorten, with_attributes
from jpaged.distributed_env import split_address
from jpaged.errors import InvalidArgument
from jpaged.structured import JSON_WHITESPACE

Policy = Literal["fcfs", "priority", "fair"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Batching = Literal["continuous", "static"]
KVPolicy = Literal["paged", "reserve-max", "reserve-pow2", "reserve-oracle"]
EvictionPolicyName = Literal["auto", "lru", "lfu", "2q", "worth"]
_JsonCalls = Literal["hermes", "llama3_json", "mistral", "mistral_args", "openai", "granite"]
_TaggedCalls = Literal["qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss"]
_SectionCalls = Literal["deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2"]
_ListCalls = Literal["pythonic", "lfm2", "functiongemma", "gemma4"]
_OtherCalls = Literal[
    "qwen3_xml", "mimo", "step3p5", "poolside_v1", "ling3", "llama4_json", "llama4_pythonic", "granite4"
]
ToolCallParser = Literal["auto", "none", _JsonCalls, _TaggedCalls, _SectionCalls, _ListCalls, _OtherCalls]
"""Formats of tool calls, then other names of some: see `jpaged.service.chat.formats`."""
_Thoughts = Literal["qwen3", "deepseek_r1", "mistral", "openai_gptoss", "granite", "gemma4", "kimi_k2", "seed_oss"]
_OtherThoughts = Literal[
    "glm45", "glm47", "mimo", "deepseek_v3", "minimax_m2", "nemotron_v3", "olmo3", "holo2", "step3"
]
ReasoningParser = Literal["auto", "none", _Thoughts, _OtherThoughts]
"""Formats of reasoning, then other names of some."""
LinearBackend = Literal["cpu", "xla"]
ActivationDtype = Literal["model", "int8"]
"""Types of the rows that quantized matrices multiply."""
Backend = Literal["xla", "pallas-tpu", "pallas-gpu", "pallas-triton", "cuda", "cpu"]
"""Attention backends."""


OWN_QUANTIZATIONS = (
    *("auto-round", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "gguf", "gptq", "gptq_marlin"),
    *("moe_wna16", "mxfp4", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "hqq", "quark", "torchao"),
)
"""Methods of quantized checkpoints by vLLM's names; files of the last three are not supported."""
_EXAMPLES = {
    "hf_overrides": '{"max_position_embeddings": 65536}',
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "reasoning_effort_map": '{"medium": "low"}',
}
"""Options of the model that are JSON objects, with examples for errors."""


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Reasoning efforts of OpenAI's API and vLLM's."""
_MAX_EFFORT_CHARS = 64


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and its data types."""

    model: str = option(
        "demo", "model to load: `demo`, a folder (Hugging Face or jpaged layout), a GGUF file, or a Hugging Face Hub id"
    )
    tokenizer: str | None = option(
        None, "tokenizer and chat template, if not the model's own: a folder, a GGUF file or a Hugging Face Hub id"
    )
    revision: str | None = option(None, "branch, tag or commit of a model on the Hugging Face Hub; main if unset")
    tokenizer_revision: str | None = option(
        None, "branch, tag or commit of a tokenizer on the Hugging Face Hub; that of the model if both are in one place"
    )
    download_dir: str | None = option(
        None,
        "folder for downloads; if unset, that of the hub's client, or for URLs one next to compiled programs",
        path="new folder",
    )
    hf_token: str | None = option(
        None, "token for the Hugging Face Hub; the process list shows it: prefer the variable HF_TOKEN"
    )
    hf_overrides: JsonText | None = option(
        None,
        "JSON object of values that replace those of config.json, such as "
        '{"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}; '
        "a nested *_config is merged",
    )
    dtype: str = option(
        "auto",
        "data type of weights and activations; auto: the checkpoint's type, but bfloat16 in place of float16 on TPUs "
        "and CPUs, and float32 on CPUs without AVX512_BF16 or AMX; float16 runs on GPUs, and on CPUs for tests",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )
    quantization: str = option(
        "auto",
        "quantization of the layers' weight matrices while they load; auto: none beyond the checkpoint's own; -all: "
        "embedding and output matrix too, to int8; other names must be those of the checkpoint's own method",
        choices=(
            *("auto", "int8", "int4", "fp8", "int8-all", "int4-all", "fp8-all"),
            *OWN_QUANTIZATIONS,
        ),
    )
    load_format: str = option(
        "auto", "auto: load the checkpoint; dummy: random weights of the right shapes", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None, "maximum length of a sequence, prompt plus output tokens; the model's limit if unset", low=2
    )
    attention_backend: str = option(
        "auto",
        "attention kernels; auto: the device's own if they support this model and device; otherwise the reason is "
        "logged",
        choices=("auto", *get_args(Backend)),
    )
    linear_backend: str = option(
        "auto",
        "kernels of the matrix products; cpu: weights packed for a kernel that runs on one CPU device",
        choices=("auto", "cpu", "xla"),
    )
    activation_dtype: str = option(
        "auto",
        "data type of the rows that quantized weight matrices multiply; model: the model's, exact; int8: integers with "
        "a scale for every 64 numbers or fewer, which requires linear_backend cpu; auto: int8 on CPUs with "
        "AVX512-VNNI or AVX2, otherwise model",
        choices=("auto", *get_args(ActivationDtype)),
    )
    seed: int = option(0, "seed for requests that set none", low=0, high=2**64 - 1)
    max_logprobs: int = option(
        20, "maximum number of top log-probabilities per position; -1 for the full vocabulary", low=-1
    )
    whitespace_pattern: str = option(
        JSON_WHITESPACE,
        "regular expression for the whitespace between parts of constrained JSON, for requests that set none; "
        r"[ \t\r\n]+ is unbounded",
    )
    parse_special_tokens: bool = option(
        True,
        "parse special tokens that are spelled out in prompts and messages; if off, they are plain text there, and "
        "only those of the chat template count",
    )
    enable_prompt_embeds: bool = option(
        False,
        "accept input embeddings (`prompt_embeds`) in place of a prompt's tokens; only from trusted callers, because "
        "they reach inputs of the model that no text has",
    )
    enable_return_routed_experts: bool = option(
        False,
        "return the experts that each token was routed to, in every layer, with the outputs of models that have "
        "experts (`routed_experts`)",
    )
    skip_tokenizer_init: bool = option(
        False, "serve token ids only: load no tokenizer, and refuse requests with text or messages"
    )
    chat_template: str | None = option(
        None, "file with the chat template to use instead of the model's own, or the template itself", path="file"
    )
    chat_template_content_format: str = option(
        "auto",
        "form of a message's text in chat templates: string, or openai (a list of parts); auto: string unless the "
        "template prints a text only as a part",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: JsonText | None = option(
        None,
        'JSON object of chat template variables, such as {"enable_thinking": false}, for requests that do not set '
        "them (`chat_template_kwargs`)",
    )
    reasoning_effort_map: JsonText | None = option(
        None,
        "JSON object that replaces the reasoning effort of requests by one that the chat template has, such as "
        '{"medium": "low", "xhigh": "max"}; other efforts reach the template unchanged',
    )
    generation_config: str = option(
        "auto",
        "defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens for requests that leave them "
        "out: auto reads the model's generation_config.json, none (or vllm) keeps those of the API; otherwise a file, "
        "or a folder with that file",
    )
    override_generation_config: JsonText | None = option(
        None, 'JSON object of such defaults, such as {"temperature": 0.6}; replaces those of generation_config'
    )
    trust_request_chat_template: bool = option(
        False, "accept chat templates in chat requests (`chat_template`), rendered in a process with resource limits"
    )
    tool_call_parser: ToolCallParser = option(
        "auto",
        "parser that separates tool calls from the text of chat answers; auto: detected from the chat template",
        choices=get_args(ToolCallParser),
    )
    reasoning_parser: ReasoningParser = option(
        "auto",
        "parser that separates reasoning from the text of chat answers; auto: detected from the chat template",
        choices=get_args(ReasoningParser),
    )

    @property
    def overrides(self) -> dict[str, Any]:
        """The values of `hf_overrides`."""
        return {} if self.hf_overrides is None else parse_json_object("hf_overrides", self.hf_overrides, "{}")

    @property
    def efforts(self) -> dict[str, str]:
        """The values of `reasoning_effort_map`."""
        name = "reasoning_effort_map"
        return {} if self.reasoning_effort_map is None else parse_json_object(name, self.reasoning_effort_map, "{}")

    def __post_init__(self) -> None:
        """Raise InvalidArgument if an option is invalid, or conflicts with another."""
        for name, example in _EXAMPLES.items():
            parse_json_object(name, getattr(self, name) or "{}", example)
        for effort, replacement in self.efforts.items():
            name = f"reasoning_effort_map.{shorten(effort)}"
            if effort not in _EFFORTS:
                raise InvalidArgument(name, f"is no reasoning effort: must be one of {', '.join(_EFFORTS)}")
            if not isinstance(replacement, str) or not 1 <= len(replacement) <= _MAX_EFFORT_CHARS:
                problem = f"{shorten(str(replacement))} is not a text of 1 to {_MAX_EFFORT_CHARS} characters"
                raise InvalidArgument(name, problem)
        for name in ("tokenizer", "tokenizer_revision") if self.skip_tokenizer_init else ():
            if (value := getattr(self, name)) is not None:
                raise InvalidArgument(name, f"{value} is not used: skip_tokenizer_init is True")
        try:
            re.compile(self.whitespace_pattern)
        except re.error as error:
            raise InvalidArgument("whitespace_pattern", f"{self.whitespace_pattern!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The pool of KV blocks."""

    block_size: int | None = option(
        None,
        "tokens per KV block; on TPUs 128 if sequences are long or a device has few KV heads",
        low=1,
        high=1024,
        unit="tokens",
        by_platform={"cpu": 16, "gpu": 32, "tpu": 64},
    )
    num_blocks: int | None = option(
        None,
        "KV blocks in the pool; if unset, as many as memory and the largest batch call for, and on CPUs at most 4 "
        "GiB or a quarter of the free memory unless memory_utilization is set",
        low=1,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV pool on each device, including the null block, instead of num_blocks; the command line "
        "accepts 512M, 2G or 1.5G (powers of 1024), and 512m, 2g (powers of 1000)",
        low=1,
        unit="bytes",
    )
    memory_utilization: float | None = option(
        None,
        "fraction of device memory for weights, programs and the KV pool; the compiler reports the programs' share",
        low=0.01,
        high=1.0,
        by_platform={"cpu": 0.9, "gpu": 0.95, "tpu": 0.97},
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache; auto: as computed; int8 and fp8 hold two to four times as many tokens",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
    )
    swap_space: float = option(
        1.0,
        "host memory for swapped-out sequences and offloaded prefix-cache blocks, total over all replicas",
        low=0.0,
        high=4096.0,
        unit="GiB",
    )
    kv_disk_space: float = option(
        0.0,
        "disk space for offloaded prefix-cache blocks, which survive a restart; total over all replicas and over "
        "all models in kv_disk_dir; 0 disables disk offload",
        low=0.0,
        high=65536.0,
        unit="GiB",
    )
    kv_disk_dir: str | None = option(
        None, "folder for kv_disk_space, used by one server at a time; created if missing", path="new folder"
    )
    kv_transfer_config: JsonText | None = with_attributes(
        option(
            None,
            "KV connector for offloaded prefix-cache blocks, as a JSON object with vLLM's keys: kv_connector (the "
            "class), kv_connector_module_path (its module) and kv_connector_extra_config (its options); kv_connector "
            "MooncakeStoreConnector: memory of a fleet (docs/tiers.md); jax: data port for the roles prefill and "
            "decode (docs/roles.md)",
        ),
        ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config"),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts that share a prefix (prefix cache)")
    state_checkpoint_interval: int | None = option(
        None,
        "tokens of a prompt between stored recurrent states, at which a cached prefix can end, rounded up to whole "
        "blocks; the pool has a slot for each; if unset, the tokens that take the bytes of a state, at least 128",
        low=1,
        high=1 << 20,
        unit="tokens",
    )
    enable_cascade_attention: bool = option(
        True,
        "cascade attention: read a prefix shared by several rows of a step once for all of them, if that is faster",
    )
    kv_policy: KVPolicy = option(
        "paged",
        "KV allocation; paged: blocks on demand; reserve-*: contiguous space for a sequence's whole life "
        "(baselines for benchmarks)",
        choices=get_args(KVPolicy),
    )
    eviction_policy: EvictionPolicyName = option(
        "auto",
        "eviction order of cached blocks, on the device and in host memory: least recently (lru) or least "
        "frequently (lfu) used, seen only once (2q), or least recompute time saved (worth); auto is lru",
        choices=get_args(EvictionPolicyName),
    )

    def check(self) -> None:
        """Check the options of eviction and of stores below host memory against the others.

        Raises:
            InvalidArgument: with the other options nothing is cached, or an option conflicts with a store.
        """
        self._check_store()
        if self.state_checkpoint_interval is not None and not self.enable_prefix_caching:
            raise InvalidArgument(
                "state_checkpoint_interval",
                f"{self.state_checkpoint_interval} has no effect, because enable_prefix_caching is False: unset it",
            )
        if self.eviction_policy == "auto":
            return
        problem = f"{self.eviction_policy} has no effect, because no prefixes are cached with"
        if self.kv_policy != "paged":
            raise InvalidArgument("eviction_policy", f"{problem} kv_policy {self.kv_policy}: use auto")
        if not self.enable_prefix_caching:
            raise InvalidArgument("eviction_policy", f"{problem} enable_prefix_caching False: use auto")

    @property
    def kv_transfer(self) -> KVTransferOptions | None:
        """Options of a KV connector; None if there is none.

        Raises:
            InvalidArgument: `kv_transfer_config` is invalid; cannot happen for loaded options.
        """
        if self.kv_transfer_config is None or self.data_port is not None:
            return None
        return KVTransferOptions.parse(self.kv_transfer_config)

    @property
    def data_port(self) -> DataPortOptions | None:
        """Options of a data port; None if there is none.

        Raises:
            InvalidArgument: `kv_transfer_config` is invalid; cannot happen for loaded options.
        """
        return None if self.kv_transfer_config is None else DataPortOptions.parse(self.kv_transfer_config)

    @property
    def store_option(self) -> str | None:
        """Name of the option that selects a store below host memory; None if there is none."""
        if self.kv_transfer_config is not None and self.data_port is None:
            return "kv_transfer_config"
        return "kv_disk_space" if self.kv_disk_space else None

    def described_store(self) -> str:
        """Return the value of `store_option`, for messages."""
        transfer = self.kv_transfer
        return f"{self.kv_disk_space:g} GiB" if transfer is None else transfer.kv_connector

    def _check_store(self) -> None:
        name, value = self.store_option, self.described_store()
        if not self.kv_disk_space and self.kv_disk_dir is not None:
            raise InvalidArgument("kv_disk_dir", f"{self.kv_disk_dir} is not used, because kv_disk_space is 0")
        if name is None:
            return
        if name == "kv_transfer_config" and self.kv_disk_space:
            problem = f"{value}: only one store is supported below host memory, but kv_disk_space is"
            raise InvalidArgument(name, f"{problem} {self.kv_disk_space:g} GiB")
        if name == "kv_disk_space" and self.kv_disk_dir is None:
            raise InvalidArgument(name, f"{value} requires kv_disk_dir, the folder")
        if not self.swap_space:
            raise InvalidArgument(name, f"{value}: blocks pass through host memory, but swap_space is 0")
        if self.kv_policy != "paged":
            raise InvalidArgument(name, f"{value}: kv_policy {self.kv_policy} caches no prefixes")
        if not self.enable_prefix_caching:
            raise InvalidArgument(name, f"{value}: enable_prefix_caching is False")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Scheduling of steps."""

    max_num_seqs: int | None = option(
        None,
        "maximum number of sequences per step; if unset, up to 512 if device memory holds as many sequences, "
        "bounded by max_num_batched_tokens and by the block-table limit of TPU kernels",
        low=1,
        high=4096,
        by_platform={"cpu": 64, "gpu": 128, "tpu": 128},
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens per step over all sequences; if unset, at least max_num_seqs and up to 4096, by "
        "device",
        low=8,
        high=1 << 20,
        by_platform={"cpu": 512, "gpu": 1024, "tpu": 1024},
    )
    long_prefill_token_threshold: int = option(
        0,
        "maximum number of tokens of one prompt per step, so that short prompts do not wait for the prefill of long "
        "ones; 0 is unlimited",
        low=0,
        high=1 << 20,
    )
    policy: Policy = option("fcfs", "admission order of waiting requests", choices=get_args(Policy))
    preemption_mode: PreemptionMode = option(
        "auto",
        "preemption when KV blocks run out: swap to host memory, recompute, or (auto) the faster of the two",
        choices=get_args(PreemptionMode),
    )
    batching: Batching = option(
        "continuous",
        "continuous: admit requests at every step; static: only after the whole batch has finished "
        "(a baseline for benchmarks)",
        choices=get_args(Batching),
    )
    overlap: bool | None = option(
        None,
        "prepare a step while the device still runs the previous one; if unset, on, except on a CPU of which this "
        "process may use one core: there overlap gains no throughput, and a new request waits for two steps",
    )
    num_scheduler_steps: int = option(
        0,
        "decode steps per dispatch while no request can join; 0: up to 8 on CPUs and 2 elsewhere, within 0.02 s, "
        "less while requests keep arriving and few rows are taken, 0.05 s if all are taken, or 0.1 s if in "
        "addition none may end early. On CPUs an arriving request ends a dispatch after the current step. "
        "-1: like 0, but without a time limit if none may end early (default of LLM)",
        low=-1,
        high=16,
    )
    max_inter_token_latency: float | None = option(
        None,
        "target for the longest wait between tokens of running streams: prefill is chunked to meet it as far as "
        "the device can, but may always lengthen a step by half. If unset, 20 times the part of a step that does not "
        "depend on its tokens, as measured at the start, within 0.1 to 1 s. 0 is unlimited",
        low=0.0,
        high=3600.0,
        unit="s",
    )
    speculative_config: JsonText | None = option(
        None,
        "speculative decoding, as a JSON object in vLLM's format (methods ngram, suffix, draft_model, eagle3 and mtp), "
        'such as {"method": "suffix"}; draft tokens never change the output',
    )
    max_num_queued_reqs: int = option(
        4096, "maximum number of waiting requests; further ones are refused", low=1, high=1 << 20
    )
    enable_sleep_mode: bool = option(
        False,
        "let callers release device memory, pause generation and update weights: `sleep`, or POST /sleep, /wake_up, "
        "/pause, /resume and /update_weights",
    )


_EPLB = "eplb_config"
_UNUSED_EPLB_KEYS = ("policy", "use_async", "communicator", "log_balancedness_interval")
"""Keys of vLLM about its policies, transfers and logs: here compiled programs move the experts of a layer per step."""


@dataclass(frozen=True, slots=True)
class ExpertBalanceOptions:
    """Load balancing of experts (EPLB): the keys of `eplb_config`, named as in vLLM."""

    num_redundant_experts: int = option(
        0, "replicas of experts beyond the model's own, in each layer, of all devices together", low=0, high=1 << 16
    )
    window_size: int = option(1000, "last steps before a change whose load counts", low=1, high=100_000, unit="steps")
    step_interval: int = option(3000, "steps between changes", low=1, high=1_000_000_000, unit="steps")
    log_balancedness: bool = option(False, "log the balancedness of devices whenever the load is read")

    @classmethod
    def parse(cls, text: str) -> ExpertBalanceOptions:
        """Parse the options of a JSON object; null counts as absent.

        Raises:
            InvalidArgument: it is not a JSON object, a key is unknown, or a value is not supported.
        """
        values = parse_json_object(_EPLB, text, '{"num_redundant_experts": 32}')
        if values.get("policy") not in (None, "default"):
            problem = f"{shorten(repr(values['policy']))} is not supported: must be 'default', the only policy"
            raise InvalidArgument(f"{_EPLB}.policy", problem)
        given = checked_keys(cls, _EPLB, values, _UNUSED_EPLB_KEYS)
        options = cls(**{"window_size": min(1000, given.get("step_interval", 3000)), **given})
        if options.window_size > options.step_interval:
            problem = f"{options.window_size} is above step_interval ({options.step_interval})"
            raise InvalidArgument(f"{_EPLB}.window_size", problem)
        return options


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Parallelism: the number of devices is the product of the sizes."""

    context_parallel_size: int = option(
        1,
        "devices that split the KV cache of every sequence: each holds a part of the slots of every block, so a "
        "context may be that many times longer; weights are replicated, or split over tensor_parallel_size of the "
        "devices",
        low=1,
        high=256,
    )
    tensor_parallel_size: int = option(
        1,
        "devices that split one copy of the model: attention heads, feed-forward layers and vocabulary; with "
        "several processes, 1 means all devices",
        low=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "stages that the layers are split into, each with the weights and the KV cache of its layers on "
        "tensor_parallel_size times context_parallel_size devices; a step passes through them in microbatches",
        low=1,
        high=256,
    )
    data_parallel_size: int = option(
        1,
        "model replicas behind one server, each with its own devices and KV pool; max_num_seqs and num_blocks "
        "apply per replica, swap_space and max_num_queued_reqs are totals; requests are routed by prefix cache "
        "hits, then by load",
        low=1,
    )
    enable_expert_parallel: bool = option(
        False, "place whole experts on the devices of a replica instead of a part of every expert"
    )
    enable_dp_attention: bool = option(
        False,
        "data-parallel attention for latent caches (DeepSeek): each of the tensor_parallel_size devices has the KV "
        "cache and the attention of some sequences, with whole attention weights, so the pool grows with the "
        "devices; requires enable_expert_parallel for models with experts",
    )
    enable_eplb: bool = option(
        False,
        "balance the load of experts over devices: count the tokens of each expert, and move experts between devices "
        "while requests run; requires enable_expert_parallel; moves never change the output",
    )
    eplb_config: JsonText | None = option(
        None,
        "load balancing of experts, as a JSON object with vLLM's keys: num_redundant_experts, window_size, "
        'step_interval and log_balancedness, such as {"num_redundant_experts": 32}; no effect without enable_eplb',
    )
    coordinator: str | None = option(
        None,
        "HOST:PORT of process 0, the same for all processes; if unset, detected from LeaderWorkerSet, GKE TPU "
        "pods, Slurm or Open MPI; with port 0, process 0 picks a port and prints it",
    )
    num_processes: int | None = option(
        None, "number of processes that serve one model together; 1 ignores the launcher's environment", low=1
    )
    process_id: int | None = option(None, "index of this process; process 0 listens for clients", low=0)
    join_timeout: float = option(300.0, "timeout for all processes to join at startup", low=1.0, high=86400.0, unit="s")
    cluster_secret_file: str | None = option(
        None,
        "file with the secret by which the processes authenticate each other at startup; JPAGED_CLUSTER_SECRET if "
        "unset; without either, no authentication",
        path="file",
    )
    heartbeat_interval: float = option(
        1.0,
        "interval of heartbeats between process 0 and the other processes",
        low=0.05,
        high=3600.0,
        unit="s",
    )
    heartbeat_timeout: float = option(
        10.0,
        "heartbeat silence after which a process counts as lost and all processes exit",
        low=0.1,
        high=86400.0,
        unit="s",
    )

    @property
    def num_devices(self) -> int:
        """Devices of all replicas in one process."""
        of_stage = self.tensor_parallel_size * self.context_parallel_size
        return of_stage * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def eplb(self) -> ExpertBalanceOptions | None:
        """Options of expert load balancing; None if it is off.

        Raises:
            InvalidArgument: `eplb_config` is invalid; cannot happen for loaded options.
        """
        return ExpertBalanceOptions.parse(self.eplb_config or "{}") if self.enable_eplb else None

    def check(self) -> None:
        """Check the options of several processes against each other, and those of experts.

        Raises:
            InvalidArgument: one is missing, malformed or conflicts with another.
        """
        if self.eplb_config is not None:
            ExpertBalanceOptions.parse(self.eplb_config)
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise InvalidArgument(
                "heartbeat_timeout",
                f"{self.heartbeat_timeout:g} s is below twice heartbeat_interval ({self.heartbeat_interval:g} s)",
            )
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            given = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
            missing = [name for name, value in given.items() if value is None]
            if len(missing) == len(given) or (self.num_processes == 1 and len(missing) == 2):
                return
            raise InvalidArgument(missing[0], f"is missing: give all of {', '.join(given)}, or none")
        if self.process_id >= self.num_processes:
            raise InvalidArgument(
                "process_id",
                f"{self.process_id} is not below num_processes ({self.num_processes}); the first process is 0",
            )
        _, port = split_address("coordinator", self.coordinator)
        if port == 0 and self.process_id != 0:
            raise InvalidArgument(
                "coordinator", f"{self.coordinator}: only process 0 can pick a port; give the port that it picked"
            )


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """Requirements before the first step."""

    wait_for_all_programs: bool | None = option(
        None,
        "start only after every program is compiled, instead of after the subset to which any step can be padded "
        "(default: on for GPUs, whose compiler times kernels on the serving device, and for several processes)",
    )
    compiled: str | None = option(
        None,
        "folder of programs saved by `jpaged plan --save` for this model, these options and these devices, loaded "
        "instead of compiled; num_blocks defaults to the saved one; not for GPUs",
        path="folder",
    )


_MAX_IMAGES = 999
_DOMAIN = re.compile(r"\*|[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:]{2,45}", re.ASCII)
_LIMITS = re.compile(r"[a-z_]+=\d{1,9}(,[a-z_]+=\d{1,9})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Images of requests."""

    limit_mm_per_prompt: JsonText | None = option(
        None,
        'maximum number of images in a request, as {"image": 4} or image=4 (default: 64, up to 999); a limit of '
        "video or audio, which no model here reads, has no effect",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "host from which requests may name images by URL (http, https), or * for any; repeatable. Images of other "
        "hosts, and at private addresses, are refused (default: none)",
    )
    allowed_local_media_path: str | None = option(
        None,
        "folder of this machine from which requests may name images by path or file URL; none if unset",
        path="folder",
    )
    mm_processor_cache_gb: float = option(
        1.0,
        "host memory for encoded images, for later requests with the same image; 0 keeps none",
        low=0.0,
        high=1024.0,
        unit="GiB",
    )

    @property
    def max_images(self) -> int:
        """Maximum number of images in a request."""
        given = self._limits().get("image", 64)
        count = given.get("count", 64) if isinstance(given, Mapping) else given
        if type(count) is not int or not 0 <= count <= _MAX_IMAGES:
            problem = f"{shorten(str(count))} is not a number from 0 to {_MAX_IMAGES}"
            raise InvalidArgument("limit_mm_per_prompt.image", problem)
        return count

    def check(self) -> None:
        """Reject invalid limits and domains; raise InvalidArgument."""
        for name in self._limits():
            if name not in ("image", "video", "audio", "vision_chunk"):
                raise InvalidArgument(f"limit_mm_per_prompt.{shorten(name)}", "is unknown: must be image")
        _ = self.max_images
        for domain in self.allowed_media_domains:
            if not _DOMAIN.fullmatch(domain):
                raise InvalidArgument("allowed_media_domains", f"{shorten(domain)!r} is no host, such as example.com")

    def _limits(self) -> dict[str, Any]:
        name, given = "limit_mm_per_prompt", self.limit_mm_per_prompt or "{}"
        if (pairs := _LIMITS.fullmatch(given)) is not None:
            return {key: int(count) for key, _, count in (one.partition("=") for one in pairs[0].split(","))}
        return parse_json_object(name, given, '{"image": 4}')


_DEFAULT_MAX_LORAS = 8


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """LoRA adapters: slots on the device, and adapters loaded at the start."""

    enable_lora: bool = option(False, "serve LoRA adapters; on if `lora` names any")
    max_loras: int = option(
        _DEFAULT_MAX_LORAS,
        "maximum number of adapters in one step; each takes a device slot for matrices of max_lora_rank; by default at "
        "most max_cpu_loras",
        low=1,
        high=256,
    )
    max_lora_rank: int = option(16, "maximum LoRA rank", low=1, high=512)
    enable_dora: bool = option(
        False, "also serve adapters with DoRA or biases: two more float32 numbers per slot and output of a matrix"
    )
    enable_lm_head_lora: bool = option(
        False, "also serve adapters of lm_head: two more matrices per slot, for the outputs of the vocabulary"
    )
    enable_embedding_lora: bool = option(
        False, "also serve adapters of embed_tokens: two more matrices per slot, for the ids of the vocabulary"
    )
    enable_expert_lora: bool = option(
        False, "also serve adapters of experts and routers: two more matrices per slot and expert; slower experts"
    )
    max_cpu_loras: int = option(
        256,
        "maximum number of adapters in host memory; the least recently used others are read again from disk when "
        "requests need them",
        low=1,
        high=1 << 16,
    )
    lora: tuple[str, ...] = option((), "NAME=PATH of an adapter to load at startup, a folder in PEFT's format")

    def __post_init__(self) -> None:
        """Lower the default of `max_loras` to `max_cpu_loras`."""
        if self.max_cpu_loras < self.max_loras == _DEFAULT_MAX_LORAS:
            object.__setattr__(self, "max_loras", self.max_cpu_loras)

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Name and path of each adapter loaded at the start."""
        return tuple((name, path) for name, _, path in (one.partition("=") for one in self.lora))

    def check(self) -> None:
        """Check the form of adapters loaded at the start, and the limits of device and host memory.

        Raises:
            InvalidArgument: a name or a path is missing, a name occurs twice, or max_cpu_loras is below max_loras.
        """
        for one, (name, path) in zip(self.lora, self.adapters, strict=True):
            if not name or not path:
                raise InvalidArgument("lora", f"{one!r} is not NAME=PATH")
        names = [name for name, _ in self.adapters]
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgument("lora", f"{name!r} is given {names.count(name)} times: names must be unique")
        if self.max_cpu_loras < self.max_loras:
            raise InvalidArgument(
                "max_cpu_loras", f"{self.max_cpu_loras} is below max_loras ({self.max_loras}): slots would stay empty"
            )


NUM_SINKS = 4
"""Default number of attention sinks; StreamingLLM's authors found this sufficient."""


@dataclass(frozen=True, slots=True)
class LossyOptions:
    """StreamingLLM (Xiao et al. 2023): attention to a recent window and attention sinks only."""

    lossy_kv_window: int | None = option(
        None,
        "LOSSY: sliding attention window: each token attends to the last N tokens, itself included, and to the "
        "first lossy_kv_sinks; blocks in between are freed. Outputs differ from the exact model's. Exact if unset",
        low=1,
        unit="tokens",
    )
    lossy_kv_sinks: int | None = option(
        None,
        f"LOSSY: first tokens (attention sinks) kept in addition to lossy_kv_window; {NUM_SINKS} if unset",
        low=0,
        unit="tokens",
    )

    @property
    def num_sinks(self) -> int:
        """Number of attention sinks."""
        return NUM_SINKS if self.lossy_kv_sinks is None else self.lossy_kv_sinks

    def check(self, cache: CacheOptions, draft: str | None) -> None:
        """Check the options against each other, and against those of the pool.

        Args:
            draft: the speculative method, if it has a separate pool; None for none.

        Raises:
            InvalidArgument: sinks are set without a window, or another option conflicts.
        """
        window = self.lossy_kv_window
        if window is None:
            if self.lossy_kv_sinks is not None:
                raise InvalidArgument(
                    "lossy_kv_sinks",
                    f"{self.lossy_kv_sinks} requires lossy_kv_window",
                )
            return
        if cache.kv_policy != "paged":
            raise InvalidArgument(
                "lossy_kv_window",
                f"{window}: kv_policy {cache.kv_policy} reserves memory for whole sequences, so a window frees nothing",
            )
        if draft is not None:
            raise InvalidArgument(
                "lossy_kv_window",
                f"{window}: speculative_config has method {draft}, whose draft model reads all tokens of the blocks",
            )
