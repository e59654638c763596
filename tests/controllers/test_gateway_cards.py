"""What a gateway takes from a model's object in a cluster, for the time that no agent says more."""

from __future__ import annotations

from typing import Any

from omnimodel.controllers.gateway_kubernetes import card_of
from omnimodel.protocol.dispatch import ModelCard


def card(*conditions: tuple[str, str, str, str], served: list[str] | None = None, **spec: Any) -> ModelCard:
    status: dict[str, Any] = {
        "conditions": [
            {"type": kind, "status": value, "reason": reason, "message": message}
            for kind, value, reason, message in conditions
        ],
        **({} if served is None else {"servedNames": served}),
    }
    return card_of(
        {
            "apiVersion": "omnimodel.io/v1alpha1",
            "kind": "OmniModel",
            "metadata": {"name": "chat", "namespace": "team", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"source": {"path": "/m.gguf"}, "runtime": {"engine": "llamacpp"}, **spec},
            "status": status,
        }
    )


NAMES = ["Chat:7b", {"name": "chat:brief", "listed": False, "defaults": {"max_tokens": 8}}]


def test_everything_that_the_manifest_says_is_known() -> None:
    found = card(served=["chat", "chat:brief"], servedNames=NAMES, limits={"requestBytes": "256Mi", "concurrency": 9})
    assert (found.name, found.task, found.ready, found.granted) == ("team/chat", "text-generation", True, True)
    assert (found.request_bytes, found.concurrency, found.created_seconds) == (256 << 20, 9, 1767225600)
    assert found.served_names == ("chat", "chat:brief")
    assert (found.unlisted, found.defaults) == (("chat:brief",), {"chat:brief": {"max_tokens": 8}})


def test_names_that_nobody_has_granted_yet_are_claims() -> None:
    found = card(servedNames=NAMES)
    assert (found.granted, found.served_names) == (False, ("chat", "Chat:7b", "chat:brief"))


def test_a_model_that_lost_all_its_names_claims_none() -> None:
    lost = ("Ready", "False", "NameTaken", "others have them"), ("Stalled", "True", "NameTaken", "others have them")
    found = card(*lost)
    assert (found.granted, found.served_names, found.ready) == (True, (), False)
    assert (found.reason, found.message) == ("NameTaken", "others have them")


def test_a_suspended_model_says_so() -> None:
    assert card(suspend=True).message == "its manifest says suspend: true"
