"""Reading lists that lag: where to begin so that nothing near the edge is lost.

Lists are eventually consistent and filters are strict (protocol §1), so a reader begins a little before the last
thing it saw and drops what it knows by id. Only the platform's own timestamps are compared with each other.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from fleet.platform.client import Timestamp

#: Seconds after which a list shows what was stored, with a margin (protocol §1: about 2 s).
LIST_DELAY_S = 2.5
#: Seconds by which a reader begins earlier than the newest row it has seen. Lists lag by about two seconds.
OVERLAP_S = 5


def overlapped(created_at: Timestamp) -> Timestamp:
    """Return `created_at` moved back by `OVERLAP_S`, in the form in which the platform wrote it.

    A form that is not understood is returned as it is: then only rows of the very same instant can be missed.
    """
    if isinstance(created_at, int | float):
        return created_at - OVERLAP_S * 1000
    try:
        moment = datetime.fromisoformat(created_at) - timedelta(seconds=OVERLAP_S)
    except (ValueError, OverflowError):
        return created_at
    text = moment.isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z") if created_at.endswith("Z") else text
