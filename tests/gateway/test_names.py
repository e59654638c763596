"""Which model a name means when more than one answers to it, and which names are proposed."""

from __future__ import annotations

from typing import Any

import pytest

from omnimodel.gateway.names import find, not_found
from omnimodel.protocol.dispatch import ModelCard, card_name


def card(key: str, *served: str, **more: Any) -> ModelCard:
    namespace, name = key.split("/")
    return ModelCard(card_name(namespace, name), namespace, served, "infer", "cold", ready=True, **more)


OLDER = card("team/x", "x", created_seconds=1)
LOST = card("default/x", "other", created_seconds=2)
NOBODY = card("default/x", created_seconds=2)
IMPOSTOR = card("default/y", "y", "team/x", created_seconds=0)
YOUNG = card("default/alpha", "alpha", "qwen:brief", granted=False, created_seconds=9)
QWEN = card("default/qwen", "qwen", "qwen:brief", created_seconds=5)
FIRST = card("default/b", "b", "both", granted=False, created_seconds=3)
SECOND = card("default/a", "a", "both", granted=False, created_seconds=4)
CASES = {
    "its own name": ([QWEN], "qwen", "qwen"),
    "an alias": ([QWEN], "qwen:brief", "qwen"),
    "who holds a name is before whoever is called so": ([LOST, OLDER], "x", "team/x"),
    "and so when the other has no name left": ([NOBODY, OLDER], "x", "team/x"),
    "with its namespace a model is reached whatever its names": ([OLDER, LOST], "team/x", "team/x"),
    "and that of default too": ([OLDER, LOST], "default/x", "x"),
    "though another asks to be called so": ([OLDER, IMPOSTOR], "team/x", "team/x"),
    "a name that is nobody's is that of the card": ([NOBODY], "x", "x"),
    "a claim waits for its grant": ([YOUNG, QWEN], "qwen:brief", "qwen"),
    "of two claims the older one": ([SECOND, FIRST], "both", "b"),
    "a claim that nobody disputes": ([YOUNG], "qwen:brief", "alpha"),
}


@pytest.mark.parametrize("what", CASES)
def test_the_model_that_a_name_means(what: str) -> None:
    cards, name, expected = CASES[what]
    found = find(cards, name)
    assert found is not None
    assert found.name == expected


def test_a_name_that_no_model_has() -> None:
    assert find([QWEN, OLDER], "gwen") is None


def test_near_names_are_few_near_and_listed() -> None:
    cards = [
        card("default/smollm2", "smollm2", "smollm2:secret", unlisted=("smollm2:secret",)),
        card("default/smollm3", "smollm3"),
        card("default/smollm4", "smollm4"),
        card("default/minilm", "minilm"),
    ]
    assert not_found(cards, "smollm").cure.count(" or ") == 1
    assert "secret" not in not_found(cards, "smollm2:secrets").cure
    assert not_found(cards, "whisper").cure == "GET /v1/models lists those there are"
    assert not_found(cards, "gpt-4o-mini").cure == "GET /v1/models lists those there are"
