"""What the tests of sources share: content, a small disk, and what is left on it."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
from pathlib import Path

from omnimodel.agent.sources import Sources

SUBJECT = "OmniModel default/tiny"
CONTENT = bytes(range(256)) * 4096  # 1 MiB


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left(sources: Sources) -> set[str]:
    return {str(path.relative_to(sources.root)) for path in sources.root.rglob("*") if path.is_file()}


async def until(condition, seconds: float = 60) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


class SmallDisk:
    """A file system of a few megabytes."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)

    def grow(self, megabytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", str(self.path)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)
