"""A folder of manifests as a stream of catalogues."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

import watchfiles

from omnimodel.catalog.catalog import Catalog, Identity, Key
from omnimodel.catalog.load import load
from omnimodel.catalog.reading import files_of

log = logging.getLogger(__name__)

# An editor saves in several steps; a round begins when nothing has changed for a moment.
STEP_MILLISECONDS = 50
DEBOUNCE_MILLISECONDS = 400
# Changes that no event tells of (network file systems, a lost event) are found by looking.
LOOK_MILLISECONDS = 2_000
ABSENT_SECONDS = 0.5


async def watch(
    folder: str | os.PathLike[str], *, identities: Mapping[Key, Identity] | None = None
) -> AsyncGenerator[Catalog]:
    """Yield the catalogue of a folder, and a new one whenever it changes, until the caller stops.

    A broken file keeps its last good version, and its errors are in the catalogue. A folder that is not there gives a
    catalogue with that error, and may come later.

    Args:
        folder: with manifests at any depth.
        identities: those of an earlier run of the program, for objects as they are first seen.
    """
    root = Path(folder)
    catalog: Catalog | None = None
    seen: _State = ()
    left = dict(identities or {})
    async with aclosing(_bell(root)) as bell:
        async for _ in bell:
            state = await asyncio.to_thread(_state, root)
            if catalog is not None and state == seen:
                continue
            fresh = await asyncio.to_thread(load, root, previous=catalog, identities=left)
            # What has been there in this run and comes again after it was deleted is another object.
            left = {key: identity for key, identity in left.items() if key not in fresh.identities}
            seen = state
            if catalog is None or _differs(catalog, fresh):
                catalog = fresh
                yield catalog


async def _bell(root: Path) -> AsyncGenerator[None]:
    """Ring at once, on every change below a folder, and now and then; the watch begins before the first ring."""
    rung = False
    while True:
        if not _inode(root):
            if not rung:
                yield None
                rung = True
            await asyncio.sleep(ABSENT_SECONDS)
            yield None
            continue
        identity = _inode(root)
        notices = watchfiles.awatch(
            root,
            watch_filter=None,
            step=STEP_MILLISECONDS,
            debounce=DEBOUNCE_MILLISECONDS,
            rust_timeout=LOOK_MILLISECONDS,
            yield_on_timeout=True,
        )
        waiting = asyncio.ensure_future(anext(notices))
        try:
            await asyncio.sleep(0)  # lets the watch begin, so that nothing is lost between it and the first look
            yield None
            rung = True
            while _inode(root) == identity:
                await waiting
                waiting = asyncio.ensure_future(anext(notices))
                yield None
        except (FileNotFoundError, StopAsyncIteration):
            log.info("catalog folder is gone folder=%s", root)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await notices.aclose()


def _inode(root: Path) -> int:
    try:
        return root.stat().st_ino
    except OSError:
        return 0


_State = tuple[tuple[str, int, int, int], ...]


def _state(root: Path) -> _State:
    """What shows that a file may have changed: names, sizes, times and inodes."""
    found = []
    for name in files_of(root, []):
        try:
            about = Path(name).stat()
        except OSError:
            found.append((name, 0, 0, 0))
            continue
        found.append((name, about.st_size, about.st_mtime_ns, about.st_ino))
    return tuple(found)


def _differs(one: Catalog, other: Catalog) -> bool:
    if one.objects != other.objects or one.configs != other.configs or one.notes != other.notes:
        return True
    return [str(error) for error in one.errors] != [str(error) for error in other.errors]
