"""The start of an epoch on the host that owns the work folder: the checks of protocol §3.1, then the first words."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fleet import items, lapse, lifecycle
from fleet.activation import read_envelope
from fleet.artifacts import prepare_outbox
from fleet.config import AgentSettings, resolve_agent_settings
from fleet.context import Fleet
from fleet.envelope import Thread
from fleet.errors import ThreadFailedError
from fleet.hostfiles import Checkpoint, HostFiles, HostUnwritableError
from fleet.hosts import resolved_roots
from fleet.inbound import catch_up
from fleet.journal import audit_draft, item_draft, state_draft
from fleet.leases import Lease
from fleet.platform.client import SessionRef
from fleet.platform.paging import LIST_DELAY_S
from fleet.policy import parse_policy
from fleet.rebuild import restored, say_again
from fleet.record import Record
from fleet.refs import ThreadRef
from fleet.terms import Terms

log = logging.getLogger(__name__)

#: Bytes of JSON that a policy block may have: every turn parses it.
POLICY_MAX_BYTES = 64 * 1024

PERMISSIONS = ("autonomous", "approval", "guarded")


async def start_thread(fleet: Fleet, ref: ThreadRef, epoch: int) -> None:
    """Start the epoch `epoch` of a thread, if it is still to be started here.

    Raises:
        TransientError: the platform did not answer; the start stays outstanding.
    """
    record = await fleet.records.read(ref)
    at = await fleet.at(ref.session)
    if record.epoch != epoch or record.step != "start" or record.host != fleet.host or at is None:
        return
    lease = await fleet.leases.take(record)
    if lease is None:
        return
    async with fleet.leases.kept(lease):
        behind = await lapse.recovered(fleet, record)
        try:
            if not behind:
                await _start(fleet, at, lease)
        except ThreadFailedError as error:
            await lifecycle.fail(fleet, record, error.code, error.detail, token=lease.token)
        except HostUnwritableError as error:
            await say_unwritable(fleet, record, error)
    if behind:
        await lifecycle.dispatch(fleet, await fleet.records.read(ref))


async def say_unwritable(fleet: Fleet, record: Record, error: HostUnwritableError) -> None:
    """Tell a thread, once for each of its steps, that it waits for its host's disk; `fleet.reconcile` tries again."""
    log.warning("%s, step %s: %s", record.ref, record.step, error)
    waits = f"Turn {record.turn} goes on" if record.turn and record.step != "start" else "The thread starts"
    detail = f"{record.host} can't write its state folder: {error.detail}. {waits} by itself when it can."
    cause = f"unwritable:{record.epoch}:{record.turn}:{record.step}"
    said = item_draft(items.status("host_unwritable", detail))
    if await fleet.journal.append_once(record.ref, cause, said, epoch=record.epoch):
        await fleet.nudges.post_items(record.ref)


async def _start(fleet: Fleet, at: SessionRef, lease: Lease) -> None:
    ref = lease.record.ref
    thread = await read_envelope(fleet, at, ref)
    if thread is None or not thread.is_ours:
        await fleet.nudges.activate(ref)
        return
    folder = checked_folder(thread.work_folder, fleet.config.hosts[fleet.host].work_folders)
    agent = checked_agent(thread, fleet)
    files = HostFiles(fleet.environment.home, ref)
    await asyncio.to_thread(files.check_room)
    record, step = restored(lease.record, Checkpoint.read(files.checkpoint))
    behind = record is not lease.record
    if behind:
        await _forget_older(fleet, ref)
    if elsewhere := _session_is_elsewhere(record, Terms.read(files), folder, agent):
        record, step = await _without_session(fleet, lease, record, elsewhere), ""
    recovers = thread.state == "active" and not record.forced
    lost = recovers or behind
    unposted = await say_again(fleet, at, ref) if lost else []
    if behind and thread.state not in ("pending", "active") and not record.forced:
        await _end_as_told(fleet, lease, thread)
        return
    await catch_up(fleet, at, record, rebuild=lost, unposted=unposted)
    settings = asdict(agent) | {
        "artifacts": _outbox(ref, thread, folder),
        "inbox": thread.inbox or fleet.config.attachments.inbox,
        "policy": thread.policy if agent.permissions == "guarded" else None,
    }
    Terms(record.epoch, str(folder), agent.type, settings).write(files)
    await lifecycle.say_registered(fleet, lease.record)
    if recovers:
        audit = items.audit("thread_recovered", ref.alias)
    else:
        audit = items.audit("thread_active", ref.alias, agent_session_id=record.agent_session)
    await fleet.journal.append_once(
        ref,
        f"started:{record.epoch}",
        state_draft("active", record.epoch, force=record.forced),
        audit_draft(audit),
        epoch=record.epoch,
    )
    values = {field.name: getattr(record, field.name) for field in fields(Checkpoint)}
    del values["epoch"], values["step"]
    started = await fleet.records.transition(
        lease.record,
        f"{step}_restored" if step else "started",
        token=lease.token,
        release=True,
        work_folder=str(folder),
        said=0,  # a new epoch numbers a restored turn's items anew
        **values,
    )
    await fleet.nudges.post_items(ref)
    await fleet.add_due(ref, "list", int(LIST_DELAY_S * 1000))
    if started:
        await lifecycle.dispatch(fleet, await fleet.records.read(ref))


async def _forget_older(fleet: Fleet, ref: ThreadRef) -> None:
    """Forget what Redis has of a question and of what persons said: it is older than the turn that is restored."""
    keys = fleet.store.thread(ref)
    await fleet.store.redis.delete(keys.prompt, keys.inbox, keys.seen)


