"""Parking: when it is refused, what a failed or hanging restore becomes, and that one runs at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

import cuda.bindings.driver as real

from gpu.emulated import EmulatedDriver
from omnimodel.errors import LedgerError, ProcessError
from omnimodel.memory.devices import RestoreFailedError, cuda_checkpoint, cuda_driver
from omnimodel.memory.devices.cuda_checkpoint import park, state, unpark

REFUSED = real.CUresult.CUDA_ERROR_ILLEGAL_STATE


@pytest.fixture
def driver(monkeypatch):
    emulated = EmulatedDriver(capacity_bytes=1 << 30)
    monkeypatch.setattr(cuda_driver, "_loaded", [emulated])
    return emulated


def scripted(driver, **results):
    """Steps return what is given for them, and are written down."""
    steps: list[str] = []

    def checkpoint(name, _pid):
        steps.append(name)
        result = results.get(name, ())
        return result() if callable(result) else result

    driver.checkpoint = checkpoint
    return steps


def test_park_locks_and_checkpoints_and_unpark_restores_and_unlocks(driver):
    steps = scripted(driver)
    park(7, frames_mapped=False)
    unpark(7)
    assert steps == ["lock", "checkpoint", "restore", "unlock"]
    assert state(7) == "checkpointed"


def test_a_process_with_frames_is_not_touched(driver):
    steps = scripted(driver)
    with pytest.raises(LedgerError, match="evict it first"):
        park(7, frames_mapped=True)
    assert steps == []


def test_a_process_that_cannot_be_locked_runs_on(driver):
    steps = scripted(driver, lock=REFUSED)
    with pytest.raises(ProcessError, match="cannot be parked"):
        park(7, frames_mapped=False)
    assert steps == ["lock"]


def test_a_failed_checkpoint_is_unlocked_so_that_the_process_runs_on(driver):
    steps = scripted(driver, checkpoint=REFUSED)
    with pytest.raises(ProcessError, match="cannot be parked") as caught:
        park(7, frames_mapped=False)
    assert not isinstance(caught.value, RestoreFailedError)
    assert steps == ["lock", "checkpoint", "unlock"]


@pytest.mark.parametrize("step", ["checkpoint", "restore", "unlock"])
def test_a_failure_that_leaves_the_process_still_says_to_kill_it(driver, step):
    results = {step: REFUSED, "unlock": REFUSED}
    scripted(driver, **results)
    with pytest.raises(RestoreFailedError, match="kill it"):
        park(7, frames_mapped=False) if step == "checkpoint" else unpark(7)


def test_a_restore_that_hangs_is_given_up(driver, monkeypatch):
    monkeypatch.setattr(cuda_checkpoint, "STEP_SECONDS", 0.05)
    release = threading.Event()
    scripted(driver, restore=lambda: release.wait(30) and ())
    try:
        with pytest.raises(RestoreFailedError, match="has not returned"):
            unpark(7)
    finally:
        release.set()


def test_one_at_a_time(driver):
    inside, most = [0], [0]
    lock = threading.Lock()
    both = threading.Event()

    def restore():
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        both.wait(0.05)
        with lock:
            inside[0] -= 1
        return ()

    scripted(driver, restore=restore)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(unpark, range(4)))
    assert most[0] == 1
