"""What models get to see of volumes, config maps and secrets in a real pod."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster_node.installation import MINUTES, PODS, VOLUME, Installation
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
# At level landlock nothing can be mounted: variables of the manifest are told where the files are instead.
PLACES = {f"{mount['name'].upper()}_PLACE": mount["path"] for mount in MOUNTS}
READ = """
import os
answer = {name: open(os.path.join(os.environ[name + "_PLACE"], file)).read() for name, file in (
    ("SECRET", "token"), ("SETTINGS", "mode"), ("VOICES", "one.txt"), ("LABELS", "labels.txt"))}
"""
WRITE = """
import os
def tried(path):
    try:
        return open(path, "w").write("hello")
    except OSError as error:
        return error.strerror
answer = {name: tried(os.environ[name + "_PLACE"] + "/x") for name in (
    "SECRET", "SETTINGS", "VOICES", "LABELS", "NOTES", "SCRATCH")}
"""
ABOVE = """
import os
def tried(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
voices = os.environ["VOICES_PLACE"]
answer = [
    sorted(os.listdir(voices)),
    tried(lambda: os.listdir("/volumes/claim")),
    tried(lambda: open(voices + "/../other.txt").read()),
]
"""
LEVELS = {"namespaces": "Read-only file system", "landlock": "Permission denied"}  # and how a write is refused
at_each_level = pytest.mark.parametrize("level", LEVELS)


def settings(mode: str) -> dict[str, Any]:
    metadata = {"name": "settings", "namespace": PODS}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"mode": mode}}


def secret(token: str) -> dict[str, Any]:
    encoded = base64.b64encode(token.encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub", "namespace": PODS},
        "data": {"token": encoded},
    }


@pytest.fixture(scope="module")
def claim(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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
        settings("fast"),
        secret("first"),
    )
    yield folder
    made = ("pvc/voices", "configmap/settings", "secret/hub")
    installation.cluster.kubectl("delete", *made, "-n", PODS, "--wait", MINUTES)
    installation.cluster.kubectl("delete", "pv", "voices", "--wait", MINUTES)


@pytest.fixture(scope="module")
def readers(installation: Installation, claim: Path) -> Iterator[dict[str, str]]:
    """At each level a model with everything mounted: in pods that may mount, and in those that a pool has by default."""
    del claim  # made by now
    volumes = [
        {"name": VOLUME, "path": str(installation.folder)},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "voices"}, "readOnly": False},
    ]
    runtime = {"env": PLACES}
    with (
        installation.pool("rooms", isolation={"level": "namespaces"}, volumes=volumes) as rooms,
        installation.pool("open", volumes=volumes) as plain,
        installation.model(prober("in-rooms", rooms, mounts=MOUNTS, runtime=runtime)) as first,
        installation.model(prober("in-open", plain, mounts=MOUNTS, runtime=runtime)) as second,
    ):
        installation.wait_ready(first, second)
        levels = {name: installation.get("omnipool", name)["status"]["isolation"]["level"] for name in (rooms, plain)}
        assert levels == {rooms: "namespaces", plain: "landlock"}
        yield {"namespaces": first, "landlock": second}


@at_each_level
def test_everything_can_be_read(installation: Installation, readers: dict[str, str], level: str) -> None:
    assert said(installation.ask(readers[level], code(READ)).values) == {
        "SECRET": "first",
        "SETTINGS": "fast",
        "VOICES": "voice",
        "LABELS": "cat",
    }


def test_where_mounts_are_possible_everything_is_at_its_path(
    installation: Installation, readers: dict[str, str]
) -> None:
    told = f"import os; answer = {{name: os.environ[name] for name in {sorted(PLACES)}}}"
    assert said(installation.ask(readers["namespaces"], code(told)).values) == PLACES


@at_each_level
def test_of_a_volume_it_sees_the_sub_path_and_nothing_above(
    installation: Installation, readers: dict[str, str], level: str
) -> None:
    listed, above, beside = said(installation.ask(readers[level], code(ABOVE)).values)
    assert listed == ["one.txt"]
    assert {above, beside} <= {"No such file or directory", "Permission denied"}


@at_each_level
def test_it_writes_where_it_may_and_nowhere_else(
    installation: Installation, readers: dict[str, str], level: str, claim: Path
) -> None:
    (claim / "notes" / "x").unlink(missing_ok=True)
    refused = LEVELS[level]
    assert said(installation.ask(readers[level], code(WRITE)).values) == {
        "SECRET": refused,
        "SETTINGS": refused,
        "VOICES": refused,
        "LABELS": refused,
        "NOTES": 5,
        "SCRATCH": 5,
    }
    assert (claim / "notes" / "x").read_text() == "hello"


def test_a_secret_and_a_config_map_that_are_changed_reach_the_models(
    installation: Installation, readers: dict[str, str]
) -> None:
    installation.cluster.apply(secret("second"), settings("slow"))
    wanted = {"SECRET": "second", "SETTINGS": "slow", "VOICES": "voice", "LABELS": "cat"}

    def has_changed(model: str) -> bool:
        answer = installation.ask(model, code(READ))
        return answer.status == 200 and said(answer.values) == wanted

    for model in readers.values():
        installation.until(partial(has_changed, model), "the new token and mode", 120)
