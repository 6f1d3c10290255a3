"""`fleet doctor` on a machine where all is well, and where one thing or another is not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml

from fleet import __version__
from fleet.cli import main
from fleet.doctor import agents, clis
from fleet.doctor.services import clock
from fleet.hosts import Host, Hosts
from fleet.platform.client import PlatformClient, SessionRef
from fleet.store import Store
from tests.support import wait_until

#: Seconds that the whole command may take, whatever hangs.
LIMIT_S = 15

#: A program that tells its version.
VERSION = "#!/bin/sh\necho 'claude {version} (a stand-in)'\n"


class Machine:
    """A machine with Redis, a platform, a root and a scripted agent; `config` and `environ` may be spoiled."""

    def __init__(self, sandbox, redis_url: str, folder: Path, monkeypatch, capsys) -> None:
        self.platform = sandbox.platform
        self.at = SessionRef(sandbox.platform.revision_id, sandbox.session())
        self.folder = folder
        self.root = folder / "repos"
        self.root.mkdir()
        (folder / "script.yaml").write_text("turns: []\n")
        ids = {name: getattr(sandbox.platform, name) for name in ("org_id", "blob_id", "revision_id")}
        self.config: dict = {
            "redis": {"namespace": "doctor"},
            "hosts": {"alpha": {"work_folders": [str(self.root)]}},
            "agents": {"scripted": {"script": "script.yaml"}},
            "sections": [{"name": "desk", "session": ids | {"session_id": self.at.session_id}}],
        }
        self.environ = {
            "FLEET_CONFIG": str(folder / "fleet.yaml"),
            "FLEET_HOME": str(folder / "home"),
            "FLEET_HOST": "alpha",
            "HOME": str(folder),
            "FLEET_REDIS_URL": redis_url,
            "BLOBHUB_API_URL": sandbox.platform.url,
            "BLOBHUB_API_KEY": sandbox.platform.worker_key,
            "FLEET_PERSON_API_KEY": sandbox.platform.person_key,
        }
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        for name in (*self.environ, "BLOBHUB_API_KEY_FILE", "FLEET_PERSON_API_KEY_FILE", "BLOBHUB_PROFILE"):
            monkeypatch.delenv(name, raising=False)

    def program(self, text: str) -> str:
        file = self.folder / "program"
        file.write_text(text)
        file.chmod(0o700)
        return str(file)

    def run(self, *arguments: str, status: int) -> str:
        """Run `fleet doctor ARGUMENTS`; return what it prints."""
        (self.folder / "fleet.yaml").write_text(yaml.safe_dump(self.config))
        with self._monkeypatch.context() as patch:
            for name, value in self.environ.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["fleet", "doctor", *arguments])
            began = time.monotonic()
            with pytest.raises(SystemExit) as ended:
                main()
        assert time.monotonic() - began < LIMIT_S
        output = self._capsys.readouterr()
        assert (ended.value.code or 0) == status, output.out + output.err
        return output.out

    def found(self, subject: str, *, status: int) -> tuple[str, str]:
        """Return state and detail of what is found about `subject`, the first of its findings."""
        report = json.loads(self.run("--json", status=status))
        assert report["ok"] is (status == 0)
        found = [each for each in report["findings"] if each["subject"] == subject]
        assert found, report
        assert bool(found[0]["remedy"]) is (found[0]["state"] != "ok")
        return found[0]["state"], found[0]["detail"]

    def put(self, alias: str, value: object) -> None:
        async def put() -> None:
            async with PlatformClient(self.platform.url, self.platform.worker_key) as client:
                await client.upload_object(self.at, alias, value)

        asyncio.run(put())

    def heartbeat(self, name: str, version: str = __version__) -> None:
        async def beat() -> None:
            store = Store(self.environ["FLEET_REDIS_URL"], "doctor")
            await Hosts(store).beat(Host(name, (), (), 4, (), version))
            await store.close()

        asyncio.run(beat())


@pytest.fixture
def machine(sandbox, redis_url, tmp_path, monkeypatch, capsys) -> Machine:
    return Machine(sandbox, redis_url, tmp_path, monkeypatch, capsys)


@pytest.fixture
def silence() -> Iterator[str]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_machine_with_all_it_needs_has_no_problem_and_no_key_is_shown(machine):
    machine.heartbeat("alpha")
    report = json.loads(machine.run("--json", status=0))
    subjects = {each["subject"] for each in report["findings"] if each["state"] == "ok"}
    fine = {"configuration", "this machine", "API key", "person's key", "Redis", "Redis persistence", "Redis memory"}
    fine |= {"platform", "clock", "section desk", f"root {machine.root}", "agent scripted", "host alpha"}
    assert fine <= subjects
    shown = machine.run(status=0)
    assert "✓ section desk" in shown
    assert "0 problem(s)" in shown
    for secret in (machine.platform.worker_key, machine.platform.person_key, machine.environ["FLEET_REDIS_URL"]):
        assert secret not in shown + json.dumps(report)


def test_nothing_is_changed(machine, sandbox):
    with redis.Redis.from_url(machine.environ["FLEET_REDIS_URL"]) as client:
        sandbox.reset_requests()
        machine.run(status=0)
        assert client.keys() == []
    assert not any(name.startswith(("upload", "post", "delete")) for name in sandbox.requests())
    assert not (machine.folder / "home").exists()


def test_a_machine_for_fleet_up_needs_neither_redis_nor_a_platform(machine):
    for name in ("FLEET_REDIS_URL", "BLOBHUB_API_URL", "BLOBHUB_API_KEY", "FLEET_PERSON_API_KEY"):
        del machine.environ[name]
    machine.config["sections"] = []
    assert machine.found("platform", status=0)[0] == "ok"
    assert machine.found("Redis", status=0)[0] == "ok"


def test_a_section_is_looked_at_also_where_redis_comes_with_fleet_up(machine):
    del machine.environ["FLEET_REDIS_URL"]
    assert machine.found("section desk", status=0)[0] == "ok"


def test_a_wrong_configuration_is_a_problem_that_names_the_key(machine):
    machine.config["hosst"] = {}
    state, detail = machine.found("configuration", status=1)
    assert (state, "did you mean hosts?" in detail) == ("problem", True)


def test_a_machine_that_is_no_host_is_told_the_hosts(machine):
    machine.environ["FLEET_HOST"] = "gamma"
    state, detail = machine.found("this machine", status=1)
    assert (state, "gamma" in detail, "alpha" in detail) == ("problem", True, True)


def test_a_key_that_is_refused_is_a_problem_and_not_shown(machine):
    machine.environ["BLOBHUB_API_KEY"] = "wr0ng-key"
    assert machine.found("API key", status=1)[0] == "problem"
    assert "wr0ng-key" not in machine.run(status=1)


def test_a_missing_key_is_a_problem_that_says_where_it_was_looked_for(machine):
    del machine.environ["BLOBHUB_API_KEY"]
    state, detail = machine.found("API key", status=1)
    assert (state, "credentials.yaml" in detail) == ("problem", True)


def test_a_credentials_file_that_others_can_read_is_a_problem_also_when_it_is_not_used(machine):
    file = machine.folder / ".blobhub" / "credentials.yaml"
    file.parent.mkdir()
    file.write_text("default: {api_key: k}\n")
    file.chmod(0o644)
    state, detail = machine.found("credentials file", status=1)
    assert (state, "644" in detail) == ("problem", True)
    file.chmod(0o600)
    assert machine.found("credentials file", status=0)[0] == "ok"


def test_a_signing_key_that_is_too_short_is_a_problem_and_not_shown(machine):
    assert machine.found("signing key", status=0)[0] == "ok"
    machine.environ["FLEET_SIGNING_KEY"] = "sh0rt"
    assert machine.found("signing key", status=1)[0] == "problem"
    assert "sh0rt" not in machine.run(status=1)


def test_a_person_with_the_workers_user_is_warned_that_nobody_will_hear(machine):
    machine.environ["FLEET_PERSON_API_KEY"] = machine.platform.worker_key
    state, detail = machine.found("person's key", status=0)
    assert (state, "echoes" in detail) == ("warning", True)


def test_how_redis_treats_its_data_is_looked_at(machine):
    with redis.Redis.from_url(machine.environ["FLEET_REDIS_URL"]) as client:
        try:
            client.config_set("maxmemory-policy", "allkeys-lru")
            assert machine.found("Redis memory", status=0)[0] == "warning"
            client.config_set("maxmemory", "1gb")
            assert machine.found("Redis memory", status=1)[0] == "problem"
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")
        try:
            client.config_set("appendonly", "no")
            assert machine.found("Redis persistence", status=0)[0] == "warning"
        finally:
            client.config_set("appendonly", "yes")


def test_services_that_are_away_or_silent_are_named_in_time(machine, silence):
    machine.environ |= {"FLEET_REDIS_URL": f"redis://:s3cret@{silence}/0", "BLOBHUB_API_URL": f"http://{silence}"}
    report = json.loads(machine.run("--json", status=1))
    states = {each["subject"]: each["state"] for each in report["findings"]}
    assert (states["Redis"], states["platform"]) == ("problem", "problem")
    # Only what is the cause is a problem.
    assert (states["API key"], states["section desk"]) == ("warning", "warning")
    assert "s3cret" not in json.dumps(report)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m, s: s.set_session(m.at.session_id, "closed"), "session_closed"),
        (lambda _, s: s.set_revision(phase="archived"), "revision_not_writable"),
        (lambda m, _: m.put("worker", {"type": "thread", "thread": {"metadata": {}}}), "MALFORMED"),
        (
            lambda m, _: m.put("worker", {"type": "thread", "thread": {"metadata": {"user": {"user_id": "other"}}}}),
            "SESSION_OWNED_BY_DIFFERENT_USER",
        ),
        (lambda m, _: m.config["sections"][0]["session"].update(session_id="unknown"), "not"),
        (lambda m, _: m.config["sections"][0]["session"].update(revision_id="unknown"), "revision_not_found"),
    ],
)
def test_a_section_that_can_not_be_served_is_a_problem(machine, sandbox, spoil, says):
    spoil(machine, sandbox)
    state, detail = machine.found("section desk", status=1)
    assert state == "problem"
    assert says in detail


def test_a_section_whose_worker_object_is_ours_is_fine(machine):
    owner = {"user": {"user_id": machine.platform.worker_user_id}}
    machine.put("worker", {"type": "thread", "thread": {"metadata": owner}})
    assert machine.found("section desk", status=0) == ("ok", "open; its object `worker` is ours")


def test_roots_that_can_not_be_used_are_problems_and_links_are_followed(machine):
    (machine.folder / "link").symlink_to(machine.root)
    roots = {name: str(machine.folder / name) for name in ("missing", "script.yaml", "link")}
    machine.config["hosts"]["alpha"]["work_folders"] = list(roots.values())
    assert machine.found(f"root {roots['missing']}", status=1)[0] == "problem"
    assert machine.found(f"root {roots['script.yaml']}", status=1)[0] == "problem"
    state, detail = machine.found(f"root {roots['link']}", status=1)
    assert (state, str(machine.root) in detail) == ("ok", True)


def test_other_hosts_that_are_away_or_of_another_version_are_warned_of(machine):
    machine.config["hosts"] |= {name: {"work_folders": ["/srv"]} for name in ("beta", "gamma")}
    machine.heartbeat("beta", version="0.0.1")
    machine.heartbeat("stranger")
    assert machine.found("host gamma", status=0) == ("warning", "has never been there")
    assert "0.0.1" in machine.found("host beta", status=0)[1]
    assert machine.found("host stranger", status=0)[0] == "warning"


def test_an_executable_that_is_not_there_or_tells_no_version_is_a_problem(machine):
    machine.config["agents"]["codex"] = {"executable": str(machine.folder / "nothing")}
    assert machine.found("agent codex", status=1)[0] == "problem"
    machine.config["agents"]["codex"] = {"executable": machine.program("#!/bin/sh\nexit 3\n")}
    state, detail = machine.found("agent codex", status=1)
    assert (state, "status 3" in detail) == ("problem", True)


def test_a_version_that_is_not_tested_is_warned_of(machine, monkeypatch):
    monkeypatch.setattr(agents, "tested", lambda package: clis.SpecifierSet(">=0.163,<0.164"))
    machine.config["agents"]["codex"] = {"executable": machine.program(VERSION.format(version="0.163.9"))}
    assert machine.found("agent codex", status=0)[0] == "ok"
    machine.config["agents"]["codex"] = {"executable": machine.program(VERSION.format(version="0.200.0"))}
    state, detail = machine.found("agent codex", status=0)
    assert state == "warning"
    assert "version 0.200.0" in detail


def test_an_sdks_own_cli_is_fine_and_an_older_one_is_warned_of(machine):
    if clis.installed_version(clis.PACKAGES["claude_code"]) is None:
        pytest.skip("Claude Code's SDK is not installed")
    assert machine.found("agent claude_code", status=0)[0] == "ok"
    machine.config["agents"]["claude_code"] = {"executable": machine.program(VERSION.format(version="1.0.3"))}
    assert machine.found("agent claude_code", status=0)[0] == "warning"


def test_an_agent_that_is_not_installed_is_a_warning_that_says_how_to_install_it(machine, monkeypatch):
    monkeypatch.setattr(agents, "installed_version", lambda package: None)
    report = json.loads(machine.run("--json", status=0))
    remedies = {each["subject"]: each["remedy"] for each in report["findings"] if each["state"] == "warning"}
    assert remedies["agent claude_code"] == "pip install 'blobhub-fleet[claude]'"
    assert "agents.codex.executable" in remedies["agent codex"]


def test_an_executable_that_hangs_is_ended_with_all_that_it_started(machine, monkeypatch):
    monkeypatch.setattr(clis, "VERSION_TIMEOUT_S", 2.0)
    pids = machine.folder / "pids"
    script = f"#!/bin/sh\nsleep 600 &\necho $! >>{pids}\necho $$ >>{pids}\nsleep 600\n"
    machine.config["agents"]["codex"] = {"executable": machine.program(script)}
    state, detail = machine.found("agent codex", status=1)
    assert (state, "gave no answer" in detail) == ("problem", True)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    wait_until(lambda: {_state(pid) for pid in started} <= {"gone", "Z"})


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_a_file_that_hangs_when_it_is_read_holds_the_command_up_for_seconds_only(machine):
    machine.environ["BLOBHUB_API_KEY_FILE"] = str(machine.folder / "key")
    del machine.environ["BLOBHUB_API_KEY"]
    (machine.folder / "fleet.yaml").write_text("{}")
    os.mkfifo(machine.folder / "key")
    command = [sys.executable, "-m", "fleet", "doctor"]
    done = subprocess.run(
        command, env=os.environ | machine.environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "could not be read within" in done.stdout


@pytest.mark.parametrize(("ahead_s", "state"), [(0.2, "ok"), (-4.9, "ok"), (5.1, "warning"), (-3600, "warning")])
def test_clocks_that_are_apart_are_warned_of_and_nothing_depends_on_them(ahead_s, state):
    finding = clock("Redis's", ahead_s)
    assert finding.state == state
    assert "nothing depends on it" in finding.detail
