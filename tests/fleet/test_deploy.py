"""The services of docker-compose.yml as processes: their commands, environments, mounts and health checks.

Each service has a folder laid out as its container's root. Paths, and the names and ports of the containers' network,
are replaced by those of this machine; all else is taken from the compose file as it is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fleet.machine import free_port
from fleet.sandbox import platform_server
from fleet.sandbox.redis_server import find_redis_server
from tests import compose
from tests.conftest import MARK
from tests.fleet.programs import PATIENCE_S
from tests.support import wait_until

#: What a container's root has for a service, whether from the image, from Docker or from its mounts.
LAYOUT = ("/data", "/etc/fleet", "/etc/redis.conf", "/home/fleet", "/run/secrets", "/tmp", "/var/lib/fleet")
#: Where these programs are in the images.
PROGRAMS = f"{Path(sys.executable).parent}:{find_redis_server().parent}:/usr/bin:/bin"
#: The files in the folder of secrets.
KEYS = ("worker", "person", "signing")
#: Seconds in which several of Celery's heartbeats must have come.
HEARTBEATS_S = 20


class Project:
    """The compose project on this machine: its `.env`, its `fleet.yaml`, its secrets and volumes."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.raw = compose.read(compose.FIRST)
        redis_port, flower_port, platform_port = free_port(), free_port(), free_port()
        self.flower_port = flower_port
        self.here = {
            "redis:6379": f"127.0.0.1:{redis_port}",
            "redis-cli": f"redis-cli -p {redis_port}",
            "127.0.0.1/5555": f"127.0.0.1/{flower_port}",
            "127.0.0.1/8080": f"127.0.0.1/{platform_port}",
            "--host 0.0.0.0 --port 8080": f"--host 127.0.0.1 --port {platform_port}",
        }
        self.variables = {
            "FLEET_HOST": "alpha",
            "FLEET_REPOSITORIES": str(self._folder("repositories")),
            "REDIS_PASSWORD": secrets.token_hex(32),
            "FLOWER_BASIC_AUTH": "somebody:flower-password",
            "BLOBHUB_API_URL": f"http://127.0.0.1:{platform_port}",
            "FLEET_YAML": str(self._configuration()),
            "FLEET_SECRETS": str(self._folder("secrets")),
        }
        for name in KEYS:
            (base / "secrets" / f"{name}.key").write_text(secrets.token_hex(32) + "\n")
        self._redis_conf = base / "redis.conf"
        settings = (compose.ROOT / "ops/redis.conf").read_text()
        self._redis_conf.write_text(f"{settings}\nport {redis_port}\nbind 127.0.0.1\n")
        self.services = {name: Service(name, self) for name in self.raw["services"]}

    def volume(self, source: str) -> Path:
        """Return what a mount's source is here: a named volume, or a file of the repository."""
        if source == "./ops/redis.conf":
            return self._redis_conf
        return self._folder(f"volumes/{source}") if "/" not in source else compose.ROOT / source

    def _folder(self, name: str) -> Path:
        folder = self.base / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _configuration(self) -> Path:
        session = {
            "org_id": platform_server.ORG_ID,
            "blob_id": platform_server.BLOB_ID,
            "revision_id": platform_server.REVISION_ID,
            "session_id": platform_server.SESSION_ID,
        }
        script = self.base / "script.yaml"
        script.write_text(yaml.safe_dump({"turns": [{"events": [{"text": "You said: {prompt}"}]}]}))
        config = {
            "hosts": {"alpha": {"work_folders": [str(self.base / "repositories")], "max_agents": 1}},
            "polling": {"interval_idle_ms": 300, "interval_active_ms": 300},
            "agents": {"scripted": {"script": str(script), "permissions": "autonomous"}},
            "sections": [{"name": "demo", "session": session}],
        }
        file = self.base / "fleet.yaml"
        file.write_text(yaml.safe_dump(config))
        return file


class Service:
    """A service of the project: a folder in place of its container's root, and its process."""

    def __init__(self, name: str, project: Project) -> None:
        self.root = project.base / "roots" / name
        self.log = self.root / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._project = project
        raw = project.raw["services"][name]
        for mount in raw["volumes"]:
            self._mount(mount)
        for secret in raw.get("secrets", ()):
            self._place(
                f"/run/secrets/{secret}", compose.fill(project.raw["secrets"][secret]["file"], project.variables)
            )
        if "build" in raw:
            self._place("/etc/fleet/flower.py", compose.ROOT / "ops/flower.py")
        for folder in ("home/fleet", "tmp"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        settings = self._local({key: raw[key] for key in ("command", "environment", "healthcheck")})
        self._command, self._test = settings["command"], settings["healthcheck"]["test"]
        self._grace_s = compose.seconds(compose.fill(raw["stop_grace_period"], project.variables))
        image = self._local(compose.image_environment())
        self.environ = {
            **{name: value for name, value in os.environ.items() if name == MARK},
            "PATH": PROGRAMS,
            "HOME": str(self.root / "home/fleet"),
            "FLOWER_PORT": str(project.flower_port),
            **image,
            **settings["environment"],
        }

    def _mount(self, mount: Any) -> None:
        if isinstance(mount, dict):
            source, target = mount["source"], mount["target"]
        else:
            source, target = mount.removesuffix(":ro").rsplit(":", 1)
        if not target.startswith("$"):
            self._place(target, self._project.volume(compose.fill(source, self._project.variables)))

    def _place(self, target: str, source: Path | str) -> None:
        place = self.root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)

    def _local(self, settings: Any) -> Any:
        return compose.each_string(settings, lambda text: compose.fill(self._here(text), self._project.variables))

    def _here(self, text: str) -> str:
        text = re.sub(rf"(?<![\w/.}}])({'|'.join(LAYOUT)})\b", lambda found: f"{self.root}{found[1]}", text)
        for there, here in self._project.here.items():
            text = text.replace(there, here)
        return text

    def start(self) -> None:
        folder = self.root / "data"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=folder if folder.exists() else self.root,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the service, as `docker compose exec` does."""
        return subprocess.run(
            command, cwd=self.root, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def is_healthy(self) -> bool:
        assert self.process is None or self.process.poll() is None, self.log.read_text()
        kind, *test = self._test
        return self.run(*(["/bin/sh", "-c", *test] if kind == "CMD-SHELL" else test)).returncode == 0

    def await_healthy(self, patience_s: float = PATIENCE_S) -> None:
        wait_until(self.is_healthy, patience_s, f"unhealthy: {self._test}, its log is {self.log}")

    def stop(self) -> int:
        """Stop as `docker stop` does. Returns the exit status, that of SIGKILL when the grace was too short."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


