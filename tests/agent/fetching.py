"""What the tests of sources share: content, a small disk, and what is left on it."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

from omnimodel.agent.sources import Sources

SUBJECT = "OmniModel default/tiny"
CONTENT = bytes(range(256)) * 4096  # 1 MiB


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left(sources: Sources) -> set[str]:
    return {str(path.relative_to(sources.root)) for path in sources.root.rglob("*") if path.is_file()}


def wheel(folder: Path, name: str = "tiny_weights", version: str = "1.0", tag: str = "py3-none-any", **files) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    entries = files.pop("entries", {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in {"tiny_weights/__init__.py": b"raise SystemExit('imported')", **entries}.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class SmallDisk:
    """A file system of a few megabytes."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], check=True)

    def grow(self, megabytes: int) -> None:
        self.mount(f"size={megabytes}m")

    def mount(self, option: str) -> None:
        """Mount it again, in another way: `ro`, `rw`."""
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)
