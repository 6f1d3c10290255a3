"""What a command line would run, found with the grammar of bash (protocol §4, Policy).

`analyse` never fails: what no grammar covers, or what is over a bound, is kept as opaque text. Unknown pieces (`$X`, a
glob, `$(…)`) are marked in the commands, see `fleet.policy.patterns`; a script that is unknown is the command `ANY`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tree_sitter import Node

from fleet.policy.bash import UnparsableError, below, is_quoted, is_reliable, parse, text_of
from fleet.policy.patterns import ANY, ANY_WORD, Pattern, is_known, normalized
from fleet.policy.words import DESCRIPTORS, value_of
from fleet.policy.wrappers import Words, inner_commands

#: Scripts within scripts, and wrappers within wrappers.
MAX_DEPTH = 12
#: Characters of all commands found in one line.
MAX_TEXT = 262_144
#: Seconds for one line, besides one parse that began before. A line of 64 KiB takes about one.
ANALYSIS_MAX_S = 2.0

#: Statements whose source is matched too, so that a pattern may name a redirection, a pipe or an assignment.
_STATEMENTS = frozenset(
    {"pipeline", "redirected_statement", "declaration_command", "unset_command", "test_command"}
    | {"variable_assignment", "variable_assignments"}
)

#: Redirections that write a file, if it isn't this one.
_INTO_A_FILE = frozenset({">", ">>", "&>", "&>>", ">|", "<>", ">&"})
NOWHERE = "/dev/null"

#: A line in which nothing outside of quotes begins another command: the second opinion on what may be allowed.
_ONE_COMMAND = re.compile(
    r"""(?:\\.|\$'(?:[^'\\]|\\.)*+'|'[^']*+'|"(?:[^"\\`$]|\\.|\$(?!\())*+"|&>>?|[<>]&[0-9-]|[^;&|()`\n'"\\])*+""",
    re.DOTALL,
)

#: Options of git that stand before its command and take the next word.
_GIT_VALUED = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace", "--config-env", "--attr-source"})
_GIT_ALIAS = re.compile(rf"(?:--config-env=)?(?:alias\.|[^=]*[{ANY}{ANY_WORD}])", re.IGNORECASE)


class _TooMuchError(Exception):
    """The line is over a bound."""


@dataclass(frozen=True)
class Opaque:
    """Text that no grammar covers."""

    text: str

    def names(self, program: Pattern) -> bool:
        """Return whether the program's name occurs as a word, or a word could be anything."""
        if program.is_literal and program.glob in self._words:
            return True
        words: Iterable[str] = (
            (word for word in self._words if not is_known(word)) if program.is_literal else self._words
        )
        return any(program.matches(word) for word in words)

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(_opaque_words(self.text.replace("\\\n", "")))


@dataclass(frozen=True)
class Line:
    """A command line, the commands in it, and what in it no grammar covers."""

    text: str
    commands: tuple[str, ...]
    opaque: tuple[Opaque, ...]

    def restricted_by(self, pattern: Pattern) -> str | None:
        """Return what in the line a deny or ask pattern catches."""
        for command in self.commands:
            if pattern.matches(command):
                return command
        return next((opaque.text for opaque in self.opaque if opaque.names(pattern.program)), None)

    def allowed_by(self, pattern: Pattern) -> bool:
        """Return whether an allow pattern covers all that the line does."""
        return self._simple is not None and pattern.matches(self._simple)

    @cached_property
    def _simple(self) -> str | None:
        """The normalized text of a line that is one simple command, however it is read."""
        readings = _continued(self.text)
        if self.opaque or not is_known(self.text) or not all(map(_is_simple, readings)):
            return None
        return normalized(readings[-1])


def analyse(line: str) -> Line:
    """Return what `line` would run."""
    found = _Finder(time.thread_time() + ANALYSIS_MAX_S)
    try:
        for reading in _continued(line):
            found.script(reading, (), 0)
    except _TooMuchError:
        found.opaque.append(Opaque(line))
    return Line(line, tuple(dict.fromkeys((normalized(line), *found.commands))), tuple(found.opaque))


def _continued(line: str) -> tuple[str, ...]:
    """Return the readings of a line that goes on behind a backslash: bash joins it first, the grammar does not."""
    return tuple(dict.fromkeys((line, line.replace("\\\n", ""))))


