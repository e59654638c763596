"""The admission policy for what the CRDs cannot refuse, on a real API server: the same manifests, the same words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.builders import COMMAND, TRANSFORMERS, model
from cluster.connection import Connection
from cluster.server import Server, path_of
from cluster.test_crd_rules import BAD, GOOD, is_later
from omnimodel.api import validate
from omnimodel.api.policy import NAME

pytestmark = pytest.mark.cluster_api
ROOT = Path(__file__).parents[2]
POLICY = ROOT / "charts/omnimodel/files/policies/omnimodels.yaml"
PREFIX = f"ValidatingAdmissionPolicy '{NAME}' with binding '{NAME}' denied request: "

# The operator says these in a condition, for a parser is needed.
PARSED = {"model: probe regex", "model: handler syntax"}
# The API server drops a null before anybody looks: what it stores is right, and the same as without the line.
DROPPED = {"model: null", "model: null spec section", "model: memory None", "pool: pool memory None"}
# The problem is the same, but what is meant is found by likeness, which only `omni validate` does.
LIKENESS = {"model: option misspelt", "model: option of vllm misspelt, and one of another engine"}
LATER = [(name, manifest) for name, manifest in BAD if is_later(name)]

TAKEN = [
    *GOOD,
    ("quotes in arguments", model(runtime={**COMMAND, "args": ["--greeting 'a b' --mode \"x\""]})),
    ("a word that begins like an option", model(runtime={**COMMAND, "args": ["--mo", "-1"]})),
    ("a name that ends like a secret's", model(runtime__env={"API_KEY": "none", "KEYBOARD": "de", "TOKENS": "4"})),
    ("a port where the system puts one", model(runtime={**COMMAND, "env": {"PORT": "{port}"}})),
    ("an option at its bounds", model(runtime={**TRANSFORMERS, "options": {"topP": 1, "temperature": 0.0}})),
]


@pytest.fixture(scope="module", autouse=True)
def policy(api_cluster: Connection, server: Server) -> Iterator[None]:
    """The policy in force for the tests of this module, and for no others."""
    api_cluster.kubectl("apply", "--server-side", "-f", str(POLICY))
    refused = model(runtime__env={"HF_HOME_TOKEN": "hunter2"})
    for _ in api_cluster.until(60):  # a policy comes into force a moment after it was made
        if not server.try_create(refused, "default").ok:
            break
    yield
    api_cluster.kubectl("delete", "-f", str(POLICY))
    for _ in api_cluster.until(60):
        if server.try_create(refused, "default").ok:
            break


def said_by(message: str) -> list[tuple[str, str]]:
    """Field and sentence of each problem in a refusal."""
    return [tuple(line.split(": ", 1)) for line in message.partition(PREFIX)[2].split(" | ")]  # type: ignore[misc]


@pytest.mark.parametrize(("name", "manifest"), LATER, ids=[row[0] for row in LATER])
def test_what_the_definitions_cannot_refuse_is_refused_in_the_words_of_offline_validation(
    name: str, manifest: dict[str, Any], server: Server
) -> None:
    _, errors = validate(manifest)
    answer = server.try_create(manifest, "default")
    assert answer.ok == (name in PARSED | DROPPED), answer.body
    if answer.ok:
        return
    said = sorted(said_by(answer.body["message"]))  # the server knows no order of names
    for (field, sentence), error in zip(said, sorted(errors, key=lambda error: error.field), strict=True):
        problem, _, cure = sentence.partition("; ")
        assert field == error.field
        assert error.problem.endswith(problem)  # offline it begins with the value
        assert cure == error.cure or name in LIKENESS


@pytest.mark.parametrize("manifest", [row[1] for row in TAKEN], ids=[row[0] for row in TAKEN])
def test_what_is_right_is_taken(manifest: dict[str, Any], server: Server) -> None:
    assert not validate(manifest)[1]
    answer = server.try_create(manifest, "default")
    assert answer.ok, answer.body


def test_the_catalogue_is_taken(api_cluster: Connection, namespace: str) -> None:
    folder = ROOT / "examples/catalog"
    documents = [item for path in folder.rglob("*.yaml") for item in yaml.safe_load_all(path.read_text()) if item]
    said = api_cluster.apply(*documents, options=["-n", namespace, "--dry-run=server"])
    assert len(said.splitlines()) == len(documents)


def test_a_model_that_was_there_before_may_change_in_all_but_its_spec(
    api_cluster: Connection, server: Server, namespace: str
) -> None:
    """The policy must not keep anybody from labelling, or deleting, what an older version took."""
    bad = model(runtime__env={"SETTING": "sk-abcdefghijklmnopqrstuvwxyz"})
    api_cluster.kubectl("delete", "validatingadmissionpolicybinding", NAME)
    for _ in api_cluster.until(60):
        if server.create(bad, namespace).ok:
            break
    api_cluster.kubectl("apply", "--server-side", "-f", str(POLICY))
    for _ in api_cluster.until(60):
        if not server.try_create(bad, "default").ok:
            break
    path = path_of("OmniModel", namespace, bad["metadata"]["name"])
    item = dict(server.ask("GET", path).body)
    item["metadata"] = {**item["metadata"], "labels": {"team": "search"}}
    answer = server.ask("PUT", path, item)
    assert answer.ok, answer.body
    item = {**dict(answer.body), "spec": {**answer.body["spec"], "description": "edited"}}
    assert not server.ask("PUT", path, item).ok
    assert server.ask("DELETE", path).ok
