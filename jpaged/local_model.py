"""A loaded model with its engine in this process, and the prompts that its callers give.

`LLM`, `AsyncLLM` and `LLMEngine` in `jpaged.llm` extend `LocalModel`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import Field, fields, make_dataclass, replace
from functools import partial
from numbers import Integral
from types import NoneType
from typing import Any, ClassVar, NamedTuple, NoReturn, NotRequired, Self, TypedDict, TypeVar

from jpaged.build import build, ignore_progress, read_hf_fields
from jpaged.chat import build_chat_options, parse_images
from jpaged.config import PROCESS_OPTIONS, ConfigView, EngineConfig, ModelOptions, server_field_names, vllm_environment
from jpaged.engine.core import PauseMode
from jpaged.engine.engine import THREAD_NAME as ENGINE_THREAD
from jpaged.engine.executor import Progress
from jpaged.errors import InvalidArgument, NotFound, Unavailable, Unsupported
from jpaged.outputs import CounterMetric, GaugeMetric, HistogramMetric, VectorMetric
from jpaged.sampling_params import (
    PROMPT_TOKENIZATION,
    PoolingParams,
    change_sampling,
    check_tokenization,
    get_sampling_changes,
    python_names,
    refuse_processor_options,
    with_defaults,
)
from jpaged.server_load import EngineLoad
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.score_embed import (
    EMBED_SAMPLING,
    VectorOptions,
    classifiable,
    errors_named,
    require_classifier,
)
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.service.tokenizer_parts import keep_quiet_about_torch
from jpaged.types import (
    EmbedsInput,
    LoadedAdapter,
    LoRARequest,
    Prompt,
    Request,
    SamplingParams,
    to_host_array,
)


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(EmbedsInput):
    """A prompt as input embeddings."""

    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; its text has no effect."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class ChatToPool(TypedDict):
    """A chat whose vector, or whose tokens' vectors, are returned."""

    messages: Sequence[Mapping[str, Any]]
    chat_template: NotRequired[str]
    chat_template_kwargs: NotRequired[Mapping[str, Any]]
    add_generation_prompt: NotRequired[bool]
    continue_final_message: NotRequired[bool]
    cache_salt: NotRequired[str]


_ResultT = TypeVar("_ResultT")
_ParserT = TypeVar("_ParserT", argparse.ArgumentParser, argparse._ArgumentGroup)
ONLINE_DEFAULTS: Mapping[str, Any] = {"trust_request_chat_template": True}
"""Defaults that differ from a server's: the caller is trusted."""
_DEFAULTS = {"num_scheduler_steps": -1, **ONLINE_DEFAULTS}
"""Defaults of `LLM`, to which no requests arrive later."""
GivenPrompt = str | TextPrompt | TokensPrompt | EmbedsPrompt | Sequence[int]
GivenInput = GivenPrompt | ChatToPool
GivenParams = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]
GivenAdapter = str | Sequence[str | None] | None
GivenLora = LoRARequest | Sequence[LoRARequest | None] | None
_TASKS = ("generate", "embed", "token_embed")
_LOG = logging.getLogger(__name__)


Weights = str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]]


class PreparedRequest(NamedTuple):
    """A request, its adapter as the caller gave it, and for chats the parser of the answers."""

    request: Request
    answers: ChatOutputParser | None
    lora_request: LoRARequest | None = None


class ParsedPrompt(NamedTuple):
    """A prompt, and its `cache_salt` if it has one."""

    prompt: Prompt
    cache_salt: str | None = None


class GivenRequest(NamedTuple):
    """A prompt with its parameters."""

    prompt: Prompt
    sampling: SamplingParams


