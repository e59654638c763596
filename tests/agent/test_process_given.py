"""What one model's process is given, and what it is not: secrets, descriptors, folders, frames, libraries."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from agent.children import children, run

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make control groups and users"),
]


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


async def test_secrets_reach_the_process_and_nobody_else(tmp_path: Path) -> None:
    secret = "secret-" + random.Random().randbytes(16).hex()
    async with children(tmp_path) as many:
        process = await many.make(env={"TOKEN": secret})
        other = await many.make()
        assert (await run(process, "answer['t'] = os.environ['TOKEN']"))["t"] == secret
        assert "t" not in await run(other, "if 'TOKEN' in os.environ: answer['t'] = 1")
        for pid in (many.spawner.zygotes.processes()[0][0], other.pid):
            assert secret.encode() not in _memory(pid)
        assert secret.encode() in _memory(process.pid)


def _memory(pid: int) -> bytes:
    """All of a process's own writable memory."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split()
            if mode.startswith("rw"):
                first, last = (int(part, 16) for part in span.split("-"))
                try:
                    memory.seek(first)
                    found.append(memory.read(last - first))
                except OSError:
                    continue
    return b"".join(found)


async def test_it_inherits_only_the_descriptors_it_was_given(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        await many.make()
        process = await many.make()
        folder = "/proc/self/fd"
        links = (
            f"[os.readlink(f'{folder}/{{n}}') for n in os.listdir('{folder}') if os.path.lexists(f'{folder}/{{n}}')]"
        )
        answer = await run(process, f"answer['fds'] = {links}")
        kinds = sorted(link.split(":")[0] for link in answer["fds"])
        assert kinds == ["/dev/null", "pipe", "pipe", "socket"]


async def test_its_folders_are_given_to_its_user(tmp_path: Path) -> None:
    output = tmp_path / "staging"
    output.mkdir(mode=0o700)
    async with children(tmp_path) as many:
        process = await many.make(writable=(str(output),))
        await run(process, f"open({str(output)!r} + '/image', 'w').write('weights')")
    assert (output / "image").read_text() == "weights"


async def test_libraries_and_programs_inside_work_with_this_interpreter(tmp_path: Path) -> None:
    look = """
import psutil, subprocess, sys, ctypes, ssl, sqlite3, pwd, getpass, tempfile, locale
answer['memory'] = psutil.virtual_memory().total
answer['program'] = subprocess.run([sys.executable, '-c', 'import json; print(7)'], capture_output=True).stdout.decode()
answer['name'] = getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name
answer['folder'] = tempfile.gettempdir(), os.getcwd()
answer['cores'] = len(os.sched_getaffinity(0)) > 0 and os.cpu_count() > 0
answer['program_is_mine'] = os.access(sys.executable, os.X_OK)
"""
    async with children(tmp_path) as many:
        answer = await run(await many.make(memory_bytes=128 << 20), look)
    assert answer["memory"] == 128 << 20
    assert answer["program"] == "7\n"
    assert answer["name"] == ["model", "model"]
    assert answer["folder"] == ["/tmp", "/tmp"]
    assert answer["cores"]
    assert answer["program_is_mine"]


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="this machine gives nobody large pages"
)
async def test_its_allocator_gets_large_pages_when_it_is_told_to(tmp_path: Path) -> None:
    program = "memory = bytearray(64 << 20); print(open('/proc/self/smaps_rollup').read())"
    look = f"""
import subprocess, sys
os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
answer['rollup'] = subprocess.run([sys.executable, '-c', {program!r}], capture_output=True).stdout.decode()
"""
    async with children(tmp_path) as many:
        rollup = (await run(await many.make(memory_bytes=256 << 20), look))["rollup"]
    (large,) = (line.split() for line in rollup.splitlines() if line.startswith("AnonHugePages:"))
    assert int(large[1]) << 10 >= 32 << 20


async def test_it_cannot_reopen_a_frame_for_writing(tmp_path: Path) -> None:
    frame = os.memfd_create("frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(frame, 0o600)
    os.truncate(frame, 4096)
    shown = os.open(f"/proc/self/fd/{frame}", os.O_RDONLY | os.O_CLOEXEC)
    tries = """
import mmap
for name, step in {
    'reopen': lambda: os.open(f'/proc/self/fd/{received[0]}', os.O_RDWR),
    'write': lambda: os.write(received[0], b'x'),
    'map': lambda: mmap.mmap(received[0], 0),
    'truncate': lambda: os.ftruncate(received[0], 0),
}.items():
    try:
        step(); answer[name] = 'done'
    except OSError as error:
        answer[name] = error.strerror
"""
    async with children(tmp_path) as many:
        answer = await run(await many.make(), tries, descriptors=[shown])
    os.close(frame)
    os.close(shown)
    assert answer["reopen"] == "Permission denied"
    assert "done" not in answer.values()
