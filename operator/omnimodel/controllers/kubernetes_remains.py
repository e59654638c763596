"""What pods that are no more have left behind: what they said of models and pools, and objects that nobody ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from omnimodel.controllers.kubernetes_cache import Cache, Key
from omnimodel.controllers.kubernetes_news import News
from omnimodel.controllers.kubernetes_nodes import Nodes
from omnimodel.controllers.kubernetes_pods import PodView, is_by, is_stuck
from omnimodel.controllers.kubernetes_writes import NotLeadingError, Writer
from omnimodel.kube import PODS, Kind, KubeError

log = logging.getLogger(__name__)


class Remains:
    """See the module.

    Args:
        cache: of everything that is watched.
        writer: of everything that is written.
        news: knows which pods are heard of.
        nodes: that pods are on.
        clock, wall: monotonic, and Unix time.
    """

    def __init__(
        self,
        cache: Cache,
        writer: Writer,
        news: News,
        nodes: Nodes,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._writer = writer
        self._news = news
        self._nodes = nodes
        self._clock = clock
        self._wall = wall

    async def bury(self) -> None:
        """Delete pods that were told to end, on nodes where nobody will do it."""
        for key, pod in list(self._cache.items[PODS].items()):
            if not pod["metadata"].get("deletionTimestamp"):
                continue
            node = (pod.get("spec") or {}).get("nodeName", "")
            lost = bool(node) and self._nodes.lost(node)
            if is_stuck(pod, silent=self._news.silent(pod), node_lost=lost, unix_seconds=self._wall()):
                try:
                    await self._writer.bury(key, pod)
                except NotLeadingError:
                    return
                except KubeError as error:
                    log.warning("pod not buried namespace=%s name=%s error=%s", *key, error)

    async def clear(self, kind: Kind, key: Key, field: str, namespace: str | None, pods: Sequence[PodView]) -> None:
        """Take back what pods said that are no more.

        Args:
            kind, key: of the object.
            field: of its status.
            namespace: of the pods; None when that is not known.
            pods: of the pool; an entry of another pool's pod, which had the model before, is that pod's affair.

        Raises:
            KubeError: it could not be written.
            LaterError: someone else has written meanwhile.
        """
        views = {view.name: view for view in pods}
        item = self._cache.get(kind, key) or {}
        for entry in list((item.get("status") or {}).get(field) or ()):
            name = str(entry["pod"])
            view = views.get(name)
            if view is None:
                dead = not any(pod == name for _, pod in self._cache.items[PODS])
            else:
                doubtful = not is_by(entry, view.uid) if entry.get("podUid") else view.replaced
                dead = view.gone(self._clock()) or (
                    doubtful and await self._writer.is_by_predecessor(namespace, view, entry)
                )
            if dead:
                await self._writer.clear_entry(kind, key, field, entry)
