from pathlib import Path

import pytest

from fleet.config import AgentSettings, FleetConfig, HostConfig, load_config, read_environment, resolve_agent_settings
from fleet.envelope import AgentBlock
from fleet.errors import ConfigError, ThreadFailedError
from fleet.urls import SentinelUrl, redis_url, sentinel_url

SESSION = "{org_id: o, blob_id: b, revision_id: r, session_id: s}"


@pytest.fixture
def write(tmp_path):
    """Write a fleet.yaml and return its path."""

    def write(text: str | bytes) -> Path:
        file = tmp_path / "fleet.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    return write


def refused(file: Path, env: dict[str, str] | None = None) -> list[str]:
    """Return the lines of the error that the file is refused with, without the file's name and the remedy."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, env or {})
    assert caught.value.code == "config_invalid"
    return [line.removeprefix(f"{file}: ") for line in caught.value.detail.splitlines()]


def test_an_empty_file_is_all_defaults(write):
    config = load_config(write(""), {})
    assert config.platform.url == "https://api.blobhub.io/v1"
    assert (config.redis.url, config.redis.namespace) == (None, "fleet")
    assert (config.polling.interval_idle_ms, config.polling.interval_active_ms) == (1500, 1000)
    assert (config.polling.backoff_max_ms, config.polling.resync_s) == (30_000, 60)
    assert (config.concurrency.max_agents, config.concurrency.per_work_folder) == (4, 0)
    assert (config.turns.lease_s, config.turns.shutdown_grace_s, config.turns.attempts) == (15, 20, 3)
    assert config.turns.stop_grace_s == 0.3
    assert config.policy.allow_autonomous
    assert config.policy.rules == ()
    assert (config.attachments.inbox, config.artifacts.upload) == (".blobhub/inbox", "object")
    assert config.items.budget_bytes == 350_000
    assert [host.work_folders for host in config.hosts.values()] == [("/",)]
    assert config.sections == ()
    assert set(config.agents) == {"claude_code", "codex"}
    agent = config.agents["claude_code"]
    assert (agent.permissions, agent.wait, agent.hold_s, agent.turn_retries) == ("approval", "held", 60, 3)


def test_a_workers_config_yaml_works_as_it_is(write):
    config = load_config(
        write(f"""
polling: {{interval_idle_ms: 1500, interval_active_ms: 3000, backoff_max_ms: 30000}}
concurrency: {{max_agents: 2}}
agents:
  claude_code: {{executable: claude, model: "", effort: high, permissions: guarded}}
policy:
  allow_autonomous: false
  rules: [{{id: no_push, effect: exec, action: deny, command: ["git push*"]}}]
attachments: {{inbox: in/box}}
sections:
  - {{name: backend, job_type: session_agent_harness, session: {SESSION}}}
"""),
        {},
    )
    assert config.polling.interval_active_ms == 3000
    assert config.concurrency.max_agents == 2
    assert config.agents["claude_code"].effort == "high"
    assert config.policy.rules[0]["command"] == ["git push*"]
    assert not config.policy.allow_autonomous
    assert config.attachments.inbox == "in/box"
    assert config.sections[0].session.revision_id == "r"


def test_the_fleets_own_groups_are_read(write):
    config = load_config(
        write("""
redis: {url: "redis://redis:6379/0", namespace: blue}
hosts:
  alpha: {work_folders: [/srv/repos]}
  beta: {work_folders: [/data, /srv/repos/big], max_agents: 9}
agents: {codex: {wait: parked, hold_s: 0.5, env: {A: b}}}
artifacts: {upload: file}
items: {budget_bytes: 60000}
turns: {lease_s: 2, attempts: 1}
"""),
        {},
    )
    assert config.hosts["beta"].work_folders == ("/data", "/srv/repos/big")
    assert (config.hosts["alpha"].max_agents, config.hosts["beta"].max_agents) == (None, 9)
    assert (config.agents["codex"].wait, config.agents["codex"].env) == ("parked", {"A": "b"})
    assert (config.artifacts.upload, config.items.budget_bytes, config.turns.lease_s) == ("file", 60000, 2)


def test_null_and_empty_mean_not_set(write):
    config = load_config(
        write("""
polling:
platform: {url: ""}
agents:
  claude_code:
  codex: {model: null, permissions: ""}
