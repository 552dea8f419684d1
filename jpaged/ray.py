"""Ray Data processor over `LLM`, by the names of `ray.data.llm`; requires the package ray (extra `ray`).

    config = JpagedEngineProcessorConfig(model_source="demo", concurrency=2)
    processor = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["question"], "sampling_params": {"max_tokens": 64}},
        postprocess=lambda row: {"answer": row["generated_text"]},
    )
    answers = processor(ray.data.read_parquet("questions"))

    rows ──preprocess──> batches ──EngineStage: an LLM in each actor──> rows with results ──postprocess──> rows

Between the stages a row is one pickled column, so that rows of a batch may have different keys and nested values. The
package ray is imported by the process that builds the data set, not by this module.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jpaged.errors import InvalidArgument, JpagedError, Unavailable, Unsupported
from jpaged.sampling_params import PoolingParams
from jpaged.types import LoRARequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from ray.data import Dataset


_ParamsT = TypeVar("_ParamsT")
Row = dict[str, Any]
RowFunction = Callable[[Row], Row]

ROW_COLUMN = "__data"
"""The column that carries a pickled row between stages."""
ERROR_COLUMN = "__inference_error__"
"""The error of a row, "" if it succeeded."""
TASKS = ("generate", "embed", "classify")
PROMPT_KEYS = ("messages", "tokenized_prompt", "prompt_token_ids", "prompt")
"""Keys of a row that give a prompt; the first that is set counts."""
_CHAT_KEYS = ("tools", "chat_template_kwargs")
_UNSUPPORTED_KEYS = ("multimodal_data", "mm_processor_kwargs", "multimodal_uuids", "tokenization_kwargs", "images")
"""Keys of a row that would change the results in Ray's own processor."""
_MIN_ACTORS_WAIT_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class JpagedEngineProcessorConfig:
    """Configuration of a processor, by the names of `ray.data.llm.vLLMEngineProcessorConfig`.

    Attributes:
        model_source: model of each engine: `demo`, a folder, a GGUF file or a hub id.
        engine_kwargs: options of `LLM`, by the names of jpaged or vLLM.
        task_type: "generate", "embed" or "classify".
        batch_size: rows that an actor takes together.
        concurrency: number of engines, or (minimum, maximum) for an actor pool that scales.
        max_concurrent_batches: batches that an actor runs at a time.
        max_tasks_in_flight_per_actor: batches that Ray sends to an actor ahead (default: Ray's).
        max_pending_requests: no effect: the engine's queue limits itself.
        should_continue_on_error: a row that fails has its error in `__inference_error__`; False ends the data set.
        apply_chat_template: use `messages` of rows, with the model's chat template.
        chat_template: template for all rows in place of the model's.
        chat_template_kwargs: variables of the chat template.
        tokenize: no effect: the engine tokenizes prompts, and takes `tokenized_prompt`.
        detokenize: no effect: the engine returns texts.
        has_image: must be False.
        chat_template_stage: False, or a mapping with `enabled`, `chat_template` and `chat_template_kwargs`.
        tokenize_stage: no effect.
        detokenize_stage: no effect.
        prepare_image_stage: must be off.
        prepare_multimodal_stage: must be off.
        resources_per_bundle: Ray's resources of an engine, such as `{"TPU": 4}`. The default is one CPU, and the GPUs
            or TPU chips of the engine's parallelism if the cluster has some.
        placement_group_config: the same as `{"bundles": [...]}`, which are added up: an engine is one actor.
        accelerator_type: Ray's type of accelerator for each engine.
        runtime_env: Ray's runtime environment of each engine.
        dynamic_lora_loading_path: folder of LoRA adapters, one folder each, which rows name in `model`.
        log_engine_metrics: no effect.
        experimental: `max_tasks_in_flight_per_actor` only, its former place.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    task_type: str = "generate"
    batch_size: int = 32
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int = 8
    max_tasks_in_flight_per_actor: int | None = None
    max_pending_requests: int | None = None
    should_continue_on_error: bool = False
    apply_chat_template: bool = True
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenize: bool = True
    detokenize: bool = True
    has_image: bool = False
    chat_template_stage: Any = True
    tokenize_stage: Any = True
    detokenize_stage: Any = True
    prepare_image_stage: Any = False
    prepare_multimodal_stage: Any = False
    resources_per_bundle: Mapping[str, float] | None = None
    placement_group_config: Mapping[str, Any] | None = None
    accelerator_type: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    dynamic_lora_loading_path: str | None = None
    log_engine_metrics: bool = True
    experimental: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.model_source or not isinstance(self.model_source, str):
            raise InvalidArgument("model_source", f"{self.model_source!r} is not the name of a model")
        task = getattr(self.task_type, "value", self.task_type)  # Ray's enumeration of tasks
        if task not in TASKS:
            raise Unsupported(f"task_type: {task!r} is not supported: must be one of {', '.join(TASKS)}")
        object.__setattr__(self, "task_type", task)
        for name in ("batch_size", "max_concurrent_batches"):
            _require_count(name, getattr(self, name), 1)
        if self.max_tasks_in_flight is not None:
            _require_count("max_tasks_in_flight_per_actor", self.max_tasks_in_flight, 1)
        for count in self.pool_sizes:
            _require_count("concurrency", count, 1)
        if self.pool_sizes[0] > self.pool_sizes[1]:
            raise InvalidArgument("concurrency", f"{self.pool_sizes[0]} is above its maximum of {self.pool_sizes[1]}")
        for name in ("has_image", "prepare_image_stage", "prepare_multimodal_stage"):
            if _is_stage_on(getattr(self, name)):
                raise Unsupported(f"{name}: prompts with images, audio or video are not supported by this processor")
        if unknown := sorted(set(self.experimental) - {"max_tasks_in_flight_per_actor"}):
            raise InvalidArgument("experimental", f"{unknown[0]} is not supported")
        if self.resources_per_bundle is not None and self.placement_group_config is not None:
            raise InvalidArgument("placement_group_config", "is given together with resources_per_bundle: give one")
        model = self.engine_kwargs.get("model", self.model_source)
        if model != self.model_source:
            raise InvalidArgument("engine_kwargs.model", f"{model!r} is not model_source, {self.model_source!r}")

    @classmethod
    def from_ray(cls, config: Any) -> JpagedEngineProcessorConfig:
        """Return the configuration of a `ray.data.llm.vLLMEngineProcessorConfig`.

        Raises:
            InvalidArgument: it sets a field that does not exist here.
        """
        values = {name: getattr(config, name) for name in type(config).model_fields}
        known = {one.name for one in fields(cls)}
        for name, value in values.items():
            if name not in known and value not in (None, False, {}, []):
                raise InvalidArgument(name, "is not supported by jpaged.ray")
        return cls(**{name: value for name, value in values.items() if name in known})

    @property
    def pool_sizes(self) -> tuple[int, int]:
        """Minimum and maximum number of engines."""
        if isinstance(self.concurrency, Sequence) and len(self.concurrency) == 2:
            return self.concurrency[0], self.concurrency[1]
        return self.concurrency, self.concurrency

    @property
    def max_tasks_in_flight(self) -> int | None:
        """Batches that Ray sends to an actor ahead; None for Ray's default, with which a pool can grow."""
        former = self.experimental.get("max_tasks_in_flight_per_actor")
        return former if self.max_tasks_in_flight_per_actor is None else self.max_tasks_in_flight_per_actor

    @property
    def chat_options(self) -> Mapping[str, Any] | None:
        """Options of the chat template; None if rows give texts or token ids."""
        stage = self.chat_template_stage
        if not (self.apply_chat_template and _is_stage_on(stage)):
            return None
        given = _stage_values(stage)
        template = given.get("chat_template") or self.chat_template
        variables = {**self.chat_template_kwargs, **(given.get("chat_template_kwargs") or {})}
        found = {"chat_template": template, "chat_template_kwargs": variables}
        return {name: value for name, value in found.items() if value}

    def resources(self, cluster: Mapping[str, float]) -> dict[str, Any]:
        """Return Ray's options of an actor, given the resources of the cluster."""
        bundles = (self.placement_group_config or {}).get("bundles")
        if self.resources_per_bundle is not None:
            bundles = [self.resources_per_bundle]
        if bundles is None:
            num_devices = 1
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
                num_devices *= int(self.engine_kwargs.get(name) or 1)
            device = next((name for name in ("GPU", "TPU") if cluster.get(name)), None)
            bundles = [{"CPU": 1} | ({device: num_devices} if device else {})]
        total: Counter[str] = Counter()
        for bundle in bundles:
            total.update(bundle)
        options: dict[str, Any] = {"num_cpus": total.pop("CPU", 0), "num_gpus": total.pop("GPU", 0)}
        options |= {"resources": dict(total)} if total else {}
        given = {"accelerator_type": self.accelerator_type, "runtime_env": self.runtime_env}
        return options | {name: value for name, value in given.items() if value}


