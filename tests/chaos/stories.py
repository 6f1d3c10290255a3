"""The threads of a chaos run: what a person does in each of them, and what must have been said in the end."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.scripted_player import CLASH
from fleet.envelope import new_thread, with_state
from tests.fleet.harness import Person, brief, kind

Json = dict[str, Any]

#: What the agent plays. The first turn whose mark is in the prompt is the one; several messages may make one prompt.
SCRIPT = """
turns:
  - match: "[ask]"
    events:
      - text: "heard {prompt}"
      - repeat: {times: 4, events: [{text: "before {i}"}, {sleep: 0.2}]}
      - ask: {kind: text, questions: [{question: "What now?", header: Now, options: []}]}
      - text: "chose {answer}"
      - repeat: {times: 4, events: [{text: "behind {i}"}, {sleep: 0.2}]}
  - match: "[permit]"
    events:
      - text: "heard {prompt}"
      - tool: {name: Bash, input: {command: make deploy}, output: "deployed"}
      - text: "went on"
  - match: "[steps]"
    events:
      - text: "heard {prompt}"
      - write: {path: out/plan.md, text: "the plan", replace: true}
      - repeat: {times: 12, events: [{text: "step {i}"}, {sleep: 0.25}]}
      - text: "over"
  - match: "[burst]"
    events:
      - text: "heard {prompt}"
      - repeat: {times: 40, events: [{text: "line {i}"}]}
"""

#: Kinds of items that stand for steps of the script, or end a turn. The others are about the way there.
STEPS = ("text", "tool_call", "tool_result", "artifacts_published", "turn_end")
#: Marks of turns that ask a person: nothing else may be said before their question is answered.
ASKING = ("[ask]", "[permit]")
MARKS = (*ASKING, "[steps]", "[burst]")
TOKEN = re.compile(r"<[a-z0-9-]+>")
#: Statuses that a fault explains.
EXPLAINED = ("recovering", "no_host")
#: Seconds until a question is answered: while the agent's process waits for it, or when it is parked.
SOON_S, LATE_S = (0.0, 1.0), (3.0, 6.0)


def steps_of(prompt: str) -> list[str]:
    """Return the steps of the turn that a prompt begins, in the words of `step`; `*` stands for a person's answer."""
    mark = next(mark for mark in MARKS if mark in prompt)
    body = {
        "[ask]": [*(f"before {i}" for i in range(4)), "chose *", *(f"behind {i}" for i in range(4))],
        "[permit]": ["call make deploy", "result deployed", "went on"],
        "[steps]": [*(f"step {i}" for i in range(12)), "over"],
        "[burst]": [f"line {i}" for i in range(40)],
    }[mark]
    return [f"heard {prompt}", *body, "artifacts_published", "Turn complete"]


def step(item: Json) -> str:
    """Return what an item says, in the words of `steps_of`."""
    match kind(item):
        case "tool_call":
            return f"call {item['metadata']['tool']['input'].get('command')}"
        case "tool_result":
            return f"result {item['metadata']['tool']['output']}"
        case "artifacts_published":
            return "artifacts_published"
        case _:
            return brief(item)


