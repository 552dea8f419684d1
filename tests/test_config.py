"""Options have one home: their names, limits and help, and nobody else reads the environment."""

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.build import has_overlap
from jpaged.config import (
    CacheOptions,
    EngineConfig,
    KVTransferOptions,
    SchedulerOptions,
    compile_cache_dir,
    compile_cache_url,
    iter_options,
    platform_default,
    server_field_names,
)
from jpaged.config.kv_transfer import DataPortOptions
from jpaged.config.option import checked, option_type
from jpaged.distributed_env import MultiHost
from jpaged.errors import InvalidArgument


def test_what_nobody_sets_has_its_default():
    config = EngineConfig.load({})
    assert config == EngineConfig()
    assert all(origin == "default" for _, _, origin in config.explain())


def test_an_option_lands_in_its_section():
    config = EngineConfig.load({"block_size": 32, "max_num_seqs": 4, "port": 0, "dtype": "float32"})
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 4)
    assert (config.server.port, config.model.dtype) == (0, "float32")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("block_sise", 16, "unknown option; the options are"),
        ("block_size", 0, "0 is below the limit of 1"),
        ("block_size", 2000, "2000 is above the limit of 1024"),
        ("block_size", "16", "'16' is not of type int"),
        ("block_size", True, "True is not of type int"),
        ("memory_utilization", 1.5, "1.5 is above the limit of 1.0"),
        ("memory_utilization", float("nan"), "nan is below the limit"),
        ("dtype", "float8", "'float8' is not one of auto, float32, float, bfloat16, float16, half"),
        ("overlap", 1, "1 is not of type bool"),
        ("num_blocks", 0, "0 is below the limit of 1"),
        ("kv_cache_memory_bytes", 0, "0 is below the limit of 1"),
        ("kv_cache_memory_bytes", "1G", "'1G' is not of type int"),
        ("swap_space", -0.5, "-0.5 is below the limit of 0.0"),
        ("swap_space", 5000, "5000.0 is above the limit of 4096.0"),
        ("kv_policy", "reserve", "'reserve' is not one of paged, reserve-max, reserve-pow2, reserve-oracle"),
        ("policy", "lottery", "'lottery' is not one of fcfs, priority, fair"),
        ("preemption_mode", "kill", "'kill' is not one of auto, recompute, swap"),
        ("batching", "dynamic", "'dynamic' is not one of continuous, static"),
        ("enable_prefix_caching", "no", "'no' is not of type bool"),
        ("served_model_name", "", "is empty: give at least one character, or leave it out"),
        ("served_model_name", "a\udcff", "is not UTF-8: .* at character 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(name, value, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load({name: value})
    assert error.value.field == name


def test_every_number_passes_up_to_its_limits_and_no_further():
    num_limits = 0
    for _, _, spec in iter_options():
        for limit, away in ((spec.metadata["low"], -math.inf), (spec.metadata["high"], math.inf)):
            if limit is None:
                continue
            num_limits += 1
            is_int = option_type(spec) is int
            assert checked(spec, limit) == limit
            with pytest.raises(InvalidArgument, match=f"^{spec.name}: "):
                checked(spec, limit + int(math.copysign(1, away)) if is_int else math.nextafter(limit, away))
    assert num_limits > 50


def test_steps_have_a_token_for_every_row_where_both_are_chosen():
    with pytest.raises(InvalidArgument, match=r"8 is below max_num_seqs \(9\)") as error:
        EngineConfig.load({"max_num_batched_tokens": 8, "max_num_seqs": 9})
    assert error.value.field == "max_num_batched_tokens"
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        assert EngineConfig.load({name: 1024}).scheduler is not None


def test_a_part_of_a_prompt_is_no_longer_than_a_sequence():
    with pytest.raises(InvalidArgument, match=r"65 is above max_model_len \(64\)") as error:
        EngineConfig.load({"long_prefill_token_threshold": 65, "max_model_len": 64})
    assert error.value.field == "long_prefill_token_threshold"
    assert EngineConfig.load({"long_prefill_token_threshold": 64, "max_model_len": 64}).scheduler is not None


def test_a_platform_has_values_of_its_own_within_the_limits():
    for name, _, spec in iter_options():
        of_each = spec.metadata["by_platform"]
        if of_each:
            assert spec.default is None
            assert list(of_each) == ["cpu", "gpu", "tpu"]
            for platform, value in of_each.items():
                assert platform_default(name, platform) == value
                EngineConfig.load({name: value})
            assert platform_default(name, "rocket") == of_each["gpu"]
    assert [platform_default("block_size", platform) for platform in ("cpu", "gpu", "tpu")] == [16, 32, 64]


def test_every_option_has_help_and_a_name_of_its_own():
    names = [name for name, _, _ in iter_options()]
    assert len(names) == len(set(names))
    for _, _, spec in iter_options():
        assert spec.metadata["help"]
        assert option_type(spec) in {str, int, float, bool, tuple}


def test_the_engine_serves_as_a_plain_server_by_default():
    cache, scheduler = CacheOptions(), SchedulerOptions()
    assert (cache.kv_policy, cache.enable_prefix_caching, cache.swap_space) == ("paged", True, 1.0)
    assert (scheduler.policy, scheduler.preemption_mode, scheduler.batching) == ("fcfs", "auto", "continuous")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"huge": "low"}, "reasoning_effort_map.huge: is no reasoning effort: must be one of none, minimal, low,"),
        ({"low": 3}, "reasoning_effort_map.low: 3 is not a text of 1 to 64 characters"),
        ({"low": ""}, "reasoning_effort_map.low:  is not a text of 1 to 64 characters"),
    ],
)
def test_reasoning_efforts_are_mapped_to_texts(value, problem):
    with pytest.raises(InvalidArgument, match=problem):
        EngineConfig.load({"reasoning_effort_map": value})
    assert EngineConfig.load({"reasoning_effort_map": {"xhigh": "max"}}).model.efforts == {"xhigh": "max"}


