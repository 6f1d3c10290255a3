"""Programs and builtins that run another command: which words of theirs are that command.

A wrapper whose options are all known gives exactly its command. With an option that is not known, each word behind it
could be where the command begins, so that all of these are given.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fleet.policy.patterns import ANY, ANY_WORD, is_known
from fleet.policy.words import DESCRIPTORS


@dataclass(frozen=True, slots=True)
class Inner:
    """What a wrapper runs: the words of a command, or a script, or neither when it reads the script from stdin."""

    words: tuple[str, ...] = ()
    script: str | None = None


@dataclass(frozen=True, slots=True)
class _Options:
    """A wrapper's options: letters without a value, those with one, long ones with one; operands before the command."""

    flags: str = ""
    valued: str = ""
    long_flags: frozenset[str] = frozenset()
    long_valued: frozenset[str] = frozenset()
    operands: int = 0


Words = tuple[str, ...]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _long(text: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in text.split())


SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "ash", "mksh", "rbash", "fish"})

#: Words that stand before a command in the grammar, in places where the parser takes them for one.
_RESERVED = _names("! { ( if then elif else while until do for case select function in [[ coproc")

#: env takes any name for a variable's.
_ASSIGNMENT = re.compile(r"[^=]*=.*", re.DOTALL)


_SIMPLE: dict[str, _Options] = {
    "env": _Options("i0v", "uCa", _long("ignore-environment null debug"), _long("unset chdir argv0")),
    "sudo": _Options(
        "ABbEeHiKklnPSsvVN",
        "ughpCrtTUDR",
        _long("askpass background preserve-env set-home login stdin shell non-interactive reset-timestamp"),
        _long("user group host prompt chdir chroot role type command-timeout other-user close-from"),
    ),
    "doas": _Options("nsL", "uC"),
    "command": _Options("p"),
    "builtin": _Options(),
    "exec": _Options("cl", "a"),
    "nohup": _Options(),
    "time": _Options("pvaqV", "fo", _long("portability verbose append quiet"), _long("format output")),
    "timeout": _Options(
        "vfp", "ks", _long("foreground preserve-status verbose"), _long("kill-after signal"), operands=1
    ),
    "nice": _Options("0123456789-", "n", long_valued=_long("adjustment")),
    "ionice": _Options("t", "cnpPu", _long("ignore"), _long("class classdata pid pgid uid")),
    "stdbuf": _Options("", "ioe", long_valued=_long("input output error")),
    "setsid": _Options("cfw", "", _long("ctty fork wait")),
    "chroot": _Options("", "", _long("skip-chdir"), _long("userspec groups"), operands=1),
    "busybox": _Options(),
    "toybox": _Options(),
}
_SIMPLE["gtimeout"] = _SIMPLE["timeout"]

#: Wrappers with options of many kinds: every word could begin their command.
_ANYWHERE = _names(
    "strace ltrace unshare nsenter chrt taskset setarch linux32 linux64 prlimit numactl setpriv systemd-run fakeroot "
    "unbuffer caffeinate xvfb-run dbus-run-session ssh-agent parallel flock watch su runuser script"
)
#: Of these, those whose words are a script, and those whose option `-c` has one.
_JOINED = frozenset({"watch", "parallel"})
_SCRIPTED = frozenset({"su", "runuser", "script", "flock"})

_XARGS = _Options(
    "0rtpxo",
    "adEILnPs",
    _long("null no-run-if-empty verbose interactive exit open-tty"),
    _long("arg-file delimiter max-args max-procs max-chars max-lines process-slot-var eof"),
)


def inner_commands(words: Words) -> Iterator[Inner]:
    """Yield what the command `words` runs in turn; nothing when it is no wrapper."""
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name in SHELLS:
        yield from _shell(arguments)
    elif name in _SPECIAL:
        yield from _SPECIAL[name](arguments)
    elif name in _SIMPLE:
        yield from (Inner(words=rest) for rest in _after_options(arguments, _SIMPLE[name]))
    elif name in _RESERVED:
        yield from (Inner(words=rest) for rest in _suffixes(arguments))
    elif name in _ANYWHERE:
        yield from _anywhere(name, arguments)


def _after_options(arguments: Words, options: _Options) -> Iterator[Words]:
    """Yield the words of the command behind a wrapper's options, operands and assignments."""
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            index += 1
            break
        if word[:1] in (ANY, ANY_WORD) or (word.startswith("-") and not is_known(word)):
            yield from _suffixes(arguments[index:])
            return
        if not word.startswith("-"):
            break
        step = _option_length(word, options)
        if not step:
            yield from _suffixes(arguments[index + 1 :])
            return
        index += step
    rest = arguments[index + options.operands :]
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        rest = rest[1:]
    if rest:
        yield rest


def _option_length(word: str, options: _Options) -> int:
    """Return how many words the option takes; 0 when it is not known."""
    if word.startswith("--"):
        if "=" in word:
            return 1
        return 2 if word in options.long_valued else int(word in options.long_flags)
    for index, letter in enumerate(word[1:], 2):
        if letter in options.valued:
            return 1 if word[index:] else 2
        if letter not in options.flags:
            return 0
    return 1


