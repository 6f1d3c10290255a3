"""What the scheduler and a worker say when Redis goes away under them: in their logs, and to Prometheus."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fleet.config import load_config
from fleet.machine import beat_child, free_port, host_children
from fleet.sandbox.platform_server import RunningPlatform
from fleet.sandbox.redis_server import start_redis
from fleet.supervisor import Supervisor
from tests.support import wait_until
from tests.wire.stage import Sandbox

#: Seconds within which a process must have noticed; generous, for a machine of two busy cores.
PATIENCE_S = 45
#: Where kombu stumbles when it gives messages back to a broker that is away: an error of its own.
STUMBLES = ("celery.worker.request",)

#: A process that runs two tasks as a worker does; the first meets a lost broker, the second has a bug.
TWO_TASKS = """
from celery.app.trace import build_tracer
from celery.signals import setup_logging
from kombu.exceptions import OperationalError
import tasks
from fleet.celery import app

def run(error):
    def fails():
        raise error
    name = type(error).__name__
    build_tracer(name, app.task(name=name)(fails), app=app)("an-id", (), {}, {"hostname": "io"})

setup_logging.send(None)
run(OperationalError("Error 111"))
run(KeyError("a-bug"))
"""


@dataclass(frozen=True)
class Widowed:
    """The scheduler and a worker for short work, whose Redis was killed under them. They are up."""

    beat_log: Path
    io_log: Path
    metrics: str

    def sample(self, name: str, **labels: str) -> float | None:
        text = httpx.get(self.metrics, trust_env=False, timeout=20).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return next((one.value for one in samples if one.name == name and labels.items() <= one.labels.items()), None)


@pytest.fixture(scope="module")
def widowed(shared_platform: RunningPlatform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Widowed]:
    base, platform, port = tmp_path_factory.mktemp("widowed"), shared_platform, free_port()
    where = {"org_id": platform.org_id, "blob_id": platform.blob_id, "revision_id": platform.revision_id}
    values = {
        "hosts": {"alpha": {"work_folders": [str(base)]}},
        "platform": {"url": platform.url},
        "sections": [{"session": {**where, "session_id": Sandbox(platform).session()}}],
        "logs": {"format": "json"},
        "metrics": {"port": port},
    }
    (base / "fleet.yaml").write_text(yaml.safe_dump(values))
    known = Widowed(base / "logs" / "beat.log", base / "logs" / "io-alpha.log", f"http://127.0.0.1:{port}/metrics")
    with start_redis(base / "redis") as redis:
        environ = {
            "PATH": "",
            "FLEET_CONFIG": str(base / "fleet.yaml"),
            "FLEET_HOME": str(base / "home"),
            "FLEET_HOST": "alpha",
            "FLEET_REDIS_URL": redis.url,
            "BLOBHUB_API_KEY": platform.worker_key,
        }
        io, _turns = host_children(load_config(base / "fleet.yaml", environ), environ, "alpha")
        with Supervisor([[io, beat_child(environ, base / "home")]], base / "logs"):
            wait_until(lambda: known.sample("fleet_polls_total", result="read"), PATIENCE_S, "nothing is polled")
            psutil.Process(redis.pid).kill()
            wait_until(lambda: known.beat_log.read_text().count("Message Error") > 1, PATIENCE_S, "no tick fails")
            wait_until(lambda: "no heartbeat" in known.io_log.read_text(), PATIENCE_S, "the worker is silent")
            yield known


def objects(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, without what Celery prints when it comes and goes."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_what_is_only_a_lost_connection_is_one_line_each_time(widowed: Widowed):
    for log in (widowed.beat_log, widowed.io_log):
        lines = [line for line in objects(log) if line["logger"] not in STUMBLES]
        assert {line["host"] for line in lines} == {"alpha"}
        assert [line for line in lines if "traceback" in line or "  File" in line["message"]] == []


def test_a_scrape_says_that_redis_is_away_and_keeps_its_counters(widowed: Widowed):
    assert widowed.sample("fleet_redis_up", host="alpha") == 0
    assert widowed.sample("fleet_turns_running", host="alpha") is None
    assert (widowed.sample("fleet_polls_total", host="alpha", result="read") or 0) > 0


def test_a_task_that_meets_a_lost_broker_costs_one_line_and_a_bug_its_traceback(tmp_path: Path):
    file = tmp_path / "fleet.yaml"
    file.write_text("logs: {format: json}\n")
    environ = {
        "FLEET_CONFIG": str(file),
        "FLEET_HOME": str(tmp_path),
        "FLEET_REDIS_URL": "redis://127.0.0.1:1",
        "BLOBHUB_API_KEY": "a-key-of-a-worker",
    }
    run = subprocess.run(
        [sys.executable, "-c", TWO_TASKS], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    lost, bug = (json.loads(line) for line in run.stderr.splitlines())
    assert lost["message"].endswith("raised unexpected: OperationalError('Error 111')")
    assert "traceback" not in lost
    assert bug["traceback"].endswith("KeyError: 'a-bug'")
