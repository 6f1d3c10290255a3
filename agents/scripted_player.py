"""The scripted agent's process: plays one turn of a script.

Run as `python -I -S scripted_player.py`, with the standard library alone, so that it is up at once. It speaks JSON
lines. The adapter's first line says what to play: `turns` (a validated script), `prompt`, `turn`, `session_id`,
`transcript` (a path), `work_folder`. The player writes `session`, then events (`text`, `thinking`, `tool_call`,
`tool_result`, `status`, `usage`), and `ended` last. `permit` and `ask` are questions: the adapter answers each with one
line. It answers `session` too, and until then nothing is played: what is said must never be more than is known to have
been asked for. When stdin ends, the player ends.

The transcript is a file of JSON lines per session. A turn in it is one `prompt` line and one line per step that was
done, with `n`, the step's number in the turn, written before the step's event goes out. So whenever the player is
killed, the next one goes on behind the last step that is in there. A `resumed` line says that the adapter's turn has
another number by now: a person has answered what was parked. An `ended` line closes the turn.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

#: In the work folder, locked while an agent is at work there: two at once would show as a clash.
LOCK_FILE = ".scripted-agent.lock"

CLASH = "another scripted agent is running in this folder"
NO_MATCH = "No turn of the script matches this prompt."
NO_ANSWER = "(no answer)"

PLACEHOLDER = re.compile(r"\{(i|prompt|session_id|turn|answer)\}")

CHUNK_BYTES = 1 << 16

Step = tuple[str, Any, int]


class Channel:
    """JSON lines to and from the adapter."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._pending = b""

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; it is out when this returns."""
        data = memoryview(encode(message))
        while data:
            data = data[os.write(self._sink, data) :]

    def receive(self) -> dict[str, Any]:
        """Wait for one message. Ends the process when there is nobody left to send one."""
        while b"\n" not in self._pending:
            self._read()
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def sleep(self, seconds: float) -> None:
        """Sleep, and notice the end of stdin meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._source], [], [], left)[0]:
                self._read()

    def _read(self) -> None:
        chunk = os.read(self._source, CHUNK_BYTES)
        if not chunk:
            sys.exit(1)
        self._pending += chunk


class Transcript:
    """The session's file, and what it says of the last turn."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.turns = 0
        self.prompt: dict[str, Any] = {}
        self.ended: dict[str, Any] | None = None
        self.steps_done = 0
        self.answer = ""
        lines, whole = read_lines(path)
        os.ftruncate(self._file, whole)  # a line that a kill cut short was never sent
        for line in lines:
            self._take(line)

    def add(self, line: dict[str, Any]) -> None:
        """Write one line; it is in the file when this returns."""
        data = memoryview(encode(line))
        while data:  # a full disk takes a part and then no more: what is cut short was never sent
            data = data[os.write(self._file, data) :]
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        kind = line["type"]
        if kind == "prompt":
            self.turns += 1
            self.prompt, self.ended, self.steps_done = line, None, 0
        elif kind == "resumed":
            self.prompt = {**self.prompt, "turn": line["turn"]}
        elif kind == "ended":
            self.ended = line
        else:
            self.steps_done = line["n"] + 1
        if kind == "answer":
            self.answer = line["text"]


class Player:
    """Plays the steps of one turn."""

    def __init__(self, start: dict[str, Any], channel: Channel, transcript: Transcript) -> None:
        self.start = start
        self.channel = channel
        self.transcript = transcript
        self.folder = Path(start["work_folder"]).resolve()
        self.n = 0
        self.i = 0

    def run(self) -> None:
        """Begin a turn, or go on with the session's last one, until it has ended."""
        transcript = self.transcript
        # The same turn again after its end: whoever was told the end has crashed, and must be told once more.
        if not transcript.prompt or (transcript.ended and transcript.prompt["turn"] != self.start["turn"]):
            transcript.add({"type": "prompt", "turn": self.start["turn"], "prompt": self.start["prompt"]})
        elif transcript.prompt["turn"] != self.start["turn"]:
            transcript.add({"type": "resumed", "turn": self.start["turn"]})
        self.channel.send({"type": "session", "session_id": self.start["session_id"]})
        self.channel.receive()
        if transcript.ended is None:
            self.play()
            if transcript.ended is None:
                transcript.add({"type": "ended", "ok": True, "error": ""})
        self.channel.send({**(transcript.ended or {}), "transient": False})

    def play(self) -> None:
        """Do the steps that the transcript doesn't have yet."""
        done = self.transcript.steps_done
        for n, (kind, value, i) in enumerate(islice(steps(self.events()), done, None), done):
            self.n, self.i = n, i
            STEPS[kind](self, self.fill(value))
            if self.transcript.ended:
                return

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the first turn whose `match` is in the prompt."""
        prompt = self.transcript.prompt["prompt"]
        for turn in self.start["turns"]:
            if turn["match"] is None or turn["match"] in prompt:
                events: list[dict[str, Any]] = turn["events"]
                return events
        return [{"text": NO_MATCH}]

    def fill(self, value: Any) -> Any:
        """Replace the placeholders in all strings of `value`."""
        if isinstance(value, str):
            return PLACEHOLDER.sub(lambda found: self.placeholder(found[1]), value)
        if isinstance(value, dict):
            return {key: self.fill(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.fill(each) for each in value]
        return value

    def placeholder(self, name: str) -> str:
        """Return what stands for {name}."""
        if name == "i":
            return str(self.i)
        if name == "answer":
            return self.transcript.answer
        if name == "session_id":
            return str(self.start["session_id"])
        return str(self.transcript.prompt[name])

    def record(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write this step into the transcript and return the line."""
        uid = f"{self.start['session_id']}:{self.transcript.turns}:{self.n}"
        line = {"type": kind, "n": self.n, "uid": uid, **fields}
        self.transcript.add(line)
        return line

    def say(self, kind: str, **fields: Any) -> None:
        """Record an event, then send it."""
        self.channel.send(self.record(kind, **fields))

    def text(self, value: str) -> None:
        """Say words."""
        self.say("text", text=value)

    def thinking(self, value: str) -> None:
        """Think aloud."""
        self.say("thinking", text=value)

    def status(self, value: dict[str, Any]) -> None:
        """Report a state."""
        self.say("status", **value)

    def usage(self, value: dict[str, Any]) -> None:
        """Report tokens."""
        self.say("usage", **value)

    def tool_call(self, value: dict[str, Any]) -> None:
        """Announce a call."""
        self.say("tool_call", **self.call(value, self.n))

    def tool_result(self, value: dict[str, Any]) -> None:
        """Ask whether the call, the step before this one, may run, and say what came of it."""
        call = self.call(value, self.n - 1)
        self.channel.send({"type": "permit", **call})
        decision = self.channel.receive()
        allowed = decision["allow"]
        self.say(
            "tool_result",
            invocation_id=call["invocation_id"],
            output=value["output"] if allowed else decision["message"],
            is_error=value["is_error"] if allowed else True,
        )

    def call(self, value: dict[str, Any], n: int) -> dict[str, Any]:
        """Return the call whose step has the number `n`."""
        invocation_id = f"toolu_{self.start['session_id']}_{self.transcript.turns}_{n}"
        return {"invocation_id": invocation_id, "name": value["name"], "input": value["input"]}

    def ask(self, value: dict[str, Any]) -> None:
        """Ask a person; the answer is {answer} from here on."""
        self.channel.send({"type": "ask", **value})
        answers = self.channel.receive()["answers"]
        text = NO_ANSWER if answers is None else "; ".join(", ".join(each) for each in answers)
        self.record("answer", text=text)

    def write(self, value: dict[str, Any]) -> None:
        """Write a file or a link. Done again after a crash it comes to the same."""
        try:
            write(self.folder, value)
        except OSError as error:
            self.fail(f"write {value['path']}: {error.strerror or error}")
        else:
            self.record("write")

    def sleep(self, value: float) -> None:
        """Do nothing for `value` seconds."""
        self.channel.sleep(value)
        self.record("sleep")

    def api_error(self, value: str) -> NoReturn:
        """End this attempt with a transient failure of the model's service; a resume goes on behind it."""
        self.record("api_error", error=value)
        self.channel.send({"type": "ended", "ok": False, "error": value, "transient": True})
        sys.exit(0)

    def fail(self, value: str) -> None:
        """End the turn with an error."""
        self.transcript.add({"type": "ended", "ok": False, "error": value})

    def exit(self, value: int) -> NoReturn:
        """Die."""
        self.record("exit", status=value)
        os._exit(value)


