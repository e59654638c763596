"""Promises of the sandbox, tried from inside: processes, sockets, memory and space of others stay theirs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from isolation.attempt import (
    CONTAINER_ROOT,
    CONTAINER_USER,
    ROOT,
    ROOT_WITHOUT_SYS_ADMIN,
    Machine,
    attempt,
)
from isolation.host import (
    CONNECT,
    REAL_HOST,
    TRY,
    Host,
    done,
    names,
    on_all,
    on_landlock,
    on_namespaces,
)
from omnimodel.isolation import Level

pytestmark = REAL_HOST


# Processes


@on_all
def test_it_cannot_see_other_processes_or_their_environment(
    host: Host, machine: Machine, neighbour: subprocess.Popen
) -> None:
    code = (
        TRY
        + """
answer['listed'] = tried(lambda: [name for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()])
answer['cmdline'] = tried(lambda: open(f'/proc/{pid}/cmdline').read())
answer['environ'] = tried(lambda: open(f'/proc/{pid}/environ').read())
answer['me'] = bool(open('/proc/self/cmdline').read())
"""
    )
    answer = done(attempt(machine, host.plan(), code, pid=neighbour.pid))
    assert answer["me"]
    assert answer["listed"] in ([], True, "Permission denied")
    assert answer["cmdline"] in {"No such file or directory", "Permission denied"}
    assert answer["environ"] in {"No such file or directory", "Permission denied"}


@on_all
def test_it_cannot_signal_or_trace_others(host: Host, machine: Machine, neighbour: subprocess.Popen) -> None:
    code = (
        TRY
        + """
from omnimodel.isolation import syscalls
answer['signal'] = tried(lambda: os.kill(pid, 9))
answer['trace'] = tried(lambda: syscalls.check(syscalls.libc.ptrace(16, pid, 0, 0)))
answer['all'] = tried(lambda: os.kill(-1, 9))
"""
    )
    answer = done(attempt(machine, host.plan(), code, pid=neighbour.pid))
    assert answer["signal"] in {"No such process", "Operation not permitted"}
    assert answer["trace"] == "Operation not permitted"
    assert neighbour.poll() is None


@on_all
def test_threads_and_subprocesses_work(host: Host, machine: Machine) -> None:
    code = """
import threading, subprocess, sys
seen = []
thread = threading.Thread(target=lambda: seen.append(1)); thread.start(); thread.join()
answer['threads'] = seen
answer['program'] = subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout
"""
    assert done(attempt(machine, host.plan(), code)) == {"threads": [1], "program": "42\n"}


@pytest.mark.parametrize("machine", [ROOT, ROOT_WITHOUT_SYS_ADMIN, CONTAINER_ROOT], ids=names)
def test_a_fork_bomb_stops_at_its_limit_without_control_groups(host: Host, machine: Machine) -> None:
    code = """
import time, signal
made = []
try:
    while len(made) < 200:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        made.append(pid)
except OSError as error:
    answer['stopped'] = error.strerror
for pid in made:
    os.kill(pid, 9)
answer['made'] = len(made)
"""
    answer = done(attempt(machine, host.plan(processes=16), code))
    assert answer["stopped"] == "Resource temporarily unavailable"
    assert answer["made"] <= 16


# Sockets and the network


@on_all
def test_it_cannot_reach_the_network(host: Host, machine: Machine, listener: socket.socket) -> None:
    answer = done(attempt(machine, host.plan(), CONNECT, port=listener.getsockname()[1]))
    assert answer["loopback"] in {"Connection refused", "Address family not supported by protocol"}


@on_all
def test_it_reaches_the_network_when_allowed(host: Host, machine: Machine, listener: socket.socket) -> None:
    answer = done(attempt(machine, host.plan(network=True), CONNECT, port=listener.getsockname()[1]))
    assert answer["loopback"] is True


@on_namespaces
def test_it_has_a_loopback_of_its_own_and_no_other_interface(host: Host, machine: Machine) -> None:
    code = (
        TRY
        + """
