"""Kinds of hosts, a model's files beside another one's on them, and what is tried from inside."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.attempt import (
    CONTAINER_ROOT,
    CONTAINER_USER,
    COVERED_PROC,
    NO_PIVOT,
    PYTHON,
    ROOT,
    ROOT_WITHOUT_SYS_ADMIN,
    USER,
    Machine,
    Outcome,
)
from omnimodel.isolation import SandboxPlan

REAL_HOST = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="kinds of hosts are made by giving up root's privileges"),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"needs {PYTHON}, which every user can reach"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux"),
]

NAMESPACES = [ROOT, ROOT_WITHOUT_SYS_ADMIN, USER, COVERED_PROC, NO_PIVOT]
LANDLOCK = [CONTAINER_ROOT, CONTAINER_USER]
ALL = [*NAMESPACES, *LANDLOCK]
UID = 21000


def names(machine: Machine) -> str:
    return machine.name.replace(" ", "-")


on_namespaces = pytest.mark.parametrize("machine", NAMESPACES, ids=names)
on_landlock = pytest.mark.parametrize("machine", LANDLOCK, ids=names)
on_all = pytest.mark.parametrize("machine", ALL, ids=names)


class Host:
    """A model's files beside another one's, on a folder that every user can reach."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.image = root / "mine"
        self.other = root / "other"
        self.output = root / "output"
        self.scratch = root / "scratch"
        for folder in (self.image, self.other, self.output, self.scratch):
            folder.mkdir()
            (folder / "index.json").write_text("{}")
            (folder / "index.json").chmod(0o666)
            folder.chmod(0o777)

    def plan(self, **changes: object) -> SandboxPlan:
        base = SandboxPlan(
            "promise",
            uid=UID,
            hostname="smollm2",
            read_only=(str(self.image),),
            writable=(str(self.output),),
            scratch=str(self.scratch),
            memory_bytes=256 << 20,
            tmp_bytes=4 << 20,
            shm_bytes=2 << 20,
        )
        return replace(base, **changes)


TRY = """
def tried(step):
    try:
        return step() or True
    except OSError as error:
        return error.strerror
"""
CONNECT = (
    TRY
    + """
import socket
def connect():
    with socket.socket() as sock:
        sock.settimeout(5)
        sock.connect(('127.0.0.1', port))
answer['loopback'] = tried(connect)
"""
)


def done(outcome: Outcome) -> dict:
    assert not outcome.error, outcome.error
    return outcome.answer
