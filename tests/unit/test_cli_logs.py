"""`fleet logs`: what this machine's own log has of a thread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.cli.app import cli
from fleet.errors import FleetError
from fleet.hostfiles import HostFiles, LogWriter
from fleet.refs import ThreadRef

OUTPUT = "a line of output\n" * 200


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder as `fleet up` has it, with the log of one thread on the host alpha."""
    (tmp_path / "fleet.yaml").write_text("{}")
    home = tmp_path / "home"
    monkeypatch.setenv("FLEET_CONFIG", str(tmp_path / "fleet.yaml"))
    monkeypatch.setenv("FLEET_HOME", str(home))
    monkeypatch.setenv("FLEET_HOST", "alpha")
    with LogWriter(HostFiles(home / "hosts" / "alpha", ThreadRef("s1", "fix/parser")), 10**6) as log:
        for turn, text, tool in ((1, "first", None), (2, "second", {"name": "Bash", "output": OUTPUT})):
            metadata = {"type": "text", "post_id": f"id{turn}", **({"tool": tool} if tool else {})}
            item = {"content": [{"type": "text", "text": text}], "metadata": metadata}
            log.write(json.dumps({"epoch": 1, "turn": turn, "n": 1, "uid": None, "item": item}))
    return home


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    cli.main(["logs", *words], standalone_mode=False)
    return capsys.readouterr().out


def test_the_log_is_shown_whole(home: Path, capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, "fix/parser")
    assert text.index("first") < text.index("second")
    assert text.count("a line of output") == 200


def test_one_turn_can_be_chosen_and_programs_get_the_lines_as_they_are(home: Path, capsys: pytest.CaptureFixture[str]):
    lines = [json.loads(line) for line in shown(capsys, "fix/parser", "--turn", "2", "--json").splitlines()]
    assert [line["item"]["metadata"]["tool"]["output"] for line in lines] == [OUTPUT]


def test_the_path_is_told(home: Path, capsys: pytest.CaptureFixture[str]):
    assert Path(shown(capsys, "fix/parser", "--path").strip()).is_relative_to(home)


@pytest.mark.parametrize("alias", ["fix/other", "fix"])
def test_a_thread_that_never_ran_here_has_no_log(home: Path, alias: str):
    with pytest.raises(FleetError, match="log_missing"):
        cli.main(["logs", alias], standalone_mode=False)


def test_an_alias_that_climbs_is_refused(home: Path):
    with pytest.raises(FleetError, match="alias_invalid"):
        cli.main(["logs", "../../etc"], standalone_mode=False)
