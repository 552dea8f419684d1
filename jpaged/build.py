"""Options -> running objects: the only module that depends on every layer.

model folder -> config, tokenizer -> parameters -> executor (pool, programs) -> engine, input processor

With `data_parallel_size` there are several executors and engines, on separate devices, in one `DataParallelEngine`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged.chat import MAX_CHAT_TEMPLATE_BYTES, ChatOptions
from jpaged.checkpoints.adapters import AdapterReader
from jpaged.checkpoints.gguf.file import is_gguf
from jpaged.checkpoints.gguf.tokenizer import read_tokenizer
from jpaged.checkpoints.hub import (
    choose_dtype,
    find_folder,
    find_model,
    find_tokenizer,
    fingerprint,
    read_config,
    read_default_sampling,
    read_json,
)
from jpaged.checkpoints.names import weight_bytes
from jpaged.checkpoints.pooler import CheckpointPooler, read_pooler
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.weights import (
    PackStored,
    WeightReader,
    load_params,
    random_params,
    read_head,
    read_kv_scales,
    read_mtp,
)
from jpaged.config import EngineConfig, LinearBackend, ModelOptions, compile_cache_dir, platform_default
from jpaged.config.option import parse_json_object
from jpaged.config.speculative import NAME as SPECULATIVE
from jpaged.device.compilation.compile import program_caches, set_up_compile_cache
from jpaged.device.compilation.lowering import get_encoder_bytes, takes_images
from jpaged.device.compilation.memory_plan import DeviceMemory
from jpaged.device.device_info import prepare_gpu_memory
from jpaged.device.executor import JaxExecutor
from jpaged.device.kv_scales import kv_dtype, name_of_kv_dtype
from jpaged.device.linear import choose_activation_dtype, choose_linear_backend, leaf_packer, served_config
from jpaged.device.mesh import MeshPlacement, first_device, num_stages, serving_meshes
from jpaged.device.multihost.executor import MultiHostExecutor
from jpaged.device.multihost.executor import follow as run_steps
from jpaged.device.multihost.handshake import Follower, Leader
from jpaged.device.step_sizes import DeviceAttention
from jpaged.engine.data_parallel import DataParallelEngine, shares
from jpaged.engine.engine import Engine
from jpaged.engine.executor import BlockPort, Executor, Geometry, Progress
from jpaged.engine.executor.io import RopeLengthLimits
from jpaged.engine.kv_cache.connector import import_connector
from jpaged.engine.kv_cache.offload.connector_tier import open_stores
from jpaged.engine.kv_cache.pinned import pin_limit
from jpaged.engine.scheduler.multi_step import choose_bound_s
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.decoder.config import apply_lossy_window, describe_lossy_cache
from jpaged.models.eagle import mtp_config
from jpaged.models.hf_config import to_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.sharding import with_dp_attention, with_parallel_experts
from jpaged.service.chat.formats import AnswerFormat, has_built_in_tools, parser_for
from jpaged.service.chat.output_config import ChatOutputConfig
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import Adapters, BackendFacts, LoadedModel, Vision
from jpaged.service.structured_output.compiler import ServedGrammars
from jpaged.service.tokenizer import HuggingFaceTokenizer, TemplateSettings, load_tokenizer
from jpaged.service.tokenizer_parts import TokenizerParts
from jpaged.types import ModelInfo

if TYPE_CHECKING:
    from jpaged.device.vision import JaxVisionEncoder
    from jpaged.models.vision.processors import PatchProcessor

logger = logging.getLogger(__name__)


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Source of a model; its folder may be a GGUF file."""

    name: str
    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    pooler: CheckpointPooler = CheckpointPooler()  # noqa: RUF009 - frozen

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a sequence."""
        return frozenset(self.config.eos_token_ids) or self.tokenizer.eos_token_ids


def build(
    options: EngineConfig,
    progress: Progress = ignore_progress,
    leader: Leader | None = None,
    *,
    is_offline: bool = False,
) -> LoadedModel:
    """Load a model and compile its programs; return it with an engine that is ready but not started.

    Args:
        options: the options as given; the result has the resolved ones.
        progress: receives the progress: weights, programs, the pool.
        leader: this process's role as process 0 of several; the others run `follow`.
        is_offline: unless an option decides, wait for all programs if their sizes could affect results.

    Raises:
        InvalidArgument, NotFound, Unsupported: the model or an option is invalid; states which and why.
    """
    with _paused_gc():
        return _build(options, progress, leader, is_offline=is_offline).with_images()


@contextlib.contextmanager
def _paused_gc() -> Iterator[None]:
    """Pause the garbage collector: a start makes a million objects that stay, and would look at each several times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _build(options: EngineConfig, progress: Progress, leader: Leader | None, *, is_offline: bool) -> LoadedModel:
    if (transfer := options.cache.kv_transfer) is not None:
        import_connector(transfer)  # errors before weights are read
    source, model, places = _place(options, progress, starts_templates=not is_offline)
    options = _with_length(options, source)
    if model.config.num_recurrent_layers:
        options.check_recurrent(model.config.architecture)
    if model.config.is_encoder:
        options = options.for_encoder(model.config.architecture)
    if is_offline and options.startup.wait_for_all_programs is None:
        options = options.replace(wait_for_all_programs=not _has_equal_programs(model, options, places[0]))
    answer_format, device = _answer_format(source, options.model), first_device(places[0].mesh)
    adapters = _adapters(options, source, model, places[0], progress)
    images = _vision(source, model, options, first_device(places[0].mesh), progress)
    executors = _make_executors(source, model, options, places, progress, leader)
    executor, geometry = executors[0], executors[0].geometry
    if images is not None and geometry.embed_width:
        images[1].set_programs(executor.programs)
    runs: list[Executor[Any, Any]] = [*executors]
    if leader is not None:
        leader.agree(_findings(source, executor, options.model.overrides))
        runs = [*MultiHostExecutor.of_replicas(executor, leader, options.parallel.data_parallel_size)]
    for index, one in enumerate(runs):
        one.warm_up(_get_progress(index, len(runs), progress))
    if leader is not None:
        leader.agree({})  # replicas in other processes are ready, too
    _say([*executor.memory_plan.lines(), *describe_lossy_cache(options)], progress)
    resolved = _resolve(options, source.name, executor, model.dtype.name, places[0])
    whitespace = options.model.whitespace_pattern
    grammars = ServedGrammars(source.tokenizer, geometry.vocab_size, source.eos_token_ids, whitespace=whitespace)
    engines = _make_engines(source, options, resolved, runs, grammars)
    return LoadedModel(
        engine=engines[0] if len(engines) == 1 else DataParallelEngine(engines),
        input_processor=_input_processor(source, geometry, options.model, answer_format),
        tokenizer=source.tokenizer,
        model=_model_info(source, resolved, geometry, answer_format, is_offline=is_offline),
        backend=BackendFacts(
            platform=device.platform,
            device_kind=device.device_kind,
            num_devices=places[0].mesh.size * len(runs),
            attention=executor.step.backend,
            jax_version=metadata.version("jax"),
        ),
        config=resolved,
        adapters=adapters,
        grammars=grammars,
        hidden_size=source.config.hidden_size,
        checkpoint=fingerprint(source.folder, options.model.overrides),
        pooler=source.pooler,
        block_port=_open_block_port(options, places[0]),
        vision=Vision(*images) if images is not None and geometry.embed_width else None,
    )


