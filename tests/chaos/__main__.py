"""`python -m tests.chaos`: a chaos run of any length, and its report."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import click

from tests.chaos.run import chaos


@click.command()
@click.option("--seconds", type=click.FloatRange(1), default=3600.0, show_default=True, help="How long faults strike.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the faults and of the threads.")
@click.option("--report", type=click.Path(path_type=Path), help="File for the report as JSON.")
def main(seconds: float, seed: int, report: Path | None) -> None:
    """Throw faults at a fleet, and check that nothing was lost, doubled or left standing.

    The status is 1 when something was; then the fleet's folder with all its logs stays.
    """
    base = Path(tempfile.mkdtemp(prefix="fleet-chaos-"))
    result = chaos(base, seed, seconds)
    print(result)
    if report:
        report.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    if result.violations:
        print(f"logs and state: {base}")
        sys.exit(1)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
