"""From a process spec to the process that shall be made: what it sees, what it may use, who it is."""

from __future__ import annotations

import base64
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from omnimodel.agent.spawner import ProcessRequest, mounts_folder
from omnimodel.agent.volumes import volume_folder, volume_path
from omnimodel.errors import ProcessError
from omnimodel.isolation import Level, Mount, SandboxPlan
from omnimodel.memory.devices.cuda_driver import device_nodes, device_uuid
from omnimodel.memory.disk import disk_errors

if TYPE_CHECKING:
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.preparation import Prepared

IMAGE_PATH = "/omni/image"
SOURCE_PATH = "/omni/source"

# An engine's `python` is the one of the environment, not the system's.
_PATH = os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"))

# Publishing holds a whole model in the process's own memory, and a hostile file must not take the machine down.
_PUBLISHING_SHARE = 0.5
_BUILDING_PROCESSES = 1024  # compilers, one for each core and more


def serving_request(
    subject: str,
    spec: Mapping[str, Any],
    layout: Layout,
    prepared: Prepared,
    *,
    devices: Sequence[str],
    memory_bytes: int,
    number: int,
) -> ProcessRequest:
    """The process that serves a model.

    Args:
        devices: that it gets, as the agent sees them: `host`, or `cuda:1` and others. It sees no other GPU, and
            these in this order.
        memory_bytes: limit of its private memory.
        number: grows with every process, so that each has an identity of its own.
    """
    instance = f"{spec['model']['namespace']}.{spec['model']['name']}.{number}"
    mounts = [Mount(str(prepared.image.path), IMAGE_PATH)] if prepared.image else []
    if prepared.source is not None:
        mounts.append(_source_mount(spec, prepared.source))
    mounts += _prepared_mounts(subject, spec, mounts_folder(layout.run, instance), prepared.source)
    request = _request(subject, spec, layout, instance, mounts, prepared.environment, memory_bytes)
    if tuple(devices) == ("host",):
        return request
    nodes = dict.fromkeys(node for device in devices for node in device_nodes(device))
    return replace(
        request,
        plan=replace(request.plan, devices=tuple(nodes)),
        env={**request.env, "CUDA_VISIBLE_DEVICES": ",".join(map(device_uuid, devices))},
    )


def publishing_request(
    subject: str,
    spec: Mapping[str, Any],
    layout: Layout,
    source: Path,
    environment: Path | None,
    output: Path,
    *,
    number: int,
) -> ProcessRequest:
    """The process that loads a model once and writes its image; `output` is all it can write."""
    instance = f"{spec['model']['namespace']}.{spec['model']['name']}.publish-{number}"
    mounts = [_source_mount(spec, source)]
    mounts += _prepared_mounts(subject, spec, mounts_folder(layout.run, instance), source)
    memory_bytes = int(psutil.virtual_memory().total * _PUBLISHING_SHARE)
    return _request(subject, spec, layout, instance, mounts, environment, memory_bytes, writable=(str(output),))


def building_request(
    subject: str, spec: Mapping[str, Any], layout: Layout, shown: Path, writable: Path, *, number: int
) -> ProcessRequest:
    """The process that builds packages for a model: `shown` is all it sees, `writable` all it can write."""
    instance = f"{spec['model']['namespace']}.{spec['model']['name']}.build-{number}"
    memory_bytes = int(psutil.virtual_memory().total * _PUBLISHING_SHARE)
    request = _request(subject, spec, layout, instance, (), shown, memory_bytes, writable=(str(writable),))
    plan = replace(request.plan, network=True, processes=max(request.plan.processes, _BUILDING_PROCESSES))
    return replace(
        request,
        plan=plan,
        environment=(),
        paths=(),
        env={"PATH": _PATH},
        working_dir=str(writable),
        target="omnimodel.runtime.building:run",
    )


