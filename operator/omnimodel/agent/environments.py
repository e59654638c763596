"""Builds what a model's code needs beside the packages of this interpreter: one overlay folder for equal sets.

uv resolves the requirements against the interpreter's own packages, pinned to the versions that are there, so that
torch is never installed twice and nothing is replaced; only what is missing goes into the overlay. A process has the
overlay on its sys.path before the interpreter's packages.

The agent itself installs wheels only, which are unpacked and not run. A package that has none, or a requirement by an
address, is built by a `Build`, which runs in a sandbox.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from omnimodel.agent.building import FOLDER, take_over
from omnimodel.agent.origins import Origins, Variables
from omnimodel.agent.programs import Finished, run_program
from omnimodel.agent.sealed import Sealed
from omnimodel.agent.shared import SharedWork
from omnimodel.agent.stored import Stored, touch, tree_bytes, tree_digest, used_seconds
from omnimodel.errors import OmniError, Reason
from omnimodel.memory.disk import disk_errors, sync_folder, sync_tree, write_atomically

log = logging.getLogger(__name__)

Progress = Callable[[str], None]  # one line of what uv says
# Runs uv in a sandbox that sees the folder and may write to `build` in it: folder, arguments, variables.
Build = Callable[[Path, Sequence[str], Variables, Progress], Awaitable[Finished]]

_ADDED = re.compile(r"^ \+ (\S+)==(\S+)(?: \(from (\S+)\))?$")
_LAST_LINES = 6
# What uv says when it may have failed only of --offline.
_NOT_CACHED = re.compile(r"network (connectivity )?(is|was) disabled|there (is|are) no versions? of", re.IGNORECASE)
_LOCK_SECONDS = 0.1
_NO_WHEEL = re.compile(r"no wheels|no usable wheels|building from source is disabled", re.IGNORECASE)
_MARKER = "environment.json"
_MARKER_BYTES = 1 << 20
_SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class Environments:
    """Overlay folders under one root.

    Args:
        root: made when it is not there.
        origins: where to fetch from; as the environment says when left out.
        published: folders of such overlays that others filled; they are looked into first, and only read.
        doubt: hears what is wrong in one of them.
    """

    def __init__(
        self,
        root: Path,
        origins: Origins | None = None,
        published: Sequence[Path] = (),
        doubt: Callable[[OmniError], None] = lambda _error: None,
    ) -> None:
        self.root = root
        self.origins = origins or Origins()
        self._published = Sealed(
            "environment", published, _MARKER, _MARKER_BYTES, "packages", lambda _marker: "", _damaged, doubt
        )
        self._work: SharedWork[Progress] = SharedWork()

    async def build(
        self,
        subject: str,
        requirements: Sequence[str],
        progress: Progress = lambda _line: None,
        build: Build | None = None,
    ) -> Path:
        """Have the environment of a set of requirements.

        Args:
            subject: whose environment it is, for messages.
            requirements: as in a requirements file, one package each.
            progress: gets what uv says; equal builds share one and are all told.
            build: for packages without a wheel; without it they are refused.

        Returns:
            The folder for sys.path. It must not be written to.

        Raises:
            OmniError: it cannot be resolved or built, with uv's own last lines, or the disk is full.
        """
        for requirement in requirements:
            if requirement.lstrip().startswith(("-", "#")) or len(requirement.splitlines()) != 1:
                raise OmniError(
                    subject,
                    f"{requirement!r:.100} is no requirement",
                    "write a package and its version, such as tiktoken==0.14.0",
                    reason=Reason.INVALID_MANIFEST,
                )
        base = await asyncio.to_thread(installed)
        key = _key(requirements, base)
        found = await asyncio.to_thread(self._published.find, key)
        if found is not None:
            return found
        folder = self.root / key
        if await asyncio.to_thread((folder / _MARKER).is_file):
            await asyncio.to_thread(touch, folder / _MARKER)
            return folder / "packages"
        progress(f"resolving {', '.join(requirements)}")
        return await self._work.run(
            key, lambda listeners: self._build(subject, requirements, base, folder, listeners, build), progress
        )

    async def _build(
        self,
        subject: str,
        requirements: Sequence[str],
        base: dict[str, str],
        folder: Path,
        listeners: Sequence[Progress],
        build: Build | None,
    ) -> Path:
        def hear(line: str) -> None:
            for progress in listeners:
                progress(line)

        with disk_errors(str(self.root)):
            self.root.mkdir(parents=True, exist_ok=True)
            async with _locked(self.root / f"{folder.name}.lock"):
                if (folder / _MARKER).is_file():  # another agent was first
                    return folder / "packages"
                staging = self.root / f"{folder.name}.part"
                await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
                (staging / "packages").mkdir(parents=True)
                uv = _Uv(staging, self.origins, hear, build, built=_has_address(requirements))
                try:
                    added = await self._resolve(subject, requirements, base, uv)
                    if added:
                        await self._install(subject, added, uv)
                    marker = {"requirements": sorted(requirements), "packages": added}
                    await asyncio.to_thread(_keep, staging, folder, marker)
                finally:
                    await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        log.info("environment_built subject=%s key=%s packages=%d", subject, folder.name, len(added))
        return folder / "packages"

    async def _resolve(self, subject: str, requirements: Sequence[str], base: dict[str, str], uv: _Uv) -> list[str]:
        """What must be installed beside the interpreter's own packages."""
        wanted, pinned = uv.folder / "requirements.txt", uv.folder / "installed.txt"
        wanted.write_text("".join(f"{requirement}\n" for requirement in requirements))
        pinned.write_text("".join(f"{name}=={version}\n" for name, version in base.items()))
        exact = all("==" in requirement for requirement in requirements)
        # --break-system-packages lets uv look at an interpreter of the system; a dry run changes nothing in it.
        finished = await uv.install(
            ["--dry-run", "--break-system-packages", "--constraint", str(pinned), "--requirement", str(wanted)],
            cached=exact,
        )
        if finished.code != 0:
            raise _refusal(subject, finished, base)
        return sorted(uv.planned)

    async def _install(self, subject: str, added: Sequence[str], uv: _Uv) -> None:
        plan, packages = uv.folder / "plan.txt", uv.folder / "packages"
        plan.write_text("".join(f"{requirement}\n" for requirement in added))
        arguments = [
            *("--no-deps", "--requirement", str(plan)),
            *("--compile-bytecode", "--link-mode", "copy"),  # read-only later; no file shared with the cache
        ]
        target = uv.folder / FOLDER / "packages" if uv.built else packages
        finished = await uv.install([*arguments, "--target", str(target)], cached=True)
        if finished.code != 0:
            raise _refusal(subject, finished, {})
        if uv.built:
            packages.rmdir()
            await asyncio.to_thread(take_over, subject, target, packages)

    def keys(self, sets: Iterable[Sequence[str]]) -> set[str]:
        """The names under which the environments of sets of requirements are kept."""
        wanted = [requirements for requirements in sets if requirements]
        base = installed() if wanted else {}
        return {_key(requirements, base) for requirements in wanted}

    def stored(self) -> list[Stored]:
        """What was built, or begun; what is being built now is left out."""
        found = []
        for folder in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if folder.is_dir() and not self._work.runs(folder.name.partition(".")[0]):
                marker = folder / _MARKER
                used = used_seconds(marker, folder)
                found.append(Stored("environment", folder.name, _what(marker), tree_bytes(folder), used))
        return found

    def remove(self, name: str) -> None:
        """Remove an environment; not while it is being built."""
        if not self._work.runs(name.partition(".")[0]):
            shutil.rmtree(self.root / name, ignore_errors=True)


