"""Read and write the blocks of a thread and of the worker object (protocol §2).

What users write is untrusted: reading never raises. A block that has another shape than the protocol's becomes a value
that the checks of protocol §3.1 refuse, never a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fleet.errors import ThreadFailedError

#: The states of `instance.state`; of these the worker writes only `active` and `failed`.
State = Literal["pending", "active", "completed", "failed"]

#: Alias of the object that is a session's affinity lock and activity log.
WORKER_ALIAS = "worker"


@dataclass(frozen=True, slots=True)
class AgentBlock:
    """The thread's own agent settings, unchecked; an empty string means "not set".

    A setting that is no string reads as the name of its type, such as `<int>`, which no check accepts.
    """

    type: str = ""
    executable: str = ""
    model: str = ""
    effort: str = ""
    permissions: str = ""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Where a turn's files are published: alias prefix (ends in `/`) and the folder below the work folder."""

    prefix: str
    source: str


@dataclass(frozen=True, slots=True)
class Thread:
    """The envelope of a thread as the fleet reads it.

    `work_folder` is empty when it is missing or no string. `state` is None when it is not set, and may be a word that
    the protocol does not have. `artifacts_warning` says why an artifacts block that is there is unusable. `policy` is
    the raw block, None when there is none. `is_ours`: there is an agent block or a state, so it is ours to run.
    """

    work_folder: str
    agent: AgentBlock
    state: str | None
    artifacts: Artifacts | None
    artifacts_warning: str | None
    policy: object
    inbox: str | None
    is_ours: bool

    @property
    def agent_type(self) -> str:
        """The agent's type as the user wrote it."""
        return self.agent.type


@dataclass(frozen=True, slots=True)
class WorkerInstance:
    """Who serves a session, for people to read. The times are ISO-8601 UTC."""

    instance_id: str
    version: str
    started_at: str
    last_seen_at: str
    status: str = "attached"


def parse(value: object) -> Thread | None:
    """Read a session object's value; None when it is no thread. Never raises."""
    if not _is_thread(value):
        return None
    metadata = _metadata(value)
    agent, state = metadata.get("agent"), _word(_mapping(metadata.get("instance")).get("state")) or None
    settings = _mapping(agent)
    work_folder = _mapping(metadata.get("workspace")).get("work_folder")
    inbox = _mapping(metadata.get("attachments")).get("inbox")
    artifacts, warning = _artifacts(metadata.get("artifacts"))
    return Thread(
        work_folder=_text(work_folder) if isinstance(work_folder, str) else "",
        agent=AgentBlock(
            type=_word(settings.get("type")),
            executable=_word(settings.get("executable")),
            model=_word(settings.get("model")),
            effort=_word(settings.get("effort")),
            permissions=_word(settings.get("permissions")),
        ),
        state=state,
        artifacts=artifacts,
        artifacts_warning=warning,
        policy=metadata.get("policy"),
        inbox=_text(inbox) or None if isinstance(inbox, str) else None,
        is_ours=agent is not None or state is not None,
    )


def with_state(value: object, state: State) -> dict[str, Any]:
    """Return `value` with another `instance.state`, and every other key as it was.

    `value` is not changed; the result shares with it what did not change. A block on the way that is missing, or that
    can't hold a state because it is no mapping, is made.

    Raises:
        ThreadFailedError: `THREAD_ENVELOPE_INVALID`, the value is no thread.
    """
    return _with_instance(value, {"state": state})


def with_work_folder(value: dict[str, Any], work_folder: str) -> dict[str, Any]:
    """Return the `value` of a thread with another `workspace.work_folder`, and every other key as it was."""
    thread, metadata = _mapping(value.get("thread")), _metadata(value)
    workspace = {**_mapping(metadata.get("workspace")), "work_folder": work_folder}
    return {**value, "thread": {**thread, "metadata": {**metadata, "workspace": workspace}}}


def new_thread(
    work_folder: str, agent_type: str, permissions: str = "", artifacts: Artifacts | None = None
) -> dict[str, Any]:
    """Return the value of a thread that is not handed over yet: it has no state."""
    agent = {"type": agent_type} | ({"permissions": permissions} if permissions else {})
    metadata: dict[str, Any] = {"workspace": {"work_folder": work_folder}, "agent": agent}
    if artifacts:
        metadata["artifacts"] = asdict(artifacts)
    return {"type": "thread", "thread": {"metadata": metadata}}


def worker_object(user_id: str, instance: WorkerInstance) -> dict[str, Any]:
    """Return the value that claims a session for `user_id`."""
    return {"type": "thread", "thread": {"metadata": {"user": {"user_id": user_id}, "instance": asdict(instance)}}}


def worker_owner(value: object) -> str | None:
    """Return the id of the user who owns a worker object; None when the object is malformed."""
    if not _is_thread(value):
        return None
    user_id = _mapping(_metadata(value).get("user")).get("user_id")
    return user_id if isinstance(user_id, str) and user_id else None


def with_worker_instance(value: object, instance: WorkerInstance) -> dict[str, Any]:
    """Return a worker object's `value` with another `instance`, and every other key as it was.

    Raises:
        ThreadFailedError: `THREAD_ENVELOPE_INVALID`, the value is no thread.
    """
    return _with_instance(value, asdict(instance))


def _with_instance(value: object, changes: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not _is_thread(value):
        raise ThreadFailedError("THREAD_ENVELOPE_INVALID", "the object is no thread")
    thread, metadata = _mapping(value.get("thread")), _metadata(value)
    instance = {**_mapping(metadata.get("instance")), **changes}
    return {**value, "thread": {**thread, "metadata": {**metadata, "instance": instance}}}


def _artifacts(block: object) -> tuple[Artifacts | None, str | None]:
    """Return the usable block, or why the one that is there is not."""
    if block is None:
        return None, None
    if not isinstance(block, Mapping):
        return None, "artifacts is no mapping"
    prefix = block.get("prefix")
    source = block.get("source") if block.get("source") is not None else block.get("outbox")
    if not isinstance(prefix, str) or not isinstance(source, str) or not prefix or not source:
        return None, "artifacts needs both prefix and source, each a string"
    if not prefix.endswith("/"):
        return None, f"artifacts.prefix must end in /, and is {prefix[:256]!r}"
    return Artifacts(_text(prefix), _text(source)), None


def _is_thread(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "thread"


def _metadata(value: object) -> Mapping[str, Any]:
    return _mapping(_mapping(_mapping(value).get("thread")).get("metadata"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _word(value: object) -> str:
    """Return a setting: a string without the space around it, nothing for null, else the name of its type."""
    if value is None:
        return ""
    return _text(value).strip() if isinstance(value, str) else f"<{type(value).__name__}>"


def _text(value: str) -> str:
    """Replace lone surrogates, which JSON can carry and no file name, log or environment can."""
    return value.encode("utf-8", "replace").decode("utf-8")
