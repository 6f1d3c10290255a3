import asyncio
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from fleet.sandbox.platform_server import PERSON_KEY_VARIABLE, WORKER_KEY_VARIABLE, load_keys, running_platform

DEADLINE_S = 20.0
TEXT = [{"type": "text", "text": "hello"}]
THREAD = {"type": "thread", "thread": {"metadata": {"workspace": {"work_folder": "/srv"}}}}
CALM = {
    "latency_ms": 0,
    "list_lag_ms": 0,
    "max_page": 1000,
    "item_cap_bytes": 65536,
    "created_at": "iso",
    "object_types": True,
    "faults": [],
}


class User:
    """One user's connection, bound to one session."""

    def __init__(self, platform, http, session_id):
        self.platform = platform
        self.session_id = session_id
        self.http = http

    def send(self, kind, name, **arguments):
        payload = {"command": name, "session_id": self.session_id} | arguments
        return self.http.post(f"/revisions/{self.platform.revision_id}/data/{kind}", json=payload)

    def ask(self, name, **arguments):
        return self.send("query", name, **arguments).json()

    def tell(self, name, **arguments):
        return self.send("command", name, **arguments).json()

    def post(self, alias="thread", content=TEXT, **arguments):
        return self.tell("post_session_thread_item", alias=alias, content=content, **arguments)

    def texts(self, **arguments):
        answer = self.ask("list_session_thread_items", alias="thread", **arguments)
        return [item["content"][0]["text"] for item in answer["items"]]

    def upload_file(self, content, **arguments):
        envelope = {
            "command": "upload_session_file",
            "session_id": self.session_id,
            "alias": "file",
            "name": "plän.bin",
            "content_type": "image/png",
            "size": len(content),
        }
        return self.http.post(
            f"/revisions/{self.platform.revision_id}/data/command",
            content=content,
            headers={
                "Content-Type": "application/octet-stream",
                "X-Request-Body": json.dumps(envelope | arguments),
            },
        )

    def conditions(self, **changes):
        answer = self.http.post("/sandbox/conditions", json=changes)
        assert answer.status_code == 200, answer.text


def text(words):
    return [{"type": "text", "text": words}]


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def connect(platform, key):
    headers = {"X-API-Key": key} if key else {}
    return httpx.Client(base_url=platform.url, headers=headers, trust_env=False, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    with running_platform(tmp_path_factory.mktemp("platform")) as running:
        yield running


@pytest.fixture(scope="module")
def person_http(platform):
    with connect(platform, platform.person_key) as http:
        yield http


@pytest.fixture(scope="module")
def worker_http(platform):
    with connect(platform, platform.worker_key) as http:
        yield http


@pytest.fixture
def person(platform, person_http):
    answer = person_http.post("/sandbox/sessions", json={"revision_id": platform.revision_id}).json()
    user = User(platform, person_http, answer["session"]["id"])
    assert user.tell("upload_session_object", alias="thread", value=THREAD) == {"status": "success"}
    yield user
    user.conditions(**CALM)


@pytest.fixture
def worker(platform, worker_http, person):
    return User(platform, worker_http, person.session_id)


# Access


def test_a_key_tells_who_is_calling(platform, person, worker):
    assert worker.http.get("/users/me").json()["user"]["id"] == platform.worker_user_id
    assert person.http.get("/v1/users/me").json()["user"]["id"] == platform.person_user_id
    assert worker.post()["item"]["user_id"] == platform.worker_user_id


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 403)])
def test_a_missing_or_unknown_key_has_no_access(platform, person, key, status):
    with connect(platform, key) as http:
        stranger = User(platform, http, person.session_id)
        assert stranger.http.get("/users/me").status_code == status
        assert stranger.send("query", "get_session").status_code == status
        assert stranger.http.get("/health").status_code == 200


