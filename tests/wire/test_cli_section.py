"""`fleet section` with a real Redis and the embedded platform; the fleet's own polls are made by hand."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
import yaml

from fleet import sections
from fleet.cli import main
from fleet.config import load_config
from fleet.operating import operated


class Terminal:
    def __init__(self, environ: dict[str, str], monkeypatch, capsys) -> None:
        self.environ = environ
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """Run `fleet section ARGUMENTS`; return what it says."""
        self.monkeypatch.setattr(sys, "argv", ["fleet", "section", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = self.capsys.readouterr()
        assert (ended.value.code or 0) == status, output.err
        return output.out if status == 0 else output.err

    def state(self) -> tuple[str, str]:
        (found,) = json.loads(self("ls", "--json"))
        return found["state"], found["reason"]

    def poll(self) -> None:
        """Do what the fleet does at the next tick."""

        async def work() -> None:
            config = load_config(None, self.environ)
            async with operated(config, self.environ) as fleet:
                await sections.poll_sections(fleet, await sections.due_sections(fleet))

        asyncio.run(work())


@pytest.fixture
def section(sandbox, redis_url, tmp_path, monkeypatch, capsys) -> Terminal:
    ids = {name: getattr(sandbox.platform, name) for name in ("org_id", "blob_id", "revision_id")}
    # An interval for which no test lasts: what is due is due for another reason.
    config = {
        "polling": {"interval_idle_ms": 3_600_000},
        "sections": [{"name": "desk", "session": ids | {"session_id": sandbox.session()}}],
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.delenv("BLOBHUB_API_KEY_FILE", raising=False)
    environ = {
        "FLEET_CONFIG": str(tmp_path / "fleet.yaml"),
        "FLEET_HOME": str(tmp_path / "home"),
        "FLEET_HOST": "alpha",
        "HOME": str(tmp_path),
        "FLEET_REDIS_URL": redis_url,
        "BLOBHUB_API_URL": sandbox.platform.url,
        "BLOBHUB_API_KEY": sandbox.platform.worker_key,
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return Terminal(environ, monkeypatch, capsys)


def test_a_section_is_taken_out_and_put_back(section):
    section.poll()
    assert section.state() == ("attached", "")
    assert section("detach", "desk", "--reason", "the disk is changed") == "Section desk is detached.\n"
    section.poll()
    assert section.state() == ("detached", "the disk is changed")
    assert "with the next poll" in section("attach", "desk")
    section.poll()
    assert section.state() == ("attached", "")
    assert section("attach", "desk") == "Section desk is attached.\n"


def test_sections_are_listed_for_people(section):
    shown = section("ls")
    assert "desk" in shown
    assert "waiting" in shown


def test_a_section_that_is_not_attached_can_not_be_detached(section):
    assert "section desk is not attached [session_unknown]" in section("detach", "desk", status=2)


@pytest.mark.parametrize("command", ["attach", "detach"])
def test_a_name_that_no_section_has_is_answered_with_those_there_are(section, command):
    assert "'other' is no section; configured: desk" in section(command, "other", status=2)


def test_a_section_is_detached_also_while_the_platform_is_away(section, sandbox):
    section.poll()
    sandbox.conditions(faults=[{"match": "post_session_thread_item", "kind": "500_before"}])
    assert "section desk is detached, but nobody was told" in section("detach", "desk", status=1)
    sandbox.conditions(faults=[])
    assert section.state()[0] == "detached"
