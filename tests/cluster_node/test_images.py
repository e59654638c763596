"""Container images as volumes: files that models read, and a published store that they serve from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from markupsafe import _speedups

from agent.fetching import wheel
from agent.package_index import PackageIndex
from cluster.cluster import Cluster
from cluster_node.installation import Installation, whole_condition
from cluster_node.models import ANSWER, code, linear, prober, said

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(600)]
VOICES = {"name": "voices", "source": {"volume": {"name": "data", "subPath": "voices/en"}}, "path": "/voices"}
# The environment has a library of machine code, which is mapped from where the image is.
READ = """
import os
from tiny_code import _speedups
answer = {"voice": open(os.environ["VOICES"] + "/one.txt").read(), "library": _speedups.__file__}
"""


@dataclass(frozen=True)
class Made:
    """Names of two images of the node: one with files, one with a published store."""

    data: str
    catalogue: str


def packaged(name: str, pool: str) -> Any:
    """A model whose weights and code come from an index, or from where they were published."""
    package = {"name": "tiny-weights", "version": "1.0", "path": "tiny_weights/linear.safetensors"}
    environment = {"requirements": ["tiny-code==1.0"]}
    manifest = prober(name, pool, source={"package": package}, mounts=[VOICES], runtime={"environment": environment})
    manifest["spec"]["runtime"]["env"] = {"VOICES": VOICES["path"]}
    return manifest


@pytest.fixture(scope="module")
def made(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The store was filled by `omni publish` on this machine, as someone does whose cluster has no way out."""
    cluster = installation.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("images are made for a node that is this machine")
    folder = tmp_path_factory.mktemp("images")
    folder.chmod(0o755)  # publishers have users of their own
    data, catalogue, manifests = folder / "data", folder / "catalogue", folder / "manifests"
    (data / "voices" / "en").mkdir(parents=True)
    (data / "voices" / "en" / "one.txt").write_text("voice")
    shutil.copy(installation.folder / "linear.safetensors", data / "voices")
    for path in (data, *data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    library = Path(_speedups.__file__)
    code = {"tiny_code/__init__.py": b"", f"tiny_code/{library.name}": library.read_bytes()}
    wheel(folder / "shelf", "tiny_code", entries=code)
    weights = (installation.folder / "linear.safetensors").read_bytes()
    wheel(folder / "shelf", entries={"tiny_weights/linear.safetensors": weights})
    manifests.mkdir()
    with PackageIndex(folder / "shelf") as index:
        spec = {
            "device": {"type": "cpu", "memory": "256Mi"},
            "sources": {"packageIndex": f"{index.url}/simple"},
            "volumes": [{"name": "data", "path": str(data)}],
        }
        pool = {"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniPool", "metadata": {"name": "imaged"}, "spec": spec}
        for number, manifest in enumerate((pool, packaged("packaged", "imaged"))):
            (manifests / f"{number}.yaml").write_text(json.dumps(manifest))
        command = [sys.executable, "-m", "omnimodel.cli", "publish", str(manifests), "--store", str(catalogue)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return Made(cluster.image("voices:1", data, []), cluster.image("catalogue:1", catalogue, []))


@pytest.fixture(scope="module")
def imaged(installation: Installation, made: Made) -> Iterator[str]:
    """A pool whose pods have nothing but these images."""
    with installation.pool(
        "imaged",
        volumes=[{"name": "data", "image": {"reference": made.data, "pullPolicy": "Never"}}],
        store={"published": [{"name": "catalogue", "image": {"reference": made.catalogue}}]},
        sources={"packageIndex": "http://127.0.0.1:9/simple"},  # where nobody answers
    ) as name:
        yield name


def test_a_model_reads_its_weights_from_an_image(installation: Installation, imaged: str) -> None:
    source = {"volume": {"name": "data", "subPath": "voices/linear.safetensors"}}
    with installation.model(linear("weighed", imaged, source=source)) as name:
        installation.wait_ready(name)
        assert installation.ask(name).values == ANSWER


def test_a_model_is_served_from_a_published_store_in_an_image(installation: Installation, imaged: str) -> None:
    with installation.model(packaged("packaged", imaged)) as name:
        installation.wait_ready(name)
        answer = said(installation.ask(name, code(READ)).values)
        assert isinstance(answer, dict), answer
        assert answer["voice"] == "voice"
        assert answer["library"].startswith("/stores/catalogue/")
        assert installation.entry(name, "imaged-0")["store"] == "catalogue"


def test_an_image_that_is_not_there_is_told_by_the_pool(installation: Installation) -> None:
    missing = {"reference": "localhost/nobody-made-it:1", "pullPolicy": "Never"}
    with installation.pool("lacking-image", volumes=[{"name": "data", "image": missing}]) as pool:
        installation.until(
            lambda: whole_condition(installation.get("omnipool", pool), "Stalled").get("status") == "True",
            "the pool to be Stalled",
        )
        stalled = whole_condition(installation.get("omnipool", pool), "Stalled")
        assert stalled["reason"] == "ImageNotPulled"
        assert "nobody-made-it" in stalled["message"]
