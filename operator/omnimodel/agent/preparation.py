"""Gets a model ready to be started: its source fetched, its environment built, its image published once."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omnimodel.agent.building import Builder
from omnimodel.agent.confinement import publishing_request
from omnimodel.agent.environments import Environments
from omnimodel.agent.forms import Forms
from omnimodel.agent.housekeeping import Housekeeping
from omnimodel.agent.kept import Room
from omnimodel.agent.layout import Layout
from omnimodel.agent.origins import Origins
from omnimodel.agent.sources import Sources
from omnimodel.agent.stored import tree_bytes
from omnimodel.errors import ImageError, OmniError, Reason, SourceError
from omnimodel.memory.disk import write_atomically
from omnimodel.memory.published import PublishedImages
from omnimodel.memory.store import Staging, Store, verify
from omnimodel.protocol.process import Publish

if TYPE_CHECKING:
    from omnimodel.agent.process import ModelProcess
    from omnimodel.agent.spawner import Spawner
    from omnimodel.memory.store import ImageRef

log = logging.getLogger(__name__)

FOREIGN_ENGINES = frozenset({"llamacpp", "vllm", "sglang", "command"})

_EVERYTHING = 1 << 62  # bytes: more than any disk has

T = TypeVar("T")
Report = Callable[[str, float], None]  # phase, share done (below 0 when unknown)


@dataclass(frozen=True)
class Footprint:
    """What a model takes, as measured; kept in the state directory, so that it is measured once.

    Args:
        working_bytes: private memory of its process beside the weights, at its peak.
    """

    working_bytes: int

    @classmethod
    def load(cls, layout: Layout, process_hash: str) -> Footprint | None:
        """What was measured of an equal process; None if nothing was."""
        try:
            return cls(int(json.loads((layout.footprints / f"{process_hash}.json").read_text())["workingBytes"]))
        except (OSError, ValueError, KeyError):
            return None

    def save(self, layout: Layout, process_hash: str) -> None:
        """Remember it."""
        with suppress(OSError, OmniError):
            body = json.dumps({"workingBytes": self.working_bytes}).encode()
            write_atomically(layout.footprints / f"{process_hash}.json", body)


@dataclass(frozen=True)
class Prepared:
    """All that a process of a model needs on this machine.

    Args:
        image: None for a foreign engine, which keeps its weights itself.
        source: the fetched source, for an engine that reads it at run time.
        environment: folder of additional packages.
        frame_bytes, device: of the device.
        threads: of one forward pass.
    """

    image: ImageRef | None
    source: Path | None
    environment: Path | None
    frame_bytes: int
    device: str
    threads: int

    @property
    def image_bytes(self) -> int:
        """Length of the image; 0 without one."""
        return self.image.bytes if self.image else 0

    @property
    def frame_count(self) -> int:
        """Frames that the image takes."""
        return -(-self.image_bytes // self.frame_bytes)

    def inside(self, process: ModelProcess) -> str:
        """The image's folder, or the source of a foreign engine, as the process sees it."""
        path = self.image.path if self.image else self.source
        return process.plan.inside(str(path), process.reached.level) if path else ""


