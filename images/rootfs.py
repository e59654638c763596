#!/usr/bin/env python3
"""Root file systems of the images without docker, from what is installed on this machine.

    python images/rootfs.py operator FOLDER   # everything: interpreter, libraries, the packages of the base install
    python images/rootfs.py agent FOLDER      # a base only, for an environment that is mounted from the node

Run it with the Python whose environment has omnimodel installed. `operator` copies that interpreter to /usr/local, the
shared libraries that it and its packages are linked with, and those packages that the base install requires, of the
versions installed here; no torch. An agent with torch is several GB; tests mount the environment of this machine into
its pods, and what `agent` makes has only the places to mount it at. The last line printed is the image's entry point.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

PREFIX = Path("usr/local")
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
MERGED = ("bin", "lib", "lib32", "lib64", "sbin")  # folders of / that are links into /usr, as in Debian
SKIPPED = ("site-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "config-*")
MOUNTED = (Path("/usr"), Path(sys.base_prefix), Path(sys.prefix))
NAMES = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\nomni:x:65532:65532:omni:/tmp:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nomni:x:65532:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
    "etc/ld.so.conf": "/usr/local/lib\n/usr/lib/x86_64-linux-gnu\n/usr/lib/aarch64-linux-gnu\n",
}
OMNI = f"#!/usr/local/bin/{VERSION}\nfrom omnimodel.cli import main\n\nmain()\n"


def write_operator(root: Path) -> list[str]:
    """Write the operator's; its entry point."""
    _skeleton(root)
    prefix = root / PREFIX
    base = Path(sys.base_prefix)
    binary = prefix / "bin" / VERSION
    binary.parent.mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), binary)
    shutil.copytree(base / "lib" / VERSION, prefix / "lib" / VERSION, ignore=shutil.ignore_patterns(*SKIPPED))
    packages = prefix / "lib" / VERSION / "site-packages"
    for distribution in required("omnimodel"):
        _copy_distribution(distribution, packages)
    _copy_package(packages)
    (prefix / "bin" / "omni").write_text(OMNI)
    (prefix / "bin" / "omni").chmod(0o755)
    _copy_libraries(root, [binary, *prefix.rglob("*.so"), *prefix.rglob("*.so.*")])
    return ["/usr/local/bin/omni"]


def write_agent(root: Path) -> list[str]:
    """Write the base of an agent; its entry point, in the environment that is to be mounted."""
    _skeleton(root)
    for path in mounted():
        (root / path.relative_to("/")).mkdir(parents=True, exist_ok=True)
    return [str(Path(sys.prefix) / "bin" / "python"), "-m", "omnimodel.cli"]


def mounted() -> tuple[Path, ...]:
    """Folders of this machine that the agent's root file system lacks: system, interpreter, environment, package."""
    return (*MOUNTED, package_folder())


def package_folder() -> Path:
    """Where the package itself is, which may be a checkout."""
    return Path(str(importlib.import_module("omnimodel").__file__)).parent


def required(name: str, seen: set[str] | None = None) -> Iterator[importlib.metadata.Distribution]:
    """The distribution and all that its base install requires, directly or not."""
    seen = set() if seen is None else seen
    normal = re.sub(r"[-_.]+", "-", name).lower()
    if normal in seen:
        return
    seen.add(normal)
    distribution = importlib.metadata.distribution(name)
    yield distribution
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from required(requirement.name, seen)


def _skeleton(root: Path) -> None:
    root.mkdir(parents=True)
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "etc", "proc", "root", "run", "sys", "tmp", "var/lib"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name, text in NAMES.items():
        (root / name).write_text(text)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        (root / "etc/ssl/certs").mkdir(parents=True)
        shutil.copy2(certificates, root / "etc/ssl/certs")


def _copy_distribution(distribution: importlib.metadata.Distribution, packages: Path) -> None:
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or "__pycache__" in file.parts or file.suffix == ".pth" or not source.is_file():
            continue  # scripts, and what an editable install points at
        target = packages / file
        _copy(source, target)
        # Where nothing can be written, each start would compile everything anew.
        if source.suffix == ".py" and os.path.exists(compiled := importlib.util.cache_from_source(source)):
            _copy(Path(compiled), target.parent / "__pycache__" / Path(compiled).name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _copy_package(packages: Path) -> None:
    """The package itself, which an editable install has elsewhere."""
    shutil.copytree(package_folder(), packages / "omnimodel", dirs_exist_ok=True)


def _copy_libraries(root: Path, linked: Iterable[Path]) -> None:
    """The shared libraries that programs and modules name, and the loader."""
    output = subprocess.run(["ldd", *map(str, linked)], check=False, capture_output=True, text=True).stdout
    found = {Path(match) for match in re.findall(r"(?:=> |^\t)(/\S+) \(0x", output, re.MULTILINE)}
    for library in sorted(found):
        if library.is_relative_to(root):
            continue
        own = library.is_relative_to(sys.base_prefix)
        target = root / PREFIX / "lib" / library.name if own else root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(library, target)
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True, capture_output=True)


def main() -> int:
    """Write one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", choices=("operator", "agent"))
    parser.add_argument("folder", type=Path, help="must not exist")
    options = parser.parse_args()
    write = write_operator if options.image == "operator" else write_agent
    sys.stdout.write(f"{' '.join(write(options.folder))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
