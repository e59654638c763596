"""Nodes as the operator needs them: in which zone they are, and whether their kubelet is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omnimodel.controllers.kubernetes_pods import ZONE_LABEL
from omnimodel.kube import NODES, Kube, Mirror


class Nodes:
    """See the module. Without the right to list nodes nothing is known of any.

    Args:
        kube: the connection.
        changed: told of each node whose zone or readiness is another one now.
    """

    def __init__(self, kube: Kube, changed: Callable[[str], None] = lambda _: None) -> None:
        self._changed = changed
        self._mirror = Mirror(kube, NODES, on_change=self._heard, trim=trimmed)

    async def run(self) -> None:
        """Keep up until cancelled."""
        await self._mirror.run()

    def zone(self, name: str) -> str:
        """Where a node is; empty when unknown."""
        item = self._mirror.items.get(("", name))
        return "" if item is None else str((item["metadata"].get("labels") or {}).get(ZONE_LABEL, ""))

    def lost(self, name: str) -> bool:
        """Whether a node is not there, or its kubelet is not; False while that is not known."""
        if not self._mirror.synced:
            return False
        item = self._mirror.items.get(("", name))
        return item is None or not item["ready"]

    def _heard(self, key: tuple[str, str], before: Mapping[str, Any] | None, item: Mapping[str, Any] | None) -> None:
        if _essence(before) != _essence(item):
            self._changed(key[1])


def trimmed(item: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a Node."""
    metadata, labels = item["metadata"], item["metadata"].get("labels") or {}
    conditions = (item.get("status") or {}).get("conditions") or ()
    return {
        "metadata": {
            "name": metadata["name"],
            "resourceVersion": metadata["resourceVersion"],
            "labels": {ZONE_LABEL: labels.get(ZONE_LABEL, "")},
        },
        "ready": any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
    }


def _essence(item: Mapping[str, Any] | None) -> object:
    return None if item is None else (item["metadata"]["labels"], item["ready"])
