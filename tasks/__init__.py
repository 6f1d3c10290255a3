"""Thin Celery tasks, one module per station of the way of a message. No domain logic."""