def installed() -> dict[str, str]:
    """Packages of the running interpreter: normalised name -> version."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=_site_folders()):
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def _site_folders() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _key(requirements: Sequence[str], base: dict[str, str]) -> str:
    """Equal for equal sets on an equal interpreter: another torch below makes another environment."""
    body = [sorted(set(requirements)), base, sys.version, sysconfig.get_platform()]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:32]


class _Uv:
    """Runs `uv pip install` for one environment: here for wheels, in a sandbox when something must be built.

    Args:
        folder: of the environment that is being made.
        built: whether it is known from the beginning that something must be built.
    """

    def __init__(self, folder: Path, origins: Origins, hear: Progress, build: Build | None, *, built: bool) -> None:
        self.folder = folder
        self.built = built
        self.planned: list[str] = []  # what uv said it would install
        self._variables = {**_uv_environment(), **origins.variables()}
        self._listener = hear
        self._build = build

    def _hear(self, line: str) -> None:
        if match := _ADDED.match(line):
            self.planned.append(f"{match[1]} @ {match[3]}" if match[3] else f"{match[1]}=={match[2]}")
        self._listener(line)

    async def install(self, arguments: Sequence[str], *, cached: bool) -> Finished:
        """Run it; a failure for want of wheels is tried again by building.

        Args:
            cached: all versions are given to the letter, so that the cache alone may have everything.
        """
        if not self.built:
            finished = await self._wheels(arguments, cached=cached)
            if finished.code == 0 or self._build is None or not _NO_WHEEL.search(finished.text):
                return finished
            self.built = True
        if self._build is None:
            return Finished(1, ("a requirement by an address must be built, which is not allowed here",))
        return await self._build(self.folder, _command(arguments), self._variables, self._hear)

    async def _wheels(self, arguments: Sequence[str], *, cached: bool) -> Finished:
        """Ask uv's cache alone before the index, where it may have everything."""
        offline = await self._here(["--offline", *arguments]) if cached else None
        if offline is not None and (offline.code == 0 or not _NOT_CACHED.search(offline.text)):
            return offline
        return await self._here(arguments)

    async def _here(self, arguments: Sequence[str]) -> Finished:
        command = [sys.executable, "-m", "uv", *_command(["--no-build", *arguments])]
        return await run_program(command, self._hear, environment=self._variables)


