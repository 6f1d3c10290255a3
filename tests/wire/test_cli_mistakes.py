"""What `fleet` says when it can't do what it is asked: one line with the remedy, and a status."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from fleet.cli import main
from fleet.sandbox.platform_server import running_platform

GOOD = "hosts: {alpha: {work_folders: [/srv]}}\n"


@pytest.fixture
def fleet(tmp_path, monkeypatch, capfd):
    """Run the command in a folder of its own, with an environment that says nothing but what is given."""
    for name in ("FLEET_CONFIG", "FLEET_HOST", "FLEET_REDIS_URL", "BLOBHUB_API_URL", "BLOBHUB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, config: str = GOOD, **environ: str) -> tuple[int, str]:
        (tmp_path / "fleet.yaml").write_text(config)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["fleet", *arguments])
        began = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            main()
        assert time.monotonic() - began < 5
        output = capfd.readouterr()
        assert "Traceback" not in output.err
        return int(ended.value.code or 0), output.err

    return run


@pytest.fixture
def nothing() -> str:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silence():
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("hosst: {}", ["fleet.yaml: hosst: unknown key", "did you mean hosts?", "[config_invalid]"]),
        ("polling: {interval_idle_ms: fast}", ["polling.interval_idle_ms", "'fast'"]),
        ("a: [", ["fleet.yaml: line"]),
    ],
)
def test_a_wrong_configuration_is_named_and_nothing_is_started(fleet, tmp_path, config, says):
    status, err = fleet("up", config=config)
    assert status == 2
    assert [part for part in says if part not in err] == []
    assert not (tmp_path / "home").exists()


def test_a_missing_configuration_is_named(fleet):
    status, err = fleet("up", "--config", "other.yaml")
    assert (status, "other.yaml does not exist [config_not_found]" in err) == (2, True)


def test_no_key_for_a_platform_of_ones_own_ends_before_anything_starts(fleet, tmp_path, nothing):
    status, err = fleet("up", BLOBHUB_API_URL=f"http://{nothing}")
    assert (status, err.count("\n")) == (2, 1)
    assert "[key_missing]: set BLOBHUB_API_KEY" in err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("where", ["nothing", "silence"])
@pytest.mark.parametrize("command", [("up",), ("status",), ("host", "alpha"), ("beat",)])
def test_a_redis_that_does_not_answer_is_named_without_its_password(fleet, tmp_path, request, where, command):
    place = request.getfixturevalue(where)
    status, err = fleet(*command, FLEET_REDIS_URL=f"redis://:s3cret@{place}/0", BLOBHUB_API_KEY="k")
    assert (status, err.count("\n")) == (1, 1)
    assert f"Redis at {place}" in err
    assert "[redis_unreachable]: start it, or correct FLEET_REDIS_URL" in err
    assert "s3cret" not in err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("where", ["nothing", "silence"])
@pytest.mark.parametrize("command", [("up",), ("thread", "ls")])
def test_a_platform_that_does_not_answer_is_named(fleet, request, where, command):
    url = f"http://{request.getfixturevalue(where)}"
    section = "sections: [{name: s, session: {org_id: o, blob_id: b, revision_id: r, session_id: s}}]\n"
    status, err = fleet(*command, config=GOOD + section, BLOBHUB_API_URL=url, BLOBHUB_API_KEY="k")
    assert (status, err.count("\n")) == (1, 1)
    assert url in err
    assert "[platform_unreachable]: check BLOBHUB_API_URL" in err


def test_a_key_that_is_refused_is_said_so_and_not_shown(fleet, tmp_path):
    with running_platform(tmp_path / "platform") as platform:
        status, err = fleet("up", BLOBHUB_API_URL=platform.url, BLOBHUB_API_KEY="wr0ng-key")
    assert (status, err.count("\n")) == (2, 1)
    assert "[key_refused]" in err
    assert "wr0ng-key" not in err


def test_a_machine_that_is_no_host_is_told_the_hosts(fleet):
    status, err = fleet("host", "gamma")
    assert (status, "configured: alpha" in err, "[host_unknown]" in err) == (2, True, True)


def test_status_without_a_fleet_says_where_it_looked(fleet):
    status, err = fleet("status")
    assert (status, "no `fleet up` runs with this FLEET_HOME" in err) == (2, True)


def test_a_wrong_alias_is_refused_before_anybody_is_asked(fleet):
    status, err = fleet("thread", "show", "../etc")
    assert (status, "[alias_invalid]" in err) == (2, True)
