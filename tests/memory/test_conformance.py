"""The device protocol on the host backend."""

from __future__ import annotations

import ctypes

import pytest

from memory.conformance import *  # noqa: F403
from memory.conformance import Backend
from omnimodel.memory.devices.host import HostDevice
from omnimodel.memory.devices.host_window import HostWindow

FRAME = 4 << 20


@pytest.fixture
def backend():
    device = HostDevice(FRAME, threads=2)
    yield Backend(
        device,
        window=lambda frames: HostWindow(frames, FRAME),
        read=lambda frame: ctypes.string_at(frame.handle.address, FRAME),
        fill=lambda frame, value: ctypes.memset(frame.handle.address, value, FRAME),
        too_many=device.free_bytes() // FRAME + 1000,
    )
    device.close()