class Preparation:
    """Prepares models, several at a time, but publishes one at a time: that takes the memory of a whole model.

    Args:
        layout: of the state directory.
        spawner: makes the processes that publish.
        device: `host` or `cuda:0`, and the size of its frames.
        threads: of one forward pass when the manifest leaves it to the machine.
        published: folders that others filled, by name; they are looked into first, and only read.
        forms: in which images are looked for and published.
        doubt: hears what is wrong in one of them; its image is then published anew, here.
    """

    def __init__(
        self,
        layout: Layout,
        spawner: Spawner,
        device: str,
        frame_bytes: int,
        threads: int,
        *,
        published: Mapping[str, Path] | None = None,
        forms: Callable[[], Forms] = Forms,
        doubt: Callable[[OmniError], None] = lambda _error: None,
    ) -> None:
        layout.make_kept()
        self.store = Store(layout.store)
        self.room = Room.of(layout.kept)
        self._layout = layout
        self._spawner = spawner
        self._device = device
        self._frame_bytes = frame_bytes
        self._threads = threads
        self.origins = Origins(layout.origins)
        others = {name: Layout(folder) for name, folder in (published or {}).items()}
        self._published = [PublishedImages(name, other.store) for name, other in others.items()]
        self._sources = Sources(layout.sources, self.origins, [other.sources for other in others.values()], doubt)
        self._environments = Environments(
            layout.environments, self.origins, [other.environments for other in others.values()], doubt
        )
        self._forms = forms
        self._doubt = doubt
        self.housekeeping = Housekeeping(layout.kept, self.store, self._sources, self._environments)
        self._builder = Builder(layout, spawner)
        self._publishing = asyncio.Lock()
        self._verified: set[Path] = set()  # folders of images whose every byte was read since this agent began
        self._numbers = itertools.count(1)

    async def prepare(self, subject: str, spec: dict[str, Any], report: Report) -> Prepared:
        """Fetch, build and publish what is not there yet.

        Raises:
            OmniError: it cannot be prepared as its manifest stands, or not now; nothing half-made is left.
        """
        await self.housekeeping.quiet()
        requirements = spec["environment"]["requirements"]
        environment = None
        if requirements:
            environment = await self._with_room(
                lambda: self._environments.build(
                    subject,
                    requirements,
                    lambda _line: report("building", -1.0),
                    lambda *how: self._builder.uv(subject, spec, *how),
                )
            )
        foreign = spec["engine"] in FOREIGN_ENGINES
        source: Path | None = None
        image: ImageRef | None = None
        if foreign:
            if spec.get("source"):
                source = await self._fetch(subject, spec, report)
        else:
            forms = await asyncio.to_thread(self._forms)
            image = await self._found(forms.keys(spec))
            if image is None:
                source = await self._fetch(subject, spec, report)
                if self._publishing.locked():
                    report("queued", -1.0)
                async with self._publishing:
                    image = await self._with_room(
                        partial(self._publish, subject, spec, forms, source, environment, report),
                        await asyncio.to_thread(tree_bytes, source),
                    )
                source = None
            if any(mount.get("source") is True for mount in spec["mounts"]):
                source = await self._fetch(subject, spec, report)
        self.room = await asyncio.to_thread(Room.of, self._layout.kept)
        threads = spec["threads"] or self._threads
        return Prepared(image, source, environment, self._frame_bytes, self._device, threads)

    async def _with_room(self, work: Callable[[], Awaitable[T]], wanted_bytes: int = 0) -> T:
        """Do something that takes disk space; what no model needs makes room for it."""
        await self.housekeeping.make_room(wanted_bytes)
        try:
            return await work()
        except OmniError as error:
            if error.reason is not Reason.DISK_FULL or not await self.housekeeping.make_room(_EVERYTHING):
                raise
        return await work()

    def distrust(self, digest: str) -> None:
        """Read every byte of an image again before its next use."""
        self._verified = {folder for folder in self._verified if folder.name != digest}

    async def seal_source(self, spec: Mapping[str, Any]) -> str:
        """Make what a model was fetched from fit to be found by others; its digest."""
        return await asyncio.to_thread(self._sources.seal, self._sources.key(spec["source"]))

    async def forget_source(self, spec: Mapping[str, Any]) -> None:
        """Remove what a model was published from."""
        await asyncio.to_thread(self._sources.remove, self._sources.key(spec["source"]))

    async def _fetch(self, subject: str, spec: dict[str, Any], report: Report) -> Path:
        report("fetching", -1.0)
        source = await self._with_room(
            lambda: self._sources.fetch(
                subject, spec["source"], lambda done, total: report("fetching", done / total if total else -1.0)
            )
        )
        if os.geteuid() == 0 and spec["identity"]["uid"]:
            await asyncio.to_thread(_check_readable, subject, source)
        return source

    async def _publish(
        self, subject: str, spec: dict[str, Any], forms: Forms, source: Path, environment: Path | None, report: Report
    ) -> ImageRef:
        """Let a process of its own, in a sandbox, load the model the ordinary way and write its image."""
        keys, dtype = forms.keys(spec), forms.dtype(spec)
        for key in keys:
            if (found := await self._stored(key)) is not None:  # an equal one may have been published meanwhile
                return found
        report("publishing", -1.0)
        async with _staging(self.store) as staging:
            request = publishing_request(
                subject, spec, self._layout, source, environment, staging.path, number=next(self._numbers)
            )
            process = await self._spawner.spawn(request)
            try:
                await process.command(
                    Publish(
                        spec,
                        process.plan.inside(str(source), process.reached.level),
                        process.plan.inside(str(staging.path), process.reached.level),
                        dtype,
                        self._threads,
                        forms.packed_frame_bytes,
                    ),
                    (),
                    spec["limits"]["loadDeadlineSeconds"],
                    lambda said: report("publishing", said.done / said.total if said.total else -1.0),
                )
            finally:
                process.kill()
                await process.released
            what = f"{subject.removeprefix('OmniModel ')} ({dtype})"
            image = await _to_its_end(self.store.commit, staging, keys[0 if staging.packed else -1], what)
        self._verified.add(image.path)
        return image

    async def _found(self, keys: Sequence[str]) -> ImageRef | None:
        """The image with one of these keys: in a store of others, else in the agent's own."""
        for published in self._published:
            for key in keys:
                image = await self._found_published(published, key)
                if image is not None:
                    return image
        for key in keys:
            image = await self._stored(key)
            if image is not None:
                return image
        return None

    async def _stored(self, key: str) -> ImageRef | None:
        """The image with a key; at its first use every byte is checked, and a damaged one is thrown away."""
        image = await asyncio.to_thread(self.store.lookup, key)
        if image is None or image.path in self._verified:
            return image
        try:
            await asyncio.to_thread(verify, image)
        except ImageError as error:
            log.warning("image_damaged key=%s digest=%s problem=%r", key, image.digest, str(error))
            await asyncio.to_thread(self.store.discard, image.digest)
            return None
        self._verified.add(image.path)
        return image

    async def _found_published(self, store: PublishedImages, key: str) -> ImageRef | None:
        """The image with a key in a store of others; a damaged one is left where it is, and told."""
        try:
            image = await asyncio.to_thread(store.lookup, key)
            if image is not None and image.path not in self._verified:
                await asyncio.to_thread(verify, image)
                self._verified.add(image.path)
        except (ImageError, OSError) as error:
            log.warning("published_image_damaged store=%s key=%s problem=%r", store.name, key, str(error))
            self._doubt(
                ImageError(
                    f"store {store.name}",
                    f"an image in it cannot be used ({error})",
                    "publish the model there again; until then it is published into the agent's own store",
                )
            )
            return None
        return image


async def _to_its_end(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread, which cannot be stopped: who is cancelled waits for its end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@asynccontextmanager
async def _staging(store: Store) -> AsyncIterator[Staging]:
    """A folder to publish into; gone at the end, unless it was committed."""
    making = asyncio.ensure_future(asyncio.to_thread(store.staging))
    try:
        staging = await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if not making.exception():
            making.result().close()
        raise
    try:
        yield staging
    finally:
        await _to_its_end(staging.close)


def _check_readable(subject: str, source: Path) -> None:
    """Raise when a source is closed to the user that the model's process will be."""
    for path in itertools.chain([source], source.rglob("*") if source.is_dir() else ()):
        if path.is_symlink() and not path.exists():  # a link to nowhere is nobody's weights
            continue
        wanted = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & wanted != wanted:
            raise SourceError(
                subject,
                f"its source {path} cannot be read by the model, whose process has a user of its own",
                f"run chmod -R o+rX {source}",
            )


async def finish(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended, whatever it ends with."""
    if task is None or task.done():
        return
    task.cancel()
    await asyncio.wait([task])  # a caller that is cancelled itself is so at once
    if not task.cancelled():
        task.exception()
