"""Settings of Flower: `celery -A fleet flower --conf=ops/flower.py`.

FLOWER_BASIC_AUTH, `user:password`, is required: who sees Flower can also stop workers and call tasks.
"""

import os

basic_auth = os.environ["FLOWER_BASIC_AUTH"].split(",")
#: Seconds after which a worker that has left disappears from the list.
purge_offline_workers = 60
#: Tasks kept in memory, a few KiB each. A fleet makes several each second, most of them looks at a section.
max_tasks = 20_000
