"""The device protocol on the cuda backend, on a real GPU; the same suite as on the host backend."""

from __future__ import annotations

import numpy as np
import pytest

from memory.codec_values import normal_fp8
from memory.conformance import *  # noqa: F403
from memory.conformance import Backend, pattern
from omnimodel.memory.codec_file import pack
from omnimodel.memory.devices.cuda_driver import available
from omnimodel.memory.index import PACKED_FILE

if not available():
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

from gpu.weights import Tensor, weights
from omnimodel.memory.devices.cuda import CudaDevice, CudaWindow
from omnimodel.memory.devices.cuda_driver import call

pytestmark = pytest.mark.gpu
FRAME = 2 << 20


def read(frame) -> bytes:
    found = np.empty(FRAME, np.uint8)
    call("cuMemcpyDtoH", found.__array_interface__["data"][0], frame.handle.address, FRAME)
    return found.tobytes()


@pytest.fixture
def backend():
    device = CudaDevice("cuda:0", FRAME, arena_bytes=256 << 20)
    assert device.arena.wait(60)

    def fill(frame, value):
        call("cuMemsetD8", frame.handle.address, value, FRAME)
        device.context.synchronize()

    total = device.context.total_bytes()
    yield Backend(device, lambda frames: CudaWindow("cuda:0", frames, FRAME), read, fill, too_many=total // FRAME + 1)
    device.close()


@pytest.mark.parametrize("whole", [True, False], ids=["in the arena", "read on the way"])
def test_a_packed_image_is_decoded_by_the_kernel(backend, tmp_path, whole):
    size, half = 40 * FRAME + 8192, 20 * FRAME
    body = weights(half, 1) + normal_fp8(size - half - 4096, 1).tobytes() + pattern(4096, 1)
    (tmp_path / "raw").write_bytes(body)
    path = tmp_path / PACKED_FILE
    tensors = [Tensor("bfloat16", 0, half), Tensor("float8_e4m3fn", half, size - half - 4096)]
    pack(str(tmp_path / "raw"), tensors, FRAME, str(path), threads=4)
    held = backend.device.create(41)
    for frame in held:
        backend.fill(frame, 0xEE)
    staged = backend.device.stage(str(path), size, whole=whole)
    assert backend.device.decodes()
    for _turn in range(3):
        backend.device.copy(staged, held).wait(60)
        found = b"".join(read(frame) for frame in held)
        assert found[:size] == body
        assert found[size:] == bytes(len(found) - size)
        backend.fill(held[7], 0xEE)
    backend.device.unstage(staged)
