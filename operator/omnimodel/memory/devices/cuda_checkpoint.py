"""Park: the driver moves what is left of a process (context, workspaces) to host memory, so that 0 bytes stay.

The driver does it without the process's help, but not safely in every state, as measured:
- with an imported frame still mapped the checkpoint succeeds and the restore never returns: refused here;
- a restore needs its bytes free, and two at once race for them: one at a time;
- a restore that fails or hangs leaves nothing to save: the caller kills the process and starts it cold.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from omnimodel.errors import LedgerError, OmniError, ProcessError
from omnimodel.memory.devices import RestoreFailedError
from omnimodel.memory.devices.cuda_driver import call, driver

log = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()
LOCK_SECONDS = 10.0
STEP_SECONDS = 20.0  # a checkpoint of 16 GiB takes 9.6, of what evicted processes have 0.4; a restore less


def state(pid: int) -> str:
    """What the driver says of a process: `running`, `locked`, `checkpointed` or `failed`."""
    value = call("cuCheckpointProcessGetState", pid)
    return str(value.name).removeprefix("CU_PROCESS_STATE_").lower()


def park(pid: int, *, frames_mapped: bool) -> float:
    """Take everything a process has on its devices to host memory; it stands still until `unpark`.

    Args:
        pid: of the process, as this process numbers it.
        frames_mapped: whether the process has not yet acknowledged an evict.

    Returns:
        Seconds that it took.

    Raises:
        LedgerError: frames are still mapped.
        ProcessError: the driver refused; the process runs on.
        RestoreFailedError: the driver failed half-way.
    """
    if frames_mapped:
        raise LedgerError(f"process {pid}", "has frames mapped and cannot be parked", "evict it first")
    began = time.perf_counter()
    arguments = driver().CUcheckpointLockArgs()
    arguments.timeoutMs = int(LOCK_SECONDS * 1e3)
    with _one_at_a_time:
        try:
            call("cuCheckpointProcessLock", pid, arguments)
        except OmniError as error:
            raise ProcessError(f"process {pid}", f"cannot be parked: {error.problem}") from error
        try:
            _within(STEP_SECONDS, "cuCheckpointProcessCheckpoint", pid)
        except OmniError as error:
            _unlock_after_failure(pid, error)
            raise ProcessError(f"process {pid}", f"cannot be parked: {error.problem}") from error
    seconds = time.perf_counter() - began
    log.info("parked pid=%d seconds=%.3f", pid, seconds)
    return seconds


def _unlock_after_failure(pid: int, error: OmniError) -> None:
    try:
        call("cuCheckpointProcessUnlock", pid, None)
    except OmniError as second:
        raise RestoreFailedError(
            f"process {pid}", f"failed while it was parked: {error.problem}, {second.problem}", "kill it and start it"
        ) from error


def unpark(pid: int) -> float:
    """Bring a parked process back; its bytes must be free on the device before.

    Returns:
        Seconds that it took.

    Raises:
        RestoreFailedError: it did not come back in time; kill it and start it cold.
    """
    began = time.perf_counter()
    with _one_at_a_time:
        try:
            _within(STEP_SECONDS, "cuCheckpointProcessRestore", pid)
            _within(LOCK_SECONDS, "cuCheckpointProcessUnlock", pid)
        except OmniError as error:
            raise RestoreFailedError(
                f"process {pid}", f"cannot be brought back: {error.problem}", "kill it and start it cold"
            ) from error
    seconds = time.perf_counter() - began
    log.info("unparked pid=%d seconds=%.3f", pid, seconds)
    return seconds


def _within(seconds: float, name: str, pid: int) -> None:
    """Call the driver in a thread, because a restore is known to hang; the thread ends when the process is killed."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call(name, pid, None))
        except OmniError as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise OmniError(f"process {pid}", f"{name} has not returned after {seconds:.0f} s")
    if isinstance(outcome[0], OmniError):
        raise outcome[0]
