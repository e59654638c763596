"""The operator's rounds: news in, decisions made by the pure modules, differences written.

A round is for one pool or one model. It reads the cache alone, decides, and writes what differs, one write after the
other; killed between any two, the next one goes on from what it finds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from omnimodel.api import OmniModel, OmniPool
from omnimodel.controllers.conditions import Refusal, condition_list
from omnimodel.controllers.kubernetes_cache import POOL_LABEL, Cache, Key
from omnimodel.controllers.kubernetes_children import AgentSettings, replicas_of
from omnimodel.controllers.kubernetes_models import ModelDecision, ModelSnapshot, decide_model
from omnimodel.controllers.kubernetes_news import News, Round
from omnimodel.controllers.kubernetes_nodes import Nodes
from omnimodel.controllers.kubernetes_pods import is_steady
from omnimodel.controllers.kubernetes_queue import KeyedQueue
from omnimodel.controllers.kubernetes_references import References
from omnimodel.controllers.kubernetes_remains import Remains
from omnimodel.controllers.kubernetes_snapshot import (
    Assigned,
    ModelView,
    PoolDecision,
    PoolSnapshot,
    assigned_of,
    decide_pool,
)
from omnimodel.controllers.kubernetes_troubles import LOOK_SECONDS, Troubles
from omnimodel.controllers.kubernetes_writes import FaultError, LaterError, NotLeadingError, Writer, delay_of, fault_of
from omnimodel.errors import ManifestError, Reason, advised
from omnimodel.kube import MODELS, PODS, POOLS, STATEFUL_SETS, Kind, Kube, KubeError, Recorder

log = logging.getLogger(__name__)

FAULT_SECONDS = 30.0  # between two looks at what only a person can change
HURRY_SECONDS = 120.0  # pods that go are kept so long for models that are not served elsewhere yet
TICK_SECONDS = 5.0
BYTES_SECONDS = 10.0  # between two writes of a pool's status that differ in bytes alone


class Reconciler:
    """See the module.

    Args:
        kube: the connection.
        cache: of everything that is watched.
        writer: of everything that is written.
        recorder: of events.
        settings: of agents.
        done: told of each round: its kind, seconds, and the error or None.
        clock, wall: monotonic, and Unix time.
    """

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        writer: Writer,
        recorder: Recorder,
        settings: AgentSettings,
        *,
        done: Callable[[str, float, Exception | None], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._writer = writer
        self._recorder = recorder
        self._settings = settings
        self._done = done
        self._clock = clock
        self._wall = wall
        self.queue: KeyedQueue[Round] = KeyedQueue(self._round, done=self._finished, delay_of=delay_of)
        self.nodes = Nodes(kube, self._node_changed)
        self._troubles = Troubles(kube, clock)
        self.news = News(cache, self.queue.add, self.nodes.zone, self.nodes.lost, self._troubles.of, clock)
        self._remains = Remains(cache, writer, self.news, self.nodes, clock, wall)
        writer.changed = self.news.changed
        self.references = References(kube, self.queue.add, clock)
        self.outdated: Refusal | None = None
        self._states: dict[Key, object] = {}
        self._assigned: dict[Key, tuple[Key, Assigned]] = {}  # model -> pool, and what its round said
        self._live: dict[Key, Mapping[str, str]] = {}  # pods that answer, and their uids
        self._dead: dict[Key, frozenset[str]] = {}  # pods whose words are no longer theirs
        self._faults: dict[Key, Refusal] = {}
        self._missing: dict[Key, Refusal] = {}  # what sources of pools refer to and is not there
        self._shrinking: dict[Key, float] = {}
        self._bytes_written: dict[Key, float] = {}

    async def tick(self) -> None:
        """Notice what changes by time alone, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self._clock()
            for key in list(self._cache.items[POOLS]):
                pool = self._cache.pool(key)
                if not isinstance(pool, OmniPool):
                    continue
                pods = self.news.views(key, pool)
                doubtful = len(self._troubles.doubtful(pods, replicas_of(pool)))
                state = (
                    doubtful,
                    is_steady(pods, now),
                    *((pod.name, pod.answers(now), pod.lost(now), pod.gone(now)) for pod in pods),
                )
                hurry = now - self._shrinking.get(key, now) > HURRY_SECONDS
                if self._states.get(key) != (state, hurry):
                    self._states[key] = (state, hurry)
                    self.queue.add(("pool", *key))
            await self._remains.bury()

    def _node_changed(self, node: str) -> None:
        for (namespace, _), pod in self._cache.items[PODS].items():
            pool = (pod["metadata"].get("labels") or {}).get(POOL_LABEL)
            if pool and (pod.get("spec") or {}).get("nodeName") == node:
                self.queue.add(("pool", namespace, pool))

    # Rounds

    def _finished(self, key: Round, seconds: float, error: Exception | None) -> None:
        self._done(key[0], seconds, None if isinstance(error, NotLeadingError | LaterError) else error)
        if error is not None and not isinstance(error, NotLeadingError | LaterError):
            log.warning("round failed kind=%s namespace=%s name=%s error=%s", *key, error)

    async def _round(self, key: Round) -> None:
        kind, *rest = key
        if kind == "pool":
            await self._pool((rest[0], rest[1]))
        else:
            await self._model((rest[0], rest[1]))

    async def _pool(self, key: Key) -> None:
        pool = self._cache.pool(key)
        if pool is None:
            self._pool_gone(key)
            return
        if isinstance(pool, ManifestError):
            await self._refused(POOLS, key, pool)
            return
        pods, owner = self.news.views(key, pool), self._cache.get(STATEFUL_SETS, key)
        if await self._troubles.look(key, pool, pods, replicas_of(pool), owner):
            self.queue.add(("pool", *key), LOOK_SECONDS)
        await self._look_for_sources(key, pool)
        decision, snapshot = self._decide_pool(key, pool)
        fault: Refusal | None = self.outdated
        written = False
        if fault is None:
            try:
                if self._settings.token_secret:
                    await self._writer.token(self._settings.token_secret, key[0])
                for child in decision.children:
                    written |= await self._writer.child(child, pool.metadata.uid)
            except FaultError as error:
                fault = error.refusal
        if fault is not None:
            self.queue.add(("pool", *key), FAULT_SECONDS)
        if fault != self._faults.get(key):
            self._faults.pop(key, None)
            if fault is not None:
                self._faults[key] = fault
            decision, snapshot = self._decide_pool(key, pool)
        self._adopt(key, decision, snapshot)
        await self._pool_status(key, decision, snapshot)
        await self._remains.clear(POOLS, key, "pods", key[0], snapshot.pods)
        await self._tell_pool(key, pool, decision, written)

    async def _look_for_sources(self, key: Key, pool: OmniPool) -> None:
        self._missing.pop(key, None)
        try:
            missing = await self.references.missing(pool)
        except KubeError as error:  # the kubelet may read it all the same
            log.warning("sources not looked for namespace=%s pool=%s error=%s", *key, error)
            self.queue.add(("pool", *key), FAULT_SECONDS)
        else:
            if missing is not None:
                self._missing[key] = missing

    def _decide_pool(self, key: Key, pool: OmniPool) -> tuple[PoolDecision, PoolSnapshot]:
        item = self._cache.items[POOLS].get(key) or {}  # it may have gone since the round began
        live = self._cache.get(STATEFUL_SETS, key)
        replicas = None if live is None else int((live.get("spec") or {}).get("replicas", 0))
        now = self._clock()
        if replicas is not None and replicas > replicas_of(pool):
            self._shrinking.setdefault(key, now)
        else:
            self._shrinking.pop(key, None)
        snapshot = PoolSnapshot(
            pool=pool,
            status=item.get("status") or {},
            models=[view for model in self._cache.models_of(key) if (view := self._view(model)) is not None],
            pods=self.news.views(key, pool),
            live_replicas=replicas,
            hurry=now - self._shrinking.get(key, now) > HURRY_SECONDS,
            fault=self._faults.get(key),
            missing=self._missing.get(key),
            divided=self._cache.divided(key),
            now_seconds=now,
            unix_seconds=self._wall(),
        )
        return decide_pool(snapshot, self._settings), snapshot

    def _view(self, key: Key) -> ModelView | None:
        model = self._cache.model(key)
        if not isinstance(model, OmniModel):
            return None
        status = self._cache.items[MODELS][key].get("status") or {}
        return ModelView(model, status, self._cache.process(key))

    def _adopt(self, key: Key, decision: PoolDecision, snapshot: PoolSnapshot) -> None:
        """Have a round for each model that the pool says something else of than before."""
        now = snapshot.now_seconds
        live = {pod.name: pod.uid for pod in snapshot.pods if pod.answers(now)}
        dead = frozenset(pod.name for pod in snapshot.pods if pod.gone(now) or pod.replaced)
        all_again = (self._live.get(key), self._dead.get(key)) != (live, dead)
        self._live[key], self._dead[key] = live, dead
        for view in snapshot.models:
            model: Key = (view.model.metadata.namespace, view.model.metadata.name)
            said = (key, assigned_of(decision, view.model.key))
            before = self._assigned.get(model)
            self._assigned[model] = said
            if all_again or before is None or _essence(before) != _essence(said):
                self.queue.add(("model", *model))

    async def _pool_status(self, key: Key, decision: PoolDecision, snapshot: PoolSnapshot) -> None:
        now = self._clock()
        before = snapshot.status
        loud = [name for name in decision.status if not name.endswith("Bytes") and name != "overcommitRatio"]
        quiet = all(before.get(name) == decision.status[name] for name in loud)
        left_seconds = self._bytes_written.get(key, -BYTES_SECONDS) + BYTES_SECONDS - now
        if quiet and left_seconds > 0:
            self.queue.add(("pool", *key), left_seconds)
        elif await self._writer.status(POOLS, key, decision.status):
            self._bytes_written[key] = now

    def _pool_gone(self, key: Key) -> None:
        for memory in (
            self._live, self._dead, self._faults, self._missing, self._shrinking, self._states, self._bytes_written,
        ):  # fmt: skip
            memory.pop(key, None)
        self.references.forget(("pool", *key))
        self.news.forget(key)
        self._troubles.forget(key)
        for model in [model for model, (pool, _) in self._assigned.items() if pool == key]:
            del self._assigned[model]
            self.queue.add(("model", *model))

    async def _refused(self, kind: Kind, key: Key, error: ManifestError) -> None:
        """An object that the API server took and we cannot: the last good state stays."""
        item = self._cache.items[kind][key]
        generation = item["metadata"].get("generation", 0)
        problem = f"{error.field}: {error.problem}" if error.field else error.problem
        text = advised(error.reason, problem, error.cure or None)
        conditions = [("Ready", "False", str(error.reason), text), ("Reconciling", "False", "Idle", "")]
        conditions.append(("Stalled", "True", str(error.reason), text))
        before = item.get("status") or {}
        kept = {
            name: before[name]
            for name in ("footprint", "servedNames", "replicas", "readyReplicas", "selector")
            if name in before
        }
        status = {
            **kept,
            "observedGeneration": generation,
            "conditions": condition_list(conditions, before.get("conditions") or (), generation, self._wall()),
        }
        if await self._writer.status(kind, key, status):
            await self._recorder.tell(item, str(error.reason), text, warning=True)

    async def _model(self, key: Key) -> None:
        model = self._cache.model(key)
        if model is None:
            self._assigned.pop(key, None)
            self.references.forget(("model", *key))
            await self._writer.delete_process(key)
            return
        if isinstance(model, ManifestError):
            await self._refused(MODELS, key, model)
            await self._remains.clear(MODELS, key, "residency", None, ())
            return
        pool_key = self._cache.pool_key(key, model.spec.pool)
        pool = self._cache.pool(pool_key) if pool_key is not None else None
        said = self._assigned.get(key)
        known = said is not None and said[0] == pool_key
        if pool_key is not None and isinstance(pool, OmniPool) and not known:
            self.queue.add(("pool", *pool_key))  # whose round will come back to this model
            return
        assigned = said[1] if said is not None and known else Assigned()
        config, fault = await self._config(key, model)
        decision = self._decide_model(key, model, pool_key, assigned, config, fault)
        before = self._cache.process(key)
        try:
            if decision.process is not None and assigned.pods:
                if await self._writer.process(decision.process):
                    await self._tell_assigned(key, assigned, before)
            elif not decision.keep and not isinstance(pool, ManifestError):
                await self._writer.delete_process(key)
        except FaultError as error:
            self.queue.add(("model", *key), FAULT_SECONDS)
            decision = self._decide_model(key, model, pool_key, assigned, config, error.refusal)
        if await self._writer.status(MODELS, key, decision.status):
            await self._tell_remarks(key, decision)
        pods = self.news.views(pool_key, pool) if pool_key is not None and isinstance(pool, OmniPool) else []
        await self._remains.clear(MODELS, key, "residency", pool_key[0] if pool_key else None, pods)

    async def _config(
        self, key: Key, model: OmniModel
    ) -> tuple[Mapping[str, Mapping[str, Mapping[str, bytes]]], Refusal | None]:
        """What a model refers to, and why that is not to be had; None when it is.

        Raises:
            KubeError: it may be had when it is tried again.
        """
        try:
            return await self.references.config(model), None
        except KubeError as error:
            fault = fault_of(error)
            if fault is None:
                raise
            self.queue.add(("model", *key), FAULT_SECONDS)
            return {"configmaps": {}, "secrets": {}}, fault.refusal

    def _decide_model(
        self,
        key: Key,
        model: OmniModel,
        pool_key: Key | None,
        assigned: Assigned,
        config: Mapping[str, Mapping[str, Mapping[str, bytes]]],
        fault: Refusal | None = None,
    ) -> ModelDecision:
        pool = self._cache.pool(pool_key) if pool_key is not None else None
        names, lost = self._cache.granted(key)
        return decide_model(
            ModelSnapshot(
                model=model,
                status=(self._cache.items[MODELS].get(key) or {}).get("status") or {},
                process=self._cache.process(key),
                pool=pool if isinstance(pool, OmniPool) else None,
                invalid=_invalid(pool_key, pool) if isinstance(pool, ManifestError) else None,
                pools=[name for _, name in self._cache.items[POOLS]],
                assigned=assigned,
                names=names,
                lost=lost,
                config=config,
                live=self._live.get(pool_key, {}) if pool_key is not None else {},
                fault=fault or self.outdated,
                taken=self._user_ids(pool_key, key),
                unix_seconds=self._wall(),
            )
        )

    def _user_ids(self, pool: Key | None, but: Key) -> Collection[int]:
        """User ids of the other models of a pool: no two on one machine may have the same."""
        if pool is None:
            return ()
        processes = (self._cache.process(model) for model in self._cache.models_of(pool) if model != but)
        return {process["spec"]["identity"]["uid"] for process in processes if process is not None}

    # Events

    async def _tell_remarks(self, key: Key, decision: ModelDecision) -> None:
        item, refusal = self._cache.items[MODELS].get(key), decision.refusal
        if item is not None:
            for reason, text in [*([(refusal.reason, refusal.message)] if refusal else []), *decision.remarks]:
                await self._recorder.tell(item, reason, text, warning=True)

    async def _tell_assigned(self, key: Key, assigned: Assigned, before: Mapping[str, Any] | None) -> None:
        item = self._cache.items[MODELS].get(key)
        had = set(((before or {}).get("spec") or {}).get("pods") or ())
        fresh = [pod for pod in assigned.pods if pod not in had]
        if item is None or not fresh:
            return
        why = "; ".join((assigned.why or {}).get(pod, "") for pod in fresh)
        await self._recorder.tell(item, "Assigned", f"assigned to {', '.join(fresh)}: {why}")

    async def _tell_pool(self, key: Key, pool: OmniPool, decision: PoolDecision, written: bool) -> None:
        item = self._cache.items[POOLS].get(key)
        if item is None:
            return
        if written:
            message = f"its pods are described anew (generation {pool.metadata.generation})"
            await self._recorder.tell(item, "Applied", message)
        for condition in decision.status["conditions"]:
            if condition["type"] == "Stalled" and condition["status"] == "True":
                await self._recorder.tell(item, condition["reason"], condition["message"], warning=True)
        for move in decision.placement.moves:
            model = self._cache.items[MODELS].get(_key_of(move.model))
            if model is not None:
                await self._recorder.tell(model, "Moving", move.message)


def _invalid(key: Key | None, error: ManifestError) -> Refusal:
    name = key[1] if key is not None else ""
    problem = f"pool {name} is not valid: {error.field}: {error.problem}"
    return Refusal(Reason.INVALID_MANIFEST, problem, error.cure or None)


def _key_of(text: str) -> Key:
    namespace, _, name = text.partition("/")
    return namespace, name


def _essence(said: tuple[Key, Assigned]) -> object:
    """What a model's round reads of it: why a pod was chosen is told once, and then it was there already."""
    pool, assigned = said
    return pool, assigned.pods, assigned.refusal, assigned.notes, assigned.waiting