@pytest.mark.parametrize("name", ["hf_overrides", "default_chat_template_kwargs"])
def test_values_of_a_model_are_a_json_object(name):
    for value, problem in (
        ("[1]", r"\[1\] is not a JSON object, such as"),
        ("{", "{ is not JSON"),
        ('{"a": NaN}', "is not JSON: NaN is not a number of JSON"),
        ('{"a": -1e400}', "is not JSON: -1e400 is not a finite number of 64 bits"),
        ({"a": math.inf}, "is not a JSON object: Out of range float values"),
        (3, "3 is not of type"),
    ):
        with pytest.raises(InvalidArgument, match=problem) as error:
            EngineConfig.load({name: value})
        assert error.value.field == name
    assert getattr(EngineConfig.load({name: {"a": 1}}).model, name) == '{"a": 1}'


@pytest.mark.parametrize("value", ["llm", "/", "//llm", "/a b", "/a?b", "https://host/llm"])
def test_the_path_of_a_proxy_is_a_path(value):
    with pytest.raises(InvalidArgument, match=r"root_path: .* is not a path, such as /llm"):
        EngineConfig.load({"root_path": value})
    assert EngineConfig.load({"root_path": "/some/llm/"}).http.root_path == "/some/llm/"
    with pytest.raises(InvalidArgument, match="root_path: /llm requires HTTP, but enable_http is False"):
        EngineConfig.load({"root_path": "/llm", "enable_http": False})


