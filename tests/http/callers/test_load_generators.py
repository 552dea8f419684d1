"""Load generators that others wrote, unmodified, against the demo model: their counts equal the server's."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jpaged.demo import FOLDER
from tests.http.callers.test_callers import ENVIRONMENT
from tests.processes import WAIT_S

BIN = Path(sys.prefix) / "callers-load" / "bin"
PERF = Path(sys.prefix) / "callers-perf" / "bin" / "inference-perf"
NUM_REQUESTS = 8
NUM_TOKENS = 8


def run(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command of the environment, or one with an absolute path; fail with what it prints if it fails."""
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        check=False,
        cwd=folder,
        env={**ENVIRONMENT, "HOME": str(folder), "NO_PROXY": "*", "PYTHONPATH": "", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * WAIT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def counters(url: str) -> dict[str, int]:
    """Return the server's counters of tokens."""
    text = httpx2.get(f"{url}/metrics", timeout=WAIT_S).text
    found = re.findall(r"^vllm:(prompt|generation)_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


def counted(before: dict[str, int], after: dict[str, int]) -> list[int]:
    """Return the tokens of prompts and of outputs between two readings."""
    return [after[name] - before[name] for name in ("prompt", "generation")]


@pytest.mark.long
def test_guidellm_counts_the_tokens_that_the_server_counts(
    served: tuple[str, str],
    tmp_path: Path,
) -> None:
    before = counters(served[1])
    words = ["guidellm", "run", "--disable-console", "--profile", "kind=concurrent,streams=4"]
    words += ["--backend", f"kind=openai_http,target={served[1]},model=demo"]
    words += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={FOLDER}", "--output", "kind=json,path=report.json"]
    run([*words, "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"], tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM_REQUESTS, 0, 0)
    sums = [metrics[name]["successful"]["total_sum"] for name in ("prompt_token_count", "output_token_count")]
    assert sums == counted(before, counters(served[1]))
    assert sums[1] == NUM_REQUESTS * NUM_TOKENS


@pytest.mark.deep
def test_aiperf_counts_the_tokens_that_the_server_counts(
    served: tuple[str, str],
    tmp_path: Path,
) -> None:
    before = counters(served[1])
    words = ["aiperf", "profile", "--model", "demo", "--url", served[1], "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", str(FOLDER), "--concurrency", "4", "--request-count", str(NUM_REQUESTS)]
    words += ["--isl", "32", "--osl", str(NUM_TOKENS), "--workers-max", "1", "--ui", "none", "--no-gpu-telemetry"]
    words += ["--no-server-metrics", "--use-server-token-count", "--output-artifact-dir", str(tmp_path / "out")]
    words += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    run(words, tmp_path, {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""})  # offline it looks up a path in its cache
    report: dict[str, Any] = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert "error_request_count" not in report and not report.get("error_summary")
    found = [report[name]["avg"] for name in ("total_usage_prompt_tokens", "total_usage_completion_tokens")]
    assert found == counted(before, counters(served[1]))
    assert found[1] == NUM_REQUESTS * NUM_TOKENS


@pytest.mark.deep
def test_inference_perf_counts_the_tokens_that_the_server_counts(served: tuple[str, str], tmp_path: Path) -> None:
    assert PERF.exists(), "it requires Python 3.12 or later: install one, then run `make test-deep`"
    before = counters(served[1])
    lengths = [
        {"min": num, "max": num, "mean": num, "std_dev": 0, "total_count": NUM_REQUESTS} for num in (32, NUM_TOKENS)
    ]
    config = {
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": NUM_REQUESTS, "duration": 1}]},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "demo", "base_url": served[1], "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(FOLDER)},
        "data": {"type": "random", "input_distribution": lengths[0], "output_distribution": lengths[1]},
        "storage": {"local_storage": {"path": "reports"}},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config))
    run([str(PERF), "--config_file", "config.yml"], tmp_path)
    report: dict[str, Any] = json.loads((tmp_path / "reports" / "summary_lifecycle_metrics.json").read_text())
    successes = report["successes"]
    assert (successes["count"], report["failures"]["count"]) == (NUM_REQUESTS, 0)
    assert successes["client_fallback_requests"] == {"prompt": 0, "output": 0}
    found = [successes[name]["total"] for name in ("prompt_tokens", "output_tokens")]
    assert found == counted(before, counters(served[1]))
    assert found[1] == NUM_REQUESTS * NUM_TOKENS
