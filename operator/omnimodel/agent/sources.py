"""Fetches what models are published from: a path, a package, a file of the web, a repository of the hub, a volume.

What was fetched lies under `fetched/<key>`, whole: it gets there by one rename, after its size and hash were checked.
`downloads/<key>` is where a fetch works, and what an interrupted one goes on with.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from omnimodel.agent import source_hub, source_package, source_url
from omnimodel.agent.origins import Origins
from omnimodel.agent.sealed import Sealed
from omnimodel.agent.shared import SharedWork
from omnimodel.agent.stored import Stored, touch, tree_bytes, tree_digest, used_seconds
from omnimodel.agent.volumes import volume_path
from omnimodel.errors import OmniError, Reason, SourceError
from omnimodel.memory.disk import disk_errors, sync_folder, sync_tree, write_atomically

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all (0 when unknown)

_MARKER = "fetched.json"
_MARKER_BYTES = 64 << 20
_CONTENT = "content"
_LIMIT_BYTES = 1 << 40


class Sources:
    """Fetched sources under one folder, each once.

    Args:
        root: made when it is not there; one agent's at a time.
        origins: where to fetch from; as the environment says when left out.
        published: folders of such sources that others sealed; they are looked into first, and only read.
        doubt: hears what is wrong in one of them.
        limit_bytes: nothing larger is fetched.
    """

    def __init__(
        self,
        root: Path,
        origins: Origins | None = None,
        published: Sequence[Path] = (),
        doubt: Callable[[OmniError], None] = lambda _error: None,
        *,
        limit_bytes: int = _LIMIT_BYTES,
    ) -> None:
        self.root = root
        self.origins = origins or Origins()
        self.limit_bytes = limit_bytes
        folders = [root / "fetched" for root in published]
        self._published = Sealed("source", folders, _MARKER, _MARKER_BYTES, _CONTENT, _inside, _damaged, doubt)
        self._work: SharedWork[Progress] = SharedWork()

    async def fetch(
        self, subject: str, source: Mapping[str, Any], progress: Progress = lambda _done, _total: None
    ) -> Path:
        """Have a source on this machine.

        Args:
            subject: whose source it is, for messages.
            source: as in the manifest, a volume with its `path` resolved.
            progress: told how far it is; equal fetches share one download and are all told.

        Returns:
            The folder or file. It must not be written to.

        Raises:
            SourceError: it does not exist, cannot be reached, or has another hash.
            OmniError: the disk is full.
        """
        kind, spec = _kind(subject, source)
        if kind in {"path", "volume"}:
            return await asyncio.to_thread(_local, subject, kind, spec)
        key = _key(kind, spec)
        found = await asyncio.to_thread(self._published.find, key) or await asyncio.to_thread(self._found, key)
        if found is not None:
            return found
        return await self._work.run(key, lambda listeners: self._fetch(subject, kind, spec, key, listeners), progress)

    @staticmethod
    def key(source: Mapping[str, Any]) -> str:
        """The name under which a source is kept."""
        return next((_key(kind, spec) for kind, spec in source.items() if spec), "")

    def seal(self, key: str) -> str:
        """Note the digest of what was fetched, so that others can take it from here; the digest.

        Raises:
            SourceError: there are other things than files in it.
        """
        folder = self.root / "fetched" / key
        marker = json.loads((folder / _MARKER).read_bytes())
        try:
            digest = tree_digest(folder / _CONTENT)
        except ValueError as error:
            raise SourceError(f"source {folder}", str(error), "publish one of plain files") from error
        if marker.get("digest") != digest:
            write_atomically(folder / _MARKER, json.dumps({**marker, "digest": digest}).encode())
        return digest

    def stored(self) -> list[Stored]:
        """What was fetched, or begun; what is being fetched now is left out."""
        found = []
        for folder in (self.root / "fetched", self.root / "downloads"):
            for place in sorted(folder.iterdir()) if folder.is_dir() else []:
                if not self._work.runs(place.name):
                    marker = place / _MARKER
                    used = used_seconds(marker, place)
                    found.append(Stored("source", place.name, _what(marker), tree_bytes(place), used))
        return found

    def remove(self, key: str) -> None:
        """Remove what was fetched, or begun, under a key; not while it is being fetched."""
        if not self._work.runs(key):
            for folder in ("fetched", "downloads"):
                shutil.rmtree(self.root / folder / key, ignore_errors=True)

    async def _fetch(
        self, subject: str, kind: str, spec: Mapping[str, Any], key: str, listeners: Sequence[Progress]
    ) -> Path:
        work = self.root / "downloads" / key

        def tell(done: int, total: int) -> None:
            for progress in listeners:
                progress(done, total)

        log.info("source_fetching subject=%s kind=%s", subject, kind)
        fetcher = {"package": source_package.fetch, "url": source_url.fetch, "huggingFace": source_hub.fetch}[kind]
        try:
            with disk_errors(str(work)):
                (work / _CONTENT).mkdir(parents=True, exist_ok=True)
                inside = await fetcher(subject, spec, work, work / _CONTENT, tell, self.limit_bytes, self.origins)
                await asyncio.to_thread(self._keep, work, key, inside, _words(kind, spec))
        except BaseException as error:
            if kind == "package" or (isinstance(error, OmniError) and error.reason == Reason.DISK_FULL):
                await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)  # nothing there to go on with
            raise
        log.info("source_fetched subject=%s kind=%s", subject, kind)
        found = await asyncio.to_thread(self._found, key)
        assert found is not None
        return found

    def _keep(self, work: Path, key: str, inside: str, what: str) -> None:
        """Make what was fetched permanent, with the sizes that tell later whether it is still whole."""
        content = work / _CONTENT
        sizes = {}
        for path in content.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                sizes[path.relative_to(content).as_posix()] = path.stat().st_size
            else:
                path.chmod(0o755)
        for leftover in work.iterdir():
            if leftover != content:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        write_atomically(work / _MARKER, json.dumps({"inside": inside, "sizes": sizes, "what": what}).encode())
        sync_tree(work)
        fetched = self.root / "fetched"
        fetched.mkdir(exist_ok=True)
        shutil.rmtree(fetched / key, ignore_errors=True)
        os.rename(work, fetched / key)
        sync_folder(fetched)

    def _found(self, key: str) -> Path | None:
        """What was fetched before, when every file of it still has its size."""
        folder = self.root / "fetched" / key
        try:
            marker = json.loads((folder / _MARKER).read_bytes())
            content = folder / _CONTENT
            whole = all((content / name).stat().st_size == size for name, size in marker["sizes"].items())
            found = content / str(marker["inside"])
        except FileNotFoundError:
            whole = False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if whole:
            touch(folder / _MARKER)
            return found
        if folder.exists():
            log.warning("source_discarded key=%s reason=damaged", key)
            shutil.rmtree(folder, ignore_errors=True)
        return None


def _kind(subject: str, source: Mapping[str, Any]) -> tuple[str, Any]:
    present = {kind: spec for kind, spec in source.items() if spec}
    if len(present) != 1 or not set(present) <= {"path", "package", "url", "huggingFace", "volume"}:
        raise SourceError(
            subject,
            "its source is none of path, package, huggingFace, url and volume, or several of them",
            reason=Reason.INVALID_MANIFEST,
        )
    return next(iter(present.items()))


def _key(kind: str, spec: Any) -> str:
    return hashlib.sha256(json.dumps([kind, spec], sort_keys=True).encode()).hexdigest()[:32]


def _words(kind: str, spec: Mapping[str, Any]) -> str:
    """A source for a person; a URL without its query, which may hold a token."""
    if kind == "url":
        return str(spec["url"]).partition("?")[0]
    if kind == "package":
        return f"package {spec['name']} {spec['version']}"
    return f"{spec['repo']} {spec.get('revision') or 'main'}"


def _inside(marker: Mapping[str, Any]) -> str | None:
    """Where the source is in what was fetched; None when nobody sealed it: it is the own one of an agent."""
    inside = PurePosixPath(marker["inside"])
    if "digest" not in marker:
        return None
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"{inside} leads out of it")
    return str(inside)


def _damaged(subject: str, problem: str) -> SourceError:
    return SourceError(
        subject, problem, "publish the model there again; until then it is fetched into the agent's own store"
    )


def _what(marker: Path) -> str:
    try:
        return str(json.loads(marker.read_bytes()).get("what", ""))
    except (OSError, ValueError, AttributeError):
        return "not whole"


def _local(subject: str, kind: str, spec: Any) -> Path:
    path = volume_path(subject, spec, "spec.source.volume") if kind == "volume" else Path(spec)
    if not path.exists():
        raise SourceError(subject, f"its source {path} does not exist on this machine", "correct spec.source")
    if not os.access(path, os.R_OK):
        raise OmniError(
            subject, f"its source {path} cannot be read", "let the agent read it", reason=Reason.SOURCE_NOT_FOUND
        )
    return path.resolve()