def test_resolving_leaves_nothing_open():
    sizes = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_messages_per_second": 10}
    sizes |= {"num_blocks": 9, "kv_cache_memory_bytes": 4096}
    config = EngineConfig().replace(max_model_len=64, served_model_name="demo", max_pinned_blocks=2, **sizes)
    config = config.replace(memory_utilization=0.9, overlap=True, wait_for_all_programs=False)
    config = config.replace(max_inter_token_latency=0.2)
    assert (config.model.max_model_len, config.cache.num_blocks) == (64, 9)
    left_out = {name for name, value, _ in config.explain() if value == "None"}
    several = {"coordinator", "num_processes", "process_id"}
    of_server = set(server_field_names())
    # Nothing of the kind unless asked for.
    lossy = {"lossy_kv_window", "lossy_kv_sinks"}
    others = {"chat_template", "compiled", "lora", "speculative_config", "cluster_secret_file", "kv_disk_dir"}
    others |= {"kv_transfer_config", "override_generation_config", "hf_overrides"}
    others |= {"default_chat_template_kwargs", "reasoning_effort_map", "eplb_config"}
    others |= {"state_checkpoint_interval", "limit_mm_per_prompt", "allowed_local_media_path", "allowed_media_domains"}
    others |= {"tokenizer", "revision", "tokenizer_revision", "download_dir", "hf_token"}
    assert left_out - of_server == others | several | lossy
    assert left_out.isdisjoint({"served_model_name", "max_messages_per_second", "max_pinned_blocks"})


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path))
    assert compile_cache_dir() == tmp_path / "programs"
    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    assert compile_cache_dir() is None
    monkeypatch.setenv("JPAGED_CACHE_DIR", "gs://bucket/cache")
    with pytest.raises(
        InvalidArgument, match=r"^JPAGED_CACHE_DIR: gs://bucket/cache is a URL: must be a folder; JPAGED_CACHE_URL"
    ):
        compile_cache_dir()
    assert compile_cache_url() is None
    monkeypatch.setenv("JPAGED_CACHE_URL", "gs://bucket/cache/")
    assert compile_cache_url() == "gs://bucket/cache"
    monkeypatch.setenv("JPAGED_CACHE_URL", "/folder")
    with pytest.raises(
        InvalidArgument, match=r"^JPAGED_CACHE_URL: /folder is not a URL; JPAGED_CACHE_DIR takes folders"
    ):
        compile_cache_url()
    monkeypatch.delenv("JPAGED_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache_dir() == tmp_path / "jpaged" / "programs"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"num_blocks": 9}, r"4096 and num_blocks \(9\) both set the size of the pool: give only one"),
        ({"compiled": "folder"}, r"4096: saved programs \(compiled\) have a fixed number of blocks"),
    ],
)
def test_a_pool_has_one_size(other, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load({"kv_cache_memory_bytes": 4096, **other})
    assert error.value.field == "kv_cache_memory_bytes"
    assert EngineConfig.load({"kv_cache_memory_bytes": 4096}).cache.num_blocks is None


def test_devices_are_counted_over_every_kind_of_parallelism():
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 3, "pipeline_parallel_size": 5}
    assert EngineConfig.load({**sizes, "data_parallel_size": 7}).parallel.num_devices == 210


def test_saved_programs_go_with_one_copy_of_the_model():
    with pytest.raises(InvalidArgument, match="data_parallel_size is 2, but must be 1") as error:
        EngineConfig.load({"compiled": "folder", "data_parallel_size": 2})
    assert error.value.field == "compiled"
    assert EngineConfig.load({"compiled": "folder"}).startup.compiled == "folder"


PUBLIC_FILES = {
    *("chat_template", "pin_prefix", "audit_log"),
    *("tls_cert", "tls_client_ca", "prefix_peer_ca", "prefill_tls_ca", "prefill_tls_cert"),
}
"""Options that name a file whose path is shown; a new one has to be decided on."""


