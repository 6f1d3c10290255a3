"""Dashboard, alerts and docs name the metrics that there are, and no others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from fleet import metrics
from fleet.config import FleetConfig
from fleet.metrics import Load, begin_at_zero, load_metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "ops/prometheus"
DOCS = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "ops/grafana/fleet.json").read_text())
RULES = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
LOAD = Load(1, 4, 0, 3, 2, 0, 0, 1.5, {"attached": 1, "retrying": 0, "down": 0})

#: A metric in a query, and the labels that it is selected by.
SELECTOR = re.compile(r"\b((?:fleet|process)_[a-z_]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
#: Labels that Prometheus itself adds, and that a histogram's buckets have.
ADDED = {"job", "instance", "le"}


def known() -> dict[str, set[str]]:
    """Each series that an endpoint serves → its labels."""
    begin_at_zero(FleetConfig(), "alpha")
    families = [*metrics.REGISTRY.collect(), *load_metrics("alpha", LOAD)]
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def queries() -> Iterator[Any]:
    """All queries of the dashboard and the rules."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield pytest.param(variable["definition"], id=variable["name"])
    for rule in RULES:
        yield pytest.param(rule["expr"], id=rule["alert"])


def promtool(*arguments: str | Path, text: str = "") -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_uses_series_and_labels_that_exist(query: str):
    series = known()
    used = SELECTOR.findall(query)
    assert [name for name, _ in used if name not in series] == []
    wrong = {name: set(LABEL.findall(labels)) - series[name] - ADDED for name, labels in used}
    assert not any(wrong.values()), wrong
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", labels)}
    assert grouped <= ADDED.union(*(series[name] for name, _ in used))


def test_every_metric_is_explained_with_its_labels_and_every_explained_one_exists():
    rows = re.findall(r"^\| `(fleet_\w+)` \| (.*?) \|", DOCS, re.MULTILINE)
    explained = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    series = {name: labels for name, labels in known().items() if name.startswith("fleet_")}
    of_histograms = {name for name in series if name.endswith(("_bucket", "_sum", "_count"))}
    expected = {name: labels for name, labels in series.items() if name not in of_histograms}
    expected |= {name.removesuffix("_count"): series[name] for name in of_histograms if name.endswith("_count")}
    assert explained == expected


def test_every_alert_says_what_to_do_and_how_bad_it_is():
    assert re.findall(r"^\| `(Fleet\w+)`", DOCS, re.MULTILINE) == [rule["alert"] for rule in RULES]
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in RULES)


def test_no_label_can_take_more_values_than_a_configuration_has():
    assert set().union(*known().values()) - ADDED == {
        "host",
        "agent",
        "outcome",
        "kind",
        "result",
        "state",
        "version",
    }


def test_without_redis_a_scrape_says_so_and_makes_no_figures_up():
    families = {family.name: family.samples[0].value for family in load_metrics("alpha", None)}
    assert families == {"fleet_build_info": 1, "fleet_redis_up": 0}


def test_the_panels_of_the_dashboard_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
    ids=" ".join,
)
def test_promtool_accepts_configuration_and_rules(arguments: tuple[str, str, str]):
    promtool(*arguments[:2], PROMETHEUS / arguments[2])


def test_promtool_accepts_what_is_served():
    begin_at_zero(FleetConfig(), "alpha")
    promtool("check", "metrics", text=generate_latest(metrics.REGISTRY).decode())
