"""Whether this machine can do its part: all that a worker needs is looked at, and nothing changed."""

from fleet.doctor.examination import Report, examine
from fleet.doctor.findings import Finding

__all__ = ["Finding", "Report", "examine"]
