"""Exit codes, and which error ends with which."""

from __future__ import annotations

import sys
import traceback
from enum import IntEnum

from omnimodel.errors import DispatchError, ManifestError, OmniError, Reason


class ExitCode(IntEnum):
    """What a script can tell apart. Documented in docs/cli.md."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    TIMED_OUT = 4
    NO_CONNECTION = 5
    INTERRUPTED = 130


_BY_REASON = {
    Reason.INVALID_MANIFEST: ExitCode.USAGE,
    Reason.MODEL_NOT_FOUND: ExitCode.NOT_FOUND,
    Reason.POOL_NOT_FOUND: ExitCode.NOT_FOUND,
    Reason.DEADLINE_EXCEEDED: ExitCode.TIMED_OUT,
    Reason.LOAD_TIMEOUT: ExitCode.TIMED_OUT,
    Reason.EVICT_TIMEOUT: ExitCode.TIMED_OUT,
}


class ConnectionFailed(OmniError):
    """Nothing answers at the address."""


def exit_code(error: BaseException) -> ExitCode:
    """The code that an error ends the command with."""
    match error:
        case ConnectionFailed():
            return ExitCode.NO_CONNECTION
        case ManifestError():
            return ExitCode.USAGE
        case DispatchError(status=404):
            return ExitCode.NOT_FOUND
        case OmniError():
            return _BY_REASON.get(error.reason, ExitCode.FAILED)
        case TimeoutError():
            return ExitCode.TIMED_OUT
        case _:
            return ExitCode.FAILED


def report_error(error: BaseException, *, debug: bool) -> None:
    """Say on stderr what went wrong."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    elif isinstance(error, OmniError):
        print(f"error: {error}", file=sys.stderr)
    else:
        print(f"error: {type(error).__name__}: {error}; `omni --debug …` shows where", file=sys.stderr)
