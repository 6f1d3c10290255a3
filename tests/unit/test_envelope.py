import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.envelope import (
    AgentBlock,
    Artifacts,
    WorkerInstance,
    new_thread,
    parse,
    with_state,
    with_worker_instance,
    worker_object,
    worker_owner,
)
from fleet.errors import ThreadFailedError

#: Keys of the protocol among others, so that the strategies below reach every block.
KEYS = st.sampled_from(
    [
        "type",
        "thread",
        "metadata",
        "workspace",
        "work_folder",
        "agent",
        "executable",
        "model",
        "permissions",
        "instance",
        "state",
        "artifacts",
        "prefix",
        "source",
        "outbox",
        "policy",
        "attachments",
        "inbox",
        "user",
        "user_id",
        "other",
    ]
)
SURROGATES = st.text(st.characters(exclude_categories=()), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SURROGATES | st.just("thread"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SURROGATES, inner, max_size=5),
    max_leaves=30,
)


def thread(**metadata: object) -> dict[str, object]:
    return {"type": "thread", "thread": {"metadata": metadata}}


def values() -> st.SearchStrategy[object]:
    blocks = st.dictionaries(KEYS, JSON, max_size=6)
    return JSON | blocks.map(lambda metadata: thread(**metadata)) | JSON.map(lambda x: {"type": "thread", "thread": x})


def test_a_whole_envelope_is_read():
    read = parse(
        thread(
            workspace={"work_folder": "/w"},
            agent={"type": "codex", "executable": "x", "model": "m", "effort": "high", "permissions": "guarded"},
            instance={"state": "pending"},
            artifacts={"prefix": "p/", "source": ".out"},
            policy={"default": "deny"},
            attachments={"inbox": "in"},
        )
    )
    assert read is not None
    assert read.work_folder == "/w"
    assert read.agent == AgentBlock("codex", "x", "m", "high", "guarded")
    assert read.agent_type == "codex"
    assert read.state == "pending"
    assert (read.artifacts, read.artifacts_warning) == (Artifacts("p/", ".out"), None)
    assert read.policy == {"default": "deny"}
    assert read.inbox == "in"
    assert read.is_ours


@pytest.mark.parametrize("value", [None, [], "thread", {}, {"type": "message"}, {"thread": {}}])
def test_an_object_of_another_type_is_no_thread(value):
    assert parse(value) is None


@pytest.mark.parametrize(
    ("metadata", "ours"),
    [
        ({}, False),
        ({"workspace": {"work_folder": "/w"}}, False),
        ({"agent": None, "instance": {}}, False),
        ({"instance": {"state": ""}}, False),
        ({"instance": {"status": "attached"}}, False),
        ({"agent": {}}, True),
        ({"agent": "codex"}, True),
        ({"instance": {"state": "active"}}, True),
        ({"instance": {"state": 5}}, True),
    ],
)
def test_a_thread_is_ours_when_it_has_an_agent_block_or_a_state(metadata, ours):
    assert parse(thread(**metadata)).is_ours is ours


@settings(deadline=None)
@given(values())
def test_whatever_a_user_writes_is_read_without_an_error(value):
    read = parse(value)
    if read is not None:
        texts = [read.work_folder, read.state or "", read.inbox or "", *(getattr(read.agent, f) for f in AGENT_FIELDS)]
        for text in texts:
            text.encode()


AGENT_FIELDS = ("type", "executable", "model", "effort", "permissions")


def test_a_setting_of_another_type_is_never_taken_for_not_set():
    agent = parse(thread(agent={"type": ["codex"], "permissions": {"guarded": True}, "model": 5})).agent
    assert agent == AgentBlock(type="<list>", permissions="<dict>", model="<int>")


@pytest.mark.parametrize("work_folder", [None, 5, ["/w"]])
def test_a_work_folder_that_is_no_string_reads_as_missing(work_folder):
    assert parse(thread(workspace={"work_folder": work_folder})).work_folder == ""
    assert parse(thread(workspace="/w")).work_folder == ""


def test_a_later_name_of_the_source_is_understood():
    assert parse(thread(artifacts={"prefix": "p/", "outbox": "o"})).artifacts == Artifacts("p/", "o")
    assert parse(thread(artifacts={"prefix": "p/", "outbox": "o", "source": "s"})).artifacts == Artifacts("p/", "s")