def test_secrets_and_the_paths_of_their_files_are_hidden():
    values = {name: "path" for name, _, spec in iter_options() if spec.metadata["path"] in ("file", "new file")}
    hidden = {*values} - PUBLIC_FILES | {"hf_token", "api_key"}
    assert hidden >= {"api_keys", "tls_key", "cluster_secret_file", "prefill_api_key_file", "prefill_tls_key"}
    config = EngineConfig().replace(**values, hf_token="hf_0123", api_key=("0123456789abcdef",))
    shown = {name: value for name, value, _ in config.explain()}
    assert {name for name, value in shown.items() if value == "(set)"} == hidden
    assert {shown[name] for name in PUBLIC_FILES} == {"path"}
    unset = {name: value for name, value, _ in EngineConfig().explain()}
    assert {unset[name] for name in hidden} == {"None"}


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        ("otlp_traces_endpoint", "http://me:p@ss@otel:4317/v1", "http://otel:4317/v1"),
        ("otlp_traces_endpoint", "https://otel:4317?api-key=12&x=1#y", "https://otel:4317?api-key=(set)&x=1#y"),
        ("prefill_target", ("http://me:pass@a:1", "b:2"), "http://a:1, b:2"),
        ("kv_events_topic", "kv@10.0.0.1:8000@model", "kv@10.0.0.1:8000@model"),
        (
            "kv_transfer_config",
            '{"kv_connector_extra_config":{"url":"redis://me:pw@kv","to":"a@b","secret_access_key":"x\\"y","n":1}}',
            '{"kv_connector_extra_config":{"url":"redis://kv","to":"a@b","secret_access_key":"(set)","n":1}}',
        ),
        (
            "hf_overrides",
            '{"password":12345,"a":[{"passwords":["x"],"secret":{"value":1}}],"auth":true,"token":null,"apiKeys":["x"]}',
            '{"password":"(set)","a":[{"passwords":"(set)","secret":"(set)"}],"auth":"(set)","token":null,'
            '"apiKeys":"(set)"}',
        ),
        (
            "hf_overrides",
            '{"Authorization": "Bearer x", "db-pwd": 1, "aws_access_key_id": "AK", "u": "https://h?a=1&sig=xyz"}',
            '{"Authorization": "(set)", "db-pwd": "(set)", "aws_access_key_id": "(set)", "u": "https://h?a=1&sig=(set)"}',
        ),
        (
            "hf_overrides",
            '{"bos_token_id": 1, "num_key_value_heads": 2, "num_speculative_tokens": 4.0, "monkey": 1}',
            '{"bos_token_id": 1, "num_key_value_heads": 2, "num_speculative_tokens": 4.0, "monkey": 1}',
        ),
        (
            "otlp_traces_endpoint",
            "https://h/p?key=1&pwd=2#access_token=3",
            "https://h/p?key=(set)&pwd=(set)#access_token=(set)",
        ),
        ("otlp_traces_endpoint", "https://h?u=http://i?auth=2", "https://h?u=http://i?auth=(set)"),
        ("otlp_traces_endpoint", "redis://me:pa/ss@kv:6379/0", "redis://kv:6379/0"),
        ("otlp_traces_endpoint", "redis://:pa/ss@kv", "redis://kv"),
        ("otlp_traces_endpoint", "a=b=key=c=d,jdbc:db://me:pass@h", "a=b=key=(set),jdbc:db://h"),
        ("otlp_traces_endpoint", "http://kv:80/a@b", "http://kv:80/a@b"),
        ("otlp_traces_endpoint", "me:pass@kv:6379", "kv:6379"),
        ("prefill_target", ("a:1", "me:pass@b:2"), "a:1, b:2"),
        ("chat_template", "{{ x }}\n", "{{ x }} (8 characters)"),
        ("chat_template", "/templates/chat.jinja", "/templates/chat.jinja"),
        ("chat_template", "{% if tools %}\n" + 80 * "{{ x }}\n", "{% if tools %} (655 characters)"),
        ("chat_template", 20 * "{{ x }}", f"{(20 * '{{ x }}')[:57]}... (140 characters)"),
    ],
)
def test_urls_are_shown_without_credentials(name, given, want):
    shown = {name: value for name, value, _ in EngineConfig().replace(**{name: given}).explain()}
    assert shown[name] == want


def test_computed_numbers_are_shown_rounded():
    shown = {name: value for name, value, _ in EngineConfig().replace(swap_space=0.1 + 0.2).explain()}
    assert (shown["swap_space"], shown["shutdown_timeout"]) == ("0.3 GiB", "30.0 s")


