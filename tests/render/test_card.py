"""What gateways are told of a model is the same from its manifest and from the process that was rendered of it."""

from __future__ import annotations

from typing import Any

import pytest

from omnimodel.render import model_card, render, spec_card
from render import manifests

GGUF = {**manifests.TRANSFORMERS, "spec": {**manifests.TRANSFORMERS["spec"], "runtime": {"engine": "llamacpp"}}}


@pytest.mark.parametrize(
    "document",
    [manifests.PYTHON, manifests.COMMAND, manifests.TRANSFORMERS, GGUF],
    ids=["python", "command", "transformers", "llamacpp"],
)
def test_the_manifest_and_its_process_say_the_same(document: dict[str, Any]) -> None:
    model = manifests.model(document)
    process = render(model, manifests.pool(), manifests.CONFIG)
    assert model_card(model, model.names) == spec_card(process.spec.to_dict())


def test_every_word_of_a_manifest_that_a_gateway_needs_is_there() -> None:
    card = model_card(manifests.model(manifests.PYTHON, limits__concurrency=7), ("tiny", "Tiny/Model:1b", "tiny:brief"))
    assert (card.name, card.namespace, card.task) == ("search/tiny", "search", "infer")
    assert card.served_names == ("tiny", "Tiny/Model:1b", "tiny:brief")
    assert card.unlisted == ("tiny:brief",)
    assert card.listed
    assert card.defaults == {"tiny:brief": {"max_tokens": 8}}
    assert (card.request_bytes, card.concurrency) == (1 << 20, 7)
    assert (card.capabilities, card.metadata) == (("infer",), {"owner": "search"})


def test_a_model_that_has_only_unlisted_names_left_is_not_listed() -> None:
    assert not model_card(manifests.model(manifests.PYTHON), ("tiny:brief",)).listed


def test_a_server_without_a_task_generates_text() -> None:
    assert model_card(manifests.model(GGUF), ("smollm2",)).task == "text-generation"


def test_what_is_computed_at_once_is_known_without_being_said() -> None:
    assert model_card(manifests.model(manifests.TRANSFORMERS), ()).concurrency == 16
    assert model_card(manifests.model(manifests.PYTHON), ()).concurrency == 1