@dataclass
class Verdict:
    """What was found in threads: numbers of items, and each violation in words."""

    threads: int = 0
    turns: int = 0
    items: int = 0
    lost: int = 0
    doubled: int = 0
    clashes: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        """Add what was found in another thread."""
        for name in ("threads", "turns", "items", "lost", "doubled", "clashes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.violations += other.violations


@dataclass
class Story:
    """One thread. `messages` are said one after the other, each when the one before was dealt with."""

    alias: str
    folder: Path
    messages: list[list[str]]
    sent: int = 0
    words: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    told: bool = False

    def open(self, person: Person) -> None:
        """Hand the thread over."""
        value = new_thread(str(self.folder), "scripted", "approval")
        value["thread"]["metadata"]["artifacts"] = {"prefix": f"published/{self.alias}/", "source": "out"}
        person.put(self.alias, value)
        self._say(person)
        person.put(self.alias, with_state(value, "pending"))

    def go_on(self, person: Person, worker: str, now: float, rng: random.Random) -> None:
        """Do what a person does next: answer a question, say the next message, or nothing."""
        items = person.items(self.alias)
        said = [item for item in items if item["user_id"] == worker]
        open_prompts = _open_prompts(said)
        for prompt in open_prompts - self.answers.keys():
            due = self.due.setdefault(prompt, now + rng.uniform(*rng.choice((SOON_S, LATE_S))))
            if now >= due:
                permit = "approval" in [item["metadata"]["prompt"]["kind"] for item in said if _prompt(item) == prompt]
                self.answers[prompt] = "yes" if permit else f"<a{len(self.answers)}-{self.alias}>"
                person.say(self.alias, self.answers[prompt])
        spoken = [item for item in said if kind(item) in STEPS]
        heard = "".join(brief(item) for item in spoken)
        resting = bool(spoken) and kind(spoken[-1]) == "turn_end" and not open_prompts
        if resting and all(token in heard for words in self.words for token in TOKEN.findall(words)):
            if self.sent < len(self.messages):
                self._say(person)
            else:
                self.told = True

    def _say(self, person: Person) -> None:
        for words in self.messages[self.sent]:
            person.say(self.alias, words)
            self.words.append(words)
        self.sent += 1

    def verdict(self, items: Sequence[Json], worker: str) -> Verdict:
        """Compare all items of the thread with what must be there."""
        said = [item for item in items if item["user_id"] == worker]
        verdict = Verdict(threads=1, items=len(said))

        def violated(what: str) -> None:
            verdict.violations.append(f"{self.alias}: {what}")

        turns = list(_turns([item for item in said if kind(item) in STEPS]))
        verdict.turns = len(turns)
        for turn in turns:
            got = [step(item) for item in turn]
            prompts = [line.removeprefix("heard ") for line in got if line.startswith("heard ")]
            if not prompts:
                violated(f"a turn says not what it heard: {got}")
                continue
            expected = self._expected(prompts[0], got)
            missing, excess = Counter(expected) - Counter(got), Counter(got) - Counter(expected)
            verdict.lost += missing.total()
            verdict.doubled += excess.total()
            if got != expected:
                violated(f"said {got}, not {expected}")
        tokens = Counter(TOKEN.findall("".join(step(item) for turn in turns for item in turn)))
        given = Counter(TOKEN.findall("".join([*self.words, *self.answers.values()])))
        verdict.lost += (given - tokens).total()
        verdict.doubled += (tokens - given).total()
        if tokens != given:
            violated(f"persons said {dict(given)}, turns took {dict(tokens)}")
        posts = Counter(item["metadata"].get("post_id") for item in said)
        if twice := [post for post, times in posts.items() if times > 1 or post is None]:
            verdict.doubled += len(twice)
            violated(f"posted more than once, or without post_id: {twice}")
        for state, ids in _prompts(said).items():
            if ids != Counter(self.answers.keys()):
                violated(f"prompts {state}: {dict(ids)}, answered were {list(self.answers)}")
        asked = sum(any(mark in words for mark in ASKING) for words in self.words)
        if asked != len(self.answers):
            violated(f"{asked} questions, {len(self.answers)} answers")
        statuses = Counter(item["metadata"]["status"] for item in said if kind(item) == "status")
        if unexplained := {status: n for status, n in statuses.items() if status not in EXPLAINED}:
            violated(
                f"statuses that no fault explains: {unexplained} {[brief(i) for i in said if kind(i) == 'status']}"
            )
        verdict.clashes = sum(CLASH in str(item) for item in said)
        if verdict.clashes:
            violated("two agents ran at once")
        return verdict

    def _expected(self, prompt: str, got: list[str]) -> list[str]:
        answers = [f"chose {answer}" for answer in self.answers.values()]
        chosen = next((line for line in got if line in answers), "chose *")
        return [chosen if line == "chose *" else line for line in steps_of(prompt)]


def new_story(number: int, folder: Path, rng: random.Random) -> Story:
    """Return a story of some messages; those that ask nothing may be said two at a time."""
    alias = f"story-{number}"
    messages: list[list[str]] = []
    for turn in range(rng.randint(3, 5)):
        mark = rng.choice(MARKS)
        marks = [mark] if mark in ASKING or rng.random() < 0.7 else [mark, rng.choice(MARKS[len(ASKING) :])]
        messages.append([f"{mark} <m{turn}-{part}-{alias}>" for part, mark in enumerate(marks)])
    return Story(alias, folder, messages)


def _turns(steps: Sequence[Json]) -> Iterator[list[Json]]:
    """Cut what was said behind each `turn_end`."""
    turn: list[Json] = []
    for item in steps:
        turn.append(item)
        if kind(item) == "turn_end":
            yield turn
            turn = []
    if turn:
        yield turn


def _prompt(item: Json) -> str:
    return str((item["metadata"].get("prompt") or {}).get("prompt_id", ""))


def _prompts(said: Sequence[Json]) -> dict[str, Counter[str]]:
    """Count the ids of prompts that were opened, and of those that were resolved."""
    kinds = {"opened": "pending_prompt", "resolved": "pending_prompt_resolved"}
    return {state: Counter(_prompt(item) for item in said if kind(item) == name) for state, name in kinds.items()}


def _open_prompts(said: Sequence[Json]) -> set[str]:
    prompts = _prompts(said)
    return prompts["opened"].keys() - prompts["resolved"].keys()