async def _end_as_told(fleet: Fleet, lease: Lease, thread: Thread) -> None:
    """End a thread that had ended, and whose envelope says so, before Redis forgot it."""
    outcome = "failed" if thread.state == "failed" else "completed"
    await lifecycle.end_stopped(fleet, lease.record, outcome, token=lease.token)
    await fleet.records.set_told(lease.record, outcome)


def _session_is_elsewhere(record: Record, before: Terms | None, folder: Path, agent: AgentSettings) -> str:
    """Return what has changed since the agent's session began, so that no session goes on; "" when it can.

    An agent knows its sessions by the folder. `before` are the terms of the last epoch that was started here.
    """
    if before is None or not record.agent_session:
        return ""
    if before.agent != agent.type:
        return f"the agent was {before.agent} before"
    return "" if before.work_folder == str(folder) else f"the work folder was {before.work_folder} before"


async def _without_session(fleet: Fleet, lease: Lease, record: Record, why: str) -> Record:
    """Forget the agent's session and say so. A turn that was under way in it is begun anew by what it was given."""
    await fleet.records.set_held(lease.record, lease.token, agent_session="")
    said = item_draft(items.status("new_session", f"The agent begins anew: {why}."))
    await fleet.journal.append_once(record.ref, f"new_session:{record.epoch}", said, epoch=record.epoch)
    return replace(record, agent_session="", prompted=False, turn_items=(), turn_newest=None)


def checked_folder(work_folder: str, roots: tuple[str, ...]) -> Path:
    """Return the real path of a work folder that passes the checks of protocol §3.1.

    Raises:
        ThreadFailedError: one of the WORK_FOLDER codes.
    """
    path = Path(work_folder)
    if not path.is_absolute():
        raise ThreadFailedError("WORK_FOLDER_NOT_ABSOLUTE", f"workspace.work_folder is {work_folder!r}")
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise ThreadFailedError("WORK_FOLDER_NOT_FOUND", f"{work_folder} does not exist") from None
    if not real.is_dir():
        raise ThreadFailedError("WORK_FOLDER_NOT_A_DIR", f"{work_folder} is not a directory")
    if not os.access(real, os.R_OK | os.X_OK):
        raise ThreadFailedError("WORK_FOLDER_NOT_READABLE", f"{work_folder} can't be read")
    if not any(real.is_relative_to(root) for root in resolved_roots(roots)):
        raise ThreadFailedError("WORK_FOLDER_OUTSIDE_ROOTS", f"{work_folder} leads to {real}")
    return real


def checked_agent(thread: Thread, fleet: Fleet) -> AgentSettings:
    """Return the settings of a thread's agent, checked in the order of protocol §3.1.

    Raises:
        ThreadFailedError: AGENT_TYPE_UNSUPPORTED, PERMISSIONS_UNSUPPORTED, POLICY_MISSING,
            POLICY_AUTONOMOUS_FORBIDDEN or AGENT_EXECUTABLE_NOT_FOUND.
    """
    settings = resolve_agent_settings(thread.agent, fleet.config)
    if settings.type not in fleet.agents:
        known = ", ".join(sorted(fleet.agents))
        raise ThreadFailedError("AGENT_TYPE_UNSUPPORTED", f"agent.type is {settings.type!r}; supported here: {known}")
    if settings.permissions not in PERMISSIONS:
        allowed = ", ".join(PERMISSIONS)
        raise ThreadFailedError(
            "PERMISSIONS_UNSUPPORTED", f"agent.permissions is {settings.permissions!r}; allowed: {allowed}"
        )
    if settings.permissions == "guarded" and thread.policy is None:
        raise ThreadFailedError("POLICY_MISSING", "agent.permissions is guarded")
    if settings.permissions == "guarded":
        checked_policy(thread.policy, fleet)
    if settings.permissions == "autonomous" and not fleet.config.policy.allow_autonomous:
        raise ThreadFailedError("POLICY_AUTONOMOUS_FORBIDDEN", "policy.allow_autonomous is false")
    if "/" in thread.agent.executable:
        named = f"agent.executable is {thread.agent.executable!r}; a thread names a program on PATH, not a path"
        raise ThreadFailedError("AGENT_EXECUTABLE_NOT_FOUND", named)
    if settings.executable and shutil.which(settings.executable) is None:
        raise ThreadFailedError("AGENT_EXECUTABLE_NOT_FOUND", f"{settings.executable!r} is not on PATH")
    if not settings.executable and settings.type not in fleet.bundled:
        raise ThreadFailedError("AGENT_EXECUTABLE_NOT_FOUND", f"no executable for {settings.type} is configured here")
    return settings


def checked_policy(block: object, fleet: Fleet) -> None:
    """Check the words of a thread's policy block, and its size.

    Raises:
        ThreadFailedError: POLICY_INVALID.
    """
    size = len(json.dumps(block))
    if size > POLICY_MAX_BYTES:
        raise ThreadFailedError("POLICY_INVALID", f"the policy block has {size} bytes, {POLICY_MAX_BYTES} at most")
    parse_policy(block, fleet.config.policy.rules)


def _outbox(ref: ThreadRef, thread: Thread, folder: Path) -> dict[str, Any] | None:
    """Return the artifacts block when publishing is on for this epoch."""
    if thread.artifacts_warning:
        log.warning("%s: artifacts are not published: %s", ref, thread.artifacts_warning)
    if thread.artifacts is None:
        return None
    if not prepare_outbox(folder, thread.artifacts.source):
        log.warning("%s: outbox_invalid: %s leads out of the work folder", ref, thread.artifacts.source)
        return None
    return asdict(thread.artifacts)