@dataclass
class _Finder:
    """Collects the commands of a line. `stdin` is what a shell would read as its script, unknown text as `ANY`."""

    deadline: float
    commands: dict[str, None] = field(default_factory=dict)
    opaque: list[Opaque] = field(default_factory=list)
    _text: int = 0

    def script(self, script: str, stdin: Words, depth: int) -> None:
        if not is_known(script):
            self._add(ANY)
            return
        self._check(depth)
        try:
            root = parse(script)
        except UnparsableError:
            self.opaque.append(Opaque(script))
            return
        if not is_reliable(root):
            self.opaque.append(Opaque(script))
        pending = [(root, stdin)]
        while pending:
            node, stdin = pending.pop()
            self._check(depth)
            pending.extend(self._visit(node, stdin, depth))

    def _visit(self, node: Node, stdin: Words, depth: int) -> Iterator[tuple[Node, Words]]:
        """Take in one node. Yields the nodes below it, each with the stdin that it has."""
        if node.type in _STATEMENTS:
            self._add(normalized(text_of(node)))
        inner = stdin
        match node.type:
            case "command":
                self._command(node, (), stdin, depth)
            case "redirected_statement":
                inner = (*_stdin_of(node), *stdin)
                self._redirected(node, inner, depth)
            case "pipeline":
                inner = (ANY,)
            case "process_substitution" if text_of(node).startswith(">("):
                inner = (ANY,)
        for index, child in enumerate(node.children):
            is_first_of_pipeline = node.type == "pipeline" and index == 0 and not _is_behind_heredoc(node)
            if not (child.type == "command" and node.type == "redirected_statement"):
                yield child, stdin if is_first_of_pipeline else inner
            else:
                yield from ((part, inner) for part in child.children)

    def _redirected(self, node: Node, stdin: Words, depth: int) -> None:
        body = node.child_by_field_name("body")
        if body is not None and body.type == "command":
            self._add(normalized(text_of(body)))
            self._command(body, tuple(_stray_arguments(node)), stdin, depth)
        elif any(_stray_arguments(node)):  # in `true && git >log push` they are the last command's
            self.opaque.append(Opaque(text_of(node)))

    def _command(self, node: Node, stray: tuple[Node, ...], stdin: Words, depth: int) -> None:
        """Take in a simple command; `stray` are words of it that the grammar gave to a redirection."""
        self._add(normalized(text_of(node)))
        parts = [child for child in node.children if _is_word_of_command(child)]
        stray = (*stray, *_stray_arguments(node))
        words = tuple(value_of(word) for word in _touching(sorted((*parts, *stray), key=lambda part: part.start_byte)))
        assignments = " ".join(text_of(child) for child in node.children if child.type == "variable_assignment")
        if words:
            self._run(words, assignments, (*_stdin_of(node), *stdin), depth)

    def _run(self, words: Words, assignments: str, stdin: Words, depth: int) -> None:
        self._check(depth)
        for candidate in _readings(words):
            self._add(candidate)
            if assignments:
                self._add(f"{assignments} {candidate}")
        for inner in inner_commands(words):
            if inner.words:
                self._run(inner.words, assignments, stdin, depth + 1)
            elif inner.script is not None:
                self.script(inner.script, stdin, depth + 1)
            else:
                for script in stdin:
                    self.script(script, (), depth + 1)

    def _add(self, command: str) -> None:
        if command not in self.commands:
            self._text += len(command)
            self.commands[command] = None
        if self._text > MAX_TEXT:
            raise _TooMuchError

    def _check(self, depth: int) -> None:
        if depth > MAX_DEPTH or time.thread_time() > self.deadline:
            raise _TooMuchError


def _readings(words: Words) -> Iterator[str]:
    """Yield the texts that a pattern may mean by a command: by path and by name, git without its global options."""
    program, rest = words[0], words[1:]
    name = program.rpartition("/")[2]
    for said in dict.fromkeys((program, name, name.lower())):
        yield _joined((said, *rest))
    if name.lower() == "git":
        yield _joined(("git", *_without_global_options(rest)))
    elif name.lower().startswith("git-"):
        yield _joined(("git", name[len("git-") :], *rest))