def _require_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(name, f"{value!r} must be an integer >= {least}")


def _stage_values(stage: Any) -> Mapping[str, Any]:
    """Return a stage's settings: those of a mapping, or of one of Ray's classes."""
    if hasattr(stage, "model_dump"):
        return dict(stage.model_dump())
    return stage if isinstance(stage, Mapping) else {}


def _is_stage_on(stage: Any) -> bool:
    return bool(_stage_values(stage).get("enabled", bool(stage)))


class Processor:
    """Transforms a data set: `processor(dataset)` returns the data set with the results of the model."""

    def __init__(
        self,
        config: JpagedEngineProcessorConfig,
        preprocess: RowFunction | None,
        postprocess: RowFunction | None,
        map_options: tuple[Mapping[str, Any], Mapping[str, Any]],
    ) -> None:
        self.config = config
        self._preprocess, self._postprocess = preprocess, postprocess
        self._map_options = map_options

    def __call__(self, dataset: Dataset) -> Dataset:
        """Return the data set of results; nothing runs before it is read."""
        import ray

        config = self.config
        context = ray.data.DataContext.get_current()
        context.wait_for_min_actors_s = max(context.wait_for_min_actors_s, _MIN_ACTORS_WAIT_S)
        least, most = config.pool_sizes
        in_flight = config.max_tasks_in_flight
        pool = ray.data.ActorPoolStrategy(
            **({"size": least} if least == most else {"min_size": least, "max_size": most}),
            max_tasks_in_flight_per_actor=in_flight,
            max_concurrent_calls_per_actor=min(
                config.max_concurrent_batches, in_flight or config.max_concurrent_batches
            ),
            enable_true_multi_threading=True,
        )
        packed = dataset.map(RowPacker(self._preprocess), **self._map_options[0])
        run = packed.map_batches(
            EngineStage,
            fn_constructor_args=(config,),
            batch_size=config.batch_size,
            batch_format="numpy",
            zero_copy_batch=True,
            compute=pool,  # Ray starts actors again if they are lost, and runs their batches again
            **config.resources(ray.cluster_resources()),
        )
        unpack = RowUnpacker(self._postprocess, has_error_column=config.should_continue_on_error)
        return run.map(unpack, **self._map_options[1])


