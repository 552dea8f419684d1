"""The Ray Data processor: rows and options over stand-ins for Ray, and all of it on a cluster of this machine."""

import dataclasses
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged import ray as processors
from jpaged.errors import InternalError, InvalidArgument, Unavailable, Unsupported
from jpaged.ray import ERROR_COLUMN, ROW_COLUMN, EngineStage, JpagedEngineProcessorConfig, build_processor
from jpaged.sampling_params import PoolingParams
from jpaged.types import LoRARequest, SamplingParams, TokenLogprob
from tests.processes import run_with_ray

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
PATIENCE_S = 1800.0


def config(**values: Any) -> JpagedEngineProcessorConfig:
    return JpagedEngineProcessorConfig(**{"model_source": "demo", **values})


class Model:
    """Answers each prompt with its text; refuses `bad`, fails at `broken` and dies at `deadly`."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.params: list[Any] = []
        self.adapters: list[LoRARequest | None] = []
        self.chats: list[tuple[Any, dict[str, Any]]] = []

    def generate(self, prompts: list[Any], params: list[SamplingParams], **options: Any) -> list[Any]:
        self.calls.append(list(prompts))
        if "bad" in prompts:
            raise InvalidArgument("prompt", "is bad")
        if "deadly" in prompts:
            raise Unavailable("the engine has stopped")
        self.params += params
        self.adapters += options["lora_request"]
        return [self._answer(prompt) for prompt in prompts]

    @staticmethod
    def _answer(prompt: Any) -> Any:
        error = InternalError("a step failed") if prompt == "broken" else None
        likely = ({7: TokenLogprob(7, -0.5, 1, "x")},) if prompt == "likely" else None
        one = SimpleNamespace(text=f"re {prompt}", token_ids=(7, 8), finish_reason="length", logprobs=likely)
        return SimpleNamespace(error=error, outputs=(one,), prompt_token_ids=(1, 2, 3), prompt_logprobs=None)

    def embed(self, prompts: list[Any], **options: Any) -> list[Any]:
        self.calls.append(list(prompts))
        self.params.append(options["pooling_params"])
        return [SimpleNamespace(values=(0.5, float(i)), prompt_token_ids=(1,)) for i, _ in enumerate(prompts)]

    def classify(self, prompts: list[Any], **options: Any) -> list[Any]:
        return [SimpleNamespace(outputs=SimpleNamespace(probs=(0.25, 0.75)), prompt_token_ids=(1,)) for _ in prompts]

    def preprocess_chat(self, messages: list[Any], **options: Any) -> list[Any]:
        self.chats.append((messages, options))
        return [{"prompt_token_ids": [9, 9]} for _ in messages]


class Failing(Model):
    """Raises the error of a single prompt, as `LLM` does."""

    def generate(self, prompts: list[Any], params: list[SamplingParams], **options: Any) -> list[Any]:
        raise InternalError("a step failed")


def run(rows: Sequence[Any], model: Any = None, **values: Any) -> list[dict[str, Any]]:
    """The rows after a stage whose engine is the stand-in."""
    stage = EngineStage(config(**values), model or Model())
    done = stage({ROW_COLUMN: [pickle.dumps(row) for row in rows]})
    return [pickle.loads(one) for one in done[ROW_COLUMN]]


def test_results_are_added_to_rows_by_rays_names():
    model = Model()
    rows = run([{"prompt": "a", "id": 1, "sampling_params": {"max_tokens": 3, "top_p": None}}, {"prompt": "b"}], model)
    assert [(row["generated_text"], row["generated_tokens"], row["num_generated_tokens"]) for row in rows] == [
        ("re a", [7, 8], 2),
        ("re b", [7, 8], 2),
    ]
    assert (rows[0]["id"], rows[0]["num_input_tokens"], rows[0]["prompt_token_ids"]) == (1, 3, [1, 2, 3])
    assert (rows[0]["finish_reason"], rows[0][ERROR_COLUMN]) == ("length", "")
    assert rows[0]["batch_uuid"] == rows[1]["batch_uuid"] and rows[0]["time_taken_llm"] >= 0
    assert [one.max_tokens for one in model.params] == [3, SamplingParams().max_tokens]


def test_chats_token_ids_and_texts_are_prompts():
    model, chat = Model(), [{"role": "user", "content": "hello"}]
    rows = [{"messages": chat, "tools": ["t"]}, {"tokenized_prompt": [4, 5], "prompt": "not read"}, {"prompt": "c"}]
    stage = {"enabled": True, "chat_template": "T", "chat_template_kwargs": {"enable_thinking": False}}
    run(rows, model, chat_template_stage=stage)
    assert model.calls == [[{"prompt_token_ids": [9, 9]}, {"prompt_token_ids": [4, 5]}, "c"]]
    options = {"chat_template": "T", "chat_template_kwargs": {"enable_thinking": False}, "tools": ["t"]}
    assert model.chats == [([chat], options)]
    run([{"messages": chat}], model, task_type="embed")
    assert model.calls[-1] == [{"messages": chat}]
    with pytest.raises(InvalidArgument, match=r"messages: is in a row, but apply_chat_template is off"):
        run(rows, apply_chat_template=False)


def test_vectors_and_labels_are_embeddings():
    assert [row["embeddings"] for row in run([{"prompt": "a"}, {"prompt": "b"}], task_type="embed")] == [
        [0.5, 0.0],
        [0.5, 1.0],
    ]
    assert run([{"prompt": "a"}], task_type="classify")[0]["embeddings"] == [0.25, 0.75]


def test_rows_have_pooling_parameters_of_their_own():
    model = Model()
    given = [None, {"dimensions": 2}, {"dimensions": 2}, None]
    rows = run([{"prompt": "a", "pooling_params": one} for one in given], model, task_type="embed")
    assert [len(call) for call in model.calls] == [1, 2, 1] and len(rows) == 4
    assert model.params == [None, PoolingParams(dimensions=2), None]


def test_log_probabilities_have_rays_form():
    (row,) = run([{"prompt": "likely"}])
    assert row["logprobs"] == [{7: {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]


def test_a_row_that_cannot_run_has_its_error_and_the_others_their_results():
    prompts = ["a", "b", "bad", "c", "broken", "d", "e"]
    model = Model()
    rows = run([{"prompt": one} for one in prompts], model, should_continue_on_error=True)
    assert [row.get("generated_text") for row in rows] == ["re a", "re b", None, "re c", None, "re d", "re e"]
    assert [row[ERROR_COLUMN] for row in rows if row[ERROR_COLUMN]] == [
        "InvalidArgument: prompt: is bad",
        "InternalError: a step failed",
    ]
    assert [row[ERROR_COLUMN] for row in run([{"prompt": "broken"}], Failing(), should_continue_on_error=True)] == [
        "InternalError: a step failed"
    ]
    assert [row["prompt"] for row in rows] == prompts
    assert len(model.params) == 6  # none ran twice


@pytest.mark.parametrize(("prompt", "error"), [("bad", InvalidArgument), ("broken", InternalError)])
def test_an_error_ends_the_batch_by_default(prompt, error):
    with pytest.raises(error):
        run([{"prompt": "a"}, {"prompt": prompt}])


def test_an_engine_that_died_is_no_error_of_a_row():
    with pytest.raises(Unavailable, match="the engine has stopped"):
        run([{"prompt": "a"}, {"prompt": "deadly"}], should_continue_on_error=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"prompt: a row has none of messages, tokenized_prompt, .* but \['text'\]"),
        ({"prompt": "a", "sampling_params": {"max_token": 3}}, "sampling_params: max_token is not a parameter"),
        ({"prompt": "a", "sampling_params": 3}, "sampling_params: int is not a mapping"),
        ({"prompt": "a", "sampling_params": {"top_p": 2.0}}, "top_p: "),
        ({"prompt": "a", "model": "sql"}, "model: 'sql' is not model_source, and there is no dynamic_lora"),
    ],
)
def test_what_a_row_lacks_is_named(row, message):
    with pytest.raises(InvalidArgument, match=message):
        run([row])


def test_a_row_with_images_is_refused():
    with pytest.raises(Unsupported, match="multimodal_data: is not supported in a row"):
        run([{"prompt": "a", "multimodal_data": {"image": "x"}}])


def test_rows_choose_adapters_by_name():
    model = Model()
    rows = [{"prompt": "a", "model": name} for name in ("sql", "demo", "css", "sql")]
    run(rows, model, dynamic_lora_loading_path="/adapters")
    sql = LoRARequest("sql", 1, "/adapters/sql")
    assert model.adapters == [sql, None, LoRARequest("css", 2, "/adapters/css"), sql]
    with pytest.raises(InvalidArgument, match=r"model: '\.\./x' is not the name of a folder"):
        run([{"prompt": "a", "model": "../x"}], dynamic_lora_loading_path="/adapters")


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model_source": ""}, InvalidArgument, "model_source: '' is not the name"),
        ({"task_type": "score"}, Unsupported, "task_type: 'score' is not supported: must be one of generate, embed"),
        ({"batch_size": 0}, InvalidArgument, "batch_size: 0 must be an integer >= 1"),
        ({"max_concurrent_batches": True}, InvalidArgument, "max_concurrent_batches: True must be an integer"),
        ({"concurrency": (0, 2)}, InvalidArgument, "concurrency: 0 must be an integer >= 1"),
        ({"concurrency": (3, 2)}, InvalidArgument, "concurrency: 3 is above its maximum of 2"),
        ({"concurrency": "2"}, InvalidArgument, "concurrency: '2' must be an integer"),
        ({"has_image": True}, Unsupported, "has_image: prompts with images"),
        ({"prepare_multimodal_stage": {"enabled": True}}, Unsupported, "prepare_multimodal_stage: prompts with"),
        ({"max_tasks_in_flight_per_actor": 0}, InvalidArgument, "max_tasks_in_flight_per_actor: 0 must be an integer"),
        ({"experimental": {"x": 1}}, InvalidArgument, "experimental: x is not supported"),
        ({"engine_kwargs": {"model": "other"}}, InvalidArgument, "engine_kwargs.model: 'other' is not model_source"),
        ({"resources_per_bundle": {}, "placement_group_config": {}}, InvalidArgument, "is given together"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values, error, message):
    with pytest.raises(error, match=message):
        config(**values)


@pytest.mark.parametrize(
    ("values", "cluster", "options"),
    [
        ({}, {"CPU": 8}, {"num_cpus": 1, "num_gpus": 0}),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, {"GPU": 8}, {"num_cpus": 1, "num_gpus": 2}),
        (
            {"engine_kwargs": {"tensor_parallel_size": 4}},
            {"TPU": 4},
            {"num_cpus": 1, "num_gpus": 0, "resources": {"TPU": 4}},
        ),
        ({"resources_per_bundle": {"TPU": 4}}, {}, {"num_cpus": 0, "num_gpus": 0, "resources": {"TPU": 4}}),
        (
            {"placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}] * 2}, "accelerator_type": "H100"},
            {},
            {"num_cpus": 2, "num_gpus": 2, "accelerator_type": "H100"},
        ),
    ],
)
def test_an_engine_has_the_devices_that_it_uses(values, cluster, options):
    assert config(**values).resources(cluster) == options


class RayConfig:
    """As much of a configuration of Ray as is read."""

    model_fields = ("model_source", "engine_kwargs", "concurrency", "chat_template_stage", "new_field")

    def __init__(self, **values: Any) -> None:
        vars(self).update({**dict.fromkeys(self.model_fields), "concurrency": 1, "engine_kwargs": {}, **values})


def test_a_configuration_of_ray_is_taken():
    stage = SimpleNamespace(model_dump=lambda: {"enabled": False, "batch_size": 4})
    found = build_processor(RayConfig(model_source="m", chat_template_stage=stage, concurrency=(1, 3))).config
    assert (found.model_source, found.pool_sizes, found.chat_options) == ("m", (1, 3), None)
    with pytest.raises(InvalidArgument, match=r"new_field: is not supported by jpaged\.ray"):
        build_processor(RayConfig(model_source="m", new_field=True))
    with pytest.raises(InvalidArgument, match="config: dict is not a configuration of an engine"):
        build_processor({"model_source": "m"})


def test_arguments_of_the_builder_are_those_of_ray():
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    assert build_processor(config(), builder_kwargs=given).config.chat_options == given
    with pytest.raises(InvalidArgument, match="builder_kwargs: x is not supported"):
        build_processor(config(), builder_kwargs={"x": 1})
    with pytest.raises(Unsupported, match=r"preprocess: <class .*Model'> is not supported: must be a function"):
        build_processor(config(), Model)  # type: ignore[arg-type]


# --- the data set -----------------------------------------------------------------------------------------------------


class Data:
    """A data set of rows, which a stage changes at once; `options` are those of each stage."""

    def __init__(self, rows: list[Any], options: tuple[dict[str, Any], ...] = ()) -> None:
        self.rows, self.options = rows, options

    def map(self, function: Callable[[Any], Any], **options: Any) -> "Data":
        again = pickle.loads(pickle.dumps(function)) if function.__class__.__name__ == "RowUnpacker" else function
        return Data([again(row) for row in self.rows], (*self.options, options))

    def map_batches(self, kind: type, *, fn_constructor_args: Any, batch_size: int, **options: Any) -> "Data":
        stage, done = kind(*pickle.loads(pickle.dumps(fn_constructor_args)), Model()), []
        for begin in range(0, len(self.rows), batch_size):
            packed = np.array([row[ROW_COLUMN] for row in self.rows[begin : begin + batch_size]], object)
            done += [{ROW_COLUMN: one} for one in stage({ROW_COLUMN: packed})[ROW_COLUMN]]
        return Data(done, (*self.options, options))


def named(row: dict[str, Any]) -> dict[str, Any]:
    return {"answer": row["generated_text"], "id": row["id"]}


@pytest.fixture
def context(monkeypatch):
    ray, found = ModuleType("ray"), SimpleNamespace(wait_for_min_actors_s=-1)
    data = SimpleNamespace(
        DataContext=SimpleNamespace(get_current=lambda: found), ActorPoolStrategy=lambda **options: options
    )
    vars(ray).update(data=data, cluster_resources=lambda: {"CPU": 2, "GPU": 1})
    monkeypatch.setitem(sys.modules, "ray", ray)
    return found


def test_a_data_set_goes_through_all_stages(context):
    processor = build_processor(
        config(concurrency=(1, 2), batch_size=2, should_continue_on_error=True),
        preprocess=lambda row: {"prompt": row["text"], "id": row["id"], "sampling_params": {"max_tokens": 2}},
        postprocess=named,
        preprocess_map_kwargs={"num_cpus": 0.5},
    )
    texts = ["a", "bad", "b"]
    done = processor(Data([{"text": text, "id": np.int64(i)} for i, text in enumerate(texts)]))
    assert done.rows[::2] == [
        {"answer": "re a", "id": 0, ERROR_COLUMN: ""},
        {"answer": "re b", "id": 2, ERROR_COLUMN: ""},
    ]
    assert (done.rows[1][ERROR_COLUMN], done.rows[1]["id"]) == ("InvalidArgument: prompt: is bad", 1)
    packing, running, unpacking = done.options
    assert (packing, unpacking) == ({"num_cpus": 0.5}, {})
    assert (running["num_gpus"], running["compute"]["min_size"], running["compute"]["max_size"]) == (1, 1, 2)
    assert running["compute"]["max_concurrent_calls_per_actor"] == 8
    assert (
        running["compute"]["max_tasks_in_flight_per_actor"] is None
    )  # a pool grows if its actors have more than they run
    assert context.wait_for_min_actors_s == 600


def test_rows_without_functions_keep_their_columns(context):
    chat = np.array([{"role": "user", "content": "hi"}], object)  # as Arrow gives a list
    (row,) = build_processor(config(concurrency=2))(Data([{"messages": chat, "n": np.float64(0.5)}])).rows
    assert (row["messages"], row["n"]) == ([{"role": "user", "content": "hi"}], 0.5)
    assert row["generated_text"] == "re {'prompt_token_ids': [9, 9]}"
    with pytest.raises(InvalidArgument, match="preprocess: returned str, which is not a row"):
        processors.RowPacker(repr)({"a": 1})  # type: ignore[arg-type]


def test_the_former_name_is_there():
    assert processors.build_llm_processor is build_processor
    assert {"model_source", "engine_kwargs", "concurrency", "batch_size"} <= {
        one.name for one in dataclasses.fields(JpagedEngineProcessorConfig)
    }


# --- with an engine, and with Ray -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stage_with_an_engine_generates_what_the_model_does_alone():
    from jpaged import LLM

    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=5)
    rows: list[Any] = [{"prompt": "Once upon a time", "sampling_params": sampling}, {"prompt": "A cat " * 3000}]
    with LLM("demo", max_num_seqs=4) as llm:
        stage = EngineStage(config(should_continue_on_error=True), llm)
        done = [pickle.loads(one) for one in stage({ROW_COLUMN: [pickle.dumps(row) for row in rows]})[ROW_COLUMN]]
        (alone,) = llm.generate([rows[0]["prompt"]], sampling, use_tqdm=False)
        chat = [{"role": "user", "content": "hi"}]
        (answer,) = llm.chat([chat], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
        chats = [{"messages": chat, "sampling_params": {"max_tokens": 4, "temperature": 0.0}}]
        (talked,) = map(pickle.loads, stage({ROW_COLUMN: [pickle.dumps(row) for row in chats]})[ROW_COLUMN])
        vectors = EngineStage(config(task_type="embed"), llm)
        (packed,) = vectors({ROW_COLUMN: [pickle.dumps({"prompt": "a cat"})]})[ROW_COLUMN]
        assert pickle.loads(packed)["embeddings"] == list(llm.embed(["a cat"], use_tqdm=False)[0].values)
    assert (done[0]["generated_text"], done[0]["generated_tokens"]) == (
        alone.outputs[0].text,
        list(alone.outputs[0].token_ids),
    )
    assert done[0]["finish_reason"] == "length"
    assert done[1][ERROR_COLUMN].startswith("RequestTooLong: ")
    assert talked["generated_tokens"] == list(answer.outputs[0].token_ids)


@pytest.mark.long
def test_a_cluster_that_loses_a_worker_processes_every_row():
    lines = run_with_ray(FOLDER, "check_processor.py", PATIENCE_S)
    found = [line.removeprefix("ray data: ") for line in lines if line.startswith("ray data: ")]
    assert [line.partition(":")[0] for line in found[1:-1]] == ["two nodes", "lost worker"]
