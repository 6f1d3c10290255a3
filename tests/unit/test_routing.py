from __future__ import annotations

import pytest

from fleet.activation import verdict
from fleet.envelope import parse
from fleet.hosts import Host, owner
from fleet.platform.paging import overlapped
from fleet.record import Record
from fleet.refs import ThreadRef


def host(name: str, *roots: str, alive: bool = True, running: int = 0) -> Host:
    return Host(name, roots, roots, 4, (), "1", alive, running)


def test_the_longest_root_owns_a_folder():
    hosts = [host("alpha", "/srv"), host("beta", "/srv/repos/big")]
    assert owner("/srv/repos/small", hosts) == "alpha"
    assert owner("/srv/repos/big/x", hosts) == "beta"
    assert owner("/srv/repos/bigger", hosts) == "alpha"


def test_a_path_that_climbs_belongs_to_nobody():
    assert owner("/srv/../etc", [host("alpha", "/srv")]) is None


def test_nobody_owns_a_folder_below_no_root():
    assert owner("/opt/x", [host("alpha", "/srv")]) is None
    assert owner("/srv/x", [host("alpha", "/srv", alive=False)]) is None


def test_between_equal_roots_the_holder_wins_else_the_one_with_more_room():
    hosts = [host("alpha", "/srv", running=3), host("beta", "/srv", running=1)]
    assert owner("/srv/x", hosts) == "beta"
    assert owner("/srv/x", hosts, current="alpha") == "alpha"


def test_a_thread_waits_for_its_holder_while_that_is_away():
    hosts = [host("alpha", "/srv", alive=False), host("beta", "/srv")]
    assert owner("/srv/x", hosts, current="alpha") is None
    assert owner("/srv/x", hosts) == "beta"


def record(step: str = "", **fields: object) -> Record:
    return Record(ThreadRef("s", "a"), epoch=1 if step else 0, step=step, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "record_", "expected"),
    [
        ("pending", record(), "start"),
        ("pending", record("wait_host"), "start"),
        ("pending", record("start"), "none"),
        ("pending", record("idle"), "none"),
        ("pending", record("idle", told="active"), "restart"),
        ("pending", record("run", told="active"), "restart"),
        ("pending", record("end", outcome="completed"), "start"),
        ("pending", record("end", outcome="failed"), "none"),
        ("pending", record("end", outcome="failed", told="failed"), "start"),
        ("active", record(), "recover"),
        ("active", record("run"), "none"),
        ("active", record("end", outcome="completed"), "none"),
        ("completed", record("run"), "stop"),
        ("completed", record(), "none"),
        ("failed", record("idle"), "stop"),
        ("failed", record("end", outcome="failed"), "none"),
        (None, record("idle"), "stop"),
        ("nonsense", record("idle"), "stop"),
    ],
)
def test_what_an_envelope_asks_for(state: str | None, record_: Record, expected: str):
    metadata = {"agent": {"type": "scripted"}, "instance": {"state": state}}
    thread = parse({"type": "thread", "thread": {"metadata": metadata}})
    assert verdict(record_, thread) == expected


def test_force_starts_whatever_the_envelope_says():
    thread = parse({"type": "thread", "thread": {"metadata": {"agent": {"type": "scripted"}}}})
    assert verdict(record(), thread, force=True) == "start"
    assert verdict(record("run"), thread, force=True) == "restart"


def test_what_is_not_ours_is_never_started():
    foreign = parse({"type": "thread", "thread": {"metadata": {}}})
    assert verdict(record(), foreign, force=True) == "none"
    assert verdict(record(), None, force=True) == "none"


@pytest.mark.parametrize(
    ("created_at", "expected"),
    [
        ("2026-01-01T00:00:07.000001Z", "2026-01-01T00:00:02.000001Z"),
        ("2026-01-01T00:00:02+00:00", "2025-12-31T23:59:57.000000+00:00"),
        (1_700_000_007_000, 1_700_000_002_000),
        ("opaque", "opaque"),
    ],
)
def test_a_reader_begins_a_little_earlier_in_the_platforms_own_form(created_at: object, expected: object):
    assert overlapped(created_at) == expected  # type: ignore[arg-type]