STEPS: dict[str, Callable[[Player, Any], None]] = {
    "text": Player.text,
    "thinking": Player.thinking,
    "tool_call": Player.tool_call,
    "tool_result": Player.tool_result,
    "write": Player.write,
    "status": Player.status,
    "ask": Player.ask,
    "sleep": Player.sleep,
    "usage": Player.usage,
    "api_error": Player.api_error,
    "fail": Player.fail,
    "exit": Player.exit,
}


def steps(events: list[dict[str, Any]], i: int = 0) -> Iterator[Step]:
    """Unroll events into (kind, value, i): repeats are played out, a tool becomes its call and its result.

    `i` counts the rounds of the innermost repeat from 0.
    """
    for event in events:
        ((kind, value),) = event.items()
        if kind == "repeat":
            for round_ in range(value["times"]):
                yield from steps(value["events"], round_)
        elif kind == "tool":
            yield "tool_call", value, i
            yield "tool_result", value, i
        else:
            yield kind, value, i


def write(folder: Path, value: dict[str, Any]) -> None:
    """Write what a `write` event says below `folder`.

    Raises:
        OSError: it can't be written, or would leave `folder` by a link.
    """
    path = folder / value["path"]
    if not path.parent.resolve().is_relative_to(folder) or ".." in path.parts:
        raise PermissionError("leads out of the work folder")
    if value["replace"]:
        remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if "symlink" in value:
        if not (path.is_symlink() and str(path.readlink()) == value["symlink"]):
            path.symlink_to(value["symlink"])
        return
    if path.is_symlink():
        raise PermissionError("is a symbolic link; say replace: true")
    content = value["text"].encode("utf-8", "replace") if "text" in value else base64.b64decode(value["base64"])
    path.write_bytes(content)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def encode(message: dict[str, Any]) -> bytes:
    """Encode one line."""
    return json.dumps(message).encode("ascii") + b"\n"


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a transcript's whole lines, and how many bytes they take."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    whole = content.rfind(b"\n") + 1
    return [json.loads(line) for line in content[:whole].splitlines()], whole


def take_lock(folder: Path) -> bool:
    """Lock the work folder for as long as this process lives. Returns whether it was free."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    """Play the turn that the first line of stdin describes."""
    channel = Channel(0, 1)
    start = channel.receive()
    if not take_lock(Path(start["work_folder"])):
        channel.send({"type": "ended", "ok": False, "error": CLASH, "transient": False})
        return
    Player(start, channel, Transcript(Path(start["transcript"]))).run()


if __name__ == "__main__":
    main()
