"""Manifests as people write them: the ported ones load as they are meant, the refused ones say what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

from omnimodel.api import ServedName
from omnimodel.catalog import load
from omnimodel.render import render

FIXTURES = Path(__file__).parent / "fixtures"
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_workstation_of_twenty_five_models() -> None:
    catalog = load(FIXTURES / "ported" / "workstation.yaml")
    assert [str(error) for error in catalog.errors] == []
    assert len(catalog.models) == 25
    by_name = {model.metadata.name: model for model in catalog.models}
    assert by_name["chat-01"].names == ("chat-01", "Coder-30B-A3B-Instruct-Q4_K_M", "coder")
    assert by_name["chat-02"].names == ("chat-02", "gpt-oss:20b")
    assert by_name["chat-09"].spec.residency.idle_after == "5h"
    assert by_name["chat-04"].spec.residency.idle_after == "15m"
    assert by_name["chat-04"].spec.limits.load_deadline == "20m"
    assert by_name["embedder"].spec.residency.keep_resident
    pool = catalog.pools[0]
    specs = {model.metadata.name: render(model, pool).spec for model in catalog.models}
    assert specs["chat-02"].source["volume"]["path"] == "/srv/gguf/oss-20b.gguf"
    assert specs["chat-11"].residency.idle_after_seconds == 18_000
    assert specs["night"].residency.idle_after_seconds is None
    assert specs["night"].residency.priority == 0
    assert specs["reranker"].command[-1].endswith("--listen 127.0.0.1:{port}")
    assert len({spec.identity.uid for spec in specs.values()}) == 25
    assert len({spec.hash for spec in specs.values()}) == 25


def test_a_pair_on_cards_of_one_class() -> None:
    catalog = load(FIXTURES / "ported" / "cloud-pair.yaml")
    assert not catalog.errors
    chat, embed = catalog.models
    pool = catalog.pool_of(chat)
    assert pool is not None
    assert pool.metadata.name == "l4"
    spec = render(chat, pool).spec
    assert spec.limits.concurrency == 64
    assert spec.device_memory_bytes == 20 << 30
    assert render(embed, pool).spec.task == "embeddings"


def test_a_serving_resource_with_a_claim_and_a_large_shm() -> None:
    catalog = load(FIXTURES / "ported" / "inference-service.yaml")
    assert not catalog.errors
    assert catalog.notes == (f"{FIXTURES}/ported/inference-service.yaml:26: apps/v1/Deployment is left out",)
    model = catalog.models[0]
    pool = catalog.pool_of(model)
    assert pool is not None
    spec = render(model, pool, catalog.config("default")).spec
    assert spec.limits.shm_bytes == 2 << 30
    assert (spec.threads, spec.limits.cpu_millis) == (4, 4000)
    assert spec.limits.load_deadline_seconds == 90
    assert spec.source["volume"]["path"] == "/volumes/weights/llama/vision"
    assert spec.secret_env["HF_TOKEN"]["name"] == "hub"
    assert "not-a-real-one" not in str(spec.to_dict())
    assert "not-a-real-one" not in repr(catalog.configs)


def test_two_names_on_one_backend() -> None:
    catalog = load(FIXTURES / "ported" / "two-names.yaml")
    assert not catalog.errors
    model = catalog.models[0]
    assert model.names == ("thinker", "thinker:high", "thinker:none", "Example/Thinker-14B-Instruct")


def test_a_model_file_with_a_long_context() -> None:
    catalog = load(FIXTURES / "ported" / "modelfile.yaml")
    assert not catalog.errors
    spec = catalog.models[0].spec
    assert spec.runtime.options == {"contextTokens": 16384}
    assert isinstance(spec.served_names[0], ServedName)
    assert spec.served_names[0].defaults["max_tokens"] == 2048


def test_every_refusal_names_its_line_and_says_what_to_write_instead() -> None:
    path = FIXTURES / "refused.yaml"
    expected = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found = re.search(r"#! (.*)$", line)
        if found:
            expected.append((number, found.group(1)))
    catalog = load(path)
    assert [(error.line, f"{error.problem}; {error.cure}") for error in catalog.errors] == expected
    assert len(expected) == 16
    assert not catalog.objects
    first = catalog.errors[0]
    assert str(first) == (
        f"{path}:9: OmniModel default/lifetime-of-zero: spec.residency.idleAfter: 0: 0s is not a lifetime; "
        "did you mean never? Else write a duration such as 5m"
    )


def test_the_examples_of_the_project_are_right() -> None:
    catalog = load(EXAMPLES / "catalog")
    assert [str(error) for error in catalog.errors] == []
    assert len(catalog.models) >= 12
