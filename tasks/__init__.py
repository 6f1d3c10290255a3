"""Thin Celery tasks, one module per station of the way of a message. No domain logic.

Task messages are nudges: JSON, arguments that name a thread and a place in its life, never content. Each task reads
the record, does one idempotent thing and nudges the next; a message too many finds nothing to do.
"""

from tasks import activating, logs, polling, posting, repairing, starting, turns, worker

__all__ = ["activating", "logs", "polling", "posting", "repairing", "starting", "turns", "worker"]
