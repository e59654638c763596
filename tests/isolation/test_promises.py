"""Each promise of the sandbox, tried from inside a real forked child on each kind of host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.attempt import (
    CONTAINER_ROOT,
    CONTAINER_USER,
    COVERED_PROC,
    NO_PIVOT,
    OPERATOR,
    PYTHON,
    ROOT,
    ROOT_WITHOUT_SYS_ADMIN,
    USER,
    Machine,
    Outcome,
    attempt,
)
from omnimodel.isolation import Level, Mount, SandboxPlan

pytestmark = [
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


@pytest.fixture
def host() -> Host:
    root = Path("/var/tmp") / f"omnimodel-promise-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o755)
    try:
        yield Host(root)
    finally:
        shutil.rmtree(root)


@pytest.fixture
def neighbour() -> subprocess.Popen:
    """Another model's process, of the same user as an ordinary agent's."""
    process = subprocess.Popen(
        ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "sleep", "300"], env={"SECRET": "of-the-other"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


TRY = """
def tried(step):
    try:
        return step() or True
    except OSError as error:
        return error.strerror
"""


def done(outcome: Outcome) -> dict:
    assert not outcome.error, outcome.error
    return outcome.answer


# The ladder


@pytest.mark.parametrize(
    ("machine", "wanted", "level"),
    [
        pytest.param(ROOT, Level.NAMESPACES, "namespaces", id="root gets namespaces"),
        pytest.param(ROOT_WITHOUT_SYS_ADMIN, Level.NAMESPACES, "namespaces", id="by a user namespace, with two users"),
        pytest.param(USER, Level.NAMESPACES, "namespaces", id="by a user namespace, with one user"),
        pytest.param(COVERED_PROC, Level.NAMESPACES, "namespaces", id="without a /proc of its own"),
        pytest.param(NO_PIVOT, Level.NAMESPACES, "namespaces", id="by moving its root where it may not pivot"),
        pytest.param(CONTAINER_ROOT, Level.NAMESPACES, "landlock", id="a container's root falls to Landlock"),
        pytest.param(CONTAINER_USER, Level.NAMESPACES, "landlock", id="a container's user falls to Landlock"),
        pytest.param(ROOT, Level.LANDLOCK, "landlock", id="Landlock when no more is wanted"),
        pytest.param(ROOT, Level.PROCESS, "process", id="the process alone when no more is wanted"),
        pytest.param(USER, Level.PROCESS, "process", id="the process alone, of an ordinary user"),
    ],
)
def test_the_level_is_what_the_machine_allows(host: Host, machine: Machine, wanted: Level, level: str) -> None:
    outcome = attempt(machine, host.plan(wanted=wanted), "")
    assert (outcome.level, outcome.error) == (level, "")
    if level != "namespaces":
        assert any("/tmp" in sentence for sentence in outcome.missing)
    if machine in {USER, CONTAINER_USER, COVERED_PROC}:
        assert any("a user of its own" in sentence for sentence in outcome.missing)


def test_without_a_proc_of_its_own_that_is_said_and_the_old_one_stays_hidden(host: Host) -> None:
    outcome = attempt(COVERED_PROC, host.plan(), "answer['x'] = sorted(os.listdir('/proc'))")
    assert any(sentence.startswith("a /proc of its own") for sentence in outcome.missing)
    assert {"self", "meminfo", "cpuinfo", "mounts"} <= set(done(outcome)["x"])
    assert not any(name.isdigit() for name in outcome.answer["x"])


def test_root_lacks_nothing(host: Host) -> None:
    assert attempt(ROOT, host.plan(), "").missing == ()


def test_a_minimum_above_what_can_be_had_names_both(host: Host) -> None:
    outcome = attempt(CONTAINER_USER, host.plan(minimum=Level.NAMESPACES), "answer['ran'] = True")
    assert "level namespaces is asked for" in outcome.error
    assert "gives landlock" in outcome.error
    assert "ran" not in outcome.answer


@pytest.mark.parametrize("machine", [ROOT, ROOT_WITHOUT_SYS_ADMIN, CONTAINER_ROOT], ids=names)
def test_it_has_a_user_of_its_own_and_no_groups(host: Host, machine: Machine) -> None:
    answer = done(attempt(machine, host.plan(), "answer.update(ids=os.getresuid() + os.getresgid(), g=os.getgroups())"))
    assert answer == {"ids": [UID] * 6, "g": []}


@on_all
def test_it_has_no_capability_and_can_gain_none(host: Host, machine: Machine) -> None:
    answer = done(attempt(machine, host.plan(), "answer['status'] = open('/proc/self/status').read()"))
    rows = dict(line.split(":", 1) for line in answer["status"].splitlines())
    assert {rows[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert rows["NoNewPrivs"].strip() == "1"
    assert rows["Seccomp"].strip() == "2"
    if machine in {ROOT, CONTAINER_ROOT}:
        assert rows["CapBnd"].strip() == "0" * 16


# Files


@on_all
def test_it_sees_its_own_files_and_not_those_of_other_models(host: Host, machine: Machine) -> None:
    code = (
        TRY
        + """
