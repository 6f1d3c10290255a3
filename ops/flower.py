"""Settings of Flower: `celery -A fleet flower --conf=ops/flower.py`. docs/flower.md shows the pages.

FLOWER_BASIC_AUTH, `user:password`, is required: who sees Flower can also stop workers and call tasks. More of them are
separated by commas.
"""

import os
import re

basic_auth = os.environ.get("FLOWER_BASIC_AUTH", "").split(",")
# Flower would let in whoever sends an empty user and password where one of them is empty, and it can't compare others
# than those of ASCII.
if not all(re.fullmatch(r"[!-~]+:[!-~]+", each) for each in basic_auth):
    raise SystemExit("flower: FLOWER_BASIC_AUTH must be user:password, of printable ASCII characters without spaces")
#: Seconds after its last heartbeat at which a worker that has left disappears from the list of workers.
purge_offline_workers = 60
#: Tasks kept in memory, a few KiB each. A fleet makes several each second, most of them looks at a section.
max_tasks = 20_000
#: The arguments say which thread a task is about, and where in its life.
tasks_columns = "name,args,state,received,runtime,worker,uuid"
