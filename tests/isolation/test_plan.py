"""Plans and results cross process borders and mean the same on the other side."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnimodel.isolation import Level, Mount, Reached, SandboxPlan
from omnimodel.isolation.interpreter import interpreter_paths, outermost

paths = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(lambda text: "/" + text)


@given(
    st.builds(
        SandboxPlan,
        instance=st.text(),
        uid=st.integers(0, 2**31),
        minimum=st.sampled_from(Level),
        wanted=st.sampled_from(Level),
        read_only=st.lists(paths).map(tuple),
        mounts=st.lists(st.builds(Mount, paths, paths, st.booleans())).map(tuple),
        network=st.booleans(),
    )
)
def test_a_plan_survives_json(plan: SandboxPlan) -> None:
    assert SandboxPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_result_survives_json() -> None:
    reached = Reached(Level.LANDLOCK, ("a", "b"))
    assert Reached.from_json(json.loads(json.dumps(reached.to_json()))) == reached


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        pytest.param("/store/1/image", "/image/image", id="below a mount"),
        pytest.param("/store/1", "/image", id="the mount itself"),
        pytest.param("/store/10/image", "/store/10/image", id="a longer name is another folder"),
        pytest.param("/store/1/deep/x", "/deep/x", id="the innermost mount decides"),
    ],
)
def test_where_a_path_is_found_inside(path: str, inside: str) -> None:
    plan = SandboxPlan("x", mounts=(Mount("/store/1", "/image"), Mount("/store/1/deep", "/deep")))
    assert plan.inside(path, Level.NAMESPACES) == inside
    assert plan.inside(path, Level.LANDLOCK) == path


def test_levels_are_ordered() -> None:
    assert sorted(Level, key=lambda level: level.strength) == [Level.PROCESS, Level.LANDLOCK, Level.NAMESPACES]


def test_only_outermost_paths_are_bound() -> None:
    assert outermost(["/a/b", "/a", "/ab", "/a/b/c"]) == ("/a", "/ab")


def test_the_interpreter_needs_no_whole_checkout() -> None:
    found = interpreter_paths()
    assert all(os.path.exists(path) for path in found)
    assert any(path.endswith("/omnimodel") for path in found)
    assert "/" not in found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("/code", "/run/a/code", id="a mount"),
        pytest.param("/code/server.py", "/run/a/code/server.py", id="a file in it"),
        pytest.param("--model=/code/deep/x", "--model=/store/deep/x", id="a mount in a mount, in an option"),
        pytest.param("/code:/usr/lib", "/run/a/code:/usr/lib", id="a list of folders"),
        pytest.param("/codec", "/codec", id="another name that begins like it"),
        pytest.param("/usr/code", "/usr/code", id="another folder of its name"),
        pytest.param("--port", "--port", id="no path"),
    ],
)
def test_below_namespaces_a_process_is_told_where_its_mounts_come_from(text: str, told: str) -> None:
    plan = SandboxPlan("one", mounts=(Mount("/run/a/code", "/code"), Mount("/store/deep", "/code/deep/")))
    assert plan.told(text, Level.LANDLOCK) == told
    assert plan.told(text, Level.NAMESPACES) == text