answer['mine'] = open(image + '/index.json').read()
answer['other'] = tried(lambda: open(other + '/index.json').read())
answer['listed'] = tried(lambda: os.listdir(other))
answer['shadow'] = tried(lambda: open('/etc/shadow').read())
answer['home'] = tried(lambda: os.listdir('/root'))
"""
    )
    answer = done(attempt(machine, host.plan(), code, image=str(host.image), other=str(host.other)))
    assert answer["mine"] == "{}"
    refusals = {"No such file or directory", "Permission denied"}
    assert answer["other"] in refusals
    assert answer["listed"] in refusals
    assert answer["shadow"] in refusals
    assert answer["home"] in refusals


@on_namespaces
def test_its_root_shows_nothing_but_what_it_needs(host: Host, machine: Machine) -> None:
    code = (
        "answer.update(root=sorted(os.listdir('/')), beside=os.listdir(os.path.dirname(image)), tmp=os.listdir('/tmp'))"
    )
    answer = done(attempt(machine, host.plan(), code, image=str(host.image)))
    assert set(answer["root"]) <= {
        *("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "tmp", "usr", "var"),
        Path(__file__).parts[1],
    }
    assert set(answer["beside"]) == {"mine", "output"}
    assert answer["tmp"] == []


@on_all
def test_it_cannot_write_its_image_its_environment_or_the_system(host: Host, machine: Machine) -> None:
    code = (
        TRY
        + """
import omnimodel, sysconfig
answer['image'] = tried(lambda: open(image + '/index.json', 'w'))
answer['added'] = tried(lambda: open(image + '/more', 'w'))
answer['unlinked'] = tried(lambda: os.unlink(image + '/index.json'))
answer['package'] = tried(lambda: open(omnimodel.__file__, 'a'))
answer['environment'] = tried(lambda: open(sysconfig.get_path('purelib') + '/evil.py', 'w'))
answer['root'] = tried(lambda: os.mkdir('/evil'))
answer['passwd'] = tried(lambda: open('/etc/passwd', 'a'))
answer['output'] = tried(lambda: open(output + '/image', 'w').write('x'))
"""
    )
    answer = done(attempt(machine, host.plan(), code, image=str(host.image), output=str(host.output)))
    assert answer.pop("output") == 1
    assert set(answer.values()) <= {"Read-only file system", "Permission denied", "No such file or directory"}


@on_namespaces
def test_it_cannot_make_its_read_only_files_writable_again(host: Host, machine: Machine) -> None:
    code = (
        TRY
        + """
from omnimodel.isolation import syscalls
answer['remount'] = tried(lambda: syscalls.mount(None, image, None, syscalls.MS_REMOUNT | syscalls.MS_BIND))
answer['unmount'] = tried(lambda: syscalls.unmount('/proc/meminfo'))
answer['namespace'] = tried(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS))
answer['chroot'] = tried(lambda: os.chroot('/tmp'))
"""
    )
    answer = done(attempt(machine, host.plan(), code, image=str(host.image)))
    assert set(answer.values()) == {"Operation not permitted"}


@on_namespaces
def test_mounts_appear_where_they_are_wanted(host: Host, machine: Machine) -> None:
    plan = host.plan(
        mounts=(
            Mount(str(host.image), "/models/smollm2"),
            Mount(str(host.image / "index.json"), "/config/settings.json"),
            Mount(str(host.scratch), "/cache", read_only=False),
        )
    )
    code = (
        TRY
        + """
