"""The state directory: one system a directory, an address to find it by, identities that outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnimodel.catalog import Identity
from omnimodel.controllers.local_state import ADDRESS_FILE, IdentityFile, StateLock
from omnimodel.errors import OmniError, Reason

HOLDER = """
import sys
from pathlib import Path
from omnimodel.controllers.local_state import StateLock
with StateLock(Path(sys.argv[1])) as lock:
    lock.publish_address("http://127.0.0.1:1")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that runs on the state directory."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "operator")}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_system_on_a_state_directory_is_refused_and_told_the_pid(holder, tmp_path: Path) -> None:
    with pytest.raises(OmniError) as refusal, StateLock(tmp_path):
        pass
    assert refusal.value.reason == Reason.STATE_DIR_IN_USE
    assert str(holder.pid) in str(refusal.value)
    assert (tmp_path / ADDRESS_FILE).exists(), "the refused one must not touch the other's files"


def test_a_killed_system_leaves_neither_lock_nor_address(holder, tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ADDRESS_FILE).exists()
    with StateLock(tmp_path):
        assert not (tmp_path / ADDRESS_FILE).exists(), "clients must not be sent to a system that is gone"


def test_the_lock_does_not_outlive_its_owner_in_a_child(tmp_path: Path) -> None:
    with StateLock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with StateLock(tmp_path):
            pass
    finally:
        child.communicate(b"\n")


def test_the_address_goes_when_the_system_ends(tmp_path: Path) -> None:
    with StateLock(tmp_path) as lock:
        lock.publish_address("http://127.0.0.1:8080")
        assert (tmp_path / ADDRESS_FILE).read_text().strip() == "http://127.0.0.1:8080"
    assert not (tmp_path / ADDRESS_FILE).exists()


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OmniError, match="--state-dir"), StateLock(tmp_path / "file" / "state"):
        pass


KEY = ("OmniModel", "default", "words")


def test_identities_outlive_a_restart(tmp_path: Path) -> None:
    identity = Identity("uid-1", "2026-11-29T12:00:00Z", 3, "abc")
    IdentityFile(tmp_path / "objects.json").write({KEY: identity})
    assert IdentityFile(tmp_path / "objects.json").read() == {KEY: identity}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a/b/c": {"uid": "x"}}', '{"a": {}}', "\x00\xff"])
def test_a_damaged_identity_file_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "objects.json").write_text(text, encoding="utf-8")
    assert IdentityFile(tmp_path / "objects.json").read() == {}


def test_a_missing_identity_file_is_an_empty_one(tmp_path: Path) -> None:
    assert IdentityFile(tmp_path / "objects.json").read() == {}