class EngineArgs:
    """Arguments of a model's engine: keywords of `LLM`, also from a command line.

    Arguments are attributes, which may be assigned; those that are not set are None. `dataclasses.asdict` returns those
    that are set.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        vars(self).update(options, model=model)

    def __getattr__(self, name: str) -> Any:
        from jpaged.cli.vllm_flags import is_engine_argument

        if name.startswith("_") or not is_engine_argument(name):
            raise AttributeError(f"EngineArgs has no argument {name}")
        return None

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword -> value."""
        return dict(vars(self))

    @property
    def __dataclass_fields__(self) -> dict[str, Field[Any]]:  # for dataclasses.asdict and replace
        return {one.name: one for one in fields(make_dataclass("EngineArgs", vars(self)))}

    @staticmethod
    def add_cli_args(parser: _ParserT) -> _ParserT:
        """Add one flag for each option, and those of vLLM, to a parser or a group; return it."""
        from jpaged.cli.vllm_flags import add_engine_arguments

        add_engine_arguments(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the arguments that a command line gives; other values of the namespace are ignored."""
        from jpaged.cli.vllm_flags import is_engine_argument

        given = vars(args).items()
        return cls(**{name: value for name, value in given if value is not None and is_engine_argument(name)})


def _stop(serving: LoadedModel, process_id: int) -> None:
    """Stop the engine thread and its child processes; a forked child owns neither."""
    if os.getpid() != process_id:
        return
    if (
        threading.current_thread().name == ENGINE_THREAD
    ):  # the garbage collector ran on that thread, which cannot join itself
        threading.Thread(target=_stop, args=(serving, process_id), daemon=True).start()
        return
    serving.engine.stop()
    if serving.grammars is not None:
        serving.grammars.close()


class LocalModel:
    """A loaded model with its engine in this process: the base of `LLM`, `AsyncLLM` and `LLMEngine`.

    Args:
        model: `demo`, a folder in Hugging Face layout or from `jpaged convert`, a GGUF file, or a Hugging Face hub id.
        options: command-line options with underscores (`dtype`, `max_model_len`, `block_size`, `num_blocks`,
            `max_num_seqs`, `max_num_batched_tokens`, `seed`, ...), and vLLM's names of them, such as
            `gpu_memory_utilization`. None is the default of each. Three defaults differ from the server's.
            `wait_for_all_programs` is False only if programs of all sizes return the same bits (the CPU's kernels
            without a draft model), so that results do not depend on timing. `num_scheduler_steps` is -1 (automatic),
            because no requests arrive later. `trust_request_chat_template` is True.
        progress: called with (what, done, total) while the model loads and its programs compile.

    Raises:
        InvalidArgument: an option is unknown, out of range, or one of the server's.
    """

    _defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    _has_thread = True

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        for name in (*server_field_names(), *PROCESS_OPTIONS):
            if options.get(name) is not None:
                raise InvalidArgument(name, "is an option of `jpaged serve`, not of LLM")
        config = EngineConfig.load({"model": model, **self._defaults, **_get_options(options)})
        self._serving = build(config, progress or ignore_progress, is_offline=True)
        self._numbers = itertools.count(1)
        self._loras: OrderedDict[str, LoRARequest] = OrderedDict()
        self._lora_lock = threading.Lock()
        self._process_id = os.getpid()
        self._is_closed = False
        if self._has_thread:
            self._serving.engine.start()
        self._stop = weakref.finalize(self, _stop, self._serving, self._process_id)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Sequence[object] | None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Load the model of an `EngineArgs` with its options. The loop always starts, in this process.

        Args:
            usage_context: has no effect: no usage data is sent.

        Raises:
            Unsupported: `stat_loggers` is given.
        """
        if stat_loggers:
            raise Unsupported("stat_loggers: is not supported; read get_metrics(), or the metrics of a server")
        return cls(**engine_args.options)

    @property
    def weight_version(self) -> str:
        """The version of the weights: "0" until the first update."""
        return self._serving.engine.weight_version

    @property
    def config(self) -> EngineConfig:
        """The resolved options."""
        return self._serving.config

    @property
    def llm_engine(self) -> ConfigView:
        """The engine's tokenizer and configuration by vLLM's names; its loop runs on a thread."""
        advice = f"use the methods of {type(self).__name__}, or LLMEngine to run each step"
        configs = {"model_config": self.model_config, "vllm_config": self.vllm_config}
        tokenizer = self.get_tokenizer()
        name, get = "llm_engine", self.get_tokenizer
        return ConfigView(name, advice, **configs, tokenizer=tokenizer, get_tokenizer=get, get_metrics=self.get_metrics)

    @property
    def model_config(self) -> ConfigView:
        """The model's configuration by vLLM's names."""
        model, options = self._serving.model, self.config.model
        advice = "`config` has the options of jpaged"
        return ConfigView(
            "model_config",
            advice,
            {name: partial(_read_hf_config, name, options, advice) for name in ("hf_config", "hf_text_config")},
            model=options.model,
            served_model_name=model.name,
            tokenizer=options.tokenizer or options.model,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            seed=options.seed,
            quantization=None if options.quantization == "auto" else options.quantization,
            max_logprobs=model.max_logprobs,
            is_multimodal_model=self._serving.images is not None,
            is_encoder_decoder=False,
            architecture=model.architecture,
            get_vocab_size=lambda: model.vocab_size,
            get_hidden_size=lambda: self._serving.hidden_size,
            get_head_size=lambda: model.head_dim,
        )

    @property
    def vllm_config(self) -> ConfigView:
        """The configurations of model, cache, scheduler and devices by vLLM's names."""
        advice, options, geometry = "`config` has the options of jpaged", self.config, self._serving.engine.geometry
        cache = ConfigView(
            "cache_config",
            advice,
            block_size=geometry.block_size,
            num_gpu_blocks=geometry.num_blocks,
            cache_dtype=options.cache.kv_cache_dtype,
            enable_prefix_caching=options.cache.enable_prefix_caching,
            gpu_memory_utilization=options.cache.memory_utilization,
        )
        limits = {name: getattr(options.lora, name) for name in ("max_loras", "max_lora_rank", "max_cpu_loras")}
        has_adapters = options.lora.enable_lora or bool(options.lora.lora)
        lora = ConfigView("lora_config", advice, **limits) if has_adapters else None
        scheduler = ConfigView(
            "scheduler_config",
            advice,
            max_num_seqs=geometry.max_num_seqs,
            max_num_batched_tokens=geometry.max_num_batched_tokens,
            max_model_len=geometry.max_model_len,
        )
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
        sizes = {name: getattr(options.parallel, name) for name in names}
        configs = {"cache_config": cache, "scheduler_config": scheduler, "model_config": self.model_config}
        parallel = ConfigView("parallel_config", advice, **sizes)
        return ConfigView("vllm_config", advice, **configs, lora_config=lora, parallel_config=parallel)

    def collective_rpc(self, method: object, *arguments: Any, **options: Any) -> NoReturn:
        """Raise Unsupported: the engine has no worker processes."""
        raise Unsupported("collective_rpc: the engine runs in this process and has no workers to call")

    def apply_model(self, func: object) -> NoReturn:
        """Raise Unsupported: a model is compiled programs and arrays."""
        raise Unsupported("apply_model: a model is compiled programs and arrays, not a module")

    def start_profile(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise Unsupported: JAX has a profiler."""
        raise Unsupported("start_profile: use jax.profiler.start_trace and stop_trace around the calls")

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any: the model's generation config, then the API's defaults."""
        return SamplingParams(**self._serving.model.default_sampling)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks of the model by vLLM's names; `LLM.score` compares vectors if there is no task `score`."""
        pooler = self._serving.pooler
        if pooler is not None and pooler.labels:
            return ("classify", "score") if len(pooler.labels) == 1 else ("classify",)
        return _TASKS[1:] if self._serving.engine.geometry.is_encoder else _TASKS

    def set_tokenizer(self, tokenizer: object) -> NoReturn:
        """Raise Unsupported: a model has one tokenizer, which it is loaded with."""
        raise Unsupported("set_tokenizer: load the model with the tokenizer: LLM(model, tokenizer=FOLDER)")

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, as transformers reads it; without tokenizer files, a placeholder."""
        tokenizer = self._serving.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return tokenizer
        keep_quiet_about_torch()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        written = tokenizer.to_json()
        if written is None or (tokenizer.folder / "tokenizer_config.json").is_file():
            loaded: Any = AutoTokenizer.from_pretrained(str(tokenizer.folder), trust_remote_code=False)
        else:
            from tokenizers import Tokenizer

            special: dict[str, Any] = dict(tokenizer.named_special_tokens)
            loaded = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(written), **special)
        if loaded.chat_template is None:
            loaded.chat_template = tokenizer.chat_template
        return loaded

    def get_metrics(self) -> list[CounterMetric | GaugeMetric | HistogramMetric | VectorMetric]:
        """Return the metrics of the engine, by the names that a server has in Prometheus' format."""
        from jpaged.telemetry.metrics import read_metrics

        self._check_usable()
        return read_metrics(self._serving)

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter under a name; requires `enable_lora`. Errors are those of `Adapters.load`.

        Args:
            replaces: the name may be in use; requests in flight keep the former adapter.
        """
        self._check_usable()
        with self._lora_lock:
            self._serving.adapters.load(name, path, replaces=replaces)
            self._loras.pop(name, None)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; raise NotFound if there is none of that name."""
        self._check_usable()
        self._serving.adapters.unload(name)

    def load(self) -> EngineLoad:
        """Return a snapshot of the engine's counters and of the pool's state; see `jpaged.server_load.EngineLoad`.

        The difference of two snapshots covers the work between them.
        """
        self._finish_step()
        return self._serving.engine.load()

    def close(self) -> None:
        """Stop the engine and free the device's memory; the object cannot be used again, and calls in flight fail.

        With a KV connector or a disk tier, pending blocks are written first.
        """
        if self._is_closed or os.getpid() != self._process_id:
            return
        self._is_closed = True
        config = self._serving.config
        if self._has_thread and config.cache.store_option is not None:
            self._serving.engine.drain(config.server.shutdown_timeout)
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _params(self, prompts: Sequence[Prompt], sampling_params: GivenParams) -> list[GivenRequest]:
        """Return each prompt with a copy of the parameters: the caller may change its object afterwards."""
        defaults = self._serving.model.default_sampling
        if sampling_params is not None:
            params = one_each("sampling_params", sampling_params, (SamplingParams,), len(prompts))
            with python_names():
                copies = {id(one): one.clone() for one in params}
            return [GivenRequest(prompt, copies[id(one)]) for prompt, one in zip(prompts, params, strict=True)]
        if (most := defaults.get("max_tokens")) is not None:
            given = SamplingParams(**with_defaults({}, defaults), max_tokens=1)  # the minimum that must fit
            prompts = [replace(prompt, fills_length=True, max_filled=most) for prompt in prompts]
        else:
            given = SamplingParams(**defaults)
        return [GivenRequest(prompt, given) for prompt in prompts]

    def _start_request(
        self,
        sampling: SamplingParams,
        prompt: Prompt,
        adapter: str | LoRARequest | None = None,
        request_id: str | None = None,
        *,
        is_whole: bool = True,
    ) -> Callable[[], PreparedRequest]:
        """Check a request and start to encode its images; return a function that waits for them."""
        self._check_usable()
        processor, grammars, images = self._serving.input_processor, self._serving.grammars, self._serving.images
        lora_request = adapter if isinstance(adapter, LoRARequest) else None
        with python_names():
            prompt, given = processor.parse_images(prompt)
            make = partial(
                processor.make_request,
                request_id=f"llm-{next(self._numbers)}" if request_id is None else request_id,
                sampling=sampling,
                is_whole=is_whole,
                adapter=self._find_adapter(adapter),
            )
            prepared: Callable[[], Request] = (
                images.start_now(given, prompt, make)
                if images is not None and given
                else partial(replace, make(prompt=prompt))
            )

        @python_names()
        def finish() -> PreparedRequest:
            request = prepared()
            if prompt.messages is not None:  # as rendered by the chat template
                text = processor.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
                request = replace(request, prompt=text)
            with processor.naming_errors(prompt, sampling, request):
                request = request if grammars is None else grammars.bind_now(request)
            return PreparedRequest(request, processor.answers(prompt, sampling, request), lora_request)

        return finish

    def _pooling_requests(
        self,
        prompts: GivenInput | Sequence[GivenInput],
        given: PoolingParams,
        lora_request: GivenLora,
        adapter: str | None,
        options: VectorOptions,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[PreparedRequest]:
        """Return a request with pooling for each prompt, which may be a chat."""
        options.check(self._serving.pooler, self._serving.hidden_size)
        many, _ = list_prompts(prompts)
        loras: list[Any] = one_each("lora_request", lora_request, (LoRARequest, NoneType), len(many))
        sampling = EMBED_SAMPLING
        if given.truncate_prompt_tokens is not None:
            sampling = replace(sampling, truncate_prompt_tokens=given.truncate_prompt_tokens)
        requests: list[PreparedRequest] = []
        for i, (one, lora) in enumerate(zip(many, loras, strict=True)):
            with errors_named(f"prompts[{i}]"):
                parsed = parse_pooled(one)
                parsed = parsed._replace(prompt=change_prompt(parsed.prompt, tokenization_kwargs))
                salted = sampling if parsed.cache_salt is None else replace(sampling, cache_salt=parsed.cache_salt)
                requests.append(
                    self._start_request(
                        salted, options.prompted(self._serving.pooler, parsed.prompt), lora or adapter
                    )()
                )
        return requests

    def _pair_requests(
        self,
        pairs: Sequence[tuple[GivenPrompt, GivenPrompt]],
        given: PoolingParams,
        lora_request: GivenLora,
        adapter: str | None,
        chat_template: str | None,
    ) -> list[PreparedRequest]:
        """Return a request for each pair of texts, which the model's classification head scores.

        Args:
            chat_template: joins the texts, as messages of the roles "query" and "document"; None: the tokenizer does.
        """
        pooler, requests = require_classifier(self._serving, for_pairs=True), list[PreparedRequest]()
        if isinstance(lora_request, Sequence):
            raise InvalidArgument("lora_request", "must be one adapter for all pairs")
        for i, pair in enumerate(pairs):
            with errors_named(f"data_2[{i}]"):
                first, second = (parse_prompt(one).prompt.text for one in pair)
                if first is None or second is None:
                    raise InvalidArgument("prompt", "must be a text: a cross-encoder joins the texts of a pair")
                joined = Prompt(text=first, text_pair=second)
                if chat_template is not None:
                    joined = self._render_pair(first, second, chat_template)
                prompt = classifiable(self._serving.input_processor, joined, pooler, given.truncate_prompt_tokens)
                requests.append(self._start_request(EMBED_SAMPLING, prompt, lora_request or adapter)())
        return requests

    def _render_pair(self, first: str, second: str, chat_template: str) -> Prompt:
        """Return the token ids of a pair of texts that a chat template joins."""
        messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        options = build_chat_options(chat_template=chat_template, add_generation_prompt=False)
        chat = Prompt(messages=messages, chat_options=replace(options, add_special_tokens=True))
        return Prompt(token_ids=self._serving.input_processor.tokenize(chat))

    def _find_adapter(self, given: str | LoRARequest | None) -> LoadedAdapter | None:
        """Return the adapter of a name or a LoRARequest, which is loaded if needed.

        At the limit of loaded adapters, the one that was loaded by a LoRARequest and used longest ago is unloaded.

        Raises:
            NotFound: no adapter of this name is loaded, and no path is given.
            InvalidArgument: another adapter was loaded under this name by `load_adapter` or an option.
        """
        adapters = self._serving.adapters
        if given is None or isinstance(given, str):
            return adapters.find(given) if given else None
        if not isinstance(given, LoRARequest):
            raise InvalidArgument("lora_request", f"{given!r} is not a LoRARequest")
        with self._lora_lock:
            loaded = {one.name: one for one in adapters.loaded()}
            mine, found = self._loras.get(given.name), loaded.get(given.name)
            if found is not None and given.load_inplace and given.path:
                self._loras[given.name] = given
                return adapters.load(given.name, given.path, replaces=True)
            if found is not None and given.path in ("", found.path) and (mine is None or mine == given):
                if mine is not None:
                    self._loras.move_to_end(given.name)
                return found
            if found is not None and mine is None:
                raise InvalidArgument(
                    "lora_request", f"{given.name!r} is loaded from {found.path}; choose another name"
                )
            if not given.path:
                return adapters.find(given.name)
            if found is not None:
                adapters.unload(given.name)
            del loaded
            while self._loras and len(adapters.loaded()) >= adapters.max_num:
                oldest, _ = self._loras.popitem(last=False)
                if oldest in adapters.names():
                    adapters.unload(oldest)
            self._loras[given.name] = given
            try:
                return adapters.load(given.name, given.path)
            except BaseException:
                del self._loras[given.name]
                raise

    def _remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter that a LoRARequest of this number loaded; return False if there is none."""
        self._check_usable()
        with self._lora_lock:
            names = [name for name, one in self._loras.items() if one.lora_int_id == lora_id]
            for name in names:
                del self._loras[name]
                with contextlib.suppress(NotFound):  # unloaded by `unload_adapter`
                    self._serving.adapters.unload(name)
            return bool(names)

    def _list_loras(self) -> set[int]:
        """Return the numbers of the adapters that LoRARequests loaded."""
        with self._lora_lock:
            names = {one.name for one in self._serving.adapters.loaded()}
            return {one.lora_int_id for name, one in self._loras.items() if name in names}

    def _decode_token(self, token_id: int) -> str:
        return self._serving.tokenizer.decode([token_id], skip_special_tokens=False)

    def _check_usable(self) -> None:
        """Raise an error if a call could never finish.

        Raises:
            Unavailable: the LLM is closed, or belongs to the process that this one was forked from.
        """
        if os.getpid() != self._process_id:
            raise Unavailable(
                f"this LLM belongs to process {self._process_id}: its engine thread and device do not survive fork(); "
                "create the LLM in the child process, or start children by the method 'spawn'"
            )
        if self._is_closed:
            raise Unavailable("the LLM is closed")

    def _finish_step(self) -> None:
        """Wait for the end of the step in flight, so that the counters include all of an ended call."""
        if self._is_closed:
            return
        self._check_usable()
        if self._has_thread:
            with contextlib.suppress(CancelledError):  # the engine has ended: no step is in flight
                self._serving.engine.call_soon(_nothing).result()


class SynchronousModel(LocalModel):
    """Base of `LLM` and `LLMEngine`, whose calls return when they are done."""

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Release device memory until `wake_up`; requires `enable_sleep_mode`.

        Args:
            level: 0 only pauses generation, 1 keeps the weights in host memory, 2 discards them. The KV cache is freed.
            mode: "abort" ends running requests, "wait" lets them end, "keep" continues them after `wake_up`. Calls
                during the sleep raise Unavailable, or wait with "keep".
        """
        self._check_usable()
        self._await(self._serving.engine.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore device memory; discarded weights are read from the model's files. Return True if all of it is there.

        Args:
            tags: "weights", "kv_cache" and "scheduling"; None for all.
        """
        self._check_usable()
        return self._await(self._serving.engine.wake_up(tags))

    def update_weights(self, weights: Weights, *, mode: PauseMode = "keep", version: str | int | None = None) -> str:
        """Replace the model's weights between two steps; return their version.

        Args:
            weights: a folder or GGUF file of the same model, or arrays by Hugging Face's names: a dictionary, which may
                be nested, or pairs. NumPy's, JAX's and PyTorch's arrays are accepted. They may have some of the model's
                tensors: all of those that are stored together, such as queries, keys and values.
            mode: "keep" recomputes running requests from their tokens, and continues them with the new weights. "wait"
                lets them end first, "abort" ends them.
            version: name of the weights, which outputs report; None counts the updates.

        Raises:
            InvalidArgument: a tensor is missing, unknown, misshapen or not finite. Names, shapes and types are checked
                before anything is changed. If a later check fails, the weights are asleep until a complete update or
                `wake_up` succeeds.
            Unsupported: the model's weights cannot be replaced; states why.
        """
        self._check_usable()
        return self._await(self._serving.update_weights(weights, mode, version))

    def is_sleeping(self) -> bool:
        """Return True between `sleep` and `wake_up`."""
        return self._serving.engine.is_paused

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request; return True. Errors are those of `LLM.generate`."""
        self._check_usable()
        return self._find_adapter(lora_request) is not None

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter that a LoRARequest with this `lora_int_id` loaded; return False if there is none."""
        return self._remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id` of every adapter that a LoRARequest loaded."""
        return self._list_loras()

    def _await(self, future: Future[_ResultT]) -> _ResultT:
        """Return the result of a command of the engine, whose steps the caller of an `LLMEngine` runs."""
        while not self._has_thread and not future.done():
            self._serving.engine.step()
        return future.result()


class AsynchronousModel(LocalModel):
    """Base of `AsyncLLM`, whose calls are coroutines."""

    @property
    def errored(self) -> bool:
        """True if the engine has failed."""
        return self._serving.engine.failure is not None

    @property
    def is_running(self) -> bool:
        """True until the engine fails or the object is closed."""
        return not (self._is_closed or self.errored)

    @property
    def is_stopped(self) -> bool:
        """True after the engine has failed, or the object was closed."""
        return not self.is_running

    @property
    def dead_error(self) -> BaseException:
        """The error with which calls fail after the engine has failed."""
        return self._serving.engine.failure or Unavailable("the LLM is closed")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks of the model, as `supported_tasks`."""
        return self.supported_tasks

    async def is_tracing_enabled(self) -> bool:
        """Return False: only servers export traces."""
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request, as `LLM.add_lora`."""
        self._check_usable()
        return await asyncio.to_thread(self._find_adapter, lora_request) is not None

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter, as `LLM.remove_lora`."""
        return self._remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers of loaded adapters, as `LLM.list_loras`."""
        return self._list_loras()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Release device memory until `wake_up`, as `LLM.sleep`."""
        self._check_usable()
        await asyncio.wrap_future(self._serving.engine.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore device memory, as `LLM.wake_up`."""
        self._check_usable()
        return await asyncio.wrap_future(self._serving.engine.wake_up(tags))

    async def update_weights(
        self, weights: Weights, *, mode: PauseMode = "keep", version: str | int | None = None
    ) -> str:
        """Replace the model's weights between two steps, as `LLM.update_weights`."""
        self._check_usable()
        begun = await asyncio.to_thread(self._serving.update_weights, weights, mode, version)
        return await asyncio.wrap_future(begun)

    async def is_sleeping(self) -> bool:
        """Return True between `sleep` and `wake_up`, and during a pause that keeps requests."""
        return self._serving.engine.is_paused


def _read_hf_config(name: str, options: ModelOptions, advice: str) -> ConfigView:
    fields = read_hf_fields(options)
    text = fields.get("text_config") if name == "hf_text_config" else None
    return ConfigView(name, advice, **(text if isinstance(text, Mapping) else fields))


def _nothing() -> None:
    """Do nothing, on the engine thread."""


def list_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Return the prompts of a call, which may be an iterator, and True if it is one prompt instead of several."""
    prompts = _to_list(prompts)
    many: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    if isinstance(prompts, str | Mapping):
        return many, True
    is_one = bool(many) and all(isinstance(one, Integral) for one in many)
    if not is_one:
        return many, False
    return [[one if isinstance(one, int) else int(one) for one in many]], True  # NumPy's integers become Python's


def _to_list(given: Any) -> Any:
    """Return an array of NumPy or JAX, or a tensor of PyTorch, as a list; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def parse_prompt(prompt: GivenPrompt) -> ParsedPrompt:
    """Return a prompt as the input processor takes it.

    Raises:
        InvalidArgument: it has several forms or none.
        Unsupported: it is neither text nor token ids nor embeddings.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(Prompt(text=prompt))
    if not isinstance(prompt, Mapping):
        token_ids = _to_list(prompt)
        if not isinstance(token_ids, Sequence):
            raise InvalidArgument("prompts", f"{str(prompt)[:80]} of type {type(prompt).__name__} is no prompt")
        return ParsedPrompt(Prompt(token_ids=token_ids))
    fields: dict[str, Any] = {name: value for name, value in prompt.items() if value is not None}
    if "encoder_prompt" in fields:
        raise Unsupported("prompts: encoder_prompt is not supported: prompts are text, token ids or prompt_embeds")
    refuse_processor_options(fields.pop("mm_processor_kwargs", None), "prompts: mm_processor_kwargs")
    if "prompt_token_ids" in fields:
        fields.pop("prompt", None)  # their text, as in vLLM
    images, _ = parse_images(fields.pop("multi_modal_data", None)), fields.pop("multi_modal_uuids", None)
    salt, forms = fields.pop("cache_salt", None), ("prompt", "prompt_token_ids", "prompt_embeds")
    if fields.keys() - set(forms) or len(fields) != 1:
        raise InvalidArgument("prompts", f"{sorted(fields)} given; must be one of {', '.join(forms)}")
    text, token_ids, embeds = map(fields.get, forms)
    given = None if embeds is None else to_host_array(embeds)
    return ParsedPrompt(Prompt(text, token_ids, embeds=given, images=images), salt)


def parse_pooled(prompt: GivenInput) -> ParsedPrompt:
    """Return a prompt to pool as the input processor takes it: as `parse_prompt` does, or a chat.

    A chat is rendered without the start of the assistant's message by default, as in vLLM's EmbeddingChatRequest.
    """
    given: Any = prompt
    if not isinstance(given, Mapping) or given.get("messages") is None:
        return parse_prompt(given)
    fields = {name: value for name, value in given.items() if value is not None}
    messages, salt = fields.pop("messages"), fields.pop("cache_salt", None)
    if unknown := fields.keys() - ChatToPool.__annotations__.keys():
        raise InvalidArgument("prompts", f"{sorted(unknown)} given with messages; remove them")
    fields.setdefault("add_generation_prompt", False)
    return ParsedPrompt(Prompt(messages=messages, chat_options=build_chat_options(**fields)), salt)


def change_prompt(prompt: Prompt, tokenization_kwargs: Mapping[str, Any] | None) -> Prompt:
    """Return a prompt with options of tokenization.

    Raises:
        InvalidArgument: a value is invalid.
    """
    given = check_tokenization(tokenization_kwargs)
    changes = {name: value for name, value in given.items() if name in PROMPT_TOKENIZATION}
    for name, value in changes.items():
        if value not in PROMPT_TOKENIZATION[name]:
            raise InvalidArgument(f"tokenization_kwargs.{name}", f"{value!r} is not one of {PROMPT_TOKENIZATION[name]}")
    return replace(prompt, **changes) if changes else prompt


def apply_changes(
    params: Sequence[GivenRequest],
    tokenization_kwargs: Mapping[str, Any] | None,
    salts: Sequence[str | None],
    priority: int | Sequence[int] | None,
) -> list[GivenRequest]:
    """Return requests with the sampling parameters that other arguments of a call set."""
    priorities = one_each("priority", priority, (int, NoneType), len(params))
    changed = []
    for one, salt, first in zip(params, salts, priorities, strict=True):
        changes = get_sampling_changes(tokenization_kwargs, salt, first)
        sampling = change_sampling(one.sampling, changes) if changes else one.sampling
        changed.append(GivenRequest(change_prompt(one.prompt, tokenization_kwargs), sampling))
    return changed


def _get_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options by jpaged's names; vLLM's names are replaced, and logged.

    Raises:
        InvalidArgument: an option is invalid, or one of vLLM that is not supported; names it.
    """
    options = {name: value for name, value in given.items() if value is not None}
    from jpaged.cli.vllm_flags import describe_variables, translate_options  # the tables of vLLM's names

    options, notes = translate_options(options)
    for note in (*notes, *describe_variables(vllm_environment())):
        _LOG.info("%s", note)
    return options


def one_each(field: str, given: Any, kinds: tuple[type, ...], count: int) -> list[Any]:
    """Return one value for each: the given one repeated, or the given list.

    Raises:
        InvalidArgument: the list has another length, or a value has another type.
    """
    if isinstance(given, kinds):
        return [given] * count
    names = " or ".join(kind.__name__ for kind in kinds)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidArgument(field, f"{given!r} is neither {names} nor a list of them")
    many = list(given)
    if len(many) != count:
        raise InvalidArgument(field, f"{len(many)} given for {count} prompts")
    for one in many:
        if not isinstance(one, kinds):
            raise InvalidArgument(field, f"{one!r} is not {names}")
    return many
