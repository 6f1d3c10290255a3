"""Thread items for a terminal: one colour per `metadata.type` (protocol §4).

What agents and people wrote is untrusted: control characters, which could rewrite the terminal, are replaced.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fleet.cli.text import plain
from fleet.questions import asked_in

if TYPE_CHECKING:
    from fleet.events import Question
    from fleet.prompts import Prompt

#: `metadata.type` → style of the brief. An item of another type is shown plainly.
STYLES = {
    "text": "default",
    "thinking": "dim italic",
    "tool_call": "yellow",
    "tool_result": "dim",
    "status": "magenta",
    "turn_end": "bold green",
    "pending_prompt": "bold yellow",
    "pending_prompt_resolved": "yellow",
    "artifacts_published": "blue",
    "policy_applied": "cyan",
    "policy_denied": "red",
    "approval_granted": "cyan",
    "injected": "dim",
}
PERSON_STYLE = "bold cyan"
TROUBLE_STYLE = "bold red"

#: Narrowest column in which a long line is still broken.
MIN_WIDTH = 20


def kind_of(item: Mapping[str, Any]) -> str:
    """Return an item's `metadata.type`; empty for a person's."""
    metadata = item.get("metadata")
    kind = metadata.get("type") if isinstance(metadata, Mapping) else None
    return kind if isinstance(kind, str) else ""


def is_trouble(item: Mapping[str, Any]) -> bool:
    """Tell whether an item says that something went wrong: a turn that did not complete, a thread that failed."""
    metadata = item.get("metadata") or {}
    match kind_of(item):
        case "turn_end":
            return bool(metadata.get("status") != "completed")
        case "status":
            return bool(metadata.get("status") == "error")
        case _:
            return False


def lines(item: Mapping[str, Any]) -> Iterator[Text]:
    """Yield what there is to show of an item, line by line."""
    kind = kind_of(item)
    prompt = asked_in(item)
    if prompt is not None:
        yield from question_lines(prompt)
        return
    metadata: Mapping[str, Any] = item.get("metadata") or {}
    text = "\n".join(str(part.get("text", "")) for part in item.get("content") or [] if isinstance(part, Mapping))
    tool = metadata.get("tool")
    failed = kind == "tool_result" and isinstance(tool, Mapping) and tool.get("is_error")
    style = TROUBLE_STYLE if failed or is_trouble(item) else STYLES.get(kind, "default")
    for line in plain(text).split("\n"):
        yield Text(line if kind else f"▸ {line}", style=style if kind else PERSON_STYLE)
    match kind:
        case "turn_end":
            yield from _turn_details(metadata)
        case "artifacts_published":
            for alias in metadata.get("aliases") or []:
                yield Text(f"  {plain(alias)}", style=style)


def question_lines(prompt: Prompt) -> Iterator[Text]:
    """Yield the questions of a prompt with their options, each with the number that picks it."""
    for number, question in enumerate(prompt.questions):
        if number:
            yield Text()
        yield from one_question(question)


def one_question(question: Question) -> Iterator[Text]:
    """Yield one question with its options, each with the number that picks it."""
    style = STYLES["pending_prompt"]
    header = f"[{plain(question.header)}] " if question.header else ""
    yield from (Text(line, style=style) for line in f"? {header}{plain(question.question)}".split("\n"))
    for number, (label, description) in enumerate(question.options, start=1):
        option = Text(f"  {number}. {plain(label)}", style="bold")
        if description:
            option.append(f" — {plain(description)}", style="not bold")
        yield from option.split("\n")
    if question.multi_select:
        yield Text("  One or more may be picked.", style="dim")


def hint(prompt: Prompt, alias: str, section: str | None) -> Text:
    """Return how an open question is answered."""
    command = ["fleet", "thread", "answer", alias, *(["--section", section] if section else [])]
    return Text(f"↳ Open: {shlex.join(command)}{_ways(prompt)}", style="bold yellow")


def _ways(prompt: Prompt) -> str:
    if prompt.kind == "approval":
        return " [yes, or why not]"
    if len(prompt.questions) > 1:
        return f" [{len(prompt.questions)} answers, one for each question]"
    return " [numbers or words]" if prompt.questions[0].options else " [words]"


def _turn_details(metadata: Mapping[str, Any]) -> Iterator[Text]:
    stats = metadata.get("stats") or {}
    tokens = f"{stats.get('input_tokens', 0)} tokens in ({stats.get('input_tokens_cached', 0)} cached)"
    seconds = stats.get("duration_ms", 0) / 1000
    yield Text(f"  {tokens}, {stats.get('output_tokens', 0)} out, {seconds:.1f} s", style="dim")
    if metadata.get("error"):
        yield Text(f"  {plain(metadata['error'])}", style=TROUBLE_STYLE)


def show(console: Console, item: Mapping[str, Any], prefix: Text | None = None) -> None:
    """Print an item, each line behind `prefix`. Only a terminal gets long lines broken: what is piped stays whole."""
    before = prefix or Text()
    width = max(console.width - before.cell_len, MIN_WIDTH)
    for line in lines(item):
        for part in line.wrap(console, width) if console.is_terminal else [line]:
            console.print(before + part, soft_wrap=True, highlight=False)
