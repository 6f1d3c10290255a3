"""How other commands find the fleet that is up on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.local import Up, announced, claimed, effective_environment, running


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def up(home, tmp_path) -> Iterator[Up]:
    up = Up(
        pid=1,
        source=str(tmp_path / "fleet.yaml"),
        config=str(home / "fleet.yaml"),
        platform_url="http://127.0.0.1:1",
        redis_url="redis://:secret@127.0.0.1:2/0",
        worker_key_file="/keys/worker",
        person_key_file="/keys/person",
    )
    with claimed(home), announced(home, up):
        yield up


def test_a_running_fleet_fills_in_what_the_environment_leaves_unsaid(home, up):
    env = effective_environment({"FLEET_HOME": str(home), "OTHER": "x"})
    assert env == {
        "FLEET_HOME": str(home),
        "OTHER": "x",
        "FLEET_CONFIG": up.config,
        "FLEET_REDIS_URL": up.redis_url,
        "BLOBHUB_API_URL": up.platform_url,
        "BLOBHUB_API_KEY_FILE": "/keys/worker",
        "FLEET_PERSON_API_KEY_FILE": "/keys/person",
    }


def test_keys_of_another_platform_never_go_to_the_embedded_one(home, up):
    keys = {"BLOBHUB_API_KEY": "real", "FLEET_PERSON_API_KEY": "real too", "BLOBHUB_API_KEY_FILE": "/real"}
    env = effective_environment({"FLEET_HOME": str(home)} | keys)
    assert not {"real", "real too", "/real"} & set(env.values())


def test_what_the_environment_says_wins(home, up):
    said = {"FLEET_REDIS_URL": "redis://other", "BLOBHUB_API_URL": "https://other", "BLOBHUB_API_KEY": "real"}
    env = effective_environment({"FLEET_HOME": str(home)} | said)
    assert env == {"FLEET_HOME": str(home), "FLEET_CONFIG": up.config} | said


def test_the_operators_configuration_leads_to_the_one_in_force(home, up):
    assert effective_environment({"FLEET_HOME": str(home), "FLEET_CONFIG": up.source})["FLEET_CONFIG"] == up.config


def test_another_configuration_means_another_fleet(home, up, tmp_path):
    environ = {"FLEET_HOME": str(home), "FLEET_CONFIG": str(tmp_path / "other.yaml")}
    assert effective_environment(environ) == environ


def test_what_a_killed_fleet_left_is_ignored(home):
    with claimed(home), announced(home, Up(1, "a", "b", "c", "d")):
        left = (home / "up.json").read_text()
    (home / "up.json").write_text(left)
    assert running(home) is None


def test_a_home_has_one_fleet(home, up):
    with pytest.raises(FleetError, match="another fleet is running"), claimed(home):
        pytest.fail("it is held")


def test_the_addresses_are_for_their_owner_alone_and_go_with_the_fleet(home):
    with claimed(home), announced(home, Up(1, "a", "b", "c", "d")):
        assert (home / "up.json").stat().st_mode & 0o777 == 0o600
        assert running(home) == Up(1, "a", "b", "c", "d")
    assert list(home.iterdir()) == []
    assert running(home) is None


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', '{"unknown": 1}'])
def test_a_damaged_file_is_ignored(home, text):
    with claimed(home):
        (home / "up.json").write_text(text)
        assert running(home) is None