def _vision(
    source: ModelSource, model: Model, options: EngineConfig, device: Any, progress: Progress
) -> tuple[PatchProcessor, JaxVisionEncoder] | None:
    """Return the parts that read images; None if the model has none, or unsupported ones, which is reported."""
    config, given = model.config.vision, options.model
    if config is None or not takes_images(model.config, options):
        return None
    from jpaged.checkpoints.weights import load_vision
    from jpaged.device import vision  # only of models that have an encoder
    from jpaged.models.vision.processors import PROCESSOR_FILES, read_processor

    tokens = source.tokenizer.vocabulary if isinstance(source.tokenizer, HuggingFaceTokenizer) else {}
    try:
        paths = (source.folder / name for name in PROCESSOR_FILES)
        processor = read_processor(config, [read_json(path) if path.is_file() else {} for path in paths], tokens)
        if given.load_format == "dummy":
            params = vision.random_params(config, model.dtype, device, given.seed)
        else:
            params = load_vision(config, source.folder, model.dtype, device)
    except (InvalidArgument, Unsupported) as error:
        progress(f"images are refused: {error}", 1, 1)
        return None
    return processor, vision.JaxVisionEncoder(config, params, processor.max_patches)


def _open_block_port(options: EngineConfig, place: MeshPlacement) -> BlockPort | None:
    """Return the data port that the options select; raise InvalidArgument if the role or the address has none."""
    if (port := options.cache.data_port) is None:
        return None
    port.check(options.roles.role)
    from jpaged.device.block_port import JaxBlockPort

    return JaxBlockPort(port, first_device(place.mesh))


