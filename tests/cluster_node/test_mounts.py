"""What models get to see of volumes, config maps and secrets in a real pod."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_node.installation import PODS, VOLUME, Installation
from cluster_node.models import code, prober, said

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(600)]
MOUNTS = [
    {"name": "secret", "source": {"secret": {"name": "hub"}}, "path": "/secrets/hub"},
    {"name": "settings", "source": {"configMap": {"name": "settings"}}, "path": "/settings"},
    {"name": "voices", "source": {"volume": {"name": "claim", "subPath": "voices/en"}}, "path": "/voices"},
    {
        "name": "notes",
        "source": {"volume": {"name": "claim", "subPath": "notes"}},
        "path": "/notes",
        "readOnly": False,
    },
    {"name": "scratch", "source": {"empty": {"size": "8Mi"}}, "path": "/scratch"},
    {"name": "labels", "source": {"files": {"labels.txt": "cat"}}, "path": "/labels"},
]
READ = """
import os
answer = {path: open(path).read() for path in (
    "/secrets/hub/token", "/settings/mode", "/voices/one.txt", "/labels/labels.txt")}
"""
WRITE = """
def tried(path):
    try:
        return open(path, "w").write("hello")
    except OSError as error:
        return error.strerror
answer = {path: tried(f"{path}/x") for path in (
    "/secrets/hub", "/settings", "/voices", "/labels", "/notes", "/scratch")}
"""


def secret(token: str) -> dict[str, Any]:
    encoded = base64.b64encode(token.encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub", "namespace": PODS},
        "data": {"token": encoded},
    }


@pytest.fixture(scope="module")
def claim(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder behind a persistent volume claim."""
    folder = tmp_path_factory.mktemp("claim")
    for path in (folder, folder / "voices", folder / "voices" / "en", folder / "notes"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    (folder / "notes").chmod(0o777)
    (folder / "voices" / "en" / "one.txt").write_text("voice")
    (folder / "voices" / "other.txt").write_text("of another language")
    size = {"requests": {"storage": "1Mi"}}
    of_one = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {**of_one, "capacity": {"storage": "1Mi"}, "hostPath": {"path": str(folder)}}
    volume["claimRef"] = {"name": "voices", "namespace": PODS}
    installation.cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "voices"}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "voices", "namespace": PODS},
            "spec": {**of_one, "resources": size, "volumeName": "voices"},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "settings", "namespace": PODS},
            "data": {"mode": "fast"},
        },
        secret("first"),
    )
    return folder


@pytest.fixture(scope="module")
def reader(installation: Installation, claim: Path) -> Iterator[str]:
    """A model with everything mounted, in a pool whose pods may mount."""
    del claim  # made by now
    volumes = [
        {"name": VOLUME, "path": str(installation.folder)},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "voices"}, "readOnly": False},
    ]
    with (
        installation.pool("rooms", isolation={"level": "namespaces"}, volumes=volumes) as pool,
        installation.model(prober("reader", pool, mounts=MOUNTS)) as name,
    ):
        installation.wait_ready(name)
        yield name


def test_everything_is_at_its_path(installation: Installation, reader: str) -> None:
    assert said(installation.ask(reader, code(READ)).values) == {
        "/secrets/hub/token": "first",
        "/settings/mode": "fast",
        "/voices/one.txt": "voice",
        "/labels/labels.txt": "cat",
    }


def test_of_a_volume_it_sees_the_sub_path_and_nothing_above(installation: Installation, reader: str) -> None:
    listed = "import os; answer = [sorted(os.listdir('/voices')), os.path.exists('/volumes')]"
    assert said(installation.ask(reader, code(listed)).values) == [["one.txt"], False]


def test_it_writes_where_it_may_and_nowhere_else(installation: Installation, reader: str, claim: Path) -> None:
    refused = "Read-only file system"
    assert said(installation.ask(reader, code(WRITE)).values) == {
        "/secrets/hub": refused,
        "/settings": refused,
        "/voices": refused,
        "/labels": refused,
        "/notes": 5,
        "/scratch": 5,
    }
    assert (claim / "notes" / "x").read_text() == "hello"


def test_a_secret_that_is_changed_reaches_the_model(installation: Installation, reader: str) -> None:
    question = code("answer = open('/secrets/hub/token').read()")
    installation.cluster.apply(secret("second"))

    def has_changed() -> bool:
        answer = installation.ask(reader, question)
        return answer.status == 200 and said(answer.values) == "second"

    installation.until(has_changed, "the new token", 120)
