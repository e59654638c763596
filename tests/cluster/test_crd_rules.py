"""Every rule of the CRDs, on a real API server: what it refuses, in which words, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from api import refused_fields, refused_options, refused_places, refused_quantities, refused_runtime
from api.builders import ABSENT, COMMAND, LLAMACPP, MODEL, POOL, SGLANG, TRANSFORMERS, VLLM, model, pool
from api.test_accepted import POOLS, SAID
from cluster.server import Server
from omnimodel.api import OmniModel, OmniPool, crd, validate
from omnimodel.api.meta import Part
from omnimodel.api.tree import fields, shape

pytestmark = pytest.mark.cluster_api

Rows = list[tuple[str, dict[str, Any]]]
REFUSED = (refused_fields, refused_places, refused_quantities, refused_runtime, refused_options)
BAD: Rows = [(f"model: {name}", model(**changes)) for table in REFUSED for name, changes, _ in table.MODELS]
BAD += [(f"pool: {name}", pool(**changes)) for table in REFUSED[:3] for name, changes, _ in table.POOLS]
GOOD: Rows = [(f"model: {name}", model(**changes)) for name, changes in SAID]
GOOD += [(f"pool: {name}", pool(**changes)) for name, changes in POOLS]
# Rules that no manifest of the offline tests comes to.
BAD += [
    ("a name in capitals", {**MODEL, "metadata": {"name": "a.b"}}),
    ("a pool with dots", {**POOL, "metadata": {"name": "a.b"}}),
    ("program with a device index", model(runtime={**COMMAND, "command": ["serve", "{port}", "--main-gpu", "1"]})),
    ("arguments with a device index", model(runtime={**COMMAND, "args": ["--main-gpu", "1"]})),
    ("llamacpp with a device index", model(runtime={"engine": "llamacpp", "args": ["--main-gpu", "1"]})),
    ("llamacpp with a repository", model(runtime={"engine": "llamacpp", "args": ["--hf-repo", "a/b"]})),
    ("vllm with a cache in bytes", model(runtime={**VLLM, "args": ["--kv-cache-memory-bytes=1G"]})),
    ("sglang with a cache in tokens", model(runtime={**SGLANG, "args": ["--max-total-tokens 4096"]})),
    ("vllm with a batch", model(runtime={**VLLM, "args": ["--max-num-seqs", "4"]})),
    ("llamacpp with threads", model(runtime={"engine": "llamacpp", "args": ["--threads", "4"]})),
    ("a command of llamacpp", model(runtime={**LLAMACPP, "command": ["serve"]})),
    ("a health path of llamacpp", model(runtime={**LLAMACPP, "healthPath": "/healthz"})),
    ("speech by transformers", model(runtime={**TRANSFORMERS, "task": "infer"})),
    ("speech by llamacpp", model(runtime={**LLAMACPP, "task": "infer"})),
    ("a matcher without place", model(probe={"path": "/v1/x", "json": {}, "expect": [{"minBytes": 1, "contains": "x"}]})),
    ("a distribution in capitals and spaces", model(source={"package": {"name": "a b", "version": "1"}})),
    ("half a thread", model(runtime__threads="many")),
    ("an answer of one byte", model(limits={"responseBytes": "1"})),
    ("frames of no unit", pool(device={"frameSize": "2MB"})),
    ("a key with a slash", pool(sources={"certificates": {"configMapKeyRef": {"name": "a", "key": "a/b"}}})),
    ("a claim with spaces", pool(volumes=[{"name": "a", "persistentVolumeClaim": {"claimName": "a b"}}])),
]  # fmt: skip
# A text or an object: Kubernetes can only preserve it. The operator refuses these in a condition.
LATER = {
    "model: own alias", "model: twice", "model: number name",
    "model: mount false", "model: mount two", "model: mount writable",
    "model: probe no body", "model: probe both", "model: probe at alone", "model: probe two matchers",
    "model: probe near", "model: probe regex", "model: probe base64",
    "model: args --gpu-mem 0.9", "model: spelt vllm -p 2", "model: spelt vllm --po=1", "model: spelt vllm --ud /x",
    "model: spelt sglang --ho ::", "model: spelt sglang --b 1",
    "model: spelt vllm --config /x.yaml", "model: spelt sglang --conf=/x.yaml", "model: args --hf-token hf_abcdefghijklmnopqrstuvwx",
    "model: command env", "model: command quoted twice",
    "model: args of a command env", "model: args of a command secret",
    "model: command fixed port", "model: command fixed port -p8080", "model: command fixed port -b :8080",
    "model: command fixed port --addr=[::]:8080", "model: command fixed port -b=:8080",
    "model: command no port", "model: api key flag",
    "model: env both refs", "model: env value", "model: handler syntax",
    "model: null spec section", "model: null", "model: memory None", "pool: pool memory None",
}  # fmt: skip
# What the value of `equals` is, and so whether there is one, CEL cannot see.
HALF = {"model: probe no at"}


def is_later(name: str) -> bool:
    """Whether a condition says it, not the API server."""
    return name in LATER or (
        name.startswith(("model: env ", "model: option ", "model: shell command ")) and name != "model: env list"
    )


def rules(node: Any) -> Iterator[str]:
    """The sentence of every rule of a schema, but those about changes (tests/operator/test_stores.py)."""
    if isinstance(node, dict):
        found = node.get("x-kubernetes-validations", ())
        yield from (rule["message"] for rule in found if "oldSelf" not in rule["rule"])
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from rules(child)


def shared(part: type[Part]) -> Iterator[str]:
    """Sentences across fields, which are the same offline and in the schema; those of single fields name the value."""
    yield from (f"{rule.problem}; {rule.cure}" for rule in part.rules if rule.cel and rule.holds)
    for info in fields(part).values():
        for child in shape(info.annotation).parts:
            yield from shared(child)


SHARED = {*shared(OmniModel), *shared(OmniPool)}


def sentence(said: str) -> str:
    """What follows the field."""
    return said.partition(": ")[2]


@pytest.mark.parametrize(("name", "manifest"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_manifest_is_refused_in_the_words_of_offline_validation(
    name: str, manifest: dict[str, Any], server: Server
) -> None:
    _, errors = validate(manifest)
    assert errors
    answer = server.try_create(manifest, "default")
    assert answer.ok == is_later(name), answer.sentences
    if answer.ok:
        return
    offline = {f"{error.field}: {error.problem}; {error.cure}" for error in errors}
    across = {line for line in offline if sentence(line) in SHARED}
    said = {line for line in answer.sentences if sentence(line) in SHARED}
    if name in HALF:
        assert said < across
        return
    if not any("rules were not checked" in line for line in answer.sentences):
        assert across <= said
    if across == offline:
        assert said == across


def test_every_rule_has_a_manifest_that_breaks_it(server: Server) -> None:
    seen = {sentence(line) for _, manifest in BAD for line in server.try_create(manifest, "default").sentences}
    known = {*rules(crd.definition(OmniModel)), *rules(crd.definition(OmniPool))}
    assert known - seen == set()


@pytest.mark.parametrize("manifest", [row[1] for row in GOOD], ids=[row[0] for row in GOOD])
def test_what_people_must_be_able_to_say_reads_back_the_same(manifest: dict[str, Any], server: Server) -> None:
    answer = server.try_create(manifest, "default")
    assert answer.ok, answer.sentences
    assert answer.body["spec"] == manifest["spec"]


def test_a_misspelt_field_is_named(server: Server) -> None:
    answer = server.try_create(model(residency={"idelAfter": "5m"}), "default")
    assert 'unknown field "spec.residency.idelAfter"' in answer.sentences[0]
    assert not server.try_create(model(source=ABSENT), "default").ok
