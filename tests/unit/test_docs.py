"""What the pages say is so: links lead somewhere, commands and keys exist, and no error is without a section."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from celery.bin.celery import celery

from fleet.cli.app import cli
from fleet.config import FleetConfig
from fleet.config_reference import VARIABLES, reference
from fleet.envelope import parse
from fleet.errors import CATALOGUE
from fleet.policy import parse_policy

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = [path for package in ("fleet", "tasks", "agents") for path in (ROOT / package).rglob("*.py")]

#: Words at the beginning of a line of a shell that are not its program.
BEFORE_A_PROGRAM = re.compile(r"sudo|[A-Z_]+=.*")
#: What begins another command in a line of a shell.
BETWEEN_COMMANDS = {"&&", "||", "|", ";", "(", ")", "&"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_blocks(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[Path, str, str]]:
    """Yield each fenced block: its page, its language, and what is in it, without the indentation of its list."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for indent, language, body in re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            yield page, language, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[Any]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text(encoding="utf-8"))):
            if "://" not in target:
                yield pytest.param(page, target, id=f"{name_of(page)}-{target}")


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_a_link_leads_to_a_page_and_a_heading_that_are_there(page: Path, target: str):
    file, _, anchor = target.partition("#")
    there = (page.parent / file).resolve() if file else page
    assert there.is_file()
    assert there.is_relative_to(ROOT)
    assert not anchor or anchor in anchors(there)


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command in a line of a shell, without what stands before its program."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for token in (*lexer, ";"):
        if token not in BETWEEN_COMMANDS:
            words.append(token)
            continue
        while words and BEFORE_A_PROGRAM.fullmatch(words[0]):
            words.pop(0)
        if words:
            yield words
        words = []


def shown_commands() -> Iterator[Any]:
    """Yield the commands of the product and of make that a reader would type."""
    for page, language, body in blocks():
        if language:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if not re.match(r"\s*(\$ |[\w./~-]+)", line) or not re.search(r"\b(fleet|make|celery|python)\b", line):
                continue
            for words in simple_commands(line):
                if words[:2] == ["docker", "compose"] and "exec" in words:
                    words = words[words.index("exec") + 2 :]
                if words and Path(words[0]).name in ("fleet", "make", "celery", "python"):
                    yield pytest.param(words, id=f"{name_of(page)}-{' '.join(words)[:60]}")


@pytest.mark.parametrize("words", list(shown_commands()))
def test_a_command_that_is_shown_exists_and_takes_its_options(words: list[str]):
    program, *arguments = words
    match Path(program).name:
        case "fleet":
            assert_is_command(arguments)
        case "make":
            assert_is_made(arguments)
        case "celery":
            assert arguments[:2] == ["-A", "fleet"]
            assert arguments[2] in celery.commands
        case "python":
            assert arguments[0] == "-m"
            module = ROOT / arguments[1].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def assert_is_command(arguments: list[str]) -> None:
    """Let click read a command line of the fleet, without running it."""
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments:
        try:
            context = command.make_context(
                "fleet", list(arguments), allow_extra_args=True, allow_interspersed_args=False
            )
        except click.exceptions.Exit:  # --help, --version
            return
        name, *arguments = (*context._protected_args, *context.args)
        assert name in command.commands, f"fleet … {name} is no command"
        command = command.commands[name]
    if not isinstance(command, click.Group):
        command.make_context(str(command.name), list(arguments))


def assert_is_made(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in arguments:
        variable, is_set, _ = word.partition("=")
        pattern = rf"^{variable} \?=|\$\({variable}\)|\$\(if \$\({variable}\)" if is_set else rf"^{word}:.*## "
        assert re.search(pattern, makefile, re.MULTILINE), f"make does not know {word}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_exist(page: Path):
    for text in re.findall(r"`fleet ([a-z][^`]*)`", without_blocks(page.read_text(encoding="utf-8"))):
        command: click.Command = cli
        for word in text.split():
            if not isinstance(command, click.Group) or not word.islower():
                break
            assert word in command.commands, f"fleet {text}"
            command = command.commands[word]


def yaml_blocks() -> Iterator[Any]:
    found = [(page, body) for page, language, body in blocks() if language == "yaml"]
    for number, (page, body) in enumerate(found):
        yield pytest.param(body, id=f"{name_of(page)}-{number}")


@pytest.mark.parametrize("body", list(yaml_blocks()))
def test_a_yaml_block_is_what_it_shows(body: str):
    value = yaml.safe_load(body)
    if set(value) == {"services"}:
        return  # a compose file; tests/unit/test_deploy_files.py looks at these
    if "default" in value.get("policy", {}):
        parse_policy(value["policy"], ())
    elif "workspace" not in value:
        FleetConfig.model_validate(value, context={"folder": ROOT})
        return
    thread = parse({"type": "thread", "thread": {"metadata": value}})
    assert thread is not None
    assert thread.artifacts_warning is None


def test_every_error_has_a_section_with_more_than_its_remedy():
    sections = re.split(r"^### ", TROUBLESHOOTING, flags=re.MULTILINE)[1:]
    described = {}
    for section in sections:
        heading, _, body = section.partition("\n")
        described[heading.strip("`")] = re.split(r"^## ", body, flags=re.MULTILINE)[0].strip()
    assert described.keys() == CATALOGUE.keys()
    assert [code for code, body in described.items() if len(body) <= len(CATALOGUE[code].remedy)] == []


def test_every_state_in_which_a_section_stands_down_is_explained():
    text = (ROOT / "fleet" / "attach.py").read_text(encoding="utf-8")
    states = set(re.findall(r'StandDownError\("(\w+)"', text))
    assert states >= {"access_lost", "SESSION_OWNED_BY_DIFFERENT_USER"}
    assert [state for state in states if f"`{state}`" not in TROUBLESHOOTING] == []


def test_every_status_token_is_explained():
    said = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    tokens = set(re.findall(r'(?:items\.status|\bStatus)\("(\w+)"', said))
    assert tokens >= {"no_host", "compacting_context"}
    assert [token for token in tokens if f"| `{token}` |" not in TROUBLESHOOTING] == []


def test_the_reference_is_what_the_models_say():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "write it anew: fleet config reference >docs/configuration.md"


def test_every_key_has_words():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", reference(), re.MULTILINE)
    assert len(rows) > len(VARIABLES)
    assert [key for key, words in rows if not words] == []


def test_the_reference_has_every_variable_that_is_read():
    said = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    named = set(re.findall(r'"((?:FLEET|BLOBHUB)_[A-Z_]+)"', said))
    # Set by the fleet for processes of its own.
    internal = {"FLEET_TURN_MARK", "FLEET_PLATFORM_WORKER_KEY", "FLEET_PLATFORM_PERSON_KEY"}
    assert named - internal <= VARIABLES.keys()


def test_a_rule_of_the_protocol_that_the_code_names_is_on_its_page():
    page = (DOCS / "protocol.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\d)\. .*\n((?:(?!## \d).*\n)*)", page, re.MULTILINE))
    for path in SOURCES:
        for section, entry in re.findall(r"protocol §(\d)(?:\.(\d))?", path.read_text(encoding="utf-8")):
            assert section in sections, f"{name_of(path)} names §{section}"
            assert not entry or re.search(rf"^{entry}\. ", sections[section], re.MULTILINE), (path, section, entry)
