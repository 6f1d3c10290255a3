"""The version mark on what workers leave for each other: thread records and task messages.

Workers of two releases run side by side while a fleet is upgraded. What only adds to a record or a message needs no
new format: unknown fields are passed over. A release that changes what is there reads the new format and goes on
writing the old one; the release after it writes the new one. A worker that is older still meets the mark, and leaves
what it can't read to the others.
"""

from __future__ import annotations

from fleet.errors import FleetError

#: The format that this release writes, and the newest that it reads.
FORMAT = 1


def check_format(mark: object, what: str) -> None:
    """Refuse what a newer release has written. Without a mark it is of the first format.

    Raises:
        FleetError: `format_newer`.
    """
    if mark is not None and str(mark) not in (str(number) for number in range(1, FORMAT + 1)):
        raise FleetError("format_newer", f"{what} has format {mark!r}, this worker reads up to {FORMAT}")
