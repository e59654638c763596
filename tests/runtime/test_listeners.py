"""Whose socket listens on a port, where other processes can be seen and where they cannot."""

from __future__ import annotations

import os
import socket

import pytest

from omnimodel.runtime.engines.listeners import listens_for


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def nothing(path: str) -> list[str]:
    raise PermissionError(path)


def test_it_is_known_by_the_session_of_its_process(port: int) -> None:
    assert listens_for(port, os.getsid(0))
    assert listens_for(1, 1)  # nobody listens: nothing speaks against it


def test_under_landlock_it_is_known_by_its_user(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", nothing)
    assert listens_for(port, 1)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert not listens_for(port, 1)