def _resolve(options: EngineConfig, name: str, executor: JaxExecutor, dtype: str, place: MeshPlacement) -> EngineConfig:
    """Return the options with the values that the server chose for those that were left to it."""
    geometry, platform = executor.geometry, first_device(place.mesh).platform
    return options.replace(
        max_model_len=geometry.max_model_len,
        num_blocks=geometry.num_blocks,
        kv_cache_memory_bytes=executor.memory_plan.pool_bytes,
        max_pinned_blocks=pin_limit(options.server.max_pinned_blocks, geometry),
        memory_utilization=executor.memory_plan.request.memory_utilization,
        block_size=geometry.block_size,
        state_checkpoint_interval=geometry.state_checkpoint_interval or None,
        max_num_seqs=geometry.max_num_seqs,
        max_num_batched_tokens=geometry.max_num_batched_tokens,
        wait_for_all_programs=executor.waits_for_all,
        dtype=dtype,
        tensor_parallel_size=place.num_parts,
        attention_backend=executor.step.backend,
        linear_backend=executor.step.linear_backend,
        activation_dtype=executor.step.activation_dtype,
        kv_cache_dtype=name_of_kv_dtype(executor.step.layout.dtype),
        lossy_kv_sinks=geometry.num_sink_tokens if options.lossy.lossy_kv_window else None,
        served_model_name=options.server.served_model_name or name,
        max_inter_token_latency=choose_bound_s(executor.rates)
        if options.scheduler.max_inter_token_latency is None
        else options.scheduler.max_inter_token_latency,
        overlap=has_overlap(options.scheduler.overlap, platform, len(os.sched_getaffinity(0))),
        max_messages_per_second=options.server.max_messages_per_second
        or platform_default("max_messages_per_second", platform),
    )


def has_overlap(given: bool | None, platform: str, num_cores: int) -> bool:
    """Return whether steps overlap: on one core, host and device take turns anyway, and a new request waits longer."""
    return given if given is not None else platform != "cpu" or num_cores > 1


def _has_equal_programs(model: Model, options: EngineConfig, where: MeshPlacement) -> bool:
    """Return True if a row's results have the same bits in programs of all sizes.

    XLA may sum in another order in a program of another size; the CPU's kernels do not. Rounds of a draft model sample
    with other noise than single steps, which run until their program is ready.
    """
    attention = DeviceAttention.on(model, options, where.mesh)
    linear = choose_linear_backend(options.model.linear_backend, where.mesh, where.layer_mode)
    return linear == attention.choose(attention.sizes()).backend == "cpu" and not options.has_draft


def _make_engines(
    source: ModelSource,
    options: EngineConfig,
    resolved: EngineConfig,
    runs: Sequence[Executor[Any, Any]],
    grammars: ServedGrammars,
) -> list[Engine]:
    """Return an engine for each executor, with KV event publishers if configured."""
    queues = shares(options.scheduler.max_num_queued_reqs, len(runs))
    stores = open_stores(options.cache, runs[0].host_blocks, runs[0].geometry, len(runs))
    engines = [
        Engine(
            one,
            source.tokenizer,
            resolved.replace(max_num_queued_reqs=queue),
            lengths=RopeLengthLimits(source.config.max_prefix_len, source.config.outgrown_len),
            eos_token_ids=source.eos_token_ids,
            make_masks=grammars.make_masks,
            stores=store,
        )
        for one, queue, store in zip(runs, queues, stores, strict=True)
    ]
    return _build_kv_events(resolved, engines)


def _build_kv_events(options: EngineConfig, engines: list[Engine]) -> list[Engine]:
    """Attach a KV event publisher to each replica if configured."""
    if options.kv_events.kv_events_endpoint is None:
        return engines
    from jpaged.kvevents.encoding import Encoder  # imports msgpack
    from jpaged.kvevents.publisher import Publisher  # imports pyzmq

    publishers: list[Publisher] = []
    try:
        for rank, engine in enumerate(engines):
            assert engine.prefixes is not None  # options that contradict this are rejected
            told = engine.geometry
            encoder = Encoder(told.block_size, told.windows, rank, num_sink_tokens=told.num_sink_tokens)
            publishers.append(Publisher(options.kv_events, encoder))
            engine.prefixes.changes.publish_to(publishers[-1])
    except InvalidArgument:
        for publisher in publishers:
            publisher.close()
        raise
    return engines


