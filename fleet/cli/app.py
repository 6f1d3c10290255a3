"""The root of the command, and the one place where errors become a line and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from fleet import __version__
from fleet.cli.answer import answer
from fleet.cli.config import config
from fleet.cli.demo import demo
from fleet.cli.doctor import doctor
from fleet.cli.hosts import hosts
from fleet.cli.logs import logs
from fleet.cli.policy import policy
from fleet.cli.processes import beat, host, platform, up
from fleet.cli.section import section
from fleet.cli.status import status
from fleet.cli.text import plain
from fleet.cli.thread import thread
from fleet.errors import ConfigError, FleetError

#: Codes of what the caller has to correct: configuration, usage, credentials. They end with status 2, others with 1.
CALLERS_CODES = frozenset(
    {
        "config_invalid",
        "config_not_found",
        "key_missing",
        "key_refused",
        "credentials_exposed",
        "host_unknown",
        "session_unknown",
        "alias_invalid",
        "home_in_use",
        "person_key_missing",
        "argument_invalid",
    }
)
CALLERS_STATUS, OTHER_STATUS = 2, 1
#: Status after Ctrl-C, as shells have it.
INTERRUPTED_STATUS = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Coding agents on several machines, driven by BlobHub threads."""


thread.add_command(answer)
for command in (up, host, beat, platform, status, doctor, config, policy, hosts, logs, section, thread, demo):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    debug = "--debug" in sys.argv[1:]
    try:
        status_ = cli.main(prog_name="fleet", standalone_mode=False)
    except FleetError as error:
        _end(f"{error}", CALLERS_STATUS if is_callers(error) else OTHER_STATUS, debug=debug)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED_STATUS)
    except BrokenPipeError:
        # The reader of a pipe has seen enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OTHER_STATUS)
    except Exception as error:
        _end(f"{type(error).__name__}: {error}; `fleet --debug …` shows where", OTHER_STATUS, debug=debug)
    sys.exit(status_ or 0)


def is_callers(error: FleetError) -> bool:
    """Tell whether the caller has to correct something, rather than something else being down."""
    return isinstance(error, ConfigError) or error.code in CALLERS_CODES


def _end(line: str, status_: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    print(f"fleet: {plain(line)}", file=sys.stderr)
    sys.exit(status_)