answer['folder'] = os.listdir('/models/smollm2')
answer['file'] = open('/config/settings.json').read()
answer['refused'] = tried(lambda: open('/models/smollm2/x', 'w'))
answer['allowed'] = tried(lambda: open('/cache/x', 'w').write('yes'))
"""
    )
    answer = done(attempt(machine, plan, code))
    assert answer == {"folder": ["index.json"], "file": "{}", "refused": "Read-only file system", "allowed": 3}
    assert (host.scratch / "x").read_text() == "yes"
    assert plan.inside(str(host.image / "a" / "b"), Level.NAMESPACES) == "/models/smollm2/a/b"
    assert plan.inside(str(host.image / "a"), Level.LANDLOCK) == str(host.image / "a")


@on_namespaces
def test_files_under_tmp_or_a_closed_home_can_be_shown(host: Host, machine: Machine) -> None:
    home = Path(tempfile.mkdtemp(prefix="omnimodel-home-"))  # 0700, in /tmp
    try:
        (home / "venv").mkdir()
        (home / "venv" / "module.py").write_text("answer = 42")
        if machine in {USER, COVERED_PROC}:
            os.chown(home, 1000, 1000)
        code = "answer['text'] = open(path).read(); answer['tmp'] = os.listdir('/tmp')"
        plan = host.plan(read_only=(str(home / "venv"),))
        answer = done(attempt(machine, plan, code, path=str(home / "venv" / "module.py")))
        assert answer == {"text": "answer = 42", "tmp": [home.name]}
    finally:
        shutil.rmtree(home)


@on_namespaces
def test_a_hidden_folder_is_empty(host: Host, machine: Machine) -> None:
    (host.image / "private").mkdir()
    (host.image / "private" / "key").write_text("secret")
    plan = host.plan(hidden=(str(host.image / "private"),))
    assert done(attempt(machine, plan, "answer['x'] = os.listdir(path)", path=str(host.image / "private"))) == {"x": []}


def test_a_path_that_does_not_exist_is_named(host: Host) -> None:
    outcome = attempt(ROOT, host.plan(read_only=("/nonexistent/model",)), "")
    assert "/nonexistent/model cannot be shown" in outcome.error


def test_a_mount_inside_a_read_only_folder_is_refused_with_its_name(host: Host) -> None:
    outcome = attempt(ROOT, host.plan(mounts=(Mount(str(host.image), "/usr/share/omnimodel-x"),)), "")
    assert "nothing can be mounted at /usr/share/omnimodel-x" in outcome.error


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


@pytest.fixture
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


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


@on_namespaces
def test_it_cannot_reach_unix_sockets_of_others(host: Host, machine: Machine) -> None:
    path = str(host.other / "agent.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.chmod(path, 0o666)
        server.listen()
        code = TRY + "import socket\nanswer['x'] = tried(lambda: socket.socket(socket.AF_UNIX).connect(path))"
        assert done(attempt(machine, host.plan(), code, path=path)) == {"x": "No such file or directory"}


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


# The weakest level, which also shows that the attempts above can succeed where nothing forbids them


@pytest.mark.parametrize("machine", [ROOT, USER], ids=names)
def test_the_process_level_says_what_it_lacks_and_still_keeps_some_promises(
    host: Host, machine: Machine, listener: socket.socket, neighbour: subprocess.Popen
) -> None:
    code = (
        CONNECT
        + """
from omnimodel.isolation import syscalls
answer['other'] = tried(lambda: open(other + '/index.json').read())
answer['cmdline'] = tried(lambda: open(f'/proc/{pid}/cmdline').read())
answer['package'] = tried(lambda: open(package, 'a'))
answer['namespace'] = tried(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER))
"""
    )
    outcome = attempt(
        machine,
        host.plan(wanted=Level.PROCESS),
        code,
        port=listener.getsockname()[1],
        other=str(host.other),
        pid=neighbour.pid,
        package=str(Path(OPERATOR) / "omnimodel" / "__init__.py"),
    )
    answer = done(outcome)
    assert answer["other"] == "{}"
    assert "sleep" in answer["cmdline"]
    assert answer["loopback"] == "Address family not supported by protocol"
    assert answer["package"] == "Permission denied"
    assert answer["namespace"] == "Operation not permitted"
    assert {"other models' files out of sight", "other processes out of sight"} <= set(outcome.missing)
