import pytest

from fleet.credentials import api_key, person_key
from fleet.errors import ConfigError


@pytest.fixture
def credentials(tmp_path):
    """Write the home's credentials file."""

    def write(text: str, mode: int = 0o600) -> None:
        file = tmp_path / ".blobhub/credentials.yaml"
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(mode)

    return write


def code_of(env: dict[str, str], home) -> str:
    with pytest.raises(ConfigError) as caught:
        api_key(env, home)
    assert "s3cret" not in str(caught.value)
    return caught.value.code


def test_the_variable_wins_over_its_file_and_both_over_the_profile(tmp_path, credentials):
    credentials("default: {api_key: from-profile}")
    (tmp_path / "key").write_text("from-file\n")
    env = {"BLOBHUB_API_KEY": "from-variable", "BLOBHUB_API_KEY_FILE": str(tmp_path / "key")}
    assert api_key(env, tmp_path) == "from-variable"
    assert api_key(env | {"BLOBHUB_API_KEY": ""}, tmp_path) == "from-file"
    assert api_key({}, tmp_path) == "from-profile"


@pytest.mark.parametrize(
    ("text", "env", "key"),
    [
        ("default: {api_key: a}\nprod: {api_key: b}", {"BLOBHUB_PROFILE": "prod"}, "b"),
        ("default: prod\nprod: {api_key: b}", {}, "b"),
        ("default: prod\nprofiles: {prod: {api_key: b}}", {}, "b"),
        ("profiles: {default: {api_key: a}, prod: {api_key: b}}", {}, "a"),
        ("default: prod\nprofiles: {prod: {api_key: b}, x: {api_key: c}}", {"BLOBHUB_PROFILE": "x"}, "c"),
    ],
)
def test_a_profile_is_chosen_by_variable_then_by_the_files_default(tmp_path, credentials, text, env, key):
    credentials(text)
    assert api_key(env, tmp_path) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_credentials_file_that_others_can_reach_is_refused(tmp_path, credentials, mode):
    credentials("default: {api_key: s3cret}", mode)
    assert code_of({}, tmp_path) == "credentials_exposed"


@pytest.mark.parametrize(
    "text", ["", "default: {}", "default: {api_key: 5}", "default: s3cret", "prod: {api_key: s3cret}", "profiles: []"]
)
def test_a_file_without_the_profile_is_a_missing_key(tmp_path, credentials, text):
    credentials(text)
    assert code_of({}, tmp_path) == "key_missing"


@pytest.mark.parametrize("text", ["- s3cret", "default: {api_key: *s3cret}", "default: {api_key: 's3cret\\n"])
def test_a_broken_file_is_refused_without_quoting_it(tmp_path, credentials, text):
    credentials(text)
    assert code_of({}, tmp_path) == "config_invalid"


def test_no_key_anywhere_is_said_so(tmp_path):
    assert code_of({}, tmp_path) == "key_missing"
    assert code_of({"BLOBHUB_API_KEY_FILE": str(tmp_path / "nope")}, tmp_path) == "key_missing"
    assert code_of({"BLOBHUB_API_KEY": "  "}, tmp_path) == "key_missing"


@pytest.mark.parametrize("key", ["s3cret\nX-Evil: 1", "s3cret s3cret", "s3crét"])
def test_a_key_that_would_break_the_header_is_refused(tmp_path, key):
    assert code_of({"BLOBHUB_API_KEY": key}, tmp_path) == "config_invalid"


def test_a_persons_key_is_optional_and_apart_from_the_workers(tmp_path):
    (tmp_path / "key").write_text("p2\n")
    assert person_key({"BLOBHUB_API_KEY": "w"}) is None
    assert person_key({"FLEET_PERSON_API_KEY": "p1"}) == "p1"
    assert person_key({"FLEET_PERSON_API_KEY_FILE": str(tmp_path / "key")}) == "p2"