"""),
        {"FLEET_HOST": "solo"},
    )
    assert config == FleetConfig(hosts={"solo": HostConfig(work_folders=("/",))})


def test_a_section_without_a_name_is_called_by_its_session(write):
    assert load_config(write(f"sections: [{{session: {SESSION}}}]"), {}).sections[0].name == "s"


def test_the_scripted_agent_exists_only_when_configured_and_finds_its_script_beside_the_file(write, tmp_path):
    config = load_config(write("agents: {scripted: {script: demo/script.yaml}}"), {})
    assert config.agents["scripted"].script == tmp_path / "demo/script.yaml"


@pytest.mark.parametrize("group", ["scripted: {}", "scripted:"])
def test_a_scripted_agent_without_a_script_is_refused(write, group):
    assert refused(write(f"agents: {{{group}}}")) == [
        "agents.scripted.script: is missing, the scripted agent plays a script"
    ]


def test_a_script_for_a_real_agent_is_refused(write):
    assert refused(write("agents: {codex: {script: x.yaml}}"))[0].startswith("agents.codex.script: only")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "pollin: {}",
            "pollin: unknown key; did you mean polling? allowed: agents, artifacts, attachments, concurrency, hosts, "
            "items, logs, metrics, platform, policy, polling, redis, sections, turns",
        ),
        ("hosts: {a: {work_folders: [], x: 1}}", "hosts.a.x: unknown key; allowed: max_agents, work_folders"),
        (
            f"sections: [{{session: {SESSION}, nmae: x}}]",
            "sections[0].nmae: unknown key; did you mean name? allowed: job_type, name, session",
        ),
        (
            "agents: {claude: {}}",
            "agents.claude: unknown agent type; did you mean claude_code? allowed: claude_code, codex, scripted",
        ),
        (
            "polling: {interval_idle_ms: 49}",
            "polling.interval_idle_ms: is 49, must be greater than or equal to 50",
        ),
        ("concurrency: {max_agents: '4'}", "concurrency.max_agents: is '4', must be a valid integer"),
        ("concurrency: {max_agents: true}", "concurrency.max_agents: is true, must be a valid integer"),
        ("turns: {stop_grace_s: 11}", "turns.stop_grace_s: is 11, must be less than or equal to 10"),
        ("polling: {resync_s: .nan}", "polling.resync_s: is nan, must be a finite number"),
        ("policy: {allow_autonomous: 'no'}", "policy.allow_autonomous: is 'no', must be a valid boolean"),
        (
            "agents: {codex: {permissions: yolo}}",
            "agents.codex.permissions: is 'yolo', must be 'autonomous', 'approval' or 'guarded'",
        ),
        ("hosts: {a b: {work_folders: []}}", "hosts.a b: must be 1 to 64 of A-Z, a-z, 0-9, _ and -"),
        ("hosts: {a: {work_folders: [repos]}}", "hosts.a.work_folders[0]: is 'repos', must be an absolute path"),
        ("hosts: {a: {work_folders: /srv}}", "hosts.a.work_folders: is '/srv', must be a list"),
        ("hosts: {a: }", "hosts.a.work_folders: is missing"),
        ("hosts: [a]", "hosts: is a list, must be a mapping"),
        ("sections: [{}]", "sections[0].session: is missing"),
        (
            f"sections: [{{session: {SESSION.replace('r,', '../x,')}}}]",
            "sections[0].session.revision_id: is '../x', must be 1 to 128 of A-Z, a-z, 0-9, ., _ and -",
        ),
        (
            "attachments: {inbox: ../x}",
            "attachments.inbox: is '../x', must be a path relative to the work folder, without ..",
        ),
        ("1: x", "[1]: is no string; quote the key"),
    ],
)
def test_a_wrong_key_is_named_with_what_is_wrong_and_what_is_allowed(write, text, line):
    assert refused(write(text)) == [line]


def test_all_errors_are_listed_at_once_one_per_line(write):
    lines = refused(write("polling: {interval_idle_ms: 1}\nitems: {budget_bytes: x}\nhosts: {a: 5}"))
    assert [line.split(":")[0] for line in lines] == ["polling.interval_idle_ms", "hosts.a", "items.budget_bytes"]


def test_a_file_that_is_no_mapping_is_refused(write):
    assert refused(write("- a"))[0].startswith("is a list, must be a mapping of agents, ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1\nb: 2", "line 2, column 2: expected ',' or ']', but got ':'"),
        ("polling: {}\nredis: {}\npolling: {}", "line 3, column 1: the key polling stands twice"),
        ("a: x\nb: \x07", "line 2: a character that YAML does not allow"),
        (b"a: \xff", "byte 3 is not UTF-8"),
        ("a: 2026-99-99", "has a value that YAML can't represent"),
    ],
)
def test_broken_yaml_is_located(write, text, problem):
    assert refused(write(text)) == [problem]


def test_broken_yaml_quotes_no_value(write):
    assert "hunter2" not in refused(write("redis: {url: *hunter2}"))[0]


@pytest.mark.parametrize(
    "text",
    [
        "redis: {url: 'http://:hunter2@h'}",
        "redis: {url: ':hunter2@h:6379'}",
        "redis: {url: 'redis://u:hunter2@[h'}",
        "redis: {url: 'redis://h:hunter2'}",
        "redis: {url: ['hunter2']}",
        "redis: {url: 'sentinel://:hunter2@h/0'}",
        "redis: {url: 'sentinel://h:hunter2/0?master=m'}",
        "redis: {url: 'sentinel://h/hunter2?master=m'}",
        "redis: {url: 'sentinel://h/0?master=m&hunter2=x'}",
        "platform: {url: 'https://u:hunter2@h/v1'}",
        "platform: {url: 'https://h/v1?key=hunter2'}",
        "polling: {interval_idle_ms: 'redis://u:hunter2@h'}",
        "agents: {codex: {env: {TOKEN: [hunter2]}}}",
        'agents: {codex: {env: {TOKEN: "hunter2\\0"}}}',
    ],
)
def test_no_error_shows_a_secret(write, text):
    (line,) = refused(write(text))
    assert "hunter2" not in line


def test_neither_config_nor_environment_shows_a_secret_in_its_repr(write):
    config = load_config(write("redis: {url: 'redis://:hunter2@h'}\nagents: {codex: {env: {K: hunter2}}}"), {})
    environment = read_environment({"FLEET_REDIS_URL": "redis://:hunter2@h", "FLEET_HOST": "a"})
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr(environment)


def test_the_environment_wins_over_the_file(write):
    file = write("redis: {url: 'redis://file', namespace: blue}\nplatform: {url: 'https://file'}")
    config = load_config(file, {"FLEET_REDIS_URL": "unix:///run/redis.sock", "BLOBHUB_API_URL": "http://env:80/v1/"})
    assert (config.redis.url, config.redis.namespace) == ("unix:///run/redis.sock", "blue")
    assert config.platform.url == "http://env:80/v1"
    assert load_config(file, {"FLEET_REDIS_URL": ""}).redis.url == "redis://file"


def test_a_wrong_value_of_the_environment_names_the_variable(write):
    with pytest.raises(ConfigError) as caught:
        load_config(write(""), {"BLOBHUB_API_URL": "ftp://x"})
    assert caught.value.detail.startswith("environment: BLOBHUB_API_URL: is 'ftp://x', must be an http://")


def test_a_sentinel_url_names_sentinels_and_master():
    url = "sentinel://us%40er:p%2Fw@a:26380,b,[::1]:26381/3?master=main&sentinel_password=s%26p"
    assert redis_url(url) == url
    assert sentinel_url(url) == SentinelUrl(
        sentinels=(("a", 26380), ("b", 26379), ("::1", 26381)),
        master="main",
        db=3,
        username="us@er",
        password="p/w",
        sentinel_password="s&p",
        tls=None,
    )
    assert sentinel_url("redis://h") is None


def test_a_sentinel_url_shows_no_password_in_its_repr():
    at = sentinel_url("sentinel://:hunter2@a?master=main&sentinel_password=hunter2")
    assert at is not None
    assert (at.password, at.sentinel_password) == ("hunter2", "hunter2")
    assert "hunter2" not in repr(at)


def test_a_sentinel_url_has_the_options_of_tls():
    at = sentinel_url("sentinels://a/0?master=main&ssl_ca_certs=/ca.pem")
    assert at is not None
    assert at.tls == {"ssl_ca_certs": "/ca.pem"}
    plain = sentinel_url("sentinels://a?master=main")
    assert plain is not None
    assert plain.tls == {}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sentinel://a,b/0", "does not name the master"),
        ("sentinel://a,b/0?master=", "does not name the master"),
        ("sentinel:///0?master=m", "has a Sentinel without a host, or with a wrong port"),
        ("sentinel://a,,b?master=m", "has a Sentinel without a host, or with a wrong port"),
        ("sentinel://a:x?master=m", "has a Sentinel without a host, or with a wrong port"),
        ("sentinel://a:66000?master=m", "has a Sentinel without a host, or with a wrong port"),
        ("sentinel://a/zero?master=m", "names no database by its number"),
        ("sentinel://a?master_name=m", "has an unknown option; allowed: master, sentinel_password, ssl_ca_certs"),
        ("sentinel://a?master=m&ssl_ca_certs=/ca", "has an option of TLS, which needs sentinels://"),
        ("sentinel+tls://a?master=m", "must be a redis://, rediss://, unix://, sentinel:// or sentinels:// URL"),
    ],
)
def test_a_wrong_sentinel_url_says_what_is_wrong_and_what_is_right(write, url, problem):
    with pytest.raises(ConfigError) as caught:
        load_config(write(""), {"FLEET_REDIS_URL": url})
    assert caught.value.detail.startswith(f"environment: FLEET_REDIS_URL: {problem}")
    if url.startswith("sentinel://"):
        assert caught.value.detail.endswith("must be sentinel://:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME")


def test_the_file_is_found_by_argument_then_variable_then_folder(tmp_path, monkeypatch):
    for name in ("argument", "variable", "fleet"):
        (tmp_path / f"{name}.yaml").write_text(f"redis: {{namespace: {name}}}")
    monkeypatch.chdir(tmp_path)
    env = {"FLEET_CONFIG": str(tmp_path / "variable.yaml")}
    assert load_config(tmp_path / "argument.yaml", env).redis.namespace == "argument"
    assert load_config(None, env).redis.namespace == "variable"
    assert load_config(None, {}).redis.namespace == "fleet"


def test_a_missing_file_has_its_own_code(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "nope.yaml", {})
    assert caught.value.code == "config_not_found"
    assert str(tmp_path / "nope.yaml") in caught.value.detail


def test_sections_of_one_name_are_refused_with_both_places(write):
    other = SESSION.replace("session_id: s", "session_id: t")
    assert refused(write(f"sections: [{{name: a, session: {SESSION}}}, {{name: a, session: {other}}}]")) == [
        "sections[1].name: 'a' is the name of sections[0] too; names must differ"
    ]


@pytest.mark.parametrize(("one", "other"), [("", ""), ("", "p/"), ("p/q", "p/"), ("p/", "p/")])
def test_sections_that_would_serve_the_same_thread_are_refused_with_both_names(write, one, other):
    sections = [
        f"{{name: {name}, session: {SESSION[:-1]}, session_prefix: '{prefix}'}}}}"
        for name, prefix in (("left", one), ("right", other))
    ]
    (line,) = refused(write(f"sections: [{', '.join(sections)}]"))
    assert "'left'" in line
    assert "'right'" in line


def test_sections_may_share_a_session_by_disjoint_prefixes(write):
    sections = [f"{{name: {p}, session: {SESSION[:-1]}, session_prefix: '{p}/'}}}}" for p in ("p", "q")]
    assert len(load_config(write(f"sections: [{', '.join(sections)}]"), {}).sections) == 2


def test_the_environment_has_a_home_and_a_host_by_default(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "alpha.example.org")
    environment = read_environment({})
    assert environment.home == Path.home() / ".blobhub-fleet"
    assert environment.host == "alpha"
    assert (environment.redis_url, environment.api_url) == (None, None)


def test_the_environments_own_values_are_taken(tmp_path):
    environment = read_environment(
        {"FLEET_HOME": str(tmp_path), "FLEET_HOST": "b", "FLEET_REDIS_URL": "redis://h", "BLOBHUB_API_URL": "http://x"}
    )
    assert environment.home == tmp_path
    assert (environment.host, environment.redis_url, environment.api_url) == ("b", "redis://h", "http://x")


def test_a_host_name_that_no_host_can_have_is_refused():
    with pytest.raises(ConfigError, match="FLEET_HOST: is 'a b'"):
        read_environment({"FLEET_HOST": "a b"})


def test_each_agent_setting_resolves_on_its_own_thread_first(write):
    config = load_config(write("agents: {codex: {model: cm, effort: low, permissions: guarded}}"), {})
    assert resolve_agent_settings(AgentBlock(type="codex", model="tm"), config) == AgentSettings(
        type="codex", executable="", model="tm", effort="low", permissions="guarded"
    )
    assert resolve_agent_settings(AgentBlock(type="claude_code", executable="x"), config) == AgentSettings(
        type="claude_code", executable="x", model="", effort="", permissions="approval"
    )


@pytest.mark.parametrize("agent_type", ["", "scripted", "gemini"])
def test_a_type_that_is_not_configured_fails_the_thread_and_lists_what_is(agent_type):
    with pytest.raises(ThreadFailedError, match="supported: claude_code, codex") as caught:
        resolve_agent_settings(AgentBlock(type=agent_type), FleetConfig())
    assert caught.value.code == "AGENT_TYPE_UNSUPPORTED"


def test_a_single_machine_workers_file_works_as_it_is(write):
    text = """
    polling: {interval_idle_ms: 1500, interval_active_ms: 3000, backoff_max_ms: 30000}
    concurrency: {max_agents: 2, per_work_folder: 1}
    agents: {claude_code: {executable: claude, permissions: approval, wait: held, hold_s: 60, turn_retries: 3, env: {}}}
    policy: {allow_autonomous: false, rules: []}
    attachments: {inbox: .blobhub/inbox}
    sections:
      - name: backend
        job_type: session_agent_harness
        session: {org_id: o, blob_id: b, revision_id: r, session_id: s, session_prefix: ""}
    """
    config = load_config(write(text), {"FLEET_HOST": "solo"})
    assert config.hosts["solo"].work_folders == ("/",)
    assert config.concurrency.per_work_folder == 1


def test_the_owners_policy_is_checked_when_the_file_is_read(write):
    (line,) = refused(write("policy: {rules: [{id: x, effect: execute, action: deny}]}"))
    assert "policy.rules" in line
    assert "execute" in line
