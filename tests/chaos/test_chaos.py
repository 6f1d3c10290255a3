"""A minute of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import chaos

SEED, SECONDS = 1, 60.0


@pytest.mark.timeout(400)
def test_under_a_minute_of_faults_nothing_is_lost_doubled_or_left_standing(tmp_path: Path):
    report = chaos(tmp_path, SEED, SECONDS)
    print(report)
    assert not report.violations, str(report)
    assert report.kills
    assert report.items