def _suffixes(words: Words) -> Iterator[Words]:
    return (words[index:] for index in range(len(words)))


def _env(arguments: Words) -> Iterator[Inner]:
    """`env -S 'git push'` splits its value into words."""
    for index, word in enumerate(arguments):
        split = re.fullmatch(r"(?:-[i0v]*S|--split-string(?:=|$))(.*)", word, re.DOTALL)
        if split:
            value = (split[1], *arguments[index + 1 :]) if split[1] else arguments[index + 1 :]
            yield Inner(script=" ".join((*value[:1], *map(shlex.quote, value[1:]))))
    yield from (Inner(words=rest) for rest in _after_options(arguments, _SIMPLE["env"]))


def _command(arguments: Words) -> Iterator[Inner]:
    """`command -v git` only looks it up."""
    if not arguments or not re.fullmatch(r"-p*[vV]+p*", arguments[0]):
        yield from (Inner(words=rest) for rest in _after_options(arguments, _SIMPLE["command"]))


def _xargs(arguments: Words) -> Iterator[Inner]:
    """Words from stdin come behind the command's own, or where the replaced text stands."""
    replaced = ""
    for index, word in enumerate(arguments):
        option = re.fullmatch(r"-[0rtpxo]*([IiJ])(.*)|--replace(?:=(.*))?", word, re.DOTALL)
        if option:
            following = arguments[index + 1] if option[1] in ("I", "J") and index + 1 < len(arguments) else ""
            replaced = option[2] or option[3] or following or "{}"
            break
    for rest in _after_options(arguments, _XARGS):
        if replaced:
            yield Inner(words=tuple(word.replace(replaced, ANY) for word in rest))
        yield Inner(words=(*rest, ANY))


def _find(arguments: Words) -> Iterator[Inner]:
    for index, word in enumerate(arguments):
        if word in ("-exec", "-execdir", "-ok", "-okdir"):
            rest = arguments[index + 1 :]
            ends = [i for i, end in enumerate(rest) if end in (";", "+")]
            name = ANY if ends and rest[ends[0]] == "+" else ANY_WORD
            inner = tuple(part.replace("{}", name) for part in rest[: ends[0] if ends else None])
            if inner:
                yield Inner(words=inner)


def _shell(arguments: Words) -> Iterator[Inner]:
    """`-c` makes the first operand the script; without an operand, or with `-s`, the script comes from stdin."""
    index, has_script, from_stdin = 0, False, False
    while index < len(arguments):
        word = arguments[index]
        if word in ("--", "-"):
            index += 1
            break
        if word == ANY or (word == ANY_WORD and arguments[index + 1 :]):
            yield Inner(script=ANY)
            return
        if word[:1] not in ("-", "+") or len(word) == 1:
            break
        letters = "" if word.startswith("--") else word[1:]
        has_script = has_script or (word[0] == "-" and "c" in letters)
        from_stdin = from_stdin or "s" in letters
        index += 2 if word in ("--rcfile", "--init-file") or letters[-1:] in ("o", "O") else 1
    operands = arguments[index:]
    if has_script:
        yield Inner(script=operands[0] if operands else ANY)
    elif from_stdin or not operands:
        yield Inner()
    else:
        yield from _source(operands)


def _source(arguments: Words) -> Iterator[Inner]:
    """A script in a file is the file's own affair; in a descriptor it is what a redirection put there."""
    if arguments and arguments[0] == "/dev/stdin":
        yield Inner()
    elif arguments and arguments[0].startswith((DESCRIPTORS, "/proc/")):
        yield Inner(script=ANY)


def _eval(arguments: Words) -> Iterator[Inner]:
    yield Inner(script=" ".join(arguments[1:] if arguments[:1] == ("--",) else arguments))


def _trap(arguments: Words) -> Iterator[Inner]:
    operands = arguments[1:] if arguments[:1] == ("--",) else arguments
    if operands:
        yield Inner(script=operands[0])


def _alias(arguments: Words) -> Iterator[Inner]:
    for word in arguments:
        yield Inner(script=word.partition("=")[2])


def _anywhere(name: str, arguments: Words) -> Iterator[Inner]:
    for index, rest in enumerate(_suffixes(arguments)):
        yield Inner(words=rest)
        if name in _JOINED:
            yield Inner(script=" ".join(rest))
        if name in _SCRIPTED and re.fullmatch(r"-[a-z]*c|--(session-)?command", arguments[index]) and rest[1:]:
            yield Inner(script=rest[1])
        if name in _SCRIPTED and arguments[index].startswith(("--command=", "--session-command=")):
            yield Inner(script=arguments[index].partition("=")[2])


_SPECIAL: dict[str, Callable[[Words], Iterator[Inner]]] = {
    "env": _env,
    "command": _command,
    "xargs": _xargs,
    "find": _find,
    "eval": _eval,
    "trap": _trap,
    "alias": _alias,
    "source": _source,
    ".": _source,
}
