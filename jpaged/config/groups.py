"""The sections of an engine: frozen dataclasses whose fields carry help and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from jpaged.config.option import JsonText, option
from jpaged.errors import InvalidArgument
from jpaged.launchers import split_address
from jpaged.structured import JSON_WHITESPACE

Policy = Literal["fcfs", "priority", "fair"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Batching = Literal["continuous", "static"]
KVPolicy = Literal["paged", "reserve-max", "reserve-pow2", "reserve-oracle"]
EvictionPolicyName = Literal["auto", "lru", "lfu", "2q", "worth"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "openai"]
"""Formats of tool calls: see `jpaged.service.chat.parsers.formats`."""
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "openai_gptoss"]
"""Formats of reasoning."""
LinearBackend = Literal["cpu", "xla"]
Backend = Literal["xla", "pallas-tpu", "pallas-gpu", "pallas-triton", "cpu"]
"""Attention backends."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and its data types."""

    model: str = option("demo", "`demo`, a folder (Hugging Face's layout or ours), a GGUF file, or a hub id")
    dtype: str = option(
        "auto", "auto is the checkpoint's own on TPU and GPU, float32 on CPU", choices=("auto", "float32", "bfloat16")
    )
    quantization: str = option(
        "auto", "rounds the matrices of layers while they load; auto does not", choices=("auto", "int8", "int4", "fp8")
    )
    load_format: str = option(
        "auto", "auto reads the checkpoint; dummy fills the shapes with random numbers", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None, "prompt and output tokens of one sequence at most; the model's own limit when left out", low=2
    )
    attention_backend: str = option(
        "auto",
        "whose attention kernels run; auto takes the device's own where they can, and says why where they cannot",
        choices=("auto", *get_args(Backend)),
    )
    linear_backend: str = option(
        "auto", "who multiplies: cpu packs the weights for a kernel of one CPU device", choices=("auto", "cpu", "xla")
    )
    seed: int = option(0, "where requests that bring no seed get theirs from", low=0, high=2**64 - 1)
    max_logprobs: int = option(
        20, "likeliest tokens that a request may have told at each position; -1 allows all of the vocabulary", low=-1
    )
    whitespace_pattern: str = option(
        JSON_WHITESPACE,
        "regular expression of the whitespace between parts of constrained JSON, for requests that name none; "
        r"[ \t\r\n]+ has no bound",
    )
    parse_special_tokens: bool = option(
        True,
        "take special tokens that are spelled out in prompts and messages for what they say; if not, they are text "
        "there, and only those that the chat template writes count",
    )
    skip_tokenizer_init: bool = option(
        False, "serve token ids alone: no tokenizer is read, and requests with text or messages are refused"
    )
    chat_template: str | None = option(
        None, "a file with the chat template, in place of the model's own; the model's when left out", path="file"
    )
    trust_request_chat_template: bool = option(
        False, "let chats bring a template of their own (`chat_template`), which runs in a process with limits"
    )
    tool_call_parser: ToolCallParser = option(
        "auto",
        "how the model writes tool calls, which answers of chats have apart from their text; auto looks into its "
        "chat template",
        choices=get_args(ToolCallParser),
    )
    reasoning_parser: ReasoningParser = option(
        "auto",
        "how the model writes what it thinks, which answers of chats have apart from their text; auto looks into its "
        "chat template",
        choices=get_args(ReasoningParser),
    )

    def __post_init__(self) -> None:
        """Raise InvalidArgument if the pattern of whitespace is not a regular expression."""
        try:
            re.compile(self.whitespace_pattern)
        except re.error as error:
            raise InvalidArgument("whitespace_pattern", f"{self.whitespace_pattern!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The pool of KV blocks."""

    block_size: int | None = option(
        None,
        "token slots in a block; on TPUs 128 where sequences are long, or a device has few key/value heads",
        low=1,
        high=1024,
        unit="tokens",
        by_platform={"cpu": 16, "gpu": 32, "tpu": 64},
    )
    num_blocks: int | None = option(
        None,
        "blocks in the pool; when left out as many as memory and the longest batch ask for, and on CPUs at most 4 GiB "
        "or a quarter of the free memory, unless memory_utilization is given",
        low=1,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the pool on each device, the null block included, instead of num_blocks; the command line takes "
        "512M, 2G or 1.5G (of 1024), and 512m, 2g (of 1000)",
        low=1,
        unit="bytes",
    )
    memory_utilization: float | None = option(
        None,
        "share of the device's memory that weights, programs and the pool may take; the compiler says what programs do",
        low=0.01,
        high=1.0,
        by_platform={"cpu": 0.9, "gpu": 0.95, "tpu": 0.97},
    )
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are kept; auto is as they are computed, int8 and fp8 hold two to four times the tokens",
        choices=("auto", "float32", "bfloat16", "int8", "fp8"),
    )
    swap_space: float = option(
        1.0,
        "host memory that groups are swapped out to, and cached prefixes kept in; of all replicas together",
        low=0.0,
        high=4096.0,
        unit="GiB",
    )
    kv_disk_space: float = option(
        0.0,
        "local disk that cached prefixes are kept on, which a server that starts again finds; of all replicas "
        "together, and of all models in kv_disk_dir; 0 keeps none",
        low=0.0,
        high=65536.0,
        unit="GiB",
    )
    kv_disk_dir: str | None = option(
        None, "the folder for kv_disk_space, which one server has at a time; made if need be", path="new folder"
    )
    enable_prefix_caching: bool = option(True, "share the blocks of prompts that begin alike")
    enable_cascade_attention: bool = option(
        True, "read the blocks that several rows of a step begin with once for all of them, where that is quicker"
    )
    kv_policy: KVPolicy = option(
        "paged",
        "paged gives blocks as tokens come; reserve-* keep contiguous room for a sequence's whole life: baselines",
        choices=get_args(KVPolicy),
    )
    eviction_policy: EvictionPolicyName = option(
        "auto",
        "which cached block goes first when blocks run out, on the device and in host memory: the least recently (lru) "
        "or least frequently (lfu) used, what was seen once (2q), or what saves the least time (worth); auto is lru",
        choices=get_args(EvictionPolicyName),
    )

    def check(self) -> None:
        """Check the options of eviction and the disk tier against the others.

        Raises:
            InvalidArgument: with the other options nothing is cached, or an option conflicts with the disk tier.
        """
        self._check_disk()
        if self.eviction_policy == "auto":
            return
        problem = f"{self.eviction_policy} has nothing to choose from: no prefix is cached with"
        if self.kv_policy != "paged":
            raise InvalidArgument(
                "eviction_policy", f"{problem} kv_policy {self.kv_policy}; auto is the choice with it"
            )
        if not self.enable_prefix_caching:
            raise InvalidArgument(
                "eviction_policy", f"{problem} enable_prefix_caching False; auto is the choice with it"
            )

    def _check_disk(self) -> None:
        if not self.kv_disk_space:
            if self.kv_disk_dir is not None:
                raise InvalidArgument("kv_disk_dir", f"{self.kv_disk_dir}: kv_disk_space is 0, so that none is used")
            return
        needed = f"{self.kv_disk_space:g} GiB"
        if self.kv_disk_dir is None:
            raise InvalidArgument("kv_disk_space", f"{needed}: kv_disk_dir has to name the folder")
        if not self.swap_space:
            raise InvalidArgument(
                "kv_disk_space", f"{needed}: blocks pass through host memory, of which swap_space (0) gives none"
            )
        if self.kv_policy != "paged":
            raise InvalidArgument("kv_disk_space", f"{needed}: kv_policy {self.kv_policy} caches no prefixes")
        if not self.enable_prefix_caching:
            raise InvalidArgument("kv_disk_space", f"{needed}: enable_prefix_caching is False")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Scheduling of steps."""

    max_num_seqs: int | None = option(
        None,
        "rows of a step; when left out up to 512 where the device's memory holds so many sequences, no more than "
        "max_num_batched_tokens, and no more than block tables of the longest sequences allow a TPU's kernel",
        low=1,
        high=4096,
        by_platform={"cpu": 64, "gpu": 128, "tpu": 128},
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens of a step, all rows; when left out no fewer than max_num_seqs, and up to 4096 as the device asks for",
        low=8,
        high=1 << 20,
        by_platform={"cpu": 512, "gpu": 1024, "tpu": 1024},
    )
    policy: Policy = option("fcfs", "order of admission", choices=get_args(Policy))
    preemption_mode: PreemptionMode = option(
        "auto", "when blocks run out: swap to host memory, recompute, or the quicker", choices=get_args(PreemptionMode)
    )
    batching: Batching = option(
        "continuous", "static admits only when the whole batch has ended: a baseline", choices=get_args(Batching)
    )
    overlap: bool = option(True, "prepare a step while the device still runs the one before")
    num_scheduler_steps: int = option(
        0,
        "decode steps in one dispatch, while nobody can join; 0 is up to 8 on CPUs, 2 elsewhere, of 0.02 s at most, "
        "or 0.05 s with all rows taken and no row that may end early; -1 is 0 without a bound for those (LLM's own)",
        low=-1,
        high=16,
    )
    max_inter_token_latency: float = option(
        0.2,
        "beside streams, prompts are computed in parts so small that none of these waits longer for its next token, as "
        "far as the device can: prompts may always make a step half as long again. 0 is no bound",
        low=0.0,
        high=3600.0,
        unit="s",
    )
    speculative_config: JsonText | None = option(
        None,
        "a JSON object as vLLM takes it, which says who proposes tokens ahead of the model (methods ngram, suffix, "
        'draft_model and eagle3), such as {"method": "suffix"}; what is proposed never changes what is generated',
    )
    max_num_queued_reqs: int = option(4096, "waiting requests before new ones are refused", low=1, high=1 << 20)


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Parallelism: the number of devices is the product of the sizes."""

    context_parallel_size: int = option(
        1,
        "devices that share the keys and values of every sequence, each with a part of the slots of every block: a "
        "context may be so many times as long as one device has memory for; weights are whole on each, or split over "
        "tensor_parallel_size of them",
        low=1,
        high=256,
    )
    tensor_parallel_size: int = option(
        1,
        "devices that share one copy of the model: heads, feed-forward and vocabulary are split over them; "
        "1 is all of them where there are several processes",
        low=1,
    )
    data_parallel_size: int = option(
        1,
        "copies of the model behind one service, each with devices and a pool of its own; max_num_seqs and num_blocks "
        "are of each, swap_space and max_num_queued_reqs are shared out; a request goes where its prefix is cached, "
        "then where the load is least",
        low=1,
    )
    enable_expert_parallel: bool = option(False, "devices of a copy have some experts whole, not a part of each")
    coordinator: str | None = option(
        None,
        "HOST:PORT of process 0, the same for all; found in the environment of LeaderWorkerSet, GKE TPU pods, Slurm "
        "and Open MPI when left out; port 0 lets process 0 pick one and print it",
    )
    num_processes: int | None = option(
        None, "processes that serve one model together; 1 keeps to this one, whatever the environment says", low=1
    )
    process_id: int | None = option(None, "which of them this is; process 0 opens the port", low=0)
    join_timeout: float = option(
        300.0, "how long processes wait for each other when they start", low=1.0, high=86400.0, unit="s"
    )
    cluster_secret_file: str | None = option(
        None,
        "a file with the same secret for all of several processes, which they show each other that they know when they "
        "start; that of the environment (JPAGED_CLUSTER_SECRET) when left out, and else nobody is asked",
        path="file",
    )
    heartbeat_interval: float = option(
        1.0,
        "each of several processes tells process 0 so often that it is there, and process 0 them",
        low=0.05,
        high=3600.0,
        unit="s",
    )
    heartbeat_timeout: float = option(
        10.0,
        "a process from which nothing has come for so long is lost, and all of them end",
        low=0.1,
        high=86400.0,
        unit="s",
    )

    def check(self) -> None:
        """Check the options of several processes against each other.

        Raises:
            InvalidArgument: one is missing, malformed or conflicts with another.
        """
        if self.context_parallel_size > 1 and (self.num_processes or 1) > 1:
            raise InvalidArgument(
                "context_parallel_size",
                f"{self.context_parallel_size}: contexts are split over the devices of one process, and num_processes "
                f"is {self.num_processes}",
            )
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise InvalidArgument(
                "heartbeat_timeout",
                f"{self.heartbeat_timeout:g} s is below two heartbeats, one each {self.heartbeat_interval:g} s",
            )
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            given = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
            missing = [name for name, value in given.items() if value is None]
            if len(missing) == len(given) or (self.num_processes == 1 and len(missing) == 2):
                return
            raise InvalidArgument(missing[0], f"is missing: {', '.join(given)} go together")
        if self.process_id >= self.num_processes:
            raise InvalidArgument(
                "process_id", f"{self.process_id} is not below num_processes ({self.num_processes}); they count from 0"
            )
        _, port = split_address("coordinator", self.coordinator)
        if port == 0 and self.process_id != 0:
            raise InvalidArgument(
                "coordinator", f"{self.coordinator}: only process 0 can pick a port; name the port it took"
            )


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """Requirements before the first step."""

    wait_for_all_programs: bool = option(
        False, "start when every program is compiled, not when those are that any step can be padded to"
    )
    compiled: str | None = option(
        None,
        "a folder of programs that `jpaged plan --save` wrote for this model, these options and these devices: what "
        "is there is loaded, not compiled; num_blocks is theirs when left out",
        path="folder",
    )


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """LoRA adapters: slots on the device, and adapters loaded at the start."""

    enable_lora: bool = option(False, "take requests for adapters (LoRA); on where `lora` names any")
    max_loras: int = option(
        8,
        "adapters that the rows of one step may have: each has room on the device for matrices of max_lora_rank",
        low=1,
        high=256,
    )
    max_lora_rank: int = option(16, "rank of an adapter at most", low=1, high=512)
    max_cpu_loras: int = option(
        256, "adapters that are loaded at one time, in host memory; further ones are refused", low=1, high=1 << 16
    )
    lora: tuple[str, ...] = option((), "NAME=PATH: an adapter from the start, a folder as PEFT writes them")

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Name and path of each adapter loaded at the start."""
        return tuple((name, path) for name, _, path in (one.partition("=") for one in self.lora))

    def check(self) -> None:
        """Check the form and the number of adapters loaded at the start.

        Raises:
            InvalidArgument: a name or a path is missing, a name occurs twice, or there are too many.
        """
        for one, (name, path) in zip(self.lora, self.adapters, strict=True):
            if not name or not path:
                raise InvalidArgument("lora", f"{one!r} is not NAME=PATH")
        names = [name for name, _ in self.adapters]
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgument("lora", f"{name!r} is given {names.count(name)} times: a name is for one adapter")
        if len(names) > self.max_cpu_loras:
            raise InvalidArgument("lora", f"{len(names)} adapters are over max_cpu_loras ({self.max_cpu_loras})")
        if self.max_cpu_loras < self.max_loras:
            raise InvalidArgument(
                "max_cpu_loras", f"{self.max_cpu_loras} is below max_loras ({self.max_loras}): slots would stay empty"
            )