def _adapters(
    options: EngineConfig, source: ModelSource, model: Model, where: MeshPlacement, progress: Progress
) -> Adapters:
    """Return the adapter registry of a model, with the adapters of the options loaded."""
    lora = options.lora
    if not lora.enable_lora:
        return Adapters()
    folder = None if options.model.load_format == "dummy" else source.folder
    reader = AdapterReader(
        model,
        where.layer_mode,
        where.num_parts,
        lora.max_lora_rank,
        has_vectors=lora.enable_dora,
        has_output=lora.enable_lm_head_lora,
        has_input=lora.enable_embedding_lora,
        has_experts=lora.enable_expert_lora,
        checkpoint=folder,
    )
    model_name = options.server.served_model_name or source.name
    adapters = Adapters(reader, lora.max_cpu_loras, model_name, options.server.served_model_aliases)
    for done, (name, path) in enumerate(lora.adapters):
        progress(f"adapter {name}", done, len(lora.adapters))
        try:
            adapters.load(name, path)
        except (InvalidArgument, NotFound) as error:
            problem = error.problem if isinstance(error, InvalidArgument) else error
            raise InvalidArgument("lora", f"{name}={path}: {problem}") from error
        except Unsupported as error:
            raise Unsupported(f"lora: {name}={path}: {error}") from error
    return adapters


@dataclass(frozen=True, slots=True)
class Preview:
    """Settings that a model would be served with here, determined without its weights.

    Attributes:
        dtype_reason: why `dtype` is not the checkpoint's; empty if it is, or was chosen.
        weight_bytes: per device.
        memory_bytes: memory of a device for weights, programs and the pool; None if not reported.
        passed_over: a line for each backend of this platform that cannot run, with the reason.
    """

    architecture: str
    dtype: str
    dtype_reason: str
    attention_backend: str
    linear_backend: str
    activation_dtype: str
    kv_cache_dtype: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_utilization: float
    weight_bytes: int
    memory_bytes: int | None
    passed_over: tuple[str, ...]


def preview(options: EngineConfig) -> Preview:
    """Determine the settings of `build`, reading only the config and the tokenizer of a model.

    Raises:
        InvalidArgument, NotFound, Unsupported: as `build`.
    """
    if (transfer := options.cache.kv_transfer) is not None:
        import_connector(transfer)  # errors before weights are read
    reasons: list[str] = []
    source, model, places = _place(options, lambda line, done, total: reasons.append(line))
    options = _with_length(options, source)
    where, num_places = places[0], len(places)
    device = first_device(where.mesh)
    attention = DeviceAttention.on(model, options, where.mesh)
    sizes = attention.sizes()
    if model.config.num_recurrent_layers:
        options.check_recurrent(model.config.architecture)
    if model.config.is_encoder:
        options = options.for_encoder(model.config.architecture)
    held = int(weight_bytes(model.config, model.dtype.itemsize, where.num_parts) / num_stages(where.mesh))
    held += get_encoder_bytes(model, options).weights
    memory = DeviceMemory.of(device, 0, where.mesh.size * num_places)
    linear_backend = choose_linear_backend(options.model.linear_backend, where.mesh, where.layer_mode)
    return Preview(
        architecture=source.config.architecture,
        dtype=model.dtype.name,
        dtype_reason=" ".join(reasons),
        attention_backend=attention.choose(sizes).backend,
        linear_backend=linear_backend,
        activation_dtype=choose_activation_dtype(options.model.activation_dtype, linear_backend, model.config),
        kv_cache_dtype=name_of_kv_dtype(kv_dtype(options.cache.kv_cache_dtype, model.dtype)),
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        memory_utilization=options.cache.memory_utilization or platform_default("memory_utilization", device.platform),
        weight_bytes=held,
        memory_bytes=memory.total_bytes,
        passed_over=tuple(attention.passed_over()),
    )


