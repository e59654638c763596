"""What is named in a volume lies in it: links that stay there are followed, links that lead out are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.fetching import SUBJECT
from omnimodel.agent.confinement import publishing_request
from omnimodel.agent.layout import Layout
from omnimodel.agent.sources import Sources
from omnimodel.errors import Reason, SourceError

SPEC: dict[str, Any] = {
    "model": {"namespace": "default", "name": "m"}, "generation": 1, "engine": "python", "workingDir": "",
    "limits": {"tmpBytes": 1, "shmBytes": 1, "processes": 1, "cpuMillis": 0}, "isolationLevel": "process",
    "identity": {"uid": 1, "hostname": "m"}, "network": False, "env": {}, "environment": {"paths": []},
}  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A volume, reached by a link as a claim may be, and what is not for models beside it."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "disk/..2026/voices").mkdir(parents=True)
    (tmp_path / "disk/..data").symlink_to("..2026")
    (tmp_path / "disk/voices").symlink_to("..data/voices")  # as Kubernetes writes config maps
    (tmp_path / "disk/out").symlink_to("../secrets")
    (tmp_path / "disk/root").symlink_to("/")
    (tmp_path / "disk/round").symlink_to("round")
    (tmp_path / "volume").symlink_to("disk")
    return tmp_path


def volume(machine: Path, sub_path: str) -> dict[str, Any]:
    return {"volume": {"name": "models", "subPath": sub_path, "path": str(machine / "volume" / sub_path)}}


INSIDE = {"": "disk", ".": "disk", "voices": "disk/..2026/voices", "./..data//voices": "disk/..2026/voices"}
OUTSIDE = ("out", "root", "root/etc")


def shown(machine: Path, sub_path: str) -> str:
    """The path of the machine that a mount of the manifest shows."""
    mount = {"name": "voices", "source": volume(machine, sub_path), "path": "/voices", "readOnly": False}
    spec = {**SPEC, "source": {}, "mounts": [mount]}
    made = publishing_request(SUBJECT, spec, Layout(machine / "agent"), machine, None, machine, number=1)
    _, found = made.plan.mounts
    assert (found.target, found.read_only, found.within) == ("/voices", False, str(machine / "disk"))
    return found.source


@pytest.mark.parametrize(("sub_path", "place"), INSIDE.items())
async def test_links_that_stay_in_the_volume_are_followed(machine: Path, sub_path: str, place: str) -> None:
    assert await Sources(machine / "sources").fetch(SUBJECT, volume(machine, sub_path)) == machine / place
    assert shown(machine, sub_path) == str(machine / place)


@pytest.mark.parametrize("sub_path", OUTSIDE)
async def test_links_that_lead_out_of_the_volume_are_refused(machine: Path, sub_path: str) -> None:
    said = (
        f"{sub_path!r}: a symbolic link leads out of volume models; put the files themselves there, or links that stay"
    )
    with pytest.raises(SourceError) as caught:
        await Sources(machine / "sources").fetch(SUBJECT, volume(machine, sub_path))
    assert caught.value.reason == Reason.SOURCE_NOT_FOUND
    assert f"{SUBJECT}: spec.source.volume: {said}" in str(caught.value)
    with pytest.raises(SourceError) as caught:
        shown(machine, sub_path)
    assert f"{SUBJECT}: mount voices: {said}" in str(caught.value)


async def test_a_link_that_leads_to_itself_is_no_source(machine: Path) -> None:
    with pytest.raises(SourceError, match="round does not exist on this machine"):
        await Sources(machine / "sources").fetch(SUBJECT, volume(machine, "round"))


def test_a_source_in_a_volume_is_watched_when_it_is_shown(machine: Path) -> None:
    spec = {**SPEC, "source": volume(machine, "voices"), "mounts": [{"name": "a", "source": True, "path": "/a"}]}
    source = machine / "disk/..2026/voices"
    made = publishing_request(SUBJECT, spec, Layout(machine / "agent"), source, None, machine, number=1)
    assert {(mount.source, mount.within) for mount in made.plan.mounts} == {(str(source), str(machine / "disk"))}
