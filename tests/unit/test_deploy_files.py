"""The files that people deploy with: compose files, Dockerfile, systemd units, and what docs/deploy.md shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from fleet.cli.app import cli
from fleet.config import TurnsConfig, load_config
from fleet.machine import TURNS_STOP_MARGIN_S
from tests import compose

ROOT = compose.ROOT
FILES = (compose.FIRST, compose.FURTHER)
UNITS = sorted((ROOT / "ops/systemd").iterdir())
DOCS = (ROOT / "docs/deploy.md").read_text()

#: The variables without a default, as `.env` would have them.
VARIABLES = {
    "FLEET_HOST": "alpha",
    "FLEET_REPOSITORIES": "/srv/repos",
    "REDIS_PASSWORD": "redis-secret",
    "FLOWER_BASIC_AUTH": "somebody:flower-secret",
    "FLEET_REDIS_URL": "redis://:redis-secret@10.0.0.1:6379/0",
}
SERVICES = [
    pytest.param(service, id=f"{file.name}-{name}")
    for file in FILES
    for name, service in compose.filled(file, VARIABLES)["services"].items()
]
OURS = [param for param in SERVICES if "build" in param.values[0]]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of all services and units, and where they are."""
    for param in OURS:
        *_, last = command = param.values[0]["command"]
        yield str(param.id), shlex.split(last.splitlines()[-1])[1:] if command[0] == "sh" else command
    for unit in UNITS:
        (start,) = setting(unit, "ExecStart")
        program, *arguments = shlex.split(start.replace("%i", "turns"))
        yield unit.name, [Path(program).name, *arguments]


