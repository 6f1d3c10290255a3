"""How workers and the scheduler log: in one form, without secrets, and a lost connection in one line."""

from __future__ import annotations

import logging
import sys
from typing import Any

import redis.exceptions
from celery.beat import SchedulingError
from celery.signals import setup_logging
from kombu.exceptions import OperationalError

from fleet.logs import formatter
from tasks.runtime import configuration

#: What says that Redis or the broker is away: where it was noticed does not matter.
LOST_CONNECTION = (
    OperationalError,
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    ConnectionError,
    TimeoutError,
)
#: Loggers of which only warnings are worth a line: each request, and each task that comes and goes.
QUIET = ("httpx", "httpcore", "celery.app.trace", "celery.worker.strategy", "celery.beat")


class OneLineForLostConnections(logging.Filter):
    """Cuts a record about a lost connection down to one line. Celery logs a whole stack for each task meanwhile."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        error = record.exc_info[1] if record.exc_info else None
        reason = error.__context__ if isinstance(error, SchedulingError) else error
        if isinstance(reason, LOST_CONNECTION):
            line = record.getMessage().partition("\n")[0]
            record.msg = line if str(reason) in line else f"{line}: {reason or type(reason).__name__}"
            record.args, record.exc_info, record.exc_text = (), None, None
        return True


def _set_up_logging(loglevel: int | str = logging.INFO, logfile: str | None = None, **_: Any) -> None:
    """Log to stderr or the file that Celery was given."""
    config, host, redactor = configuration()
    target: logging.StreamHandler[Any] = logging.FileHandler(logfile) if logfile else logging.StreamHandler(sys.stderr)
    target.setFormatter(formatter(config.logs.format, target.stream.fileno(), redactor, host))
    target.addFilter(OneLineForLostConnections())
    logging.basicConfig(level=loglevel, handlers=[target], force=True)
    logging.captureWarnings(capture=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


setup_logging.connect(_set_up_logging)
