"""Memory of processes that may not be traced, as an agent in a pod meets them: those of other users."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omnimodel.agent.private import PrivateMemory

OF_A_POD = "-all,+chown,+dac_override,+fowner,+kill,+setgid,+setpcap,+setuid"  # what the operator leaves to agents
OPERATOR = Path(__file__).parents[2] / "operator"
# The parent holds 64 MiB before it forks; the child becomes another user and takes 32 MiB more when it is told.
PROGRAM = """
import json, os, sys
from omnimodel.agent.private import PrivateMemory
shared = b"x" * (64 << 20)
down, up = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.setresuid(1000, 1000, 1000)
    os.write(up[1], b"1")
    os.read(down[0], 1)
    own = b"y" * (32 << 20)
    os.write(up[1], b"2")
    os.read(down[0], 1)
    os._exit(0)
memory = PrivateMemory()
os.read(up[0], 1)
try:
    open(f"/proc/{child}/smaps_rollup").read()
    traced = True
except PermissionError:
    traced = False
before = memory.of([child])
os.write(down[1], b"1")
os.read(up[0], 1)
after = memory.of([child])
os.write(down[1], b"2")
os.waitpid(child, 0)
print(json.dumps([traced, before, after, memory.of([child])]))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root that can give up rights")
def test_what_another_users_process_takes_is_counted_without_what_it_was_forked_with() -> None:
    command = ["setpriv", f"--bounding-set={OF_A_POD}", sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(OPERATOR)}, check=True)
    traced, before, after, ended = json.loads(done.stdout)
    assert not traced
    assert before == 0
    assert 30 << 20 < after < 40 << 20
    assert ended == 0


def test_ones_own_memory_is_counted_by_page() -> None:
    memory = PrivateMemory()
    before = memory.of([os.getpid()])
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:  # of no heap with room left
        held.write(b"x" * len(held))
        assert 24 << 20 < memory.of([os.getpid()]) - before < 80 << 20


# The parent is the zygote: it holds 64 MiB before it forks, and then ends; the child takes 32 MiB more when it is told.
LEFT = """
import os, sys
shared = b"x" * (64 << 20)
if os.fork():
    sys.stdin.readline()
    os._exit(0)
print(os.getpid(), flush=True)
while os.getppid() == int(sys.argv[1]):
    pass
own = b"y" * (32 << 20)
print("grown", flush=True)
sys.stdin.read()
"""


def test_what_a_process_shared_with_a_zygote_that_has_ended_does_not_become_its_own() -> None:
    program = "import os, sys; sys.argv.append(str(os.getpid()))\n" + LEFT
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as zygote:
        pid = int(zygote.stdout.readline())
        memory = PrivateMemory()
        before = memory.of([pid])
        assert before < 16 << 20
        zygote.stdin.write("end\n")
        zygote.stdin.flush()
        assert zygote.stdout.readline() == "grown\n"
        assert PrivateMemory().of([pid]) > before + (90 << 20)
        after = PrivateMemory({pid: memory.shared[pid]}).of([pid])
        assert (30 << 20) < after - before < (36 << 20)
        zygote.stdin.close()