def build_processor(
    config: Any,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Return a processor, as `ray.data.llm.build_processor`.

    A row for the model has `prompt`, `tokenized_prompt` or `messages`, and may have `sampling_params` and `model`, the
    name of a LoRA adapter. Results are added to it: `generated_text`, `generated_tokens`, `num_input_tokens`,
    `num_generated_tokens`, `prompt_token_ids` and `finish_reason`, or `embeddings`; and `__inference_error__`.

    Args:
        config: `JpagedEngineProcessorConfig`, or Ray's `vLLMEngineProcessorConfig`.
        preprocess: returns the row for the model; None takes rows as they are.
        postprocess: returns the row of the result; rows that failed do not pass through it.
        preprocess_map_kwargs: options of `Dataset.map` for `preprocess`.
        postprocess_map_kwargs: options of `Dataset.map` for `postprocess`.
        builder_kwargs: `chat_template_kwargs` only.

    Raises:
        InvalidArgument: a field has an invalid value.
        Unsupported: images, or another task.
    """
    if not isinstance(config, JpagedEngineProcessorConfig):
        if not hasattr(type(config), "model_fields") or not hasattr(config, "engine_kwargs"):
            raise InvalidArgument("config", f"{type(config).__name__} is not a configuration of an engine")
        config = JpagedEngineProcessorConfig.from_ray(config)
    for name, function in (("preprocess", preprocess), ("postprocess", postprocess)):
        if function is not None and (isinstance(function, type) or not callable(function)):
            raise Unsupported(f"{name}: {function!r} is not supported: must be a function of a row")
    given = dict(builder_kwargs or {})
    variables = given.pop("chat_template_kwargs", None) or {}
    if given:
        raise InvalidArgument("builder_kwargs", f"{sorted(given)[0]} is not supported")
    if variables:
        config = dataclasses.replace(config, chat_template_kwargs={**config.chat_template_kwargs, **variables})
    map_options = (dict(preprocess_map_kwargs or {}), dict(postprocess_map_kwargs or {}))
    return Processor(config, preprocess, postprocess, map_options)


build_llm_processor = build_processor
"""Ray's former name."""


class RowPacker:
    """Applies `preprocess` and packs a row into one column."""

    def __init__(self, preprocess: RowFunction | None) -> None:
        self._preprocess = preprocess

    def __call__(self, row: Row) -> Row:
        """Return the packed row."""
        found = row if self._preprocess is None else self._preprocess(row)
        if not isinstance(found, Mapping):
            raise InvalidArgument("preprocess", f"returned {type(found).__name__}, which is not a row (dict)")
        return {ROW_COLUMN: pickle.dumps(to_plain(found))}


class RowUnpacker:
    """Unpacks a row and applies `postprocess`."""

    def __init__(self, postprocess: RowFunction | None, *, has_error_column: bool) -> None:
        self._postprocess, self._has_error_column = postprocess, has_error_column

    def __call__(self, row: Row) -> Row:
        """Return the row of the result; that of a failed row is not changed."""
        found: Row = pickle.loads(row[ROW_COLUMN])
        if self._postprocess is None or found[ERROR_COLUMN]:
            return found
        result = self._postprocess(found)
        return {**result, ERROR_COLUMN: ""} if self._has_error_column else result


def to_plain(value: Any) -> Any:
    """Return a row's value without arrays of objects and NumPy scalars, which Arrow makes of lists and numbers."""
    if isinstance(value, Mapping):
        return {name: to_plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray) and (value.dtype == object or value.ndim == 1):
        return [to_plain(one) for one in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    return [to_plain(one) for one in value] if isinstance(value, list | tuple) else value


class EngineStage:
    """The model in one of Ray's actors, which calls it from several threads.

    Args:
        config: of the processor.
        llm: a loaded model; None loads that of the configuration.
    """

    def __init__(self, config: JpagedEngineProcessorConfig, llm: Any = None) -> None:
        self._config = config
        self._adapter_ids: dict[str, int] = {}
        if llm is None:
            from jpaged.llm import LLM  # imports jax, which the process that builds the data set does not need

            # `task` is one of the stage, and Ray's executors of vLLM are not jpaged's.
            unused = ("model", "task", "distributed_executor_backend")
            options = {name: value for name, value in config.engine_kwargs.items() if name not in unused}
            llm = LLM(config.model_source, **options)
        self._llm = llm

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """Return the rows with results, in the order of the batch."""
        rows: list[Row] = [pickle.loads(packed) for packed in batch[ROW_COLUMN]]
        batch_uuid, begun_s = uuid.uuid4().hex, time.perf_counter()
        results = self._run(rows)
        shared = {"batch_uuid": batch_uuid, "time_taken_llm": time.perf_counter() - begun_s}
        found = ({**row, **result, **shared} for row, result in zip(rows, results, strict=True))
        return {ROW_COLUMN: [pickle.dumps(one) for one in found]}

    def _run(self, rows: Sequence[Row]) -> list[Row]:
        """Return the results of rows. If one cannot run, halves run separately, until it is alone."""
        try:
            return self._run_together(rows)
        except Unavailable:
            raise  # the engine has stopped, so no row can run
        except JpagedError as error:
            if not self._config.should_continue_on_error:
                raise
            if len(rows) > 1:
                middle = len(rows) // 2
                return [*self._run(rows[:middle]), *self._run(rows[middle:])]
            return [{ERROR_COLUMN: _error_text(error)}]

    def _run_together(self, rows: Sequence[Row]) -> list[Row]:
        prompts = [self._prompt(row) for row in rows]
        adapters = [self._adapter(row) for row in rows]
        if self._config.task_type == "generate":
            params = [self._sampling(row) for row in rows]
            outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            return [self._result(output) for output in outputs]
        given = [_parameters("pooling_params", row, PoolingParams) for row in rows]
        if any(one != given[0] for one in given):
            middle = next(i for i, one in enumerate(given) if one != given[0])
            return [*self._run_together(rows[:middle]), *self._run_together(rows[middle:])]
        options: dict[str, Any] = {"pooling_params": given[0], "use_tqdm": False, "lora_request": adapters}
        if self._config.task_type == "embed":
            vectors = [(one.values, one.prompt_token_ids) for one in self._llm.embed(prompts, **options)]
        else:
            labels = self._llm.classify(prompts, **options)
            vectors = [(one.outputs.probs, one.prompt_token_ids) for one in labels]
        return [
            {"embeddings": list(values), "num_input_tokens": len(token_ids), ERROR_COLUMN: ""}
            for values, token_ids in vectors
        ]

    def _prompt(self, row: Row) -> Any:
        for name in _UNSUPPORTED_KEYS:
            if row.get(name):
                raise Unsupported(f"{name}: is not supported in a row")
        key = next((name for name in PROMPT_KEYS if row.get(name) is not None), None)
        if key is None:
            raise InvalidArgument("prompt", f"a row has none of {', '.join(PROMPT_KEYS)}, but {sorted(row)}")
        if key == "prompt":
            return row[key]
        if key != "messages":
            return {"prompt_token_ids": row[key]}
        options = self._config.chat_options
        if options is None:
            raise InvalidArgument("messages", "is in a row, but apply_chat_template is off")
        given = {**options, **{name: row[name] for name in _CHAT_KEYS if row.get(name) is not None}}
        if self._config.task_type != "generate":
            return {"messages": row[key], **given}
        return self._llm.preprocess_chat([row[key]], **given)[0]

    def _adapter(self, row: Row) -> LoRARequest | None:
        name, folder = row.get("model"), self._config.dynamic_lora_loading_path
        if name in (None, "", self._config.model_source):
            return None
        if folder is None:
            raise InvalidArgument("model", f"{name!r} is not model_source, and there is no dynamic_lora_loading_path")
        if "/" in name or name.startswith("."):
            raise InvalidArgument("model", f"{name!r} is not the name of a folder in dynamic_lora_loading_path")
        return LoRARequest(name, self._adapter_ids.setdefault(name, len(self._adapter_ids) + 1), f"{folder}/{name}")

    @staticmethod
    def _sampling(row: Row) -> SamplingParams:
        return _parameters("sampling_params", row, SamplingParams) or SamplingParams()

    def _result(self, output: Any) -> Row:
        if output.error is not None:
            if not self._config.should_continue_on_error:
                raise output.error
            return {ERROR_COLUMN: _error_text(output.error)}
        first = output.outputs[0]
        result: Row = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "num_input_tokens": len(output.prompt_token_ids),
            "generated_text": first.text,
            "generated_tokens": list(first.token_ids),
            "num_generated_tokens": len(first.token_ids),
            "finish_reason": getattr(first.finish_reason, "value", first.finish_reason),
            ERROR_COLUMN: "",
        }
        if len(output.outputs) > 1:
            result["generated_texts"] = [one.text for one in output.outputs]
        for name, positions in (("logprobs", first.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
            if positions is not None:
                result[name] = [one and _logprobs_row(one) for one in positions]
        return result


def _parameters(key: str, row: Row, kind: type[_ParamsT]) -> _ParamsT | None:
    """Return the parameters that a row gives; None if it gives none."""
    given = row.get(key)
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise InvalidArgument(key, f"{type(given).__name__} is not a mapping of parameters")
    values = {name: value for name, value in given.items() if value is not None}  # Arrow fills gaps with None
    if unknown := sorted(set(values) - set(inspect.signature(kind).parameters)):
        raise InvalidArgument(key, f"{unknown[0]} is not a parameter of {kind.__name__}")
    return kind(**values)


def _logprobs_row(position: Mapping[int, TokenLogprob]) -> dict[int, Row]:
    return {
        token_id: {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in position.items()
    }


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
