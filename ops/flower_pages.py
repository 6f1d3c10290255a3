"""`python ops/flower_pages.py`: take the pictures of docs/flower.md anew, of a fleet at work.

A fleet of two hosts, as `fleet up` runs it, with its own Redis and platform, serves a few threads of the scripted
agent. Flower runs beside it with the settings of ops/flower.py. Headless Chromium opens its pages, driven over the
DevTools protocol: only so can it be given the password as a header, and wait until a page is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml

from fleet.envelope import new_thread
from fleet.local import announced
from fleet.machine import celery_command, free_port
from fleet.person import desk
from fleet.supervisor import Child, ChildNotReadyError, Supervisor
from fleet.up import Plan, planned

ROOT = Path(__file__).parents[1]
#: Names under which distributions install the browser.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Seconds within which anything that is waited for must have come, and between two looks at it.
PATIENCE_S, LOOK_S = 60.0, 0.2
#: Bytes of the longest answer of the browser, which is a picture.
ANSWER_MAX = 16 * 1024 * 1024
#: Width of a page in its own pixels: all columns of the tasks. The picture's pixels for each of them.
WIDTH, SCALE = 1660, 0.7

#: Threads that are served: alias → host. The last one is still at work when the pictures are taken.
THREADS = {"fix/parser": "alpha", "docs/quick-start": "beta", "release/1.4": "beta", "migrate/schema": "alpha"}
SHOWN, AT_WORK = "fix/parser", "migrate/schema"
SCRIPT = """
turns:
  - match: migrate/schema
    events: [{text: Begun.}, {sleep: 600}]
  - events: [{text: I look at the tests first.}, {sleep: 1.5}, {text: All tests pass.}]
"""


class PageError(Exception):
    """A page did not become what is to be shown; the message says which."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A page of Flower to be shown.

    Parameters:
        name: of the file in docs/images, behind `flower-`.
        path: of the page.
        height: of what is shown of it, in its own pixels.
        complete: JavaScript that is true once the page has all that is to be seen.
        prepare: JavaScript that does what a reader would click and type.
    """

    name: str
    path: str
    height: int
    complete: str
    prepare: str = ""


def pictures(task: str) -> tuple[Picture, ...]:
    """Return the pictures of the page, that of a task's detail for the task with the id `task`."""
    workers = ("io@alpha", "turns@alpha", "io@beta", "turns@beta")
    search = f"$('#tasks-table').DataTable().search('args:{SHOWN}').order([3, 'asc']).draw()"
    found = f"[...document.querySelectorAll('#tasks-table tbody tr')].every(row => row.innerText.includes('{SHOWN}'))"
    tab = "document.querySelector('#worker-tab-tasks').click(); document.activeElement.blur(); scrollTo(0, 0)"
    return (
        Picture("workers", "/workers", 620, " && ".join(map(_shows, workers))),
        Picture("tasks", "/tasks", 800, f"{_shows('fleet.run_turn')} && {found}", search),
        Picture("task", f"/task/{task}", 760, _shows("fleet.run_turn")),
        Picture("worker", "/worker/turns@alpha", 620, _shows(AT_WORK), tab),
    )


def _shows(text: str) -> str:
    """Return JavaScript that tells whether a page shows `text` to its reader."""
    return f"document.body.innerText.includes({json.dumps(text)})"


@dataclass(slots=True)
class Browser:
    """A page of a headless browser, as the DevTools protocol has it."""

    process: asyncio.subprocess.Process
    _session: str | None = None
    _numbers: Iterator[int] = field(default_factory=count)

    async def open(self, authorization: str) -> None:
        """Open an empty page whose requests will carry the header `authorization`."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        # Else a picture may show the middle of a transition.
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
        await self.call("Network.enable")
        await self.call("Network.setExtraHTTPHeaders", headers={"Authorization": authorization})

    async def picture(self, base: str, picture: Picture) -> bytes:
        """Return the PNG of a page of the site at `base`."""
        size = {"width": WIDTH, "height": picture.height, "deviceScaleFactor": SCALE, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=base + picture.path)
        there = f"location.pathname === {json.dumps(picture.path)} && document.readyState === 'complete'"
        await until(lambda: self._evaluate(there), f"{picture.path} is not loaded")
        await self._evaluate(picture.prepare)
        await until(lambda: self._evaluate(picture.complete), f"{picture.path} does not show: {picture.complete}")
        return b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    async def call(self, method: str, **params: Any) -> Any:
        """Return the browser's answer to a call.

        Raises:
            PageError: it refuses, or is gone.
        """
        reader, writer = self.process.stdout, self.process.stdin
        assert reader is not None  # noqa: S101 - both are pipes
        assert writer is not None  # noqa: S101
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        writer.write(json.dumps(message).encode() + b"\0")
        while True:
            try:
                answer = json.loads((await reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                raise PageError(f"the browser ended at {method}") from None
            if answer.get("id") != number:  # an event
                continue
            if "error" in answer:
                raise PageError(f"{method}: {answer['error']}")
            return answer["result"]

    async def _evaluate(self, expression: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=expression))["result"].get("value")


async def until(look: Callable[[], Awaitable[Any]], message: str) -> Any:
    """Return what `look` returns as soon as it is true.

    Raises:
        PageError: with `message`, it was not within `PATIENCE_S`.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if found := await look():
                    return found
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise PageError(f"{message}, within {PATIENCE_S:.0f} s") from None