@pytest.fixture(scope="module")
def project(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """All services, healthy."""
    project = Project(tmp_path_factory.mktemp("deploy"))
    services = project.services
    try:
        for needed in ("redis", "platform"):
            services[needed].start()
        for needed in ("redis", "platform"):
            services[needed].await_healthy()
        for name in services.keys() - {"redis", "platform"}:
            services[name].start()
        for service in services.values():
            service.await_healthy()
        yield project
    finally:
        statuses = {name: services[name].stop() for name in ("turns", "io", "beat", "flower", "platform", "redis")}
    assert -signal.SIGKILL not in statuses.values(), f"not ended within their grace: {statuses}"


def ask_redis(project: Project, *command: str) -> str:
    service = project.services["redis"]
    script = f"REDISCLI_AUTH=$REDIS_PASSWORD {project.here['redis-cli']} {' '.join(command)}"
    return service.run("/bin/sh", "-c", script).stdout


def test_a_thread_handed_over_from_inside_the_platform_runs_to_its_end(project):
    people = project.services["platform"]
    work_folder = project.variables["FLEET_REPOSITORIES"]
    options = ("--work-folder", work_folder, "--agent", "scripted", "--message", "hello there")
    new = people.run("fleet", "thread", "new", "try/out", *options)
    assert new.returncode == 0, new.stderr
    said = people.run("fleet", "thread", "tail", "try/out", "--until-turn-end").stdout
    assert re.search(r"You said: hello there\n(.*\n)*Turn complete", said), said


def test_redis_keeps_all_it_is_given_and_nobody_gets_in_without_the_password(project):
    for setting, value in {"appendonly": "yes", "maxmemory-policy": "noeviction", "maxmemory": "536870912"}.items():
        assert ask_redis(project, "config", "get", setting).split() == [setting, value]
    assert list((project.base / "volumes/redis").rglob("*.aof"))
    assert "NOAUTH" in project.services["redis"].run("redis-cli", *project.here["redis-cli"].split()[1:], "ping").stdout


def test_no_secret_stands_in_a_command_line_or_in_a_log(project):
    keys = [(project.base / "secrets" / f"{name}.key").read_text().strip() for name in KEYS]
    shown = [*keys, project.variables["REDIS_PASSWORD"], project.variables["FLOWER_BASIC_AUTH"].split(":")[1]]
    for name, service in project.services.items():
        lines = "".join(process_lines(service)) + service.log.read_text()
        assert lines, name
        assert not [secret for secret in shown if secret in lines], name


def process_lines(service: Service) -> Iterator[str]:
    leader = psutil.Process(service.process.pid)
    yield from (" ".join(process.cmdline()) for process in (leader, *leader.children(recursive=True)))


def test_both_workers_are_seen_by_name_in_flower_and_only_with_the_password(project):
    url = f"http://127.0.0.1:{project.flower_port}/api/workers?refresh=1"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=10)
    word = b64encode(project.variables["FLOWER_BASIC_AUTH"].encode()).decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {word}"})
    wait_until(
        lambda: json.load(urllib.request.urlopen(request, timeout=10)).keys() >= {"io@alpha", "turns@alpha"},
        PATIENCE_S,
        "Flower does not see both workers",
    )


@pytest.mark.parametrize("name", ["io", "turns"])
def test_a_worker_is_healthy_only_as_long_as_its_heartbeat_keeps_the_ready_file_young(project, name):
    service = project.services[name]
    service.process.send_signal(signal.SIGSTOP)
    try:
        os.utime(service.environ["FLEET_READY_FILE"], (0, 0))
        assert not service.is_healthy()
    finally:
        service.process.send_signal(signal.SIGCONT)
    service.await_healthy(HEARTBEATS_S)


def test_beat_is_unhealthy_once_its_schedule_grows_old(project):
    service = project.services["beat"]
    files = list(Path(service.environ["FLEET_HOME"]).glob("beat-schedule*"))
    for file in files:
        os.utime(file, (0, 0))
    assert not service.is_healthy()
    for file in files:
        os.utime(file)
    assert service.is_healthy()
