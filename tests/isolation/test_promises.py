"""Promises of the sandbox, tried from inside a real forked child on each kind of host: its level and its files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from isolation.attempt import (
    CONTAINER_ROOT,
    CONTAINER_USER,
    COVERED_PROC,
    NO_PIVOT,
    OPERATOR,
    ROOT,
    ROOT_WITHOUT_SYS_ADMIN,
    USER,
    Machine,
    attempt,
)
from isolation.host import (
    CONNECT,
    REAL_HOST,
    TRY,
    UID,
    Host,
    done,
    names,
    on_all,
    on_namespaces,
)
from omnimodel.isolation import Level, Mount

pytestmark = REAL_HOST


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
def test_a_path_that_became_a_link_out_of_its_volume_is_not_shown(host: Host, machine: Machine) -> None:
    volume = host.root / "volume"
    (volume / "inside").mkdir(parents=True)
    (volume / "out").symlink_to(host.other)  # since the agent looked
    volume.chmod(0o755)
    mounts = [Mount(str(volume / name), "/shown", within=str(volume)) for name in ("inside", "out")]
    assert done(attempt(machine, host.plan(mounts=(mounts[0],)), "answer['x'] = os.listdir('/shown')"))["x"] == []
    outcome = attempt(machine, host.plan(mounts=(mounts[1],)), "answer['ran'] = True")
    assert f"out cannot be shown at /shown: a symbolic link leads out of {volume}" in outcome.error
    assert "ran" not in outcome.answer


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