def test_a_revision_is_found_by_id_and_as_default(platform, worker):
    for ref in (platform.revision_id, "default"):
        answer = worker.http.get(f"/blobs/{platform.org_id}/{platform.blob_id}/revisions/{ref}").json()
        assert answer["revision"] == {"id": platform.revision_id, "phase": "draft", "status": "ready"}
    unknown = worker.http.get(f"/blobs/{platform.org_id}/{platform.blob_id}/revisions/other")
    assert (unknown.status_code, unknown.json()["error"]) == (200, "revision_not_found")


def test_only_get_session_takes_a_sessions_alias(platform, worker):
    found = worker.ask("get_session", session_id=platform.session_alias)["session"]
    assert (found["id"], found["status"]) == (platform.session_id, "open")
    assert worker.send("query", "list_session_objects", session_id=platform.session_alias).status_code == 403


# Validation


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "error"),
    [
        ("command", "rename_session", {}, "unknown_command"),
        ("command", "get_session", {}, "unknown_command"),
        ("query", "download_session_object", {}, "invalid_arguments"),
        ("query", "list_session_objects", {"offset": 5}, "invalid_arguments"),
        ("query", "list_session_objects", {"cursor": None}, "invalid_arguments"),
        ("query", "list_session_objects", {"cursor": "made up"}, "invalid_cursor"),
        ("query", "list_session_objects", {"limit": 1001}, "invalid_arguments"),
        ("query", "list_session_objects", {"limit": 0}, "invalid_arguments"),
        ("query", "list_session_objects", {"limit": "10"}, "invalid_arguments"),
        ("query", "list_session_events", {"ascending": 1}, "invalid_arguments"),
        ("query", "list_session_events", {"created_since": 1700000000000}, "invalid_arguments"),
        ("query", "list_session_events", {"created_since": "yesterday"}, "invalid_arguments"),
        ("query", "download_session_object", {"alias": "a//b"}, "invalid_alias"),
        ("query", "download_session_object", {"alias": "a/../b"}, "invalid_alias"),
        ("query", "download_session_object", {"alias": "a b"}, "invalid_alias"),
        ("query", "download_session_object", {"alias": "a" * 257}, "invalid_alias"),
        ("command", "upload_session_object", {"alias": "a", "value": "text"}, "invalid_arguments"),
        ("command", "post_session_thread_item", {"alias": "thread", "content": []}, "invalid_arguments"),
        ("command", "post_session_thread_item", {"alias": "thread", "content": "text"}, "invalid_arguments"),
        (
            "command",
            "post_session_thread_item",
            {"alias": "thread", "content": [{"type": "text"}]},
            "invalid_arguments",
        ),
    ],
)
def test_a_wrong_request_is_refused(worker, kind, name, arguments, error):
    answer = worker.send(kind, name, **arguments)
    assert (answer.status_code, answer.json()["status"], answer.json()["error"]) == (400, "failure", error)


