"""The endpoint and the logs of a host that is up: what an operator's Prometheus and log collector get."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fleet.config import load_config
from fleet.machine import free_port, host_children
from tests.fleet.harness import PATIENCE_S, FleetUnderTest
from tests.support import wait_until

HOST = "delta"


class Delta:
    """A further host, with metrics and JSON logs."""

    def __init__(self, fleet: FleetUnderTest, url: str) -> None:
        self.fleet = fleet
        self.root = fleet.base / HOST
        self._url = url

    def scrape(self) -> str:
        try:
            answer = httpx.get(f"{self._url}/metrics", trust_env=False, timeout=20)
        except httpx.TransportError:
            return ""
        return answer.text if answer.is_success else ""

    def value(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.scrape()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None

    def await_value(self, expected: float, name: str, **labels: str) -> None:
        wait_until(
            lambda: self.value(name, **labels) == expected,
            PATIENCE_S,
            lambda: f"{name}{labels} is {self.value(name, **labels)}, not {expected}",
        )

    def log(self, worker: str) -> list[dict[str, Any]]:
        lines = (self.fleet.base / "home" / "logs" / f"{worker}-{HOST}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def delta(fleet: FleetUnderTest) -> Iterator[Delta]:
    (fleet.base / HOST).mkdir()
    port = free_port()
    values = yaml.safe_load((fleet.base / "fleet.yaml").read_text())
    values["hosts"][HOST] = {"work_folders": [str(fleet.base / HOST)], "max_agents": 1}
    values |= {"metrics": {"port": port}, "logs": {"format": "json"}}
    file = fleet.base / f"{HOST}.yaml"
    file.write_text(yaml.safe_dump(values))
    home = fleet.base / "home" / "hosts" / HOST
    home.mkdir(parents=True)
    environ = {**fleet.environ, "FLEET_CONFIG": str(file), "FLEET_HOME": str(home)}
    with fleet.also(*host_children(load_config(file, environ), environ, HOST)):
        host = Delta(fleet, f"http://127.0.0.1:{port}")
        wait_until(host.scrape, PATIENCE_S, "no scrape is answered")
        yield host


def test_an_endpoint_tells_of_turns_from_waiting_to_their_end(delta: Delta):
    fleet = delta.fleet
    for alias in ("m1", "m2"):
        fleet.person.hand_over(alias, fleet.folder(alias, delta.root), "long")
    delta.await_value(1, "fleet_turns_running", host=HOST)
    delta.await_value(1, "fleet_turns_waiting", host=HOST)
    assert delta.value("fleet_turn_places", host=HOST) == 1
    for alias in ("m1", "m2"):
        fleet.person.set_state(alias, "completed")
    delta.await_value(2, "fleet_turns_total", host=HOST, agent="scripted", outcome="stopped")
    delta.await_value(0, "fleet_turns_running", host=HOST)

    fleet.person.hand_over("m3", fleet.folder("m3", delta.root), "hello")
    delta.await_value(1, "fleet_turns_total", host=HOST, agent="scripted", outcome="completed")
    assert delta.value("fleet_tokens_total", host=HOST, agent="scripted", kind="output") == 7


def test_a_scrape_names_no_thread_and_no_session(delta: Delta):
    delta.fleet.person.hand_over("named-nowhere", delta.fleet.folder("m4", delta.root), "hello")
    delta.fleet.await_turns("named-nowhere")
    text = delta.scrape()
    assert "fleet_turns_running" in text
    assert "named-nowhere" not in text
    assert delta.fleet.platform.session_id not in text


def test_promtool_has_nothing_to_say_about_a_scrape(delta: Delta):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=delta.scrape(), capture_output=True, text=True, check=False, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_line_says_which_turn_it_is_about(delta: Delta):
    fleet = delta.fleet
    fleet.person.hand_over("dies", fleet.folder("dies", delta.root), "die")
    fleet.await_turns("dies")
    record = fleet.record("dies")
    (line,) = (line for line in delta.log("turns") if line["level"] == "WARNING" and line.get("thread") == "dies")
    assert {name: line[name] for name in ("host", "task", "session", "epoch", "turn")} == {
        "host": HOST,
        "task": "fleet.run_turn",
        "session": fleet.platform.session_id,
        "epoch": record.epoch,
        "turn": 1,
    }
