"""The heap of a zygote has no holes when models are forked from it, and a process has its share of a GPU."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnimodel.runtime.allocator import bound_device

OPERATOR = Path(__file__).parents[2] / "operator"

# Every other of many small blocks is freed: half of them are holes between blocks that stay.
FRAGMENTED = """
import ctypes
from omnimodel.runtime.allocator import _Statistics, fill_holes

library = ctypes.CDLL(None)
library.mallinfo2.restype, library.malloc.restype = _Statistics, ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def holes():
    found = library.mallinfo2()
    return found.fordblks - found.keepcost

blocks = [library.malloc(size) for size in (40, 200, 1000, 3000) for _ in range(4000)]
for block in blocks[::2]:
    library.free(block)
before = holes()
fill_holes()
after = holes()
lowest = min(library.malloc(40) for _ in range(1000))
print(before, after, lowest > max(blocks))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not the C library of GNU")
def test_after_the_holes_are_filled_blocks_come_from_the_end_of_the_heap():
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTED],
        env={"PYTHONPATH": str(OPERATOR)},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, beyond = done.stdout.split()
    assert int(before) > 8 << 20
    assert int(after) < 1 << 18
    assert beyond == "True"


def test_torch_is_told_what_share_of_the_gpu_a_process_may_have(monkeypatch):
    told = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        get_device_properties=lambda _: SimpleNamespace(total_memory=80 << 30),
        set_per_process_memory_fraction=lambda share, device: told.append((share, device)),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    for limit_bytes in (20 << 30, 0, 90 << 30):
        bound_device(limit_bytes)
    cuda.is_initialized = lambda: False
    bound_device(20 << 30)
    assert told == [(0.25, 0), (1.0, 0)]
