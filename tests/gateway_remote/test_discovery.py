"""What a gateway learns from objects: cards of models, and agents though some watch had nothing to say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.world import until
from omnimodel.controllers import gateway_kubernetes
from omnimodel.controllers.gateway_kubernetes import Discovery, card_of
from omnimodel.gateway.routing import RoutingBackend


def item(namespace: str = "default", *, status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "m", "namespace": namespace, "creationTimestamp": "2026-11-30T00:00:00Z"}
    spec = {
        "source": {"huggingFace": {"repo": "a/b"}},
        "runtime": {"engine": "transformers"},
        "servedNames": ["gpt", {"name": "m:brief", "defaults": {"max_tokens": 8}, "listed": False}],
        **spec,
    }
    found = {"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniModel", "metadata": metadata, "spec": spec}
    return {**found, "status": status} if status else found


def test_a_card_has_everything_that_a_request_is_checked_and_rewritten_by() -> None:
    card = card_of(item("team", limits={"requestBytes": "256Mi", "concurrency": 4}, metadata={"note": "x"}))
    assert (card.name, card.task, card.tier, card.ready) == ("team/m", "text-generation", "cold", True)
    assert card.defaults == {"m:brief": {"max_tokens": 8}}
    assert card.request_bytes == 256 << 20
    assert card.concurrency == 4
    assert card.unlisted == ("m:brief",)
    assert card.metadata == {"note": "x"}
    assert card.created_seconds == 1795996800


def test_names_are_asked_for_until_they_are_granted() -> None:
    asking = card_of(item())
    assert (asking.served_names, asking.granted) == (("m", "gpt", "m:brief"), False)
    granted = card_of(item(status={"servedNames": ["m", "gpt"]}))
    assert (granted.served_names, granted.granted) == (("m", "gpt"), True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"suspend": True}, "Suspended"),
        (
            {
                "status": {
                    "conditions": [
                        {"type": "Ready", "status": "False", "reason": "TooLarge", "message": "it needs 9 GiB"},
                        {"type": "Stalled", "status": "True", "reason": "TooLarge"},
                    ]
                }
            },
            "TooLarge",
        ),
    ],
)
def test_a_model_that_nobody_will_serve_says_why(changes: dict[str, Any], reason: str) -> None:
    card = card_of(item(**changes))
    assert (card.ready, card.reason) == (False, reason)
    assert card.message


class Listing:
    """A mirror whose first list comes when a test says."""

    made: list[Listing]

    def __init__(self, kube: object, kind: Any, namespace: str, *, on_change: Any, **_: object) -> None:
        self.kind, self.namespace, self.on_change = kind, namespace, on_change
        self.items: dict[tuple[str, str], dict[str, Any]] = {}
        self._listed = asyncio.Event()
        type(self).made.append(self)

    @property
    def synced(self) -> bool:
        return self._listed.is_set()

    async def wait_synced(self, deadline_seconds: float | None = None) -> None:
        del deadline_seconds
        await self._listed.wait()

    async def run(self) -> None:
        await asyncio.Event().wait()

    def list(self, *items: dict[str, Any]) -> None:
        for each in items:
            key = (each["metadata"]["namespace"], each["metadata"]["name"])
            self.items[key] = each
            self.on_change(key, None, each)
        self._listed.set()


async def test_a_namespace_without_pods_keeps_no_agent_from_being_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list may come last, and an empty one is no change."""
    monkeypatch.setattr(Listing, "made", [], raising=False)
    monkeypatch.setattr(gateway_kubernetes, "Mirror", Listing)
    discovery = Discovery(None, ("team-a", "team-b"), port=9)  # type: ignore[arg-type]
    backend = RoutingBackend(known=discovery.known)
    running = asyncio.create_task(discovery.run(backend))
    pods = {mirror.namespace: mirror for mirror in Listing.made if mirror.kind is gateway_kubernetes.PODS}
    metadata = {"name": "gpu-0", "namespace": "team-a", "labels": {"omnimodel.io/pool": "gpu"}}
    pods["team-a"].list({"metadata": metadata, "status": {"podIP": "127.0.0.1", "phase": "Running"}})
    for mirror in Listing.made:
        if mirror.kind is not gateway_kubernetes.PODS:
            mirror.list()
    bell = discovery._bell
    await until(lambda: not bell.is_set())  # the change was looked at while a list lacked
    assert not backend.seats
    pods["team-b"].list()
    await until(lambda: backend.seats)
    assert [seat.label for seat in backend.seats.values()] == ["team-a/gpu-0"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await backend.close()