def test_adapters_of_the_start_turn_lora_on():
    config = EngineConfig.load({"lora": ["sql=/adapters/sql", "chat=a=b"]})
    assert config.lora.adapters == (("sql", "/adapters/sql"), ("chat", "a=b"))
    assert config.lora.enable_lora
    assert not EngineConfig.load({}).lora.enable_lora
    small = EngineConfig.load({"max_cpu_loras": 2}).lora
    assert (small.max_loras, small.max_cpu_loras) == (2, 2)
    more = EngineConfig.load({"lora": ["a=b", "c=d"], "max_cpu_loras": 1}).lora  # the second one evicts the first one
    assert (len(more.adapters), more.max_loras, more.max_cpu_loras) == (2, 1, 1)
    told = {name: (value, source) for name, value, source in config.explain()}
    assert told["lora"] == ("sql=/adapters/sql, chat=a=b", "set or resolved")


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"lora": ["sql"]}, "lora", "'sql' is not NAME=PATH"),
        ({"lora": ["=/adapters/sql"]}, "lora", "'=/adapters/sql' is not NAME=PATH"),
        ({"lora": ["sql="]}, "lora", "'sql=' is not NAME=PATH"),
        ({"lora": "sql=/adapters/sql"}, "lora", "is not of type list of str"),
        ({"lora": [""]}, "lora", "is empty"),
        ({"lora": [7]}, "lora", "7 is not of type str"),
        ({"lora": ["a=b", "a=c"]}, "lora", "'a' is given 2 times"),
        ({"max_cpu_loras": 3, "max_loras": 4}, "max_cpu_loras", r"3 is below max_loras \(4\)"),
        ({"max_loras": 0}, "max_loras", "0 is below the limit of 1"),
        ({"max_lora_rank": 1024}, "max_lora_rank", "1024 is above the limit of 512"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load(options)
    assert error.value.field == field


def test_speculation_is_a_json_object_or_what_it_says():
    assert EngineConfig.load({}).speculation is None
    wanted = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    found = EngineConfig.load({"speculative_config": wanted})
    assert found == EngineConfig.load({"speculative_config": json.dumps(wanted)})
    assert found.speculation is not None
    assert (found.speculation.method, found.speculation.prompt_lookup_max) == ("ngram", 3)


@pytest.mark.parametrize(
    ("value", "field", "problem"),
    [
        ("ngram", "", "ngram is not JSON"),
        (3, "", "3 is not of type str or dict"),
        ({"method": "ngram"}, ".num_speculative_tokens", "is missing"),
        ({"method": {1}}, "", "is not a JSON object: Object of type set"),
        ({"method": "eagle", "num_speculative_tokens": 2}, ".method", "'eagle' is not one of ngram, suffix"),
        ({"method": "eagle2", "num_speculative_tokens": 2}, ".method", "'eagle2' is not one of ngram, suffix"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, ".model", "eagle3 requires a checkpoint"),
        ({"method": "eagle3", "model": "a/b"}, ".num_speculative_tokens", "is missing"),
    ],
)
def test_speculation_that_cannot_be_is_refused(value, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load({"speculative_config": value})
    assert error.value.field == f"speculative_config{field}"


DISK = {"kv_disk_space": 1.0, "kv_disk_dir": "/kv"}
EAGLE3 = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 2}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"kv_disk_space": 1.0}, "kv_disk_space", "1 GiB requires kv_disk_dir, the folder"),
        ({"kv_disk_dir": "/kv"}, "kv_disk_dir", "/kv is not used, because kv_disk_space is 0"),
        ({**DISK, "swap_space": 0.0}, "kv_disk_space", "1 GiB: blocks pass through host memory, but swap_space"),
        ({**DISK, "enable_prefix_caching": False}, "kv_disk_space", "1 GiB: enable_prefix_caching is False"),
        ({**DISK, "kv_policy": "reserve-max"}, "kv_disk_space", "1 GiB: kv_policy reserve-max caches no prefixes"),
    ],
)
def test_a_disk_that_prefixes_cannot_come_to_is_refused(options, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load(options)
    assert error.value.field == field


def test_a_disk_is_of_one_process():
    several = MultiHost("host:1", 2, 0, "the options")
    with pytest.raises(InvalidArgument, match="kv_disk_space: 1 GiB: each process has only a part of every block"):
        EngineConfig.load(DISK).for_multihost(several)


CONNECTOR = {"kv_connector": "MyConnector", "kv_connector_module_path": "my.module"}


def test_a_connector_is_described_as_in_vllm():
    given: dict[str, Any] = {
        **CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": "/kv", "port": 9},
        "engine_id": "e-1",
        "kv_buffer_device": "cpu",
        "kv_buffer_size": 1e9,
        "kv_rank": None,
        "kv_parallel_size": 1,
        "kv_ip": "127.0.0.1",
        "kv_port": 14579,
        "kv_load_failure_policy": "recompute",
        "enable_permute_local_kv": False,
    }
    want = KVTransferOptions("MyConnector", "my.module", {"path": "/kv", "port": 9})
    of_vllm = SimpleNamespace(**given | {"kv_buffer_device": "cuda"}, get_from_extra_config=print)
    for config in (given, json.dumps(given), of_vllm):
        cache = EngineConfig.load({"kv_transfer_config": config}).cache
        assert (cache.kv_transfer, cache.store_option) == (want, "kv_transfer_config")
    assert KVTransferOptions.parse(json.dumps(CONNECTOR)).kv_connector_extra_config == {}
    assert EngineConfig.load({}).cache.kv_transfer is None


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"kv_role": "kv_producer"}, ".kv_role", "'kv_producer' is not supported: must be 'kv_both', because"),
        ({"kv_role": "kv_consumer"}, ".kv_role", "'kv_consumer' is not supported"),
        ({"kv_parallel_size": 2}, ".kv_parallel_size", "2 is not supported: must be 1"),
        ({"kv_buffer_device": "cuda"}, ".kv_buffer_device", "'cuda' is not supported: must be 'cpu'"),
        ({"kv_load_failure_policy": "fail"}, ".kv_load_failure_policy", "must be 'recompute'"),
        ({"enable_permute_local_kv": True}, ".enable_permute_local_kv", "True is not supported"),
        ({"kv_conector": "a"}, ".kv_conector", "is unknown: must be one of kv_connector, kv_connector_module_path"),
        ({"kv_connector": None}, ".kv_connector", "is missing: it names the class"),
        ({"kv_connector": ""}, ".kv_connector", "'' is not a name"),
        ({"kv_connector": 3}, ".kv_connector", "3 is not a name"),
        ({"kv_connector_module_path": None}, ".kv_connector_module_path", "is missing: it names the module with"),
        ({"kv_connector_extra_config": [1]}, ".kv_connector_extra_config", r"\[1\] is not a JSON object"),
        (
            {"kv_connector": "NixlConnector", "kv_connector_module_path": None},
            ".kv_connector",
            "NixlConnector is a connector of vLLM: for separate prefill and decode servers use role",
        ),
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": None},
            ".kv_connector",
            "for local disk use kv_disk_space",
        ),
    ],
)
def test_a_connector_that_cannot_be_is_refused_by_name(change, field, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load({"kv_transfer_config": {**CONNECTOR, **change}})
    assert error.value.field == f"kv_transfer_config{field}"


def test_an_object_of_another_type_is_no_connector():
    for value in (SimpleNamespace(kv_connector=None), 3):
        with pytest.raises(InvalidArgument, match="is not of type str or dict"):
            EngineConfig.load({"kv_transfer_config": value})
    with pytest.raises(InvalidArgument, match="kv_role: 'kv_producer' is not supported"):
        EngineConfig.load({"kv_transfer_config": SimpleNamespace(kv_connector="A", kv_role="kv_producer")})


@pytest.mark.parametrize("text", ["MyConnector", "[1]", '{"kv_connector": "a", "kv_connector": "b"}'])
def test_a_connector_is_one_json_object(text):
    with pytest.raises(InvalidArgument, match=r"is not JSON|is not a JSON object|is given twice") as error:
        EngineConfig.load({"kv_transfer_config": text})
    assert error.value.field.startswith("kv_transfer_config")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (DISK, "MyConnector: only one store is supported below host memory, but kv_disk_space is 1 GiB"),
        ({"swap_space": 0.0}, "MyConnector: blocks pass through host memory, but swap_space is 0"),
        ({"enable_prefix_caching": False}, "MyConnector: enable_prefix_caching is False"),
        ({"kv_policy": "reserve-max"}, "MyConnector: kv_policy reserve-max caches no prefixes"),
    ],
)
def test_a_connector_that_prefixes_cannot_come_to_is_refused(options, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load({"kv_transfer_config": CONNECTOR, **options})
    assert error.value.field == "kv_transfer_config"


def test_a_connector_is_of_one_process():
    several = MultiHost("host:1", 2, 0, "the options")
    with pytest.raises(InvalidArgument, match="kv_transfer_config: MyConnector: each process has only a part"):
        EngineConfig.load({"kv_transfer_config": CONNECTOR}).for_multihost(several)


def test_a_head_sees_each_token_once():
    """The model runs one step at a time, and no block leaves for the host."""
    for options in ({}, {"num_scheduler_steps": -1, "swap_space": 0.0}, {"num_scheduler_steps": 1, "swap_space": 1.0}):
        for head in (EAGLE3, MTP):
            found = EngineConfig.load({"speculative_config": head, **options})
            assert (found.scheduler.num_scheduler_steps, found.cache.swap_space) == (1, 0.0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_scheduler_steps": 4}, "num_scheduler_steps is 4, over the limit of 1"),
        ({"swap_space": 2.0}, "swap_space must be 0"),
        ({"kv_disk_space": 2.0, "kv_disk_dir": "/kv"}, "kv_disk_space must be 0"),
        ({"kv_transfer_config": CONNECTOR}, "kv_transfer_config must be unset"),
        ({"tensor_parallel_size": 2}, "eagle3 runs on one device; tensor_parallel_size is 2"),
        ({"enable_lora": True}, "eagle3 does not support adapters"),
        ({"speculative_config": MTP, "swap_space": 2.0}, "mtp needs the hidden states of every token"),
        ({"speculative_config": MTP, "context_parallel_size": 2}, "mtp does not split contexts; context_parallel_size"),
    ],
)
def test_what_does_not_go_with_a_head_is_refused(options, problem):
    with pytest.raises(InvalidArgument, match=problem) as error:
        EngineConfig.load({"speculative_config": EAGLE3, **options})
    assert error.value.field == "speculative_config.method"


