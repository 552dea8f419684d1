"""The dashboard asks for what a server tells, and its panels lie side by side."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.deploy import metrics

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
NAME = re.compile(r"\b(?:vllm|jpaged):\w+")


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "jpaged.json").read_text())
    return loaded


async def test_every_metric_of_the_dashboard_is_told() -> None:
    text = json.dumps(dashboard())
    asked = set(NAME.findall(text))
    assert len(asked) > 20
    assert asked - metrics.names_in(await metrics.scrape()) == set()


def test_every_query_is_narrowed_to_what_was_chosen() -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    assert queries
    for query in queries:
        assert len(NAME.findall(query)) == query.count('{model_name=~"$model",instance=~"$instance"}')


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert is_beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def test_compose_brings_the_dashboard_where_grafana_looks() -> None:
    service = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]["grafana"]
    mounted = {target: FOLDER.parent / source for source, target, _ in (one.split(":") for one in service["volumes"])}
    provider = yaml.safe_load((FOLDER / "provisioning/dashboards/jpaged.yaml").read_text())["providers"][0]
    (path,) = [target for target in mounted if target.startswith(provider["options"]["path"])]
    assert mounted[path] == FOLDER.parent / "./grafana/jpaged.json"
    assert service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == path
    assert all(source.exists() for source in mounted.values())