@pytest.mark.parametrize(
    ("block", "warning"),
    [
        ("x", "no mapping"),
        ([], "no mapping"),
        ({}, "needs both"),
        ({"prefix": "p/"}, "needs both"),
        ({"prefix": "p/", "source": ""}, "needs both"),
        ({"prefix": 5, "source": "s"}, "needs both"),
        ({"prefix": "p", "source": "s"}, "must end in /"),
    ],
)
def test_a_malformed_artifacts_block_is_a_warning_and_no_publishing(block, warning):
    read = parse(thread(artifacts=block))
    assert read.artifacts is None
    assert warning in read.artifacts_warning


def test_no_artifacts_block_is_no_warning():
    assert parse(thread()).artifacts_warning is None


def test_a_malformed_policy_is_handed_on_as_it_is():
    assert parse(thread(policy=["x"])).policy == ["x"]
    assert parse(thread(policy=None)).policy is None


def without_state(value: dict) -> dict:
    value = copy.deepcopy(value)
    value["thread"]["metadata"]["instance"].pop("state")
    return value


def test_a_new_state_changes_nothing_else_and_not_the_argument():
    before = thread(instance={"state": "pending", "note": 1}, agent={"type": "codex"}, unknown=[1])
    before["attributes"] = {"title": "t"}
    kept = copy.deepcopy(before)
    after = with_state(before, "active")
    assert before == kept
    assert parse(after).state == "active"
    assert without_state(after) == without_state(before)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"type": "thread", "x": 1},
            {"type": "thread", "x": 1, **{"thread": thread(instance={"state": "failed"})["thread"]}},
        ),
        ({"type": "thread", "thread": None}, thread(instance={"state": "failed"})),
        (thread(instance=None, agent=1), thread(instance={"state": "failed"}, agent=1)),
        (thread(instance="x", agent=1), thread(instance={"state": "failed"}, agent=1)),
        (
            {"type": "thread", "thread": {"metadata": [], "y": 2}},
            {"type": "thread", "thread": {"metadata": {"instance": {"state": "failed"}}, "y": 2}},
        ),
    ],
)
def test_a_block_that_can_hold_no_state_is_made_and_the_rest_is_kept(value, expected):
    assert with_state(value, "failed") == expected


@settings(deadline=None)
@given(values())
def test_a_written_state_is_read_back(value):
    if parse(value) is None:
        with pytest.raises(ThreadFailedError):
            with_state(value, "failed")
    else:
        assert parse(with_state(value, "failed")).state == "failed"


def test_an_object_that_is_no_thread_is_not_made_one():
    with pytest.raises(ThreadFailedError) as caught:
        with_state({"type": "message"}, "active")
    assert caught.value.code == "THREAD_ENVELOPE_INVALID"


def test_a_new_thread_is_ours_but_not_handed_over():
    read = parse(new_thread("/w", "codex", "guarded", Artifacts("p/", ".out")))
    assert (read.work_folder, read.agent) == ("/w", AgentBlock(type="codex", permissions="guarded"))
    assert (read.artifacts, read.state, read.is_ours) == (Artifacts("p/", ".out"), None, True)
    assert "permissions" not in new_thread("/w", "codex")["thread"]["metadata"]["agent"]


INSTANCE = WorkerInstance("i1", "1.0", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z")


def test_a_worker_object_names_its_owner_and_is_no_thread_to_run():
    value = worker_object("usr_1", INSTANCE)
    assert worker_owner(value) == "usr_1"
    assert not parse(value).is_ours
    assert value["thread"]["metadata"]["instance"]["status"] == "attached"


@pytest.mark.parametrize("value", [None, {"type": "message"}, thread(), thread(user="u"), thread(user={"user_id": 5})])
def test_a_malformed_worker_object_has_no_owner(value):
    assert worker_owner(value) is None


def test_refreshing_the_worker_object_keeps_what_others_wrote():
    value = worker_object("usr_1", INSTANCE)
    value["thread"]["attributes"] = {"title": "t"}
    later = WorkerInstance("i1", "1.0", INSTANCE.started_at, "2026-01-02T00:00:00Z")
    refreshed = with_worker_instance(value, later)
    assert refreshed["thread"]["attributes"] == {"title": "t"}
    assert worker_owner(refreshed) == "usr_1"
    assert refreshed["thread"]["metadata"]["instance"]["last_seen_at"] == "2026-01-02T00:00:00Z"
