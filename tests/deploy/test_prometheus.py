"""Alarms are about metrics that a live server has, and each has its section in the runbook."""

import asyncio
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.metrics import names_in, scrape

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
FUNCTIONS = frozenset(
    ("rate", "increase", "sum", "histogram_quantile", "min_over_time", "by", "and", "on", "le", "instance", "job")
)
"""Words of PromQL and labels that the expressions use."""


@pytest.fixture(scope="module")
def scraped() -> str:
    return asyncio.run(scrape())


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [copy.deepcopy(rule) for group in groups for rule in group["rules"]]


def words_of(expression: str) -> set[str]:
    """Names in an expression: metrics, functions, labels; without the values of labels and ranges."""
    plain = re.sub(r'"[^"]*"|\[\w+\]', "", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", plain))


def anchors(text: str) -> set[str]:
    """The names by which the headings of a markdown file are linked."""
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def problems(rule: dict[str, Any], scraped: str, runbook: str) -> list[str]:
    """What is wrong with one alarm."""
    name, expression = rule["alert"], rule["expr"]
    found = [f"{key} is no key of a rule" for key in rule.keys() - {"alert", "expr", "for", "labels", "annotations"}]
    known = names_in(scraped) | FUNCTIONS | {"up", "finished_reason"}
    found += [f"the server has no metric {word}" for word in sorted(words_of(expression) - known)]
    if expression.count("(") != expression.count(")") or expression.count("[") != expression.count("]"):
        found.append("brackets are not in pairs")
    for label, value in re.findall(r'(\w+)="([^"]*)"', expression):
        if label != "job" and f'{label}="{value}"' not in scraped:
            found.append(f'nothing has {label}="{value}"')
    if not re.fullmatch(r"\d+[smh]", rule["for"]):
        found.append(f"for is {rule['for']}")
    if rule["labels"].get("severity") not in ("page", "warn"):
        found.append(f"severity is {rule['labels'].get('severity')}")
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    if path != "docs/runbook.md" or anchor != name.lower() or anchor not in anchors(runbook):
        found.append(f"{rule['annotations']['runbook']} is no section of the runbook")
    return [f"{name}: {problem}" for problem in found]


def test_every_alarm_is_in_order(scraped):
    assert [problem for rule in rules() for problem in problems(rule, scraped, RUNBOOK)] == []
    assert len({rule["alert"] for rule in rules()}) == len(rules()) >= 10


def test_the_runbook_has_no_alarm_that_there_is_not():
    assert set(re.findall(r"^### (Jpaged\w+)$", RUNBOOK, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_the_runbook_names_only_metrics_that_there_are(scraped):
    named = set(re.findall(r"`((?:vllm|jpaged):\w+)`", RUNBOOK))
    assert named - names_in(scraped) == set()
    assert len(named) > 15


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expr", "vllm:num_request_waiting > 1", "the server has no metric vllm:num_request_waiting"),
        ("expr", "rate(vllm:num_preemptions[5m]) > 1", "the server has no metric vllm:num_preemptions"),
        ("expr", "ratee(jpaged:steps_total[5m]) > 1", "the server has no metric ratee"),
        ("expr", "rate(jpaged:steps_total[5m] > 1", "brackets are not in pairs"),
        ("expr", 'vllm:request_success_total{finished_reason="eror"} > 1', 'nothing has finished_reason="eror"'),
        ("annotations", {"runbook": "docs/runbook.md#gone"}, "is no section of the runbook"),
        ("labels", {"severity": "loud"}, "severity is loud"),
        ("for", "soon", "for is soon"),
        ("summary", "", "summary is no key of a rule"),
    ],
)
def test_a_planted_mistake_in_an_alarm_is_found(scraped, key, value, message):
    rule = rules()[0]
    rule[key] = value
    found = problems(rule, scraped, RUNBOOK)
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize("name", ["prometheus.yaml", "kubernetes.yaml"])
def test_a_configuration_reads_the_alarms_under_the_job_that_they_name(name):
    config = yaml.safe_load((FOLDER / name).read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["jpaged"]
    assert 'up{job="jpaged"} == 0' in [rule["expr"] for rule in rules()]


def test_the_compose_file_is_scraped_where_its_server_answers():
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    entry_point = (ROOT / "deploy" / "docker" / "Dockerfile.cpu").read_text()
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["server:9400"]}]
    assert '"--metrics-port", "9400"' in entry_point