import socket
answer['names'] = [name for _, name in socket.if_nameindex()]
server = socket.create_server(('127.0.0.1', 8000))
client = socket.create_connection(server.getsockname())
answer['out'] = tried(lambda: socket.create_connection(('192.0.2.1', 80), timeout=5))
"""
    )
    assert done(attempt(machine, host.plan(), code)) == {"names": ["lo"], "out": "Network is unreachable"}


@on_landlock
def test_without_namespaces_a_foreign_engine_has_loopback_and_that_is_said(
    host: Host, machine: Machine, listener: socket.socket
) -> None:
    outcome = attempt(machine, host.plan(loopback=True), CONNECT, port=listener.getsockname()[1])
    assert outcome.answer["loopback"] is True
    assert any(sentence.startswith("no network") for sentence in outcome.missing)


@on_all
@pytest.mark.parametrize("network", [False, True], ids=["without-network", "with-network"])
def test_it_cannot_reach_abstract_sockets_of_others(host: Host, machine: Machine, network: bool) -> None:
    name = f"\0omnimodel-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = TRY + "import socket\nanswer['x'] = tried(lambda: socket.socket(socket.AF_UNIX).connect(name))"
        answer = done(attempt(machine, host.plan(network=network), code, name=name))
    assert answer["x"] in {"Connection refused", "Operation not permitted"}


KNOCK = TRY + "import socket\nanswer['x'] = tried(lambda: socket.socket(socket.AF_UNIX).connect(path))"


@contextmanager
def unix_socket(host: Host, mode: int, uid: int = 0) -> Iterator[str]:
    """The path of one that somebody listens on, in a folder that everybody may enter."""
    path = str(host.other / "agent.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.chmod(path, mode)
        os.chown(path, uid, uid)
        server.listen()
        yield path


@on_namespaces
def test_it_cannot_reach_unix_sockets_of_others(host: Host, machine: Machine) -> None:
    with unix_socket(host, 0o666) as path:
        assert done(attempt(machine, host.plan(), KNOCK, path=path)) == {"x": "No such file or directory"}


@pytest.mark.parametrize("wanted", list(Level), ids=str)
@on_all
def test_it_cannot_reach_unix_sockets_that_are_for_another_user_alone(
    host: Host, machine: Machine, wanted: Level
) -> None:
    with unix_socket(host, 0o600) as path:
        answer = done(attempt(machine, host.plan(wanted=wanted), KNOCK, path=path))
    assert answer["x"] in {"No such file or directory", "Permission denied"}


@pytest.mark.parametrize("wanted", [Level.LANDLOCK, Level.PROCESS], ids=str)
def test_below_namespaces_sockets_are_kept_apart_by_users_alone(host: Host, wanted: Level) -> None:
    with unix_socket(host, 0o666) as path:
        assert done(attempt(ROOT, host.plan(wanted=wanted), KNOCK, path=path)) == {"x": True}


@pytest.mark.parametrize("wanted", [Level.LANDLOCK, Level.PROCESS], ids=str)
def test_below_namespaces_it_reaches_sockets_of_its_own_user_and_that_is_said(host: Host, wanted: Level) -> None:
    with unix_socket(host, 0o600, uid=1000) as path:
        outcome = attempt(CONTAINER_USER, host.plan(wanted=wanted), KNOCK, path=path)
    assert done(outcome) == {"x": True}
    assert "other models' sockets out of reach: all have the same user" in outcome.missing


@on_all
def test_it_cannot_make_sockets_of_odd_families(host: Host, machine: Machine) -> None:
    code = (
        TRY
        + """
import socket
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET):
    answer[str(int(family))] = tried(lambda: socket.socket(family, socket.SOCK_STREAM))
"""
    )
    assert set(done(attempt(machine, host.plan(), code)).values()) == {"Address family not supported by protocol"}


# Memory and space


@on_namespaces
def test_meminfo_shows_its_own_limit(host: Host, machine: Machine) -> None:
    answer = done(attempt(machine, host.plan(memory_bytes=256 << 20), "answer['x'] = open('/proc/meminfo').read()"))
    rows = {line.split(":")[0]: int(line.split()[1]) for line in answer["x"].splitlines()}
    assert rows["MemTotal"] == rows["MemAvailable"] == 256 << 10
    assert rows["SwapTotal"] == 0


@pytest.mark.skipif(shutil.which("free") is None, reason="needs free of procps")
@on_namespaces
def test_free_shows_its_own_limit(host: Host, machine: Machine) -> None:
    code = "import subprocess; answer['x'] = subprocess.run(['free', '-b'], capture_output=True, text=True).stdout"
    assert done(attempt(machine, host.plan(memory_bytes=256 << 20), code))["x"].split()[7] == str(256 << 20)


@on_namespaces
@pytest.mark.parametrize(("folder", "limit"), [("/tmp", 4 << 20), ("/dev/shm", 2 << 20)], ids=["tmp", "shm"])
def test_filling_its_own_space_stops_at_its_size(host: Host, machine: Machine, folder: str, limit: int) -> None:
    code = """
written = 0
try:
    with open(folder + '/fill', 'wb', buffering=0) as file:
        while written < 64 << 20:
            written += file.write(bytes(65536))
except OSError as error:
    answer['error'] = error.strerror
answer['written'] = written
"""
    answer = done(attempt(machine, host.plan(), code, folder=folder))
    assert answer == {"error": "No space left on device", "written": limit}


@on_namespaces
def test_filling_its_space_with_empty_files_stops_too(host: Host, machine: Machine) -> None:
    code = """
try:
    for number in range(100_000):
        os.close(os.open(f'/tmp/{number}', os.O_CREAT))
except OSError as error:
    answer.update(error=error.strerror, made=number)
"""
    answer = done(attempt(machine, host.plan(), code))
    assert answer["error"] == "No space left on device"
    assert answer["made"] <= (4 << 20) // 4096 + 1024


@on_landlock
def test_without_namespaces_it_writes_only_to_its_scratch_folder(host: Host, machine: Machine) -> None:
    code = (
        TRY
        + """
answer['scratch'] = tried(lambda: open(scratch + '/x', 'w').write('x'))
answer['tmp'] = tried(lambda: open('/tmp/omnimodel-evil', 'w'))
answer['shm'] = tried(lambda: open('/dev/shm/omnimodel-evil', 'w'))
"""
    )
    answer = done(attempt(machine, host.plan(), code, scratch=str(host.scratch)))
    assert answer == {"scratch": 1, "tmp": "Permission denied", "shm": "Permission denied"}


def test_cores_are_not_dumped_and_descriptors_are_bounded(host: Host) -> None:
    code = "import resource; answer.update(c=resource.getrlimit(4), n=resource.getrlimit(7))"
    assert done(attempt(ROOT, host.plan(open_files=512), code)) == {"c": [0, 0], "n": [512, 512]}