def _command(arguments: Sequence[str]) -> list[str]:
    return ["pip", "install", "--python", sys.executable, *arguments]


def _has_address(requirements: Sequence[str]) -> bool:
    """Whether one is fetched from where it says, by a program that its address names (git, for example)."""
    return any("@" in requirement.partition(";")[0] or "://" in requirement for requirement in requirements)


def _uv_environment() -> Variables:
    """What makes uv use the same index as pip, and trust it as pip does: uv reads none of pip's settings."""
    found: Variables = {"UV_NO_PROGRESS": "1"}
    for own, pips in (("UV_INDEX_URL", "PIP_INDEX_URL"), ("UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL")):
        if pips in os.environ and own not in os.environ and "UV_DEFAULT_INDEX" not in os.environ:
            found[own] = os.environ[pips]
    if os.path.exists(_SYSTEM_CERTIFICATES):  # else uv trusts the authorities that it brings along
        found["UV_SYSTEM_CERTS"] = os.environ.get("UV_SYSTEM_CERTS", "true")
    return found


def _refusal(subject: str, finished: Finished, base: dict[str, str]) -> OmniError:
    text = finished.text
    if "No space left on device" in text or "os error 28" in text:
        return OmniError(
            subject, "the disk is full while its environment is built", "free space there", reason=Reason.DISK_FULL
        )
    last = [line.strip() for line in finished.lines if not line.startswith("Using Python")][-_LAST_LINES:]
    clash = [name for name in base if re.search(rf"\b{re.escape(name)}=={re.escape(base[name])}(?![\w+!]|\.\w)", text)]
    cure = "correct spec.runtime.environment.requirements"
    if clash:
        names = " and ".join(f"{name} {base[name]}" for name in clash[:3])
        cure += f"; this interpreter has {names}, which cannot be replaced"
    return OmniError(
        subject,
        f"its environment cannot be built: {' | '.join(last)[-1500:]}",
        cure,
        reason=Reason.ENVIRONMENT_FAILED,
    )


def _damaged(subject: str, problem: str) -> OmniError:
    cure = "publish the model there again; until then it is built into the agent's own store"
    return OmniError(subject, problem, cure, reason=Reason.BAD_ARTIFACT)


def _what(marker: Path) -> str:
    try:
        return ", ".join(json.loads(marker.read_bytes())["requirements"])
    except (OSError, ValueError, KeyError, TypeError):
        return "not whole"


def _keep(staging: Path, folder: Path, marker: Mapping[str, object]) -> None:
    shutil.rmtree(staging / FOLDER, ignore_errors=True)
    for made in staging.iterdir():
        if made.name != "packages":
            made.unlink()
    digest = tree_digest(staging / "packages")
    write_atomically(staging / _MARKER, json.dumps({**marker, "digest": digest}).encode())
    sync_tree(staging)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staging, folder)
    sync_folder(folder.parent)


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold a file lock; several agents may share a folder of environments."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_SECONDS)
        yield
    finally:
        os.close(descriptor)