def _without_global_options(arguments: Words) -> Words:
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        word = arguments[index]
        value = arguments[index + 1] if word in _GIT_VALUED and index + 1 < len(arguments) else ""
        sets_alias = word in ("-c", "--config-env") and _GIT_ALIAS.match(value)
        if ANY in value or sets_alias or (word.startswith("--config-env=") and _GIT_ALIAS.match(word)):
            return (ANY,)
        index += 2 if word in _GIT_VALUED else 1
    return arguments[index:]


def _joined(words: Words) -> str:
    """Return the words as one text. `ANY` may be no word or many, so it takes the spaces around it in."""
    text = normalized(" ".join(words))
    return re.sub(f" ?{ANY} ?", ANY, text)


def _is_word_of_command(child: Node) -> bool:
    return child.is_named and child.type != "variable_assignment" and not child.type.endswith("_redirect")


def _stray_arguments(node: Node) -> Iterator[Node]:
    """Yield the arguments that stand behind a redirection: `git >log push`, `git <<E push`."""
    for redirect in node.children:
        if redirect.type == "file_redirect":
            yield from redirect.children_by_field_name("destination")[1:]
        elif redirect.type == "heredoc_redirect":
            yield from redirect.children_by_field_name("argument")


def _touching(parts: Iterable[Node]) -> Iterator[list[Node]]:
    """Yield words: the parts without a gap between them. The grammar parts `p$(echo u)sh` in two."""
    word: list[Node] = []
    for part in parts:
        if word and word[-1].end_byte != part.start_byte:
            yield word
            word = []
        word.append(part)
    if word:
        yield word


def _stdin_of(node: Node) -> Iterator[str]:
    """Yield the texts that redirections of `node` put on stdin; a file's content is its own affair."""
    for redirect in node.children:
        if redirect.type == "herestring_redirect":
            yield value_of(redirect.named_children[-1:])
        elif redirect.type == "heredoc_redirect":
            yield from _heredoc(redirect)
        elif redirect.type == "file_redirect" and redirect.children_by_field_name("destination"):
            source = value_of(redirect.children_by_field_name("destination")[:1])
            operator = _operator(redirect)
            if operator == "<&" or (operator == "<" and source.startswith(("/dev/stdin", DESCRIPTORS, "/proc/"))):
                yield ANY


def _heredoc(redirect: Node) -> Iterator[str]:
    for body in redirect.children:
        if body.type == "heredoc_body":
            text = text_of(body)
            yield text if is_quoted(redirect) or not re.search(r"[$`\\]", text) else ANY


def _is_behind_heredoc(node: Node) -> bool:
    """Return whether a pipeline is the rest of `cat <<E | sh`, whose first command is elsewhere in the tree."""
    return node.parent is not None and node.parent.type == "heredoc_redirect"


def _operator(redirect: Node) -> str:
    return next((child.type for child in redirect.children if not child.is_named), "")


def _is_simple(text: str) -> bool:
    """Return whether a line is one simple command without a substitution and without a redirection into a file."""
    children = parse(text).children
    statement = children[0] if len(children) == 1 else None
    if statement is not None and statement.type == "redirected_statement":
        statement = statement.child_by_field_name("body")
    if statement is None or statement.type != "command":
        return False
    code = text
    for node in below(children[0]):
        match node.type:
            case "command_substitution" | "process_substitution":
                return False
            case "file_redirect" if _writes_file(node):
                return False
            case "heredoc_redirect":
                code = text.partition("\n")[0]
    return bool(_ONE_COMMAND.fullmatch(code.strip()))


def _writes_file(redirect: Node) -> bool:
    target = value_of(redirect.children_by_field_name("destination")[:1])
    operator = _operator(redirect)
    is_descriptor = operator == ">&" and re.fullmatch(r"[0-9]+-?|-", target)
    return operator in _INTO_A_FILE and target != NOWHERE and not is_descriptor


def _opaque_words(text: str) -> Iterator[str]:
    """Yield what could be a program's name, with quotes taken away and with quotes as separators."""
    for word in set(re.split(r"[\s;&|()<>=]+", re.sub(r"['\"\\]", "", text))):
        unknown = re.search(r"[$`*?\[]", word)
        if unknown or ("{" in word and "}" in word and ("," in word or ".." in word)):
            word = word[: unknown.start() if unknown else word.find("{")] + ANY
        yield from filter(None, (word, word.rpartition("/")[2].lower()))
    yield from re.findall(r"[\w.+-]+", text)