def setting(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def test_every_variable_is_explained_in_the_example_with_the_same_default():
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    used = dict(pair for file in FILES for pair in compose.variables_of(file) if pair[1] is not None)
    named = {name for file in FILES for name, _ in compose.variables_of(file)}
    assert example.keys() == named
    elsewhere = {"REDIS_BIND", "BLOBHUB_API_URL", "FLEET_AGENTS_HOME"}  # where the default is the absence of something
    assert {name: example[name] for name in used.keys() - elsewhere} == {
        name: used[name] for name in used.keys() - elsewhere
    }


@pytest.mark.parametrize("missing", ["FLEET_HOST", "FLEET_REPOSITORIES", "REDIS_PASSWORD", "FLOWER_BASIC_AUTH"])
def test_what_has_no_sensible_default_must_be_set(missing):
    with pytest.raises(KeyError):
        compose.filled(compose.FIRST, VARIABLES | {missing: ""})


def test_an_example_filled_in_has_no_secret_of_ours():
    example = dict(re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert example["REDIS_PASSWORD"] == example["FLOWER_BASIC_AUTH"] == ""


@pytest.mark.parametrize("command", [pytest.param(command, id=where) for where, command in commands()])
def test_every_command_is_one_that_there_is(command):
    program, *arguments = command
    if program == "celery":
        assert arguments[:2] == ["-A", "fleet"]
        assert arguments[2] in {entry.name for entry in entry_points(group="celery.commands")}
    else:
        assert program == "fleet"
        name, *options = arguments
        cli.commands[name].make_context(name, options)  # raises for what the command does not take


@pytest.mark.parametrize("service", OURS)
def test_every_name_in_an_environment_is_one_that_something_reads(service):
    sources = [*ROOT.glob("fleet/**/*.py"), *ROOT.glob("tasks/*.py"), ROOT / "ops/flower.py"]
    text = "".join(file.read_text() for file in sources)
    names = service["environment"].keys() | compose.image_environment().keys() - {"LANG", "PYTHONDONTWRITEBYTECODE"}
    assert [name for name in names if f'"{name.removesuffix("_FILE")}' not in text] == []


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_watched_restarted_limited_and_confined(service):
    health = service["healthcheck"]
    assert health["test"][0] in {"CMD", "CMD-SHELL"}
    assert compose.seconds(health["timeout"]) < compose.seconds(health["interval"]) <= 30
    assert service["restart"] == "unless-stopped"
    assert service["deploy"]["resources"]["limits"].keys() >= {"cpus", "memory", "pids"}
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"]["max-size"]


def test_every_service_runs_as_a_user_other_than_root():
    final_stage = (ROOT / "ops/Dockerfile").read_text().split("\nFROM ")[-1]
    assert re.findall(r"^USER (\w+)$", final_stage, re.MULTILINE) == ["fleet"]
    assert not [param.id for param in OURS if "user" in param.values[0]]
    assert compose.filled(compose.FIRST, VARIABLES)["services"]["redis"]["user"] == "redis"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_running_turns_get_their_grace_before_they_are_killed(file):
    grace = compose.filled(file, VARIABLES)["services"]["turns"]["stop_grace_period"]
    assert compose.seconds(grace) >= TurnsConfig().shutdown_grace_s + TURNS_STOP_MARGIN_S


def test_systemd_gives_running_turns_their_grace_too():
    (unit,) = (unit for unit in UNITS if unit.name == "fleet-worker@.service")
    assert int(setting(unit, "TimeoutStopSec")[0]) >= TurnsConfig().shutdown_grace_s + TURNS_STOP_MARGIN_S
    assert setting(unit, "KillMode") == ["mixed"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_secret_is_in_the_environment_or_a_file_and_nowhere_else(service):
    rest = str({key: value for key, value in service.items() if key != "environment"})
    assert "redis-secret" not in rest
    assert "flower-secret" not in rest


def test_a_service_has_the_keys_that_it_needs_and_no_worker_has_a_persons():
    services = compose.filled(compose.FIRST, VARIABLES)["services"]
    assert {name: service.get("secrets", []) for name, service in services.items()} == {
        "redis": [],
        "beat": ["worker_key", "signing_key"],
        "io": ["worker_key", "signing_key"],
        "turns": ["worker_key", "signing_key"],
        "flower": ["signing_key"],
        "platform": ["worker_key", "person_key", "signing_key"],
    }


def test_a_further_machine_has_the_same_workers_but_for_the_way_to_redis():
    first, further = (compose.filled(file, VARIABLES)["services"] for file in FILES)
    assert further.keys() == {"io", "turns"}
    for name, service in further.items():
        expected = {key: value for key, value in first[name].items() if key != "depends_on"}
        expected["environment"] |= {"FLEET_REDIS_URL": VARIABLES["FLEET_REDIS_URL"]}
        assert service == expected


def test_ports_are_published_on_the_machine_itself_alone_unless_said_otherwise():
    services = compose.filled(compose.FIRST, VARIABLES)["services"].values()
    ports = [port for service in services for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned_to_a_patch_release():
    images = [compose.filled(compose.FIRST, VARIABLES)["services"]["redis"]["image"]]
    images += re.findall(r"^ARG PYTHON_IMAGE=(.*)$", (ROOT / "ops/Dockerfile").read_text(), re.MULTILINE)
    assert [image for image in images if not re.fullmatch(r"\w+:\d+\.\d+\.\d+-[\w-]+", image)] == []
    assert len(images) == 2


def test_the_build_is_given_what_the_dockerfile_copies_and_little_else():
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "ops/Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()} - {"."}
    assert [source for source in sources if not any(Path(source).is_relative_to(name) for name in allowed)] == []
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    assert not {".env", "secrets", "fleet.yaml"} & set(allowed)


@pytest.mark.parametrize("text", re.findall(r"^ *```yaml\n(.*?)^ *```$", DOCS, re.DOTALL | re.MULTILINE))
def test_the_configurations_in_the_docs_are_valid(text, tmp_path):
    text = dedent(text)
    if "services" in (content := yaml.safe_load(text)):
        assert content["services"].keys() <= compose.read(compose.FIRST)["services"].keys()
        return
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    assert "alpha" in load_config(file, {}).hosts


def test_the_units_are_valid(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS:
        name = unit.name.replace("@.", "@turns.")
        (tmp_path / name).write_text(unit.read_text().replace("/opt/fleet/bin/", f"{Path(sys.executable).parent}/"))
    command = ["systemd-analyze", "verify", "--man=no", *sorted(str(file) for file in tmp_path.iterdir())]
    verified = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_compose_takes_the_file(file):
    if not shutil.which("docker-compose"):
        pytest.skip("docker-compose is not installed")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **VARIABLES}
    command = ["docker-compose", "--env-file", "/dev/null", "-f", str(file), "--profile", "platform", "config", "-q"]
    checked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
