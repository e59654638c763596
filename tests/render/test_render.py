"""What rendering resolves, refuses and keeps secret."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.builders import changed
from omnimodel.errors import ManifestError, OmniError
from omnimodel.render import fill_secrets, render, user_id
from omnimodel.render.identity import FIRST_UID, UID_COUNT
from render import manifests


def spec(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    process = render(manifests.model(document, **changes), manifests.pool(), manifests.CONFIG)
    found: dict[str, Any] = process.to_dict()["spec"]
    return found


# Options and threads are named in a variable, so that arguments need not.
TEMPLATES = changed(manifests.COMMAND, runtime__env={"TOLD": "{{ threads }} {{ options.contextTokens }}"})


def test_secrets_are_named_and_never_contained() -> None:
    found = spec(manifests.PYTHON)
    assert "hunter2" not in str(found)
    assert found["secretEnv"]["HF_TOKEN"] | {"digest": ""} == {"name": "hub", "key": "token", "digest": ""}
    assert "HF_TOKEN" not in found["env"]


def test_the_agent_fills_secrets_in() -> None:
    found = spec(manifests.PYTHON)
    filled = fill_secrets(found, manifests.CONFIG["secrets"])
    assert filled["env"]["HF_TOKEN"] == "hunter2"
    mount = next(mount for mount in filled["mounts"] if mount["name"] == "hub")
    assert mount["source"]["files"] == {"token": "hunter2", "other": "x"}
    assert filled["hash"] == found["hash"]
    assert "hunter2" not in str(found)
    with pytest.raises(ManifestError, match="there is no Secret hub in its namespace"):
        fill_secrets(found, {})


def test_equal_secrets_of_two_models_do_not_show_as_equal() -> None:
    one = spec(manifests.PYTHON)["secretEnv"]["HF_TOKEN"]["digest"]
    model = manifests.model(manifests.PYTHON).with_metadata(name="other")
    other = render(model, manifests.pool(), manifests.CONFIG).spec.secret_env["HF_TOKEN"]["digest"]
    assert one != other


@pytest.mark.parametrize(
    ("document", "changes", "expected"),
    [
        (manifests.COMMAND, {"source": {"volume": {"name": "gone"}}}, "OmniModel default/server: spec.source.volume.name: 'gone': is no volume of OmniPool default/default; write one of models"),
        (manifests.PYTHON, {"mounts": [{"name": "a", "source": {"volume": {"name": "gone"}}, "path": "/a"}]}, "OmniModel search/tiny: spec.mounts[0].source.volume.name: 'gone': is no volume of OmniPool default/default; write one of models"),
        (manifests.PYTHON, {"mounts": [{"name": "a", "source": {"configMap": {"name": "gone"}}, "path": "/a"}]}, "OmniModel search/tiny: spec.mounts[0].source.configMap.name: 'gone': there is no ConfigMap gone in its namespace; add a ConfigMap of that name beside the manifest, or in the cluster"),
        (manifests.PYTHON, {"runtime__env": {"A": {"secretKeyRef": {"name": "hub", "key": "gone"}}}}, "OmniModel search/tiny: spec.runtime.env.A.secretKeyRef.key: 'gone': is no key of Secret hub; write one of other, token"),
        (manifests.PYTHON, {"runtime__env": {"A": {"configMapKeyRef": {"name": "handler", "key": "table.bin"}}}}, "OmniModel search/tiny: spec.runtime.env.A.configMapKeyRef: key table.bin of ConfigMap handler is not UTF-8 text; mount it instead"),
        (TEMPLATES, {"runtime__args": ["{{ prot }}"]}, "OmniModel default/server: spec.runtime.args[0]: '{{ prot }}': names what is not there; possible are mounts, name, namespace, options, port, socket, threads"),
        (TEMPLATES, {"runtime__args": ["{{ options.gone }}"]}, "OmniModel default/server: spec.runtime.args[0]: '{{ options.gone }}': names what is not there; possible are mounts, name, namespace, options, port, socket, threads"),
        (TEMPLATES, {"runtime__args": ["{{ port "]}, "OmniModel default/server: spec.runtime.args[0]: '{{ port ': is no template (unexpected end of template, expected 'end of print statement'.); close {{ with }}; put text with braces of its own in a file of a mount"),
    ],
    ids=["no volume", "no volume of a mount", "no config map", "no key", "no text", "misspelt", "no option", "not closed"],
)  # fmt: skip
def test_what_is_not_there_is_refused_in_one_line(
    document: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ManifestError) as failure:
        spec(document, **changes)
    assert str(failure.value) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(10) %}x{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ name.__class__ }}",
        "{{ options.contextTokens.bit_length() }}",
        "{{ range(9) }}",
        "{% set x = 1 %}{{ x }}",
        "{% include '/etc/passwd' %}",
        "{{ name | map('upper') }}",
        "{{ [name] }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_look_values_up_and_nothing_else(text: str) -> None:
    with pytest.raises(ManifestError):
        spec(TEMPLATES, runtime__args=[text])


@pytest.mark.parametrize(
    "text", ["--{{ 'device' }}=1", "{{ '--main' }}-gpu=1", "{{ '--device=1' }}", "{{ 'LD_PRELOAD=/x' }}"]
)
def test_a_template_says_nothing_that_a_manifest_must_not(text: str) -> None:
    with pytest.raises(ManifestError, match=r"spec\.runtime\.args\[0\].*(belongs to the system|breaks isolation)"):
        spec(TEMPLATES, runtime__args=[text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{port}", "{port}"),
        ("{{ port }}", "{port}"),
        ("{{port}}:{socket}", "{port}:{socket}"),
        ('{"json": {"a": 1}}', '{"json": {"a": 1}}'),
        ("{{ options['contextTokens'] }}", "4096"),
        ("{{ options.top | default(5) }}", "5"),
        ("{{ mounts.weights | basename }}", "weights"),
        ("$HOME/{nothing}", "$HOME/{nothing}"),
        ("ends with a line\n", "ends with a line\n"),
    ],
)
def test_a_template_says_what_the_manifest_says_elsewhere(text: str, expected: str) -> None:
    assert spec(TEMPLATES, runtime__args=[text])["args"] == [expected]


def test_a_volume_is_writable_only_where_pool_and_model_say_so() -> None:
    mounts = [{"name": "a", "source": {"volume": {"name": "models"}}, "path": "/a", "readOnly": False}]
    with pytest.raises(ManifestError) as failure:
        spec(manifests.PYTHON, mounts=mounts)
    assert str(failure.value) == (
        "OmniModel search/tiny: spec.mounts[0].readOnly: false: volume models of OmniPool default/default is read-only; "
        "remove readOnly: false, or write readOnly: false at the volume in OmniPool default/default"
    )
    writable = manifests.pool(volumes=[{"name": "models", "path": "/srv/models", "readOnly": False}])
    found = render(manifests.model(manifests.PYTHON, mounts=mounts), writable, manifests.CONFIG).spec.mounts
    assert found[0]["readOnly"] is False


def test_granted_names_replace_those_that_were_asked_for() -> None:
    model = manifests.model(manifests.PYTHON)
    names = render(model, manifests.pool(), manifests.CONFIG, served_names=["tiny", "tiny:brief"]).spec.served_names
    assert [(name.name, name.defaults, name.listed) for name in names] == [
        ("tiny", {}, True),
        ("tiny:brief", {"max_tokens": 8}, False),
    ]


def test_the_process_is_owned_by_its_model() -> None:
    metadata = render(manifests.model(manifests.PYTHON), manifests.pool(), manifests.CONFIG).to_dict()["metadata"]
    assert (metadata["namespace"], metadata["name"]) == ("search", "tiny")
    assert metadata["ownerReferences"][0]["uid"] == manifests.METADATA["uid"]
    assert metadata["ownerReferences"][0]["kind"] == "OmniModel"


def test_a_model_without_uid_renders_too() -> None:
    assert spec(manifests.TRANSFORMERS)["model"] == {"namespace": "default", "name": "smollm2", "uid": ""}


NAME = st.from_regex(r"\A[a-z]([-a-z0-9]{0,20}[a-z0-9])?\Z")


@given(NAME, NAME, st.uuids())
def test_a_user_id_is_the_same_each_time_and_in_its_range(namespace: str, name: str, uid: object) -> None:
    found = user_id(namespace, name, str(uid))
    assert FIRST_UID <= found < FIRST_UID + UID_COUNT
    assert user_id(namespace, name, str(uid)) == found


@given(st.sets(st.integers(100, 109), max_size=9))
def test_a_taken_user_id_is_not_given_again(taken: set[int]) -> None:
    assert user_id("default", "tiny", "u", taken, first=100, count=10) not in taken


def test_when_all_are_taken_it_says_so() -> None:
    with pytest.raises(OmniError, match="finds no free user id"):
        user_id("default", "tiny", "u", range(100, 110), first=100, count=10)


def test_two_models_never_share_a_user_id_when_the_caller_says_which_are_taken() -> None:
    taken: set[int] = set()
    for number in range(500):
        taken.add(user_id("default", f"m{number}", "u", taken, first=100, count=500))
    assert len(taken) == 500
