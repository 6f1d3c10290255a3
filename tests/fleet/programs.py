"""The `fleet` command as a process, and every process that belongs to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support import wait_until

#: Seconds in which a whole fleet comes up or ends, on a machine that is busy with other tests.
PATIENCE_S = 90
#: In the environment of all processes of one program.
MARK = "FLEET_TEST_PROGRAM"

#: Variables that would lead a fleet under test elsewhere.
_ELSEWHERE = ("FLEET_CONFIG", "FLEET_HOST", "FLEET_REDIS_URL", "BLOBHUB_API_URL", "BLOBHUB_API_KEY")


class Program:
    """A long-running `fleet` command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output"
        self.environ = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        self.environ |= {"FLEET_HOME": str(folder / "home"), "HOME": str(folder), MARK: str(folder)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        with self.output.open("wb") as output:
            command = [sys.executable, "-m", "fleet", *arguments]
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait_said(self, text: str) -> None:
        assert self.process is not None
        wait_until(
            lambda: text in self.said() or self.process.poll() is not None, PATIENCE_S, f"it did not say {text!r}"
        )
        assert text in self.said(), self.said()

    def status(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def command(self, *argv: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a Python module with its arguments as from another terminal."""
        return subprocess.run(
            [sys.executable, "-m", *argv],
            cwd=self.folder,
            env=self.environ | (environ or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def processes(self) -> list[str]:
        """The command lines of all living processes that the program started, whoever is their parent by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        """End what a failed test has left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