@pytest.mark.parametrize(
    ("given", "platform", "num_cores", "expected"),
    [
        (None, "cpu", 1, False),
        (None, "cpu", 2, True),
        (None, "gpu", 1, True),
        (None, "tpu", 1, True),
        (True, "cpu", 1, True),
        (False, "tpu", 64, False),
    ],
)
def test_steps_overlap_by_default_unless_one_core_does_everything(given, platform, num_cores, expected):
    assert has_overlap(given, platform, num_cores) is expected


EPLB = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}


def test_balanced_experts_have_the_keys_of_vllm() -> None:
    assert EngineConfig.load({}).parallel.eplb is None
    default = EngineConfig.load(EPLB).parallel.eplb
    assert default is not None
    assert (default.num_redundant_experts, default.window_size, default.step_interval) == (0, 1000, 3000)
    keys = {"num_redundant_experts": 32, "step_interval": 100, "use_async": True, "policy": "default"}
    found = EngineConfig.load({**EPLB, "eplb_config": keys}).parallel.eplb
    assert found is not None
    assert (found.num_redundant_experts, found.window_size, found.step_interval) == (32, 100, 100)


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"eplb_config": {"num_redundant_experts": -1}}, "eplb_config.num_redundant_experts", "-1 is below the limit"),
        ({"eplb_config": {"experts": 1}}, "eplb_config.experts", "is unknown: must be one of num_redundant_experts"),
        ({"eplb_config": {"policy": "flat"}}, "eplb_config.policy", "'flat' is not supported: must be 'default'"),
        (
            {"eplb_config": {"window_size": 50, "step_interval": 20}},
            "eplb_config.window_size",
            "50 is above step_interval",
        ),
        ({"pipeline_parallel_size": 2}, "enable_eplb", "does not support pipeline_parallel_size 2; it must be 1"),
        ({"context_parallel_size": 2}, "enable_eplb", "does not support context_parallel_size 2; it must be 1"),
        ({"enable_lora": True}, "enable_eplb", "does not support enable_lora True; it must be False"),
        ({"compiled": "folder"}, "enable_eplb", "does not support compiled folder; it must be None"),
        ({"role": "prefill"}, "enable_eplb", "does not support role prefill; it must be both"),
        (
            {"kv_disk_dir": "folder", "kv_disk_space": 1.0},
            "enable_eplb",
            "does not support kv_disk_space 1 GiB; it must be None",
        ),
        ({"speculative_config": EAGLE3}, "enable_eplb", "does not support speculative_config.method eagle3"),
    ],
    ids=str,
)
def test_invalid_options_of_balanced_experts_are_named(options: dict[str, object], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(problem)) as error:
        EngineConfig.load({**EPLB, **options})
    assert error.value.field == field