@pytest.mark.parametrize("body", [b'{"a": "\\ud800"}', b'{"a": "\xff"}', b'{"a": NaN}', b"[]", b"{"])
def test_what_json_and_utf8_cannot_carry_is_refused(platform, worker, body):
    answer = worker.http.post(
        f"/revisions/{platform.revision_id}/data/query", content=body, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request")


# Objects


def test_an_object_comes_back_as_it_was_stored(platform, person, worker):
    value = {"type": "note", "unknown": {"ключ": [1, 2.5, None, True]}}
    person.tell("upload_session_object", alias="a/b", value=value)
    found = worker.ask("download_session_object", alias="a/b")["object"]
    assert (found["alias"], found["value"], found["user_id"]) == ("a/b", value, platform.person_user_id)
    assert worker.ask("download_session_object", alias="a/c")["error"] == "not_found"


def test_a_deleted_object_answers_403_and_a_thread_made_anew_is_empty(person, worker):
    worker.post()
    assert person.tell("delete_session_object", alias="thread")["status"] == "success"
    assert worker.send("query", "download_session_object", alias="thread").status_code == 403
    assert worker.send("command", "post_session_thread_item", alias="thread", content=TEXT).status_code == 403
    assert worker.ask("list_session_objects")["objects"] == []
    person.tell("upload_session_object", alias="thread", value=THREAD)
    assert worker.texts() == []


def test_objects_are_listed_by_prefix_in_pages(person, worker):
    for alias in ("p/a", "p/b/1", "p/b/2", "p/c", "q"):
        person.tell("upload_session_object", alias=alias, value={"type": "note"})
    first = worker.ask("list_session_objects", prefix="p/", limit=3)
    assert [row["alias"] for row in first["objects"]] == ["p/a", "p/b/1", "p/b/2"]
    second = worker.ask("list_session_objects", prefix="p/", limit=3, cursor=first["cursor"])
    assert second == {"status": "success", "objects": [{"alias": "p/c", "type": "note"}], "cursor": None}


def test_a_delimiter_folds_what_lies_deeper(person, worker):
    for alias in ("p/a", "p/b/1", "p/b/2", "p/c"):
        person.tell("upload_session_object", alias=alias, value={"type": "note"})
    pages, cursor = [], {}
    while cursor is not None:
        page = worker.ask("list_session_objects", prefix="p/", delimiter="/", limit=1, **cursor)
        pages.append([row["alias"] for row in page["objects"]] + page["prefixes"])
        cursor = {"cursor": page["cursor"]} if page["cursor"] else None
    assert pages == [["p/a"], ["p/b/"], ["p/c"]]


def test_a_list_can_leave_out_the_types(person, worker):
    person.conditions(object_types=False)
    assert worker.ask("list_session_objects")["objects"] == [{"alias": "thread"}]


def test_an_object_over_5_mib_is_refused(person):
    fits = {"type": "message", "text": "ü" * (5 * 512 * 1024 - 100)}
    assert person.tell("upload_session_object", alias="big", value=fits)["status"] == "success"
    answer = person.tell("upload_session_object", alias="big", value={"text": "x" * (5 * 1024 * 1024)})
    assert answer["error"] == "session_object_too_large"


# Files


def test_a_files_bytes_come_back_with_the_object_in_a_header(platform, worker):
    content = bytes(range(256))
    uploaded = worker.upload_file(content).json()["object"]
    answer = worker.http.post(
        f"/revisions/{platform.revision_id}/data/query",
        json={"command": "download_session_file", "session_id": worker.session_id, "alias": "file"},
        headers={"Accept": "application/octet-stream"},
    )
    assert answer.content == content
    assert json.loads(answer.headers["X-Response-Body"]) == {"status": "success", "object": uploaded}
    assert uploaded["value"]["file"] == {"name": "plän.bin", "content_type": "image/png", "size": 256}
    assert {"alias": "file", "type": "file"} in worker.ask("list_session_objects")["objects"]


def test_a_file_that_breaks_a_rule_is_refused(worker):
    assert worker.upload_file(b"MZ", content_type="application/x-msdownload").json()["error"] == "unsupported_file_type"
    assert worker.upload_file(b"x" * (4 * 1024 * 1024)).json()["status"] == "success"
    assert worker.upload_file(b"x" * (4 * 1024 * 1024 + 1)).json()["error"] == "file_too_large"
    assert worker.upload_file(b"x", size=2).status_code == 400


# Threads


def test_an_item_is_answered_as_stored_and_found_by_its_id(worker):
    item = worker.post(metadata={"type": "text", "post_id": "p1"}, parent_id="p0")["item"]
    assert (item["content"], item["metadata"]["post_id"], item["parent_id"]) == (TEXT, "p1", "p0")
    assert worker.ask("get_session_thread_item", alias="thread", item_id=item["id"])["item"] == item
    assert worker.ask("list_session_thread_items", alias="thread")["items"] == [item]
    assert worker.ask("get_session_thread_item", alias="thread", item_id="other")["error"] == "not_found"


def test_pages_hold_ten_rows_and_the_last_has_a_null_cursor(worker):
    for number in range(23):
        worker.post(content=text(str(number)))
    pages, arguments = [], {}
    while True:
        page = worker.ask("list_session_thread_items", alias="thread", ascending=True, **arguments)
        pages.append([int(item["content"][0]["text"]) for item in page["items"]])
        if page["cursor"] is None:
            break
        arguments = {"cursor": page["cursor"]}
    assert pages == [list(range(10)), list(range(10, 20)), list(range(20, 23))]


def test_items_are_listed_newest_first_unless_asked_otherwise(worker):
    for words in ("1", "2", "3", "4", "5"):
        worker.post(content=text(words))
    first = worker.ask("list_session_thread_items", alias="thread", limit=3)
    assert [item["content"][0]["text"] for item in first["items"]] == ["5", "4", "3"]
    assert worker.texts(limit=3, cursor=first["cursor"]) == ["2", "1"]


def test_a_cursor_serves_only_the_query_that_it_came_from(worker):
    for _ in range(2):
        worker.post()
    cursor = worker.ask("list_session_thread_items", alias="thread", limit=1)["cursor"]
    answer = worker.ask("list_session_thread_items", alias="thread", limit=1, cursor=cursor, ascending=True)
    assert answer["error"] == "invalid_cursor"


@pytest.mark.parametrize(("style", "kind"), [("iso", str), ("ms", int)])
def test_created_since_and_created_before_are_strict(person, worker, style, kind):
    person.conditions(created_at=style)
    times = [worker.post(content=text(str(number)))["item"]["created_at"] for number in range(4)]
    assert times == sorted(times)
    assert isinstance(times[0], kind)
    later = [str(number) for number, at in enumerate(times) if at > times[1]]
    earlier = [str(number) for number, at in enumerate(times) if at < times[2]]
    assert worker.texts(ascending=True, created_since=times[1]) == later
    assert worker.texts(ascending=True, created_before=times[2]) == earlier
    assert worker.texts(created_since=times[3]) == []


def test_an_item_of_the_cap_is_refused_and_one_byte_less_is_stored(person, worker):
    size = len(json.dumps({"content": text(""), "metadata": {}}))
    person.conditions(item_cap_bytes=size + 100)
    assert worker.post(content=text("x" * 99))["status"] == "success"
    assert worker.post(content=text("x" * 100))["error"] == "thread_item_too_large"


def test_posting_to_what_is_no_thread_is_refused(person, worker):
    person.tell("upload_session_object", alias="note", value={"type": "note"})
    assert worker.post(alias="note")["error"] == "invalid_thread_envelope"
    assert worker.post(alias="nothing")["error"] == "invalid_thread_envelope"


# Events and states


def test_every_change_has_its_event(person, worker):
    item = worker.post()["item"]
    person.tell("delete_session_object", alias="thread")
    for status in ("closing", "closed", "deleting"):
        person.http.post(f"/sandbox/sessions/{person.session_id}/status", json={"status": status})
    events = worker.ask("list_session_events", ascending=True)["session_events"]
    assert len({event.pop("id") for event in events}) == 6
    times = [event.pop("created_at") for event in events]
    assert times == sorted(times)
    thread = {"alias": "thread", "type": "thread"}
    assert events == [
        {"type": "session_object_modified", "session_object": thread},
        {"type": "session_thread_item_posted", "session_object": thread, "item_id": item["id"]},
        {"type": "session_object_deleted", "session_object": thread},
        {"type": "session_closing"},
        {"type": "session_closed"},
        {"type": "session_deleting"},
    ]


def test_a_session_that_is_not_open_takes_no_writes_and_a_deleted_one_answers_403(person, worker):
    person.http.post(f"/sandbox/sessions/{person.session_id}/status", json={"status": "closed"})
    assert worker.post()["error"] == "session_not_open"
    assert worker.ask("get_session")["session"]["status"] == "closed"
    person.http.post(f"/sandbox/sessions/{person.session_id}/status", json={"status": "deleted"})
    assert worker.send("query", "get_session").status_code == 403
    assert worker.send("query", "list_session_events").status_code == 403


@pytest.mark.parametrize(
    ("change", "error"),
    [({"phase": "published"}, "revision_not_writable"), ({"status": "preparing"}, "revision_not_ready")],
)
def test_a_revision_that_takes_no_writes_says_why(platform, person, worker, change, error):
    path = f"/sandbox/revisions/{platform.revision_id}"
    assert person.http.post(path, json=change).status_code == 200
    try:
        assert worker.post()["error"] == error
        assert worker.texts() == []
    finally:
        person.http.post(path, json={"phase": "draft", "status": "ready"})
    assert worker.post()["status"] == "success"


# Rehearsals


def test_the_workers_key_does_not_open_the_sandboxs_own_endpoints(worker):
    assert worker.http.post("/sandbox/conditions", json={}).status_code == 403
    assert worker.http.get("/sandbox/requests").status_code == 403


def test_a_condition_that_does_not_exist_changes_nothing(person):
    answer = person.http.post("/sandbox/conditions", json={"latency_ms": 5, "latency": 5})
    assert answer.status_code == 400
    assert person.http.get("/sandbox/conditions").json()["conditions"]["latency_ms"] == 0


def test_latency_delays_each_request_and_blocks_none(platform, person):
    person.conditions(latency_ms=500)

    async def ask_many():
        async with httpx.AsyncClient(headers={"X-API-Key": platform.worker_key}, trust_env=False) as http:
            return await asyncio.gather(*(http.get(f"{platform.url}/users/me") for _ in range(20)))

    started = time.monotonic()
    answers = asyncio.run(ask_many())
    assert {answer.status_code for answer in answers} == {200}
    assert 0.5 <= time.monotonic() - started < 20 * 0.5


def test_a_lagging_list_misses_an_item_that_is_found_by_its_id(person, worker):
    person.conditions(list_lag_ms=700)
    item = worker.post()["item"]
    assert worker.texts() == []
    assert worker.ask("get_session_thread_item", alias="thread", item_id=item["id"])["status"] == "success"
    wait_until(lambda: worker.texts() == ["hello"])


def test_pages_can_be_made_small(person, worker):
    person.conditions(max_page=3)
    for number in range(4):
        worker.post(content=text(str(number)))
    page = worker.ask("list_session_thread_items", alias="thread", ascending=True, limit=1000)
    assert len(page["items"]) == 3
    assert worker.texts(ascending=True, limit=1000, cursor=page["cursor"]) == ["3"]


@pytest.mark.parametrize(
    ("kind", "status", "stored"),
    [
        ("429", 429, False),
        ("500_before", 500, False),
        ("500_after", 500, True),
        ("cut_before", None, False),
        ("cut_after", None, True),
        ("delay", 200, True),
    ],
)
def test_a_fault_hits_as_often_as_it_should(person, worker, kind, status, stored):
    fault = {"match": "post_session_thread_item", "kind": kind, "rate": 1, "times": 1, "delay_ms": 20}
    person.conditions(faults=[fault])
    if status is None:
        with pytest.raises(httpx.RemoteProtocolError):
            worker.post(content=text("first"))
    else:
        answer = worker.send("command", "post_session_thread_item", alias="thread", content=text("first"))
        assert answer.status_code == status
    worker.post(content=text("second"))
    assert worker.texts(ascending=True) == (["first"] if stored else []) + ["second"]


def test_the_same_seed_draws_the_same_faults(person, worker):
    def draw(seed):
        person.conditions(faults=[{"match": "/users/", "kind": "429", "rate": 0.5}], seed=seed)
        return [worker.http.get("/users/me").status_code for _ in range(16)]

    first = draw(7)
    assert set(first) == {200, 429}
    assert draw(7) == first
    assert draw(8) != first


def test_requests_are_counted_by_command(person, worker):
    person.http.delete("/sandbox/requests")
    worker.post()
    worker.post(alias="nothing")
    worker.texts()
    worker.http.get("/users/me")
    counts = person.http.get("/sandbox/requests").json()["requests"]
    assert counts == {"post_session_thread_item": 2, "list_session_thread_items": 1, "users/me": 1}


def test_many_clients_at_once_lose_nothing(platform, person):
    def post_ten(index):
        with connect(platform, platform.worker_key) as http:
            user = User(platform, http, person.session_id)
            return [user.post(content=text(f"{index}.{number}"))["status"] for number in range(10)]

    with ThreadPoolExecutor(8) as pool:
        assert {status for statuses in pool.map(post_ten, range(8)) for status in statuses} == {"success"}
    assert len(set(person.texts(limit=1000))) == 80


# The process


def test_keys_and_data_outlive_a_restart_and_the_database_holds_no_key(tmp_path):
    with running_platform(tmp_path, max_page=2) as first, connect(first, first.person_key) as http:
        user = User(first, http, first.session_id)
        user.tell("upload_session_object", alias="thread", value=THREAD)
        for _ in range(3):
            user.post()
        assert len(user.texts(limit=10)) == 2
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    with sqlite3.connect(tmp_path / "platform.db") as database:
        dump = "\n".join(database.iterdump())
    database.close()
    assert first.worker_key not in dump
    assert first.person_key not in dump
    with running_platform(tmp_path) as second:
        assert (second.worker_key, second.person_key) == (first.worker_key, first.person_key)
        with connect(second, second.person_key) as http:
            assert len(User(second, http, second.session_id).texts()) == 3


def test_the_environment_may_name_the_keys(tmp_path, monkeypatch):
    monkeypatch.setenv(WORKER_KEY_VARIABLE, "worker-from-environment")
    keys = load_keys(tmp_path)
    assert keys.worker == "worker-from-environment"
    assert "worker-from-environment" not in repr(keys) + (tmp_path / "keys.json").read_text()
    monkeypatch.setenv(PERSON_KEY_VARIABLE, "worker-from-environment")
    with pytest.raises(ValueError, match="must differ"):
        load_keys(tmp_path)


def test_sigterm_ends_it_with_status_0_whatever_is_going_on(tmp_path):
    ready_file = tmp_path / "ready.json"
    command = [sys.executable, "-m", "fleet.sandbox.platform_server", "--data", str(tmp_path)]
    command += ["--latency-ms", "60000", "--ready-file", str(ready_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip().removeprefix("listening on ")
            assert json.loads(ready_file.read_text()) == {"url": url, "pid": server.pid}
            with httpx.Client(trust_env=False) as idle, ThreadPoolExecutor(1) as pool:
                assert idle.get(f"{url}/health").status_code == 200
                waiting = pool.submit(httpx.get, f"{url}/users/me", timeout=DEADLINE_S, trust_env=False)
                key = load_keys(tmp_path).person
                wait_until(
                    lambda: (
                        idle.get(f"{url}/sandbox/requests", headers={"X-API-Key": key}).json()["requests"]
                        == {"users/me": 1}
                    )
                )
                server.send_signal(signal.SIGTERM)
                assert server.wait(DEADLINE_S) == 0
                with pytest.raises(httpx.TransportError):
                    waiting.result(DEADLINE_S)
        finally:
            server.kill()
    assert not ready_file.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_it_ends_with_its_parent(tmp_path):
    script = (
        "import pathlib, sys, time\n"
        "from fleet.sandbox.platform_server import running_platform\n"
        "with running_platform(pathlib.Path(sys.argv[1])) as platform:\n"
        "    print(platform.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            platform = psutil.Process(int(parent.stdout.readline()))
        finally:
            os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not platform.is_running() or platform.status() == psutil.STATUS_ZOMBIE)
