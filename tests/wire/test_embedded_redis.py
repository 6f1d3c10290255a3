from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fleet.errors import FleetError
from fleet.sandbox import redis_server
from fleet.sandbox.redis_server import answers, find_redis_server, prepare_redis, start_redis
from tests.support import wait_until


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_data_outlives_a_restart_in_the_same_folder(tmp_path):
    folder = tmp_path / 'a folder with "quotes" and blanks'
    with start_redis(folder) as first, redis.Redis.from_url(first.url) as client:
        client.set("key", "value")
    with start_redis(folder) as second, redis.Redis.from_url(second.url) as client:
        assert client.get("key") == b"value"


def test_data_outlives_a_killed_server(tmp_path):
    with start_redis(tmp_path) as first, redis.Redis.from_url(first.url) as client:
        client.set("key", "value")
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: not answers(first.url))
    with start_redis(tmp_path) as second, redis.Redis.from_url(second.url) as client:
        assert client.get("key") == b"value"


def test_a_stopped_server_is_gone(tmp_path):
    server = start_redis(tmp_path)
    assert answers(server.url)
    server.stop()
    server.stop()
    assert not psutil.pid_exists(server.pid)
    assert not answers(server.url)


def test_a_client_without_the_password_is_refused(redis_server):
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=redis_server.port, retry=once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_the_password_is_read_by_the_owner_alone(tmp_path):
    with start_redis(tmp_path / "data") as server:
        password = server.url.split("@")[0].removeprefix("redis://:")
        assert len(password) >= 32
        assert password not in repr(server)
        assert password not in " ".join(psutil.Process(server.pid).cmdline())
        assert password in (tmp_path / "data" / "redis.conf").read_text()
        assert mode(tmp_path / "data" / "redis.conf") == 0o600
        assert mode(tmp_path / "data") == 0o700


def test_the_server_does_not_inherit_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOBHUB_API_KEY", "hush")
    with start_redis(tmp_path) as server:
        assert "BLOBHUB_API_KEY" not in psutil.Process(server.pid).environ()


def test_the_server_listens_on_the_loopback_alone(redis_server):
    listening = [c.laddr for c in psutil.Process(redis_server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", redis_server.port)]


def test_every_write_is_kept_in_an_append_only_file(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        settings = client.config_get("append*") | client.config_get("save")
    assert (settings["appendonly"], settings["appendfsync"], settings["save"]) == ("yes", "everysec", "")


def test_a_taken_port_is_an_error_that_shows_the_log_but_no_password(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FleetError, match="Address already in use") as caught:
            start_redis(tmp_path, port)
    assert f"port {port}" in caught.value.detail
    assert str(tmp_path / "redis.log") in caught.value.detail
    assert "redis://" not in caught.value.detail


def test_a_free_port_that_somebody_takes_is_replaced_by_another(tmp_path, monkeypatch):
    free_port = redis_server._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(redis_server, "_free_port", lambda: next(ports))
        with start_redis(tmp_path) as server:
            assert answers(server.url)


def test_a_damaged_append_only_file_is_an_error_that_names_the_remedy(tmp_path):
    with start_redis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    for file in tmp_path.rglob("*.aof"):
        file.write_bytes(b"nonsense" + file.read_bytes())
    with pytest.raises(FleetError, match="redis-check-aof"):
        start_redis(tmp_path)


def test_a_configuration_that_redis_refuses_shows_no_password(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server, "CONFIG", "requirepass {password} {port} {folder}\n")
    with pytest.raises(FleetError, match="requirepass") as caught:
        start_redis(tmp_path)
    password = (tmp_path / "redis.conf").read_text().split()[1]
    assert password not in str(caught.value)


def test_two_servers_never_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server, "LOCK_TIMEOUT_S", 0.1)
    with start_redis(tmp_path), pytest.raises(FleetError, match="another Redis uses the folder"):
        start_redis(tmp_path)


def test_a_prepared_folder_is_held_until_its_lock_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server, "LOCK_TIMEOUT_S", 0.1)
    prepared = prepare_redis(tmp_path)
    with pytest.raises(FleetError, match="another Redis uses the folder"):
        prepare_redis(tmp_path)
    os.close(prepared.lock_fd)
    os.close(prepare_redis(tmp_path).lock_fd)


def test_the_server_ends_with_its_starter_and_its_folder_is_free(tmp_path):
    code = (
        "import sys, pathlib; from fleet.sandbox.redis_server import start_redis\n"
        "print(start_redis(pathlib.Path(sys.argv[1])).pid, flush=True); sys.stdin.read()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    with start_redis(tmp_path) as server:
        assert answers(server.url)
    wait_until(lambda: _is_gone(pid))


def test_without_any_redis_server_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FleetError) as caught:
        find_redis_server()
    assert caught.value.code == "redis_missing"


def test_a_redis_server_on_path_comes_before_the_one_in_the_wheel(tmp_path, monkeypatch):
    binary = tmp_path / "redis-server"
    binary.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == binary


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
