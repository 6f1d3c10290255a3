"""The wheel, installed where nothing of the repository is: it has all that it needs, and a fleet runs from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from fleet import __version__
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
PACKAGES = ("fleet", "tasks", "agents")

#: Seconds for one program on a machine that is busy with something else.
PATIENCE_S = 60


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def pip(*arguments: str | Path, cwd: Path) -> None:
    # Nothing is asked of an index: what the build needs is in the environment of the tests.
    done = run(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources, so that the build leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@dataclass(frozen=True)
class Installed:
    """A virtual environment that has the wheel, and a folder outside of the repository to work in."""

    bin: Path
    folder: Path

    def environ(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "FLEET_TESTS") if name in os.environ}
        path = os.pathsep.join((str(self.bin), os.environ["PATH"]))
        return kept | {"PATH": path, "HOME": str(self.folder), "FLEET_HOME": str(self.folder / "home")}

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(self.bin / program, *arguments, cwd=self.folder, env=self.environ())

    def fleet(self, *arguments: str) -> str:
        done = self.run("fleet", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    done = run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    python = environment / "bin" / "python"
    pip("--python", python, "install", "--no-index", "--no-deps", "--no-compile", wheel, cwd=folder)
    # What the fleet depends on comes from the environment of the tests. Its .pth files, the one that leads to the
    # repository among them, are not read there.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(environment / "bin", folder)


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path):
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    assert names == {path.relative_to(ROOT).as_posix() for path in sources if "__pycache__" not in path.parts}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_wheel_has_its_licence_and_says_what_it_is(wheel: Path):
    with ZipFile(wheel) as archive:
        info = f"blobhub_fleet-{__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_what_is_installed_is_the_wheel(installed: Installed):
    code = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {PACKAGES}))"
    origins = installed.run("python", "-c", code).stdout.split()
    assert len(origins) == len(PACKAGES)
    assert all(Path(origin).is_relative_to(installed.bin.parent) for origin in origins)
    assert installed.fleet("--version") == f"{__version__}\n"


def test_the_doctor_works_outside_of_the_repository(installed: Installed):
    (installed.folder / "empty.yaml").write_text("")
    report = json.loads(installed.run("fleet", "doctor", "--json", "--config", "empty.yaml").stdout)
    found = {finding["subject"]: finding["state"] for finding in report["findings"]}
    assert {name: found[name] for name in ("configuration", "Redis", "platform")} == {
        "configuration": "ok",
        "Redis": "ok",
        "platform": "ok",
    }


@pytest.fixture
def up(installed: Installed) -> Iterator[Installed]:
    """A fleet of one host that is up."""
    folder = installed.folder
    (folder / "repository").mkdir()
    (folder / "script.yaml").write_text("turns: [{events: [{text: 'You said: {prompt}'}]}]")
    config = {
        "hosts": {"alpha": {"work_folders": [str(folder / "repository")], "max_agents": 1}},
        "polling": {"interval_idle_ms": 300, "interval_active_ms": 300},
        "agents": {"scripted": {"script": "script.yaml", "permissions": "autonomous"}},
    }
    (folder / "fleet.yaml").write_text(yaml.safe_dump(config))
    said = folder / "up.log"
    with said.open("w") as log:
        running = subprocess.Popen(
            [installed.bin / "fleet", "up"], cwd=folder, env=installed.environ(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: "fleet.activate" in said.read_text() or running.poll() is not None, PATIENCE_S)
        assert running.poll() is None, said.read_text()
        yield installed
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(PATIENCE_S)


def test_a_fleet_runs_from_the_wheel(up: Installed):
    options = ("--work-folder", str(up.folder / "repository"), "--agent", "scripted")
    up.fleet("thread", "new", "try/out", *options, "--message", "hello")
    said = up.fleet("thread", "tail", "try/out", "--until-turn-end").splitlines()
    assert said[:3] == ["▸ hello", "You said: hello", "Turn complete"]
