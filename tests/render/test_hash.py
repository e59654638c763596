"""The hash changes if, and only if, another process is needed; the publish hash if another image is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.builders import ABSENT
from omnimodel.api import OmniProcess, parse
from omnimodel.render import render
from render import manifests

FILE = {"entry": "handler:Handler", "files": {"handler.py": "class Handler:\n    speed = 2\n"}}
# What is changed -> whether that needs another process, and another image.
CHANGES: list[tuple[str, dict[str, Any], bool, bool]] = [
    ("another source", {"source__package__version": "1.0.3"}, True, True),
    ("another file of the source", {"source__package__path": "tiny/other.safetensors"}, True, True),
    ("another digest of the source", {"source__package__sha256": "b" * 64}, True, True),
    ("another handler", {"runtime__handler": FILE}, True, True),
    ("another requirement", {"runtime__environment__requirements": ["numpy==2.3.2"]}, True, True),
    ("requirements in another order", {"runtime__environment__requirements": ["numpy==2.3.1", "tiktoken==0.11.0"]}, False, False),
    ("another dtype", {"runtime__dtype": "bfloat16"}, True, True),
    ("another quantization", {"runtime__quantization": "int8"}, True, True),
    ("an option that a handler may build by", {"runtime__options__depth": 5}, True, True),
    ("another variable", {"runtime__env__MODE": "slow"}, True, False),
    ("other threads", {"runtime__threads": 7}, True, False),
    ("a network", {"runtime__allowNetwork": True}, True, False),
    ("other cores", {"resources__cpu": 4}, True, False),
    ("another memory limit", {"resources__hostMemory": "2Gi"}, True, False),
    ("the same memory limit in another unit", {"resources__hostMemory": 1 << 30}, False, False),
    ("other concurrency", {"limits__concurrency": 8}, True, False),
    ("a larger body", {"limits__requestBytes": "2Mi"}, True, False),
    ("more processes", {"limits__processes": 300}, True, False),
    ("no mounts", {"mounts": []}, True, False),
    ("another task", {"runtime__task": "embeddings"}, True, True),
    ("another device budget", {"resources__deviceMemory": "700Mi"}, False, False),
    ("another priority", {"residency__priority": 1}, False, False),
    ("another lifetime", {"residency__idleAfter": "never", "residency__idleTier": ABSENT}, False, False),
    ("a longer queue", {"limits__queue": 9}, False, False),
    ("another deadline", {"limits__deadline": "3m"}, False, False),
    ("another drain time", {"limits__drainTimeout": "5s"}, False, False),
    ("another name", {"servedNames": ["Tiny"]}, False, False),
    ("another description", {"description": "small"}, False, False),
    ("other metadata", {"metadata": {"owner": "ads"}}, False, False),
    ("other capabilities", {"capabilities": []}, False, False),
    ("another probe", {"probe__timeout": "5s"}, False, False),
    ("other models to be with, and to be without", {"affinity": {"together": ["rag"], "apart": ["large"]}}, False, False),
    ("suspended", {"suspend": True}, False, False),
]  # fmt: skip


def rendered(**changes: Any) -> OmniProcess:
    return render(manifests.model(manifests.PYTHON, **changes), manifests.pool(), manifests.CONFIG)


@pytest.mark.parametrize(("changes", "process", "image"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_change_needs_what_it_needs(changes: dict[str, Any], process: bool, image: bool) -> None:
    before, after = rendered().spec, rendered(**changes).spec
    assert (before.hash != after.hash) == process
    assert (before.publish_hash != after.publish_hash) == image


@given(st.lists(st.sampled_from(CHANGES), max_size=4, unique_by=lambda row: row[0]))
def test_changes_together_need_what_each_needs(rows: list[tuple[str, dict[str, Any], bool, bool]]) -> None:
    fields = [field for row in rows for field in row[1]]
    if len({field.split("__")[0] for field in fields}) < len(rows):
        return  # two changes of one place may undo each other
    changes = {field: value for row in rows for field, value in row[1].items()}
    before, after = rendered().spec, rendered(**changes).spec
    assert (before.hash != after.hash) == any(row[2] for row in rows)
    assert (before.publish_hash != after.publish_hash) == any(row[3] for row in rows)


def test_the_same_input_gives_the_same_bytes() -> None:
    assert rendered().to_dict() == rendered().to_dict()


def test_a_new_generation_alone_is_no_new_process() -> None:
    model = manifests.model(manifests.PYTHON)
    newer = model.with_metadata(generation=4, labels={"a": "b"}, annotations={"c": "d"})
    one = render(model, manifests.pool(), manifests.CONFIG).spec
    other = render(newer, manifests.pool(), manifests.CONFIG).spec
    assert other.generation == 4
    assert one.hash == other.hash


def test_a_model_made_anew_is_another_process() -> None:
    model = manifests.model(manifests.PYTHON)
    one = render(model, manifests.pool(), manifests.CONFIG).spec
    other = render(model.with_metadata(uid="another"), manifests.pool(), manifests.CONFIG).spec
    assert one.hash != other.hash
    assert one.publish_hash == other.publish_hash


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [("configmaps", "settings", "language"), ("configmaps", "handler", "table.bin"), ("secrets", "hub", "token")],
)
def test_another_content_of_what_it_refers_to_is_another_process(kind: str, name: str, key: str) -> None:
    config: dict[str, Any] = copy.deepcopy(manifests.CONFIG)
    config[kind][name][key] += b"!"
    model = manifests.model(manifests.PYTHON)
    assert render(model, manifests.pool(), config).spec.hash != rendered().spec.hash


def test_code_in_a_mount_is_part_of_the_image() -> None:
    changes: dict[str, Any] = {
        "runtime__handler": {"entry": "handler:Handler"},
        "runtime__environment": {"path": ["/code"]},
    }
    config: dict[str, Any] = copy.deepcopy(manifests.CONFIG)
    config["configmaps"]["handler"]["handler.py"] += b"# 2\n"
    model = manifests.model(manifests.PYTHON, **changes)
    one = render(model, manifests.pool(), manifests.CONFIG).spec
    other = render(model, manifests.pool(), config).spec
    assert one.publish_hash != other.publish_hash


def test_serving_options_of_transformers_do_not_publish_anew() -> None:
    one = render(manifests.model(manifests.TRANSFORMERS), manifests.pool()).spec
    other = render(manifests.model(manifests.TRANSFORMERS, runtime__options__contextTokens=64), manifests.pool()).spec
    assert one.publish_hash == other.publish_hash
    assert one.hash != other.hash


def test_a_pool_that_asks_for_more_isolation_needs_new_processes() -> None:
    model = manifests.model(manifests.TRANSFORMERS)
    one = render(model, manifests.pool()).spec
    limited = render(model, manifests.pool(overcommit={"limit": 2})).spec
    stricter = render(model, manifests.pool(isolation__level="namespaces")).spec
    assert one.hash == limited.hash
    assert one.hash != stricter.hash


def test_equal_specs_parse_to_equal_objects() -> None:
    process = rendered()
    assert parse(process.to_dict()) == process
