"""Flower over a running fleet, with the settings of ops/flower.py: who gets in, and what is to be seen there."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from fleet.machine import celery_command, free_port
from fleet.supervisor import Child
from ops.flower_pages import pictures
from tests.fleet.harness import PATIENCE_S, FleetUnderTest
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "ops/flower.py"
DOCS = ROOT / "docs"
LOGIN = ("somebody", "flower-password")
#: Seconds after which a worker that has left disappears here; as long as a user waits is too long for a test.
PURGE_S = 1
#: Bytes of a picture that a page of the documentation may have.
PICTURE_MAX = 150_000

PAGES = ("/", "/workers?json=1", "/worker/io@alpha", "/tasks", "/broker", "/api/workers", "/api/tasks", "/task/some-id")


@dataclass(frozen=True)
class Flower:
    """Flower, seen by somebody with the password (`inside`) and by anybody else."""

    url: str
    inside: httpx.Client
    outside: httpx.Client
    log: Path

    def is_up(self) -> bool:
        try:
            return self.outside.get("/healthcheck").is_success
        except httpx.TransportError:
            return False

    def json(self, path: str) -> Any:
        return self.inside.get(path).raise_for_status().json()

    def workers(self) -> dict[str, bool]:
        """The list of workers: name → is it online."""
        return {row["hostname"]: row["status"] for row in self.json("/workers?json=1")["data"]}

    def tasks(self, alias: str) -> list[dict[str, Any]]:
        """The tasks about a thread."""
        return list(self.json(f"/api/tasks?search=args:{alias}").values())


@pytest.fixture(scope="module")
def flower(fleet: FleetUnderTest) -> Iterator[Flower]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = (f"--conf={SETTINGS}", "--address=127.0.0.1", f"--port={port}", f"--purge_offline_workers={PURGE_S}")
    environ = {**fleet.environ, "FLOWER_BASIC_AUTH": ":".join(LOGIN)}
    with (
        httpx.Client(base_url=url, auth=LOGIN, trust_env=False, timeout=20) as inside,
        httpx.Client(base_url=url, trust_env=False, timeout=20) as outside,
    ):
        flower = Flower(url, inside, outside, fleet.base / "home" / "logs" / "flower.log")
        child = Child("flower", celery_command("flower", *options), environ, flower.is_up, ready_timeout_s=90)
        with fleet.also(child):
            yield flower


def ended_turn(fleet: FleetUnderTest, flower: Flower, alias: str, text: str) -> list[dict[str, Any]]:
    """Let a thread have its first turn; return its tasks, once Flower knows of the last one."""
    fleet.person.hand_over(alias, fleet.folder(alias), text)
    fleet.await_turns(alias)
    wait_until(
        lambda: any((task["name"], task["state"]) == ("fleet.close_turn", "SUCCESS") for task in flower.tasks(alias)),
        PATIENCE_S,
        f"Flower does not know the turn of {alias}",
    )
    return flower.tasks(alias)


@pytest.mark.parametrize("path", PAGES)
def test_nobody_sees_a_page_without_the_password(flower: Flower, path: str):
    assert flower.outside.get(path).status_code == 401
    assert flower.outside.get(path, auth=(LOGIN[0], "guessed")).status_code == 401
    assert flower.outside.get(path, headers={"Authorization": "Basic =="}).status_code == 401


def test_nobody_stops_a_worker_or_calls_a_task_without_the_password(flower: Flower):
    for path in ("worker/shutdown/io@alpha", "task/async-apply/fleet.poll", "task/revoke/some-id"):
        assert flower.outside.post(f"/api/{path}").status_code == 401


def test_both_workers_of_each_host_are_online_under_their_names(flower: Flower):
    expected = {"io@alpha", "turns@alpha", "io@beta", "turns@beta"}
    wait_until(
        lambda: {name for name, online in flower.workers().items() if online} >= expected,
        PATIENCE_S,
        lambda: f"Flower lists {flower.workers()}",
    )


def test_the_tasks_of_a_thread_name_what_happens_where_and_to_which_thread(fleet: FleetUnderTest, flower: Flower):
    tasks = ended_turn(fleet, flower, "seen/in-flower", "hello")
    session, epoch = fleet.platform.session_id, fleet.record("seen/in-flower").epoch
    assert {task["name"] for task in tasks} >= {
        "fleet.activate",
        "fleet.start_thread",
        "fleet.run_turn",
        "fleet.publish_artifacts",
        "fleet.close_turn",
        "fleet.post_items",
    }
    (turn,) = (task for task in tasks if task["name"] == "fleet.run_turn")
    assert turn["worker"] == "turns@alpha"
    assert turn["args"] == f"('{session}', 'seen/in-flower', {epoch}, 1)"
    assert turn["kwargs"] == "{}"


def test_nothing_that_was_said_in_a_thread_is_shown(fleet: FleetUnderTest, flower: Flower):
    tasks = ended_turn(fleet, flower, "private", "hello, the word is xylophone")
    assert any("xylophone" in str(item) for item in fleet.said("private"))
    shown = [flower.inside.get(f"/task/{task['uuid']}").raise_for_status().text for task in tasks]
    shown += [flower.inside.get(path).raise_for_status().text for path in ("/api/tasks", "/api/workers?refresh=1")]
    assert all(shown)
    assert not any("xylophone" in page for page in shown)


def test_no_page_and_no_log_shows_a_password_or_a_key(fleet: FleetUnderTest, flower: Flower):
    hidden = (str(urlsplit(str(fleet.config.redis.url)).password), fleet.platform.worker_key, LOGIN[1])
    assert all(len(secret) > 8 for secret in hidden)
    paths = ("/workers", "/worker/io@alpha", "/worker/turns@alpha", "/broker", "/api/workers?refresh=1")
    shown = {path: flower.inside.get(path).raise_for_status().text for path in paths}
    assert "global_keyprefix" in shown["/worker/io@alpha"]
    shown["its log"] = flower.log.read_text()
    assert [where for where, text in shown.items() if any(secret in text for secret in hidden)] == []


def test_a_worker_that_has_left_disappears(fleet: FleetUnderTest, flower: Flower):
    io, _ = fleet.host_children("gamma")
    with fleet.also(io):
        wait_until(lambda: flower.workers().get("io@gamma"), PATIENCE_S, "io@gamma is not seen")
    # One that had to be killed has not said so: it counts as there until two heartbeats of a minute were missed.
    wait_until(lambda: "io@gamma" not in flower.workers(), 2 * 60 + 20, "io@gamma stays in the list")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], dict[str, Any]]:
    """Read ops/flower.py with a value of FLOWER_BASIC_AUTH."""

    def read(login: str | None) -> dict[str, Any]:
        monkeypatch.delenv("FLOWER_BASIC_AUTH", raising=False)
        if login is not None:
            monkeypatch.setenv("FLOWER_BASIC_AUTH", login)
        return runpy.run_path(str(SETTINGS))

    return read


@pytest.mark.parametrize("login", [None, "", "user", "user:", ":word", "one:word,", "one:wörd", "one:word, two:word"])
def test_a_login_that_would_let_in_anybody_or_nobody_is_refused_and_not_shown(settings, login):
    with pytest.raises(SystemExit) as refused:
        settings(login)
    assert "FLOWER_BASIC_AUTH must be user:password" in str(refused.value)
    assert not login or login not in str(refused.value).removeprefix("flower: FLOWER_BASIC_AUTH must be user:password")


def test_several_persons_may_have_a_login(settings):
    assert settings("one:word:more,two:word")["basic_auth"] == ["one:word:more", "two:word"]


def test_workers_that_have_left_are_purged_within_minutes(settings):
    assert 0 < settings("one:word")["purge_offline_workers"] <= 300


def test_the_page_shows_each_picture_that_is_taken_and_they_are_small():
    page = (DOCS / "flower.md").read_text(encoding="utf-8")
    names = {f"images/flower-{picture.name}.png" for picture in pictures("some-id")}
    assert names == {file.relative_to(DOCS).as_posix() for file in (DOCS / "images").glob("flower-*.png")}
    assert [name for name in sorted(names) if f"]({name})" not in page] == []
    assert [name for name in sorted(names) if (DOCS / name).stat().st_size > PICTURE_MAX] == []


def test_taking_pictures_without_a_browser_ends_with_a_line_that_says_what_to_install(tmp_path):
    command = [sys.executable, str(ROOT / "ops/flower_pages.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "flower-pages: no Chromium is on PATH: install it, on Debian with apt-get install chromium\n"
    )