@asynccontextmanager
async def browsing(program: str, folder: Path) -> AsyncIterator[Browser]:
    """Run a browser that keeps all its files in `folder`."""
    options = (
        "--headless",
        "--no-sandbox",  # it is not there for root, nor in many containers; no page but Flower's is opened
        "--disable-gpu",
        "--disable-quic",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    )
    # The browser reads calls from its file descriptor 3 and answers on 4.
    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh", program, *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        limit=ANSWER_MAX,
    )
    try:
        yield Browser(process)
    finally:
        assert process.stdin  # noqa: S101 - it is a pipe
        process.stdin.close()  # ends the browser
        try:
            await asyncio.wait_for(process.wait(), PATIENCE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@contextmanager
def running(base: Path, login: str, port: int) -> Iterator[Plan]:
    """Run a fleet of two hosts in `base`, and Flower on `port`, which asks for `login`: `user:password`."""
    for alias, host in THREADS.items():
        (base / host / alias).mkdir(parents=True)
    script, config = base / "script.yaml", base / "fleet.yaml"
    script.write_text(SCRIPT)
    settings = {
        "turns": {"shutdown_grace_s": 0},
        "hosts": {host: {"work_folders": [str(base / host)], "max_agents": 2} for host in ("alpha", "beta")},
        "agents": {"scripted": {"script": str(script)}},
    }
    config.write_text(yaml.safe_dump(settings))
    elsewhere = ("FLEET_", "FLOWER_", "BLOBHUB_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(elsewhere)}
    environ["FLEET_HOME"] = str(base / "home")
    with planned(config, environ) as plan:
        command = ("flower", f"--conf={ROOT / 'ops/flower.py'}", "--address=127.0.0.1", f"--port={port}")
        flower = Child(
            "flower",
            celery_command(*command),
            {**plan.environ, "FLOWER_BASIC_AUTH": login},
            ready=lambda: _listens(port),
            ready_timeout_s=PATIENCE_S,
        )
        with Supervisor([*plan.groups, [flower]], plan.logs), announced(plan.home, plan.up):
            yield plan


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def serve_threads(plan: Plan, base: Path) -> None:
    """Hand all threads over, and wait until the one is at work and the others have ended their turn."""
    person = {"FLEET_PERSON_API_KEY_FILE": str(plan.up.person_key_file)}
    async with desk(plan.config, person) as open_desk:

        async def has_said(alias: str, kind: str) -> bool:
            return any(item["metadata"].get("type") == kind for item in (await open_desk.newest(alias)).items)

        for alias, host in THREADS.items():
            value = new_thread(str(base / host / alias), "scripted", "autonomous")
            await open_desk.hand_over(alias, value, f"Please: {alias}")
        for alias in THREADS:
            kind = "text" if alias == AT_WORK else "turn_end"
            await until(partial(has_said, alias, kind), f"{alias} says no {kind}")


async def turn_in_flower(url: str, authorization: str) -> str:
    """Wait until Flower knows the whole turn of the thread that is shown; return the id of its task."""
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": authorization}, trust_env=False) as client:

        async def look() -> str | None:
            answer = await client.get("/api/tasks", params={"search": f"args:{SHOWN} state:SUCCESS"})
            ids = {task["name"]: uuid for uuid, task in answer.raise_for_status().json().items()}
            return ids.get("fleet.run_turn") if "fleet.close_turn" in ids else None

        return str(await until(look, f"Flower does not know the turn of {SHOWN}"))


async def take(plan: Plan, base: Path, program: str, url: str, login: str) -> dict[str, bytes]:
    """Return the pictures, as PNG by name."""
    authorization = f"Basic {b64encode(login.encode()).decode()}"
    await serve_threads(plan, base)
    task = await turn_in_flower(url, authorization)
    async with browsing(program, base / "browser") as browser:
        await browser.open(authorization)
        return {picture.name: await browser.picture(url, picture) for picture in pictures(task)}


def main() -> None:
    """Write docs/images/flower-*.png."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit("flower-pages: no Chromium is on PATH: install it, on Debian with apt-get install chromium")
    login, port = f"operator:{secrets.token_hex(16)}", free_port()
    with tempfile.TemporaryDirectory(prefix="fleet-flower-") as folder:
        base = Path(folder)
        try:
            with running(base, login, port) as plan:
                taken = asyncio.run(take(plan, base, program, f"http://127.0.0.1:{port}", login))
        except (ChildNotReadyError, PageError) as error:
            sys.exit(f"flower-pages: {error}")
    for name, png in taken.items():
        file = ROOT / "docs/images" / f"flower-{name}.png"
        file.write_bytes(png)
        print(f"{file.relative_to(ROOT)}: {len(png) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
