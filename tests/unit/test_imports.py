from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path.relative_to(ROOT) for package in ("fleet", "tasks", "agents") for path in (ROOT / package).rglob("*.py")
)

#: What an adapter may know of the fleet: the words that both speak.
SHARED_WITH_AGENTS = ("fleet.events", "fleet.errors")

#: The doors between the domain and Celery.
MAY_KNOW_CELERY = ("fleet/celery.py", "fleet/broker.py", "fleet/cli", "fleet/supervisor.py")
CELERY = ("celery", "kombu", "billiard", "fleet.celery")


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of each module or member that the module at `path` imports, anywhere in it."""
    package = path.parent.parts
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def modules_of(package: str) -> list[Path]:
    return [path for path in MODULES if path.parts[0] == package]


@pytest.mark.parametrize("path", modules_of("fleet"), ids=str)
def test_the_domain_imports_neither_tasks_nor_agents(path):
    assert [name for name in imports(path) if within(name, "tasks", "agents")] == []


@pytest.mark.parametrize("path", modules_of("agents"), ids=str)
def test_an_agent_adapter_shares_only_words_with_the_fleet(path):
    names = [name for name in imports(path) if within(name, "fleet", "tasks")]
    assert [name for name in names if not within(name, *SHARED_WITH_AGENTS)] == []


@pytest.mark.parametrize(
    "path", [path for path in modules_of("fleet") if not path.as_posix().startswith(MAY_KNOW_CELERY)], ids=str
)
def test_the_domain_does_not_know_celery(path):
    assert [name for name in imports(path) if within(name, *CELERY)] == []
