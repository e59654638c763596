"""Which paths of the machine this Python needs, so that a sandbox can show them and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
KERNEL_FOLDERS = (  # what libraries read of the machine: its processors, and how allocators get large pages
    "/sys/devices/system",
    "/sys/kernel/mm/transparent_hugepage",
)


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Leave out every path that lies below another one."""
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}):
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in kept):
            kept.append(path)
    return tuple(kept)


def interpreter_paths() -> tuple[str, ...]:
    """Folders of this interpreter, its environment and this package, without what /usr and the like hold already.

    An import path that holds this package (a checkout) is narrowed down to the package, so that no other file of the
    checkout is seen.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = {package, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    found.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    for entry in sys.path:
        path = os.path.abspath(entry)
        if entry and path != "/" and os.path.exists(path) and not package.startswith(path.rstrip("/") + "/"):
            found.add(path)
    system = tuple(folder + "/" for folder in SYSTEM_FOLDERS)
    return tuple(path for path in outermost(found) if path != "/" and not (path + "/").startswith(system))
