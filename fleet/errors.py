"""The catalogue of errors: a code, what is wrong with which value, what to do.

Codes in capitals are the protocol's and appear in threads; the others are the fleet's own and appear in the terminal
and in logs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One kind of error: when it is raised, and the remedy shown with it."""

    meaning: str
    remedy: str


CATALOGUE: dict[str, Entry] = {
    # Thread codes, protocol §3
    "WORK_FOLDER_NOT_ABSOLUTE": Entry(
        "workspace.work_folder is missing or not an absolute path", "write an absolute path and set state to pending"
    ),
    "WORK_FOLDER_NOT_FOUND": Entry(
        "the work folder does not exist on its host", "create it, then set state to pending"
    ),
    "WORK_FOLDER_NOT_A_DIR": Entry("the work folder is not a directory", "name a directory, then set state to pending"),
    "WORK_FOLDER_NOT_READABLE": Entry(
        "the worker may not read the work folder", "grant read access, then set state to pending"
    ),
    "WORK_FOLDER_OUTSIDE_ROOTS": Entry(
        "the work folder resolves to a place outside every root of its host",
        "name the real path, or add the root to hosts.NAME.work_folders",
    ),
    "AGENT_TYPE_UNSUPPORTED": Entry("agent.type names no agent of this fleet", "use one of the types that are listed"),
    "PERMISSIONS_UNSUPPORTED": Entry(
        "agent.permissions is not supported by this agent", "use autonomous, approval or guarded"
    ),
    "POLICY_MISSING": Entry("permissions is guarded but the thread has no policy", "add a policy block"),
    "POLICY_AUTONOMOUS_FORBIDDEN": Entry(
        "the machine's owner forbids autonomous agents", "use approval or guarded, or set policy.allow_autonomous"
    ),
    "POLICY_INVALID": Entry("the policy block has a word that is not in the vocabulary", "correct the policy block"),
    "AGENT_EXECUTABLE_NOT_FOUND": Entry(
        "the agent's executable is not on the host's PATH", "install it, or set agents.TYPE.executable"
    ),
    "AGENT_CRASHED": Entry(
        "three attempts of one turn were interrupted", "look into the host's thread.log, then set state to pending"
    ),
    "THREAD_POST_FAILED": Entry("the platform refuses an item for good", "read the detail, then set state to pending"),
    "THREAD_ITEM_TOO_LARGE": Entry(
        "an item stays over the budget even without its long fields", "read it in the host's thread.log"
    ),
    "THREAD_ENVELOPE_INVALID": Entry("the thread's value has another shape than the protocol's", "correct the block"),
    "ACTIVATION_UNKNOWN": Entry(
        "the thread's host did not start this activation, or has lost its state folder", "set state to pending"
    ),
    # The fleet's own
    "config_invalid": Entry("a key or a value of the configuration is wrong", "correct it as the message says"),
    "config_not_found": Entry(
        "there is no configuration file", "write fleet.yaml, or point FLEET_CONFIG or --config at it"
    ),
    "key_missing": Entry(
        "there is no API key", "set BLOBHUB_API_KEY, BLOBHUB_API_KEY_FILE, or write ~/.blobhub/credentials.yaml"
    ),
    "key_refused": Entry("the platform does not accept the API key", "check the key and the platform's URL"),
    "signing_key_invalid": Entry(
        "the fleet's signing key can't be used",
        "set FLEET_SIGNING_KEY or FLEET_SIGNING_KEY_FILE to the same long random text on every machine, or neither",
    ),
    "credentials_exposed": Entry("the credentials file can be read by others", "chmod 600 it"),
    "person_key_missing": Entry(
        "there is no key of a person", "set FLEET_PERSON_API_KEY or FLEET_PERSON_API_KEY_FILE to speak as a person"
    ),
    "home_in_use": Entry("another fleet runs in this state folder", "end it, or set FLEET_HOME to another folder"),
    "host_unwritable": Entry(
        "the host can't write its state folder: its disk is full or read-only",
        "free space there; what waits goes on by itself",
    ),
    "redis_failed": Entry("the embedded Redis does not start", "read the end of its log"),
    "redis_unreachable": Entry("Redis does not answer", "start it, or correct FLEET_REDIS_URL"),
    "redis_missing": Entry(
        "there is no redis-server to embed", "install Redis or the redis extra, or set FLEET_REDIS_URL"
    ),
    "platform_unreachable": Entry("the platform does not answer", "check BLOBHUB_API_URL and the network"),
    "host_unknown": Entry(
        "this machine's name is not among the hosts of the configuration", "set FLEET_HOST to one of them"
    ),
    "format_newer": Entry(
        "a newer release has written it", "nothing, if the fleet is being upgraded; else upgrade this machine's fleet"
    ),
    "session_unknown": Entry("no such section or session", "name one of the configured sections"),
    "log_missing": Entry(
        "this machine has no log of the thread", "run it on the thread's host, which `fleet status` names"
    ),
    "thread_unknown": Entry("there is no such thread", "see `fleet thread ls`"),
    "thread_exists": Entry("there is already an object with that alias", "choose another alias"),
    "alias_invalid": Entry(
        "an alias is 1 to 256 characters of A-Za-z0-9._@- in segments separated by /", "choose another alias"
    ),
    "argument_invalid": Entry("a value on the command line or in a task message is wrong", "correct it"),
}


class FleetError(Exception):
    """An error of the catalogue.

    Parameters:
        code: a key of `CATALOGUE`.
        detail: what is wrong with which value; never a secret.
    """

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail
        self.remedy = CATALOGUE[code].remedy
        super().__init__(f"{detail} [{code}]: {self.remedy}")


class ConfigError(FleetError):
    """The configuration can't be used; the process ends with status 2."""


class ThreadFailedError(FleetError):
    """The thread must fail with a code of protocol §3."""
