"""The command line: what a command raises, and Ctrl-C at any moment, become a line and a code.

Everything that takes time to import is imported inside ``main``, where Ctrl-C is awaited.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from sim.errors import HetlabError, StoppedError

__all__ = ["main"]

EXIT_UNEXPECTED = 1
_STOPPED = "hetlab: stopped before there was a result"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code the error class names.

    Args:
        argv: arguments after the program name; None means those of this process.
    """
    try:
        _run(None if argv is None else list(argv))
    except SystemExit as stop:
        # A command that Ctrl-C ended; one that still had a result has printed it.
        if stop.code == StoppedError.exit_code and _interrupted(stop):
            _report(_STOPPED)
        raise
    except KeyboardInterrupt:
        _report(_STOPPED)
        sys.exit(StoppedError.exit_code)
    except HetlabError as error:
        _report(f"hetlab: {error}")
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last place that can turn it into one message
        if _interrupted(error):
            # Extension modules turn Ctrl-C during their import into errors of their own.
            _report(_STOPPED)
            sys.exit(StoppedError.exit_code)
        _report(f"hetlab: unexpected {type(error).__name__}: {error} (--debug shows where)")
        sys.exit(EXIT_UNEXPECTED)
    sys.exit(0)


def _run(argv: list[str] | None) -> None:
    import logging

    from sim import root_command
    from sim.cli_output import set_up_logging
    from sim.settings import read_settings

    set_up_logging(logging.DEBUG if read_settings().debug else logging.INFO)
    root_command.build_app()(args=argv, prog_name="hetlab")


def _interrupted(error: BaseException) -> bool:
    """Whether an exception comes from Ctrl-C."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _report(message: str) -> None:
    if "sim.cli_output" not in sys.modules:
        sys.stderr.write(message + "\n")
        return
    import logging

    from sim.cli_output import logger, stderr_console

    # Debug is a property of the logger, so that it needs no state beside the parser's.
    if logger.isEnabledFor(logging.DEBUG):
        logger.exception("traceback")
    stderr_console().print(message, markup=False, highlight=False, soft_wrap=True)
