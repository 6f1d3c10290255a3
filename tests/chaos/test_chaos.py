"""Five minutes of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import REST_S, chaos

SEED, SECONDS = 1, 300.0


@pytest.mark.timeout(SECONDS + REST_S + 120)
def test_under_five_minutes_of_faults_nothing_is_lost_doubled_or_left_standing(tmp_path: Path):
    report = chaos(tmp_path, SEED, SECONDS)
    print(report)
    assert not report.violations, str(report)
    assert (report.lost, report.doubled, report.clashes) == (0, 0, 0)
    assert report.kills
    assert report.items