def follow(options: EngineConfig, progress: Progress, follower: Follower) -> None:
    """Load this process's part of the model, and run the steps of process 0 until it ends.

    Raises:
        InvalidArgument, NotFound, Unsupported: as `build`.
        InternalError: a step failed.
    """
    if (transfer := options.cache.kv_transfer) is not None:
        import_connector(transfer)  # errors before weights are read
    source, model, places = _place(options, progress)
    options = _with_length(options, source)
    (executor,) = _make_executors(source, model, options, places, progress, follower)
    follower.agree(_findings(source, executor, options.model.overrides))
    executor.warm_up(progress)
    follower.agree({})
    parallel = options.parallel
    num_processes, process = parallel.num_processes or 1, parallel.process_id or 0
    is_first_of_replica = process % (num_processes // parallel.data_parallel_size) == 0
    run_steps(executor, follower, reports=is_first_of_replica)


def _place(
    options: EngineConfig, progress: Progress, *, starts_templates: bool = False
) -> tuple[ModelSource, Model, list[MeshPlacement]]:
    """Return the model, and the devices of each replica; report why its data type is not the checkpoint's."""
    parallel = options.parallel
    prepare_gpu_memory()
    sizes = parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.context_parallel_size
    meshes = serving_meshes(*sizes, parallel.pipeline_parallel_size)
    source = find_source(options.model, starts_templates=starts_templates)
    source = replace(source, config=quantized_here(source.config, options.model.quantization))
    config = with_parallel_experts(source.config) if parallel.enable_expert_parallel else source.config
    config = with_dp_attention(config) if parallel.enable_dp_attention else config
    config = served_config(apply_lossy_window(config, options), options.model.linear_backend, meshes[0])
    dtype, reason = choose_dtype(options.model.dtype, config, first_device(meshes[0]).platform, source.folder)
    _say(() if reason is None else (reason,), progress)
    model = Model(config, dtype)
    return source, model, [MeshPlacement.of(model, mesh) for mesh in meshes]


def _with_length(options: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the options with the length that an embedding model was published for, unless one is chosen."""
    most = source.pooler.max_len
    if most is None or options.model.max_model_len is not None:
        return options
    return options.replace(max_model_len=min(most, source.config.max_model_len))


def _findings(source: ModelSource, executor: JaxExecutor, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that every process determines itself and that must be equal in all."""
    geometry = executor.geometry
    sizes = {name: str(getattr(geometry, name)) for name in geometry.__slots__}
    return {
        "checkpoint": fingerprint(source.folder, overrides),
        "dtype": executor.step.model.dtype.name,
        "attention_backend": executor.step.backend,
        "linear_backend": executor.step.linear_backend,
        "activation_dtype": executor.step.activation_dtype,
        "kv_cache_dtype": name_of_kv_dtype(executor.step.layout.dtype),
        **sizes,
    }


def read_hf_fields(options: ModelOptions) -> Mapping[str, object]:
    """Return the fields of a model's config.json; those that say the same if its file is of llama.cpp."""
    folder = find_model(options)
    path = folder / "config.json"
    return {**read_json(path), **options.overrides} if path.is_file() else to_hf(read_config(folder, options.overrides))


def find_source(options: ModelOptions, *, starts_templates: bool = False) -> ModelSource:
    """Find a model by name (`demo`, a folder, a GGUF file or a hub id) and its tokenizer; see `load_tokenizer`."""
    folder = find_model(options)
    config = read_config(folder, options.overrides)
    if options.skip_tokenizer_init:
        pooler = read_pooler(folder, options.overrides, config, {})
        return ModelSource(options.model, folder, config, NoTokenizer(config.vocab_size), pooler)
    of_tokenizer = find_tokenizer(options, folder)
    try:
        tokenizer = load_tokenizer(
            of_tokenizer,
            vocab_size=config.vocab_size,
            parts=_gguf_parts(of_tokenizer),
            parse_special_tokens=options.parse_special_tokens,
            chat_template=_template_in(options.chat_template),
            trusts_request_templates=options.trust_request_chat_template,
            starts_templates=starts_templates,
            templates=TemplateSettings(
                options.chat_template_content_format,
                _default_template_kwargs(options.default_chat_template_kwargs),
                options.efforts,
            ),
        )
    except InvalidArgument as error:
        if of_tokenizer == folder or error.field != "model":
            raise
        raise InvalidArgument("tokenizer", error.problem) from error
    if of_tokenizer != folder:
        _check_tokenizer(tokenizer, of_tokenizer, config)
    tokens = tokenizer.vocabulary if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    pooler = read_pooler(folder, options.overrides, config, tokens)
    return ModelSource(options.model, folder, config, tokenizer, pooler)


def _check_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig) -> None:
    """Check a tokenizer from elsewhere than the model's folder.

    Raises:
        InvalidArgument: there is none, or its tokens are not in the model's vocabulary.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise InvalidArgument("tokenizer", f"{folder} has no tokenizer")
    special = tokenizer.special_tokens  # some checkpoints have more of these than embeddings
    largest = max((token_id for token, token_id in tokenizer.vocabulary.items() if token not in special), default=0)
    if largest >= config.vocab_size:
        raise InvalidArgument(
            "tokenizer",
            f"{folder} has token ids up to {largest}; the model's vocabulary of {config.vocab_size} tokens ends at "
            f"{config.vocab_size - 1}",
        )


_MAX_SHOWN = 200
_JINJA = frozenset("{}\n")
"""Characters of which a template has some, and the path of a file rarely any; vLLM tells them apart by these, too."""


def _template_in(path: str | None) -> str | None:
    """Return the text of a file with a chat template, or the template that is given instead of a file.

    Raises:
        InvalidArgument: it cannot be read, is empty or too large.
    """
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_CHAT_TEMPLATE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not _JINJA.isdisjoint(path):
            data, text = path.encode(), path
        else:
            raise InvalidArgument("chat_template", f"{path} cannot be read: {error}") from error
    if not text.strip() or len(data) > MAX_CHAT_TEMPLATE_BYTES:
        problem = "is empty" if len(data) <= MAX_CHAT_TEMPLATE_BYTES else f"is over {MAX_CHAT_TEMPLATE_BYTES} bytes"
        raise InvalidArgument("chat_template", f"{path[:_MAX_SHOWN]} {problem}")
    return text


def _default_template_kwargs(text: str | None) -> dict[str, Any]:
    """Return the variables of chat templates that the options set.

    Raises:
        InvalidArgument: they are not a JSON object, or over a limit of requests.
    """
    if text is None:
        return {}
    field = "default_chat_template_kwargs"
    values = parse_json_object(field, text, '{"enable_thinking": false}')
    try:
        ChatOptions(template_kwargs=values)
    except InvalidArgument as error:
        raise InvalidArgument(field, error.problem) from error
    return values


def _gguf_parts(folder: Path) -> TokenizerParts | None:
    """Return the tokenizer parts of a GGUF file; None if it has none, or for a folder."""
    found = read_tokenizer(folder) if is_gguf(folder) else None
    if found is None:
        return None
    return TokenizerParts(
        fast=found.fast,
        slow=None,
        vocabulary=found.vocabulary,
        vocab_size=found.vocab_size,
        eos_token_id=found.eos_token_id,
        chat_template=found.chat_template,
        special_tokens={**found.special_tokens},
        tool_chat_template=found.tool_chat_template,
    )


def _make_executors(
    source: ModelSource,
    model: Model,
    options: EngineConfig,
    places: Sequence[MeshPlacement],
    progress: Progress,
    other: Leader | Follower | None,
) -> list[JaxExecutor]:
    """Return an executor with a pool for each replica; nothing is compiled yet.

    The weights are read once, and all replicas are in memory before the first pool is allocated, because it determines
    the size of the others.
    """
    attention = DeviceAttention.on(model, options, places[0].mesh)
    other_share = prepare_gpu_memory() if attention.device.platform == "gpu" else None
    _say((*filter(None, (other_share,)), *attention.reasons(), *attention.passed_over()), progress)
    # With several processes on CPUs, do not use the cache: programs loaded from it returned log-probabilities of other
    # sums
    # (jaxlib 0.10.2). Gloo identifies collectives only by their order, which loading seems to lose.
    is_told_by_order = other is not None and first_device(places[0].mesh).platform == "cpu"
    cache, kept = program_caches(
        None if is_told_by_order else compile_cache_dir(), [list(where.mesh.devices.flat) for where in places]
    )
    if any(kept) and not all(kept):
        progress("replicas without device 0 do not cache programs: cached ones could halt these TPUs", 1, 1)
    set_up_compile_cache(cache)
    draft = _draft(source, model, options, places[0], progress)
    pack_stored = _pack_stored(model, options, places[0]) if len(places) == 1 else None
    load = functools.partial(_load, model, source, options, places[0], pack_stored=pack_stored)
    params = load(progress)
    copies = [where.put(params) for where in places]
    del params
    given = options.model.load_format, options.cache.kv_cache_dtype
    scales = None if given[0] == "dummy" else read_kv_scales(source.folder, model.config, is_fp8=given[1] == "fp8")
    executors: list[JaxExecutor] = []
    for index, where in enumerate(places):
        executor = JaxExecutor.create(
            model,
            {**copies.pop(0), "kv_scales": scales},  # drop the reference, so that its packed weights can be freed
            options,
            mesh=where.mesh,
            num_pools=len(places) - index,
            least=None if other is None else other.least,
            keep=kept[index],
            draft=draft,
        )
        reader = _weight_reader(model, source, options, where, pack_stored, executor.step.linear_backend)
        executor.set_reader(reader, can_reload=len(places) == 1)
        _report_sizes(executor, _get_progress(index, len(places), progress))
        options = options.replace(num_blocks=executor.geometry.num_blocks)
        executors.append(executor)
    return executors


def _weight_reader(
    model: Model,
    source: ModelSource,
    options: EngineConfig,
    where: MeshPlacement,
    pack_stored: PackStored | None,
    linear_backend: LinearBackend,
) -> WeightReader:
    """Return the reader of weights for an executor that runs."""
    given = options.model

    def check(folder: Path) -> None:
        found = quantized_here(read_config(folder, given.overrides), given.quantization)
        for field in fields(found):
            mine, other = getattr(source.config, field.name, None), getattr(found, field.name)
            if field.name not in ("eos_token_ids", "widened_method") and mine != other:
                problem = f"{folder} has {field.name} {str(other)[:80]}; the model that is served has {str(mine)[:80]}"
                raise InvalidArgument("weights", problem)

    return WeightReader(
        model,
        source.folder,
        where.layer_mode,
        num_parts=where.num_parts,
        shardings=where.shardings,
        pack_stored=pack_stored,
        check_folder=check,
        packs_on_device=linear_backend != "cpu",
        has_kv_scales=options.cache.kv_cache_dtype == "fp8",
        placeholder=_random_params(options, where) if given.load_format == "dummy" else None,
    )


def _random_params(options: EngineConfig, where: MeshPlacement) -> Callable[[], Params]:
    seed = options.model.seed
    return lambda: random_params(where.model, where.layer_mode, seed=seed, shardings=where.shardings)


def _say(lines: Iterable[str], progress: Progress) -> None:
    for line in lines:
        progress(line, 1, 1)


def _report_sizes(executor: JaxExecutor, progress: Progress) -> None:
    geometry = executor.geometry
    pool_mib = geometry.num_blocks * geometry.bytes_per_block / 2**20
    progress(f"pool of {geometry.num_blocks} blocks of {geometry.block_size} tokens ({pool_mib:.0f} MiB)", 1, 1)
    progress(f"steps of up to {geometry.max_num_seqs} rows and {geometry.max_num_batched_tokens} tokens", 1, 1)


def _get_progress(index: int, num_replicas: int, progress: Progress) -> Progress:
    """Return a progress callback that names the replica if there are several."""
    if num_replicas == 1:
        return progress
    return lambda what, done, total: progress(f"replica {index}: {what}", done, total)


def _pack_stored(model: Model, options: EngineConfig, where: MeshPlacement) -> PackStored | None:
    """Return the packing of matrices that the CPU's kernel multiplies with; None for other backends."""
    linear = choose_linear_backend(options.model.linear_backend, where.mesh, where.layer_mode)
    if linear != "cpu":
        return None
    activations = choose_activation_dtype(options.model.activation_dtype, linear, model.config)
    return leaf_packer(model.config, where.mesh, activations).pack_stored


def _load(
    model: Model,
    source: ModelSource,
    options: EngineConfig,
    where: MeshPlacement,
    progress: Progress,
    pack_stored: PackStored | None = None,
) -> Params:
    if options.model.load_format == "dummy":
        progress("random weights", 1, 1)
        return _random_params(options, where)()

    def tensor(done: int, total: int, name: str) -> None:
        progress(f"weights {name}", done, total)

    return load_params(
        model,
        source.folder,
        where.layer_mode,
        num_parts=where.num_parts,
        shardings=where.shardings,
        progress=tensor,
        pack_stored=pack_stored,
    )


def _draft(
    source: ModelSource, model: Model, options: EngineConfig, where: MeshPlacement, progress: Progress
) -> tuple[Model, Params] | None:
    """Return the draft model or draft head with its parameters; None if there is none.

    Raises:
        InvalidArgument: it cannot be found or read, or its tokens differ from the model's.
        Unsupported: its kind is not supported.
    """
    given, speculation = options.model, options.speculation
    if speculation is None or not options.has_draft:
        return None
    if speculation.model is None:
        return _mtp(source, model, options, where, progress)
    field = f"{SPECULATIVE}.model"
    try:
        if options.has_head:
            folder = find_folder(speculation.model, download_dir=given.download_dir, token=given.hf_token)
            found = ModelSource(speculation.model, folder, read_head(folder), source.tokenizer)
        else:
            found = find_source(
                ModelOptions(model=speculation.model, download_dir=given.download_dir, hf_token=given.hf_token)
            )
        check_same_tokens(source.tokenizer, found.tokenizer)
        draft = Model(served_config(found.config, options.model.linear_backend, where.mesh), model.dtype)
        params = _load(draft, found, options, MeshPlacement.of(draft, where.mesh), progress)
    except (InvalidArgument, NotFound) as error:
        raise InvalidArgument(field, str(error).removeprefix("model: ")) from error
    except Unsupported as error:
        raise Unsupported(f"{field}: {error}") from error
    progress(f"draft model {found.name}", 1, 1)
    return draft, params


def _mtp(
    source: ModelSource, model: Model, options: EngineConfig, where: MeshPlacement, progress: Progress
) -> tuple[Model, Params]:
    """Return the MTP layer in a model's checkpoint, with its parameters; see `_draft`."""
    field = f"{SPECULATIVE}.method"
    try:
        is_random = options.model.load_format == "dummy"
        config = mtp_config(model.config) if is_random else read_mtp(source.folder, model.config)
        draft = Model(config, model.dtype)
        params = _load(draft, source, options, MeshPlacement.of(draft, where.mesh), progress)
    except InvalidArgument as error:
        raise InvalidArgument(field, f"mtp: {error}") from error
    except Unsupported as error:
        raise Unsupported(f"{field}: mtp: {error}") from error
    progress("MTP layer", 1, 1)
    return draft, params


def check_same_tokens(tokenizer: Tokenizer, of_draft: Tokenizer) -> None:
    """Compare the vocabularies of two tokenizers, if both are Hugging Face tokenizers.

    Raises:
        InvalidArgument: an id stands for different tokens.
    """
    if not (isinstance(tokenizer, HuggingFaceTokenizer) and isinstance(of_draft, HuggingFaceTokenizer)):
        return
    mine, others = tokenizer.vocabulary, of_draft.vocabulary
    for token in mine.keys() | others.keys():
        if mine.get(token) != others.get(token):
            raise InvalidArgument(
                "tokenizer",
                f"{token!r} is token {others.get(token)} of the draft, but {mine.get(token)} of the model; they must "
                "be the same",
            )


def _answer_format(source: ModelSource, options: ModelOptions) -> AnswerFormat:
    """Return the model's answer format: by option, or detected from its chat template."""
    tokenizer = source.tokenizer
    template = tokenizer.chat_template if isinstance(tokenizer, HuggingFaceTokenizer) else None
    found = parser_for(
        template,
        source.config.architecture,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )
    for option in ("tool_call_parser", "reasoning_parser"):
        part = found.tools if option == "tool_call_parser" else found.reasoning
        how = "from its chat template" if getattr(options, option) == "auto" else "by option"
        logger.info("%s of %s: %s (%s)", option, source.name, "none" if part is None else part.name, how)
    if found.tools is not None and has_built_in_tools(template or ""):
        logger.info(
            "the chat template of %s does not support tools: a built-in prompt describes them, in the Hermes format; "
            "--tool-call-parser none refuses tools instead",
            source.name,
        )
    return found


def _input_processor(
    source: ModelSource, geometry: Geometry, options: ModelOptions, answer_format: AnswerFormat
) -> InputProcessor:
    return InputProcessor(
        source.tokenizer,
        geometry if options.enable_prompt_embeds else replace(geometry, embed_width=0),
        eos_token_ids=source.eos_token_ids,
        seed=options.seed,
        max_logprobs=options.max_logprobs,
        answering=ChatOutputConfig(source.tokenizer, answer_format, source.eos_token_ids),
        generates=not (source.config.is_encoder or source.pooler.labels),
    )


def _model_info(
    source: ModelSource, resolved: EngineConfig, geometry: Geometry, answer_format: AnswerFormat, *, is_offline: bool
) -> ModelInfo:
    """Return the facts about a model for clients; offline, its chat template is not tried before the first chat."""
    config, tokenizer = source.config, source.tokenizer
    has_template = isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.chat_template is not None
    return ModelInfo(
        name=str(resolved.server.served_model_name),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=int(resolved.model.max_model_len or 0),
        dtype=resolved.model.dtype,
        num_layers=config.num_layers,
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eos_token_ids=tuple(sorted(source.eos_token_ids)),
        has_chat_template=has_template if is_offline else tokenizer.has_chat_template,
        max_loras=geometry.max_loras,
        max_lora_rank=resolved.lora.max_lora_rank if geometry.max_loras else 0,
        tool_call_parser=answer_format.tools.name if answer_format.tools else "",
        reasoning_parser=answer_format.reasoning.name if answer_format.reasoning else "",
        max_logprobs=resolved.model.max_logprobs,
        lossy_kv_window=resolved.lossy.lossy_kv_window or 0,
        lossy_kv_sinks=geometry.num_sink_tokens,
        state_bytes_per_sequence=geometry.state_bytes,
        default_sampling=read_default_sampling(source.folder, resolved.model),
        aliases=resolved.server.served_model_aliases,
    )