def _request(
    subject: str,
    spec: Mapping[str, Any],
    layout: Layout,
    instance: str,
    mounts: Sequence[Mount],
    environment: Path | None,
    memory_bytes: int,
    *,
    writable: tuple[str, ...] = (),
) -> ProcessRequest:
    limits, identity = spec["limits"], spec["identity"]
    plan = SandboxPlan(
        instance=instance,
        uid=identity["uid"],
        hostname=identity["hostname"],
        minimum=Level(spec["isolationLevel"]),
        read_only=(str(environment),) if environment else (),
        writable=writable,
        mounts=tuple(mounts),
        tmp_bytes=limits["tmpBytes"],
        shm_bytes=limits["shmBytes"],
        memory_bytes=memory_bytes,
        processes=limits["processes"],
        network=spec["network"],
        loopback=spec["engine"] not in {"python", "transformers"},
    )
    return ProcessRequest(
        subject=subject,
        generation=spec["generation"],
        plan=plan,
        log_path=layout.log(spec["model"]["namespace"], spec["model"]["name"]),
        environment=(str(environment),) if environment else (),
        paths=tuple(spec["environment"]["paths"]),
        env={"PATH": _PATH, **spec["env"]},
        working_dir=spec["workingDir"],
        cpu_millis=limits["cpuMillis"],
    )


def _source_mount(spec: Mapping[str, Any], source: Path) -> Mount:
    """A source that is one file keeps its name: the engine tells by it what the file is."""
    return _shown(spec, source, f"{SOURCE_PATH}/{source.name}" if source.is_file() else SOURCE_PATH)


def _shown(spec: Mapping[str, Any], source: Path, target: str) -> Mount:
    volume = (spec.get("source") or {}).get("volume")
    return Mount(str(source), target, within=volume_folder(volume) if volume else "")


def _prepared_mounts(subject: str, spec: Mapping[str, Any], folder: Path, source: Path | None) -> list[Mount]:
    """The mounts of the manifest; whoever ends the process removes `folder`, and nothing stays when this fails.

    Raises:
        OmniError: their files cannot be written.
    """
    try:
        with disk_errors(str(folder)):
            return _mounts(subject, spec, folder, source)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ProcessError(
                subject, f"the files of its mounts cannot be written: {error}", "let the agent write there"
            ) from error
        raise


def _mounts(subject: str, spec: Mapping[str, Any], folder: Path, source: Path | None) -> list[Mount]:
    """Mounts of the manifest; inline files, config maps and secrets are written into `folder` first."""
    made, uid = [], spec["identity"]["uid"]
    for mount in spec["mounts"]:
        origin = mount["source"]
        if origin is True:
            if source is not None:
                made.append(_shown(spec, source, mount["path"]))
        elif "volume" in origin:
            volume = origin["volume"]
            place = volume_path(subject, volume, f"mount {mount['name']}")
            made.append(Mount(str(place), mount["path"], mount["readOnly"], within=volume_folder(volume)))
        elif "empty" in origin:
            place = _folder(folder, mount["name"])
            if os.geteuid() == 0:
                os.chown(place, uid, uid)
            made.append(Mount(str(place), mount["path"], read_only=False, size_bytes=origin["empty"]["sizeBytes"]))
        else:
            place = _folder(folder, mount["name"])
            content = {
                name: text.encode(errors="surrogateescape") for name, text in (origin.get("files") or {}).items()
            }
            content |= {name: base64.b64decode(text) for name, text in (origin.get("binaryFiles") or {}).items()}
            for name, raw in content.items():
                _write(place / name, raw, owner=uid if "secret" in origin else None)
            made.append(Mount(str(place), mount["path"]))
    return made


def _folder(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    folder.chmod(0o711)
    place.chmod(0o755)
    return place


def _write(path: Path, content: bytes, *, owner: int | None) -> None:
    """Write a file that everyone may read, or, with an owner, nobody else."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    with open(descriptor, "wb") as file:
        file.write(content)
        if owner is None:
            os.fchmod(descriptor, 0o444)
        elif os.geteuid() == 0:
            os.fchown(descriptor, owner, owner)
