"""`jpaged bench fleet`: what it tells, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import matplotlib.image
import pytest

from jpaged.cli.main import main
from jpaged.errors import InvalidArgument

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SMALL = ["bench", "fleet", "--topology", "h100", "--replicas", "3", "--day", "4", "--rate", "9", "--processes", "1"]
SHORT = [*SMALL, "--system-len", "200", "--thinking", "0.5"]


@pytest.mark.long
def test_json_has_a_run_for_each_router_and_a_seed_decides_them(capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*SHORT, "--seed", seed, "--router", "random", "prefix", "--price", "h100=2", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        for run in told["runs"]:
            del run["simulation"]
        outputs.append(told["runs"])
        assert told["setting"]["usd_per_replica_hour"] == {"h100": 2.0}
        assert told["setting"]["time_lapse"] == 86_400 / 4
    assert outputs[0] == outputs[1] != outputs[2]
    assert [run["router"] for run in outputs[0]] == ["random", "prefix"]
    for run in outputs[0]:
        assert run["usd_per_million_tokens"] > 0
        assert run["num_turns"] > 10
        assert 0 < run["ttft_p50_ms"] <= run["ttft_p99_ms"]


def test_a_table_says_what_was_simulated_and_how_long_a_day_would_take(tmp_path, capsys):
    picture, numbers = tmp_path / "day.png", tmp_path / "day.json"
    options = ["--failures", "2", "--drains", "1", "--cold-start", "1"]
    assert main([*SHORT, *options, "--plot", str(picture), "--output-json", str(numbers)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "llama-3.1-8b on 3 x h100, 9 requests/s over a day of 4 s" in printed
    assert "21600 times faster than in a 24-hour day" in printed
    assert "Routers see data that is up to 0.25 s old" in printed
    assert "a day of 24 hours at 9 requests/s would take" in printed
    assert "num failures" in printed
    assert matplotlib.image.imread(picture).shape[0] > 500
    assert json.loads(numbers.read_text())["runs"][0]["interruptions"]["num_failures"] == 2


@pytest.mark.long
def test_what_a_pool_gives_up_comes_back_from_host_memory(capsys):
    model = ["--model", "opt-13b", "--max-model-len", "2048", "--topology", "a100-40gb", "--replicas", "1"]
    words = ["bench", "fleet", *model, "--day", "20", "--rate", "9", "--processes", "1", "--system-len", "500"]
    words += ["--tenants", "40", "--tenant-skew", "0", "--thinking", "0.5"]
    runs = []
    for options in ((), ("--num-host-blocks", "400"), ("--num-host-blocks", "400", "--eviction-policy", "worth")):
        assert main([*words, *options, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        runs.append(told["runs"][0])
        assert told["setting"]["num_host_blocks"] == (400 if options else 0)
    without, plain, worth = runs
    assert without["host_hit_percent"] == 0 < min(plain["host_hit_percent"], worth["host_hit_percent"])
    assert without["prefix_hit_percent"] < min(plain["prefix_hit_percent"], worth["prefix_hit_percent"])
    assert plain["prefix_hit_percent"] != worth["prefix_hit_percent"]


def test_it_says_before_it_begins_what_many_requests_will_take(capsys, monkeypatch):
    words = ["--replicas", "400", "--rate", "800", "--day", "20", "--system-len", "200"]

    def stop(*given):
        raise InvalidArgument("day", "the test has seen enough")

    monkeypatch.setattr("jpaged.bench.cli.fleet.SimulatedFleet", stop)
    assert main([*SMALL, *words]) == 2
    said = re.search(r"About ([\d,]+) requests for each router: about [\d.]+ minutes", capsys.readouterr().out)
    assert said is not None and 4000 < int(said[1].replace(",", "")) < 16_000


def test_several_topologies_have_a_price_each(capsys):
    words = ["bench", "fleet", "--topology", "h100=2", "--topology", "a100-80gb=1", "--day", "2", "--rate", "3"]
    assert main([*words, "--processes", "1", "--price", "h100=3,a100-80gb=1.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["setting"]["replicas"] == {"h100": 2, "a100-80gb": 1}
    (run,) = told["runs"]
    assert run["usd"] == pytest.approx((2 * 3 + 1.5) * run["elapsed_s"] / 3600)


def test_an_autoscaled_fleet_begins_with_the_fewest(capsys):
    assert main([*SHORT, "--autoscale", str(DEPLOY), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["setting"]["autoscaling"] == "2 to 8"
    assert told["runs"][0]["curve"]["ready"][0] == 2
    words = ["bench", "fleet", "--topology", "h100", "--autoscale", str(DEPLOY), "--rate", "1", "--json"]
    assert main([*words, "--processes", "1", "--day", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["replicas"] == {"h100": 8}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas: 0 of h100 is out of range: must be from 1 to 100000"),
        (["--topology", "v9"], "--topology: h100 is one of several: add its number of replicas, as in h100=10"),
        (["--topology", "h100"], "--topology: h100 is one of several"),
        (["--day", "0"], "--day: 0.0 is out of range: must be from 1.0 to 86400.0"),
        (["--rate", "0"], "--rate: 0.0 is out of range"),
        (["--window", "nan"], "--window: nan is out of range"),
        (["--swing", "1.5"], "--swing: 1.5 is out of range"),
        (["--failures", "-1"], "--failures: -1 is out of range"),
        (["--processes", "0"], "--processes: 0 is out of range"),
        (["--cold-start", "-1"], "--cold-start: -1.0 is out of range"),
        (["--router", "random", "random"], "--router: random is given more than once"),
        (["--price", "much"], "--price: 'much' is not a price in USD"),
        (["--autoscale", "nowhere"], "--autoscale: nowhere/kubernetes/horizontalpodautoscaler.yaml cannot be read"),
        (
            ["--autoscale", "{deploy}"],
            "--replicas: 3 is out of range: must be from minReplicas to maxReplicas",
        ),
        (["--plot", "day.txt"], "--plot: day.txt does not end with one of"),
        (["--max-model-len", "200000"], "max_model_len: 200000 is over the limit of llama-3.1-8b, 131072"),
        (["--rate", "1e-6"], "--rate: 1e-06 requests/s is too low: no conversation starts in a day of 4 s"),
        (["--num-host-blocks", "-1"], "--num-host-blocks: -1 is out of range"),
        (
            ["--eviction-policy", "worth", "--no-enable-prefix-caching"],
            "eviction_policy: worth has no effect, because no prefixes are cached with enable_prefix_caching False",
        ),
        (["--rate", "1e9"], "rate: 1.33e+09 conversations in a day are above the limit of 5000000"),
    ],
)
def test_a_wrong_option_is_named(words, message, capsys, tmp_path):
    for part in ("kubernetes", "prometheus"):
        shutil.copytree(DEPLOY / part, tmp_path / part)
    scaler = tmp_path / "kubernetes" / "horizontalpodautoscaler.yaml"
    scaler.write_text(scaler.read_text().replace("minReplicas: 2", "minReplicas: 4"))
    assert main([*SMALL, *(word.format(deploy=tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "v9:1"], "topology: 'v9:1' is not known"),
        (["--topology", "h100=x"], "--topology: 'x' is not a number of replicas for h100"),
        (["--topology", "h100=1", "--topology", "h100=2"], "--topology: h100 is given more than once"),
        (
            ["--topology", "h100=2", "--replicas", "3"],
            "--replicas: conflicts with --topology h100=2: give only one of them",
        ),
        (["--topology", "tpu-v5e=1"], "num_devices: 1 x tpu-v5e leave"),
        (["--topology", "h100=1", "--price", "v6e=2"], "--price: v6e matches none of the topologies (h100)"),
        (
            ["--topology", "h100=1", "--topology", "b200=1", "--price", "h100=2"],
            "--price: b200 has no price, but other topologies have one",
        ),
        (
            ["--topology", "h100=3", "--topology", "b200=3", "--autoscale", str(DEPLOY)],
            "--autoscale: allows one --topology, not 2: a Deployment has one kind of pod",
        ),
        (
            ["--topology", "h100", "--autoscale", str(DEPLOY), "--window", "20"],
            "--window: 20 s is over the scrape_interval of --autoscale, 10 s",
        ),
    ],
)
def test_a_wrong_topology_is_named(words, message, capsys):
    assert main(["bench", "fleet", *words]) == 2
    assert message in capsys.readouterr().err