def data_port(extra: object = None, **keys: object) -> str:
    values = {"kv_connector": "jax", "kv_connector_extra_config": extra or {"address": "127.0.0.1:0"}}
    return json.dumps({**values, **keys})


@pytest.mark.parametrize(
    ("config", "field", "problem"),
    [
        (data_port({"address": "localhost:0"}), "kv_connector_extra_config.address", "must be a numeric address"),
        (data_port({"address": "0.0.0.0:1"}), "kv_connector_extra_config.address", "address of one interface"),
        (data_port({"address": "[::]:1"}), "kv_connector_extra_config.address", "address of one interface"),
        (data_port({"address": "127.0.0.1"}), "kv_connector_extra_config.address", "127.0.0.1"),
        (data_port({"pull_timeout": 1}), "kv_connector_extra_config.address", "is missing"),
        (data_port({"address": "127.0.0.1:0", "port": 1}), "kv_connector_extra_config.port", "is unknown"),
        (data_port({"address": "127.0.0.1:0", "pull_timeout": 0}), "kv_connector_extra_config.pull_timeout", "0"),
        (data_port("x"), "kv_connector_extra_config", "is not a JSON object"),
        (data_port(kv_role="kv_all"), "kv_role", "is not one of kv_both, kv_producer, kv_consumer"),
        (data_port(kv_role="kv_producer"), "kv_role", "is for the role prefill; this server's is decode"),
        (data_port(kv_buffer_size=1), "kv_buffer_size", "is not a number of bytes"),
        (data_port(kv_parallel_size=2), "kv_parallel_size", "is not supported by kv_connector jax"),
    ],
)
def test_a_data_port_that_cannot_be_used_is_refused(config: str, field: str, problem: str) -> None:
    def load() -> None:
        loaded = EngineConfig.load({"kv_transfer_config": config, "role": "decode", "prefill_target": ("a:1",)})
        loaded.roles.check(loaded.cache)

    with pytest.raises(InvalidArgument, match=problem) as refused:
        load()
    assert refused.value.field == f"kv_transfer_config.{field}"


