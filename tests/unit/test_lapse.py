"""Whether a record is older than what a host has written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.hostfiles import Checkpoint
from fleet.lapse import is_behind
from fleet.record import Record, Step
from fleet.refs import ThreadRef
from fleet.terms import Terms

RECORD = Record(ThreadRef("s", "a"), epoch=100, step="run", turn=2, turn_items=("one",))
CHECKPOINT = Checkpoint(epoch=100, turn=2, step="run", turn_items=("one",))


def terms(epoch: int) -> Terms:
    return Terms(epoch, "/srv/repo", "scripted", {})


def test_a_record_and_what_its_host_has_written_down_of_it_agree():
    assert not is_behind(RECORD, CHECKPOINT, terms(100))


@pytest.mark.parametrize("step", ["start", "idle", "run", "publish", "close", "end"])
def test_a_host_that_knows_nothing_or_an_older_epoch_is_not_ahead(step: Step):
    record = replace(RECORD, step=step)
    assert not is_behind(record, Checkpoint(), None)
    assert not is_behind(record, replace(CHECKPOINT, epoch=99, turn=7, step=""), terms(99))


@pytest.mark.parametrize(
    ("step", "known"),
    [
        ("idle", replace(CHECKPOINT, turn=3)),
        ("run", replace(CHECKPOINT, turn_items=("one", "answer"))),
        ("run", replace(CHECKPOINT, step="publish")),
        ("run", replace(CHECKPOINT, step="")),
        ("publish", replace(CHECKPOINT, step="")),
        ("start", CHECKPOINT),
        ("end", replace(CHECKPOINT, epoch=101, turn=1)),
    ],
)
def test_a_record_behind_its_hosts_checkpoint_is_found_out(step: Step, known: Checkpoint):
    assert is_behind(replace(RECORD, step=step), known, terms(100))


@pytest.mark.parametrize("step", ["publish", "close", "idle", "end"])
def test_a_turn_that_came_further_than_its_hosts_checkpoint_is_no_lapse(step: Step):
    assert not is_behind(replace(RECORD, step=step), CHECKPOINT, terms(100))


def test_an_epoch_that_was_started_and_is_forgotten_is_found_out():
    assert is_behind(replace(RECORD, step="end"), CHECKPOINT, terms(101))