def test_a_data_port_is_no_store_and_needs_a_role() -> None:
    loaded = EngineConfig.load({"kv_transfer_config": data_port(), "role": "prefill"})
    loaded.roles.check(loaded.cache)
    assert loaded.cache.data_port == DataPortOptions("127.0.0.1:0", None, 10**9, 2.0)
    assert (loaded.cache.kv_transfer, loaded.cache.store_option) == (None, None)
    extra = {"address": "127.0.0.1:0", "allowed_peers": ["10.0.0.7"]}
    config = json.dumps({"kv_connector": "jax", "kv_connector_extra_config": extra})
    found = EngineConfig.load({"kv_transfer_config": config, "role": "prefill"}).cache.data_port
    assert found is not None and found.allowed_peers == ("10.0.0.7",)
    mapped = config.replace("10.0.0.7", "::ffff:10.0.0.7").replace("127.0.0.1:0", "[::ffff:127.0.0.1]:0")
    found = EngineConfig.load({"kv_transfer_config": mapped, "role": "prefill"}).cache.data_port
    assert found is not None and (found.address, found.allowed_peers) == ("127.0.0.1:0", ("10.0.0.7",))
    for peer, problem in (("host", "is not a numeric address"), ("::1", "one is IPv4, the other IPv6")):
        wrong = config.replace("10.0.0.7", peer)
        with pytest.raises(InvalidArgument, match=problem):
            EngineConfig.load({"kv_transfer_config": wrong, "role": "prefill"})
    alone = EngineConfig.load({"kv_transfer_config": data_port()})
    with pytest.raises(InvalidArgument, match="requires the role prefill or decode"):
        alone.roles.check(alone.cache)
