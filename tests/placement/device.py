"""A device over time, for tests of the residency policy: requests arrive, run, are frozen and end; copies take time.

After every step it checks what no policy may break: bytes that are held never exceed the budget, and nothing that is
protected goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from omnimodel.placement.residency import next_step
from omnimodel.placement.state import (
    Constants,
    Drain,
    ModelState,
    Step,
    next_gap,
    wake_seconds,
)


@dataclass(frozen=True)
class Request:
    arrival: float
    model: str
    seconds: float
    patience: float = inf  # the client goes away when it is still held then
    background: bool = False


@dataclass
class Running:
    index: int
    ends_at: float
    left: float = 0.0


@dataclass
class Device:
    """Drive `next_step` through a trace; `run` returns how long each request was held (inf: its client went away)."""

    models: dict[str, ModelState]
    budget_bytes: int
    constants: Constants = field(default_factory=Constants)
    concurrency: int = 4
    now: float = 0.0
    copying: str | None = None
    drains: list[Drain] = field(default_factory=list)
    swaps: list[tuple[float, str]] = field(default_factory=list)
    frozen: int = 0
    served_since_wake: dict[str, int] = field(default_factory=dict)
    useless_wakes: int = 0

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, str, object]] = []
        self.sequence = 0
        self.held: dict[str, list[int]] = {name: [] for name in self.models}
        self.running: dict[str, list[Running]] = {name: [] for name in self.models}
        self.timer = inf

    def at(self, time: float, what: str, value: object = None) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, what, value))

    def change(self, name: str, **fields: object) -> None:
        self.models[name] = replace(self.models[name], **fields)

    def run(self, requests: Iterable[Request]) -> list[float]:
        self.requests = sorted(requests, key=lambda r: r.arrival)
        self.waited = [inf] * len(self.requests)
        for index, request in enumerate(self.requests):
            self.at(request.arrival, "arrive", index)
        self.settle()
        while self.events:
            time, _, what, value = heapq.heappop(self.events)
            if what == "look" and time != self.timer:
                continue
            assert time >= self.now
            self.now = time
            getattr(self, what)(value)
            self.settle()
        stuck = [i for name in self.held for i in self.held[name]]
        assert not stuck, f"never served: {stuck}"
        assert not any(self.running.values()), "frozen for ever"
        return self.waited

    # -- events --

    def arrive(self, index: int) -> None:
        request = self.requests[index]
        model = self.models[request.model]
        self.change(
            request.model,
            gap=next_gap(model.gap, model.last_arrival, self.now, self.constants),
            last_arrival=self.now,
        )
        self.held[request.model].append(index)
        if request.patience < inf:
            self.at(self.now + request.patience, "leave", index)

    def leave(self, index: int) -> None:
        if index in self.held[self.requests[index].model]:
            self.held[self.requests[index].model].remove(index)

    def end(self, running: Running) -> None:
        name = self.requests[running.index].model
        if running in self.running[name] and running.ends_at == self.now:
            self.running[name].remove(running)

    def copied(self, name: str) -> None:
        self.copying = None
        self.change(name, resident=True, frozen_bytes=0, frozen_since=None, wanted_since=None, resident_since=self.now)
        model = self.models[name]
        self.change(
            name,
            min_resident_until=self.now + model.min_resident_seconds,
            owed=len(self.held[name]),
        )
        self.served_since_wake[name] = len(self.running[name])
        for running in self.running[name]:
            running.ends_at = self.now + running.left
            self.at(running.ends_at, "end", running)

    def look(self, _: object) -> None:
        self.timer = inf

    # -- decisions --

    def snapshot(self, name: str) -> ModelState:
        held = self.held[name]
        return replace(
            self.models[name],
            in_flight=len(self.running[name]),
            queue=tuple(self.requests[i].arrival for i in held),
            background=sum(self.requests[i].background for i in held),
        )

    def held_bytes(self) -> int:
        return sum(m.footprint_bytes if m.resident else m.frozen_bytes for m in self.models.values())

    def free_bytes(self) -> int:
        reserved = [self.copying] if self.copying else []
        reserved += [drain.target for drain in self.drains]
        return self.budget_bytes - self.held_bytes() - sum(self.models[name].need_bytes for name in reserved)

    def may_admit(self, name: str) -> bool:
        model = self.models[name]
        free = len(self.running[name]) < self.concurrency
        return model.resident and free and (not model.draining or model.owed > 0)

    def admit(self) -> None:
        for name in self.models:
            while self.held[name] and self.may_admit(name):
                index = self.held[name].pop(0)
                self.waited[index] = self.now - self.requests[index].arrival
                running = Running(index, self.now + self.requests[index].seconds)
                self.running[name].append(running)
                self.at(running.ends_at, "end", running)
                self.served_since_wake[name] = self.served_since_wake.get(name, 0) + 1
                self.change(name, owed=max(0, self.models[name].owed - 1))
            if self.models[name].resident and not self.held[name]:
                self.change(name, owed=0)  # those it was woken for went away

    def settle(self) -> None:
        for _ in range(10 * len(self.models) + 10):
            self.admit()
            snapshot = [self.snapshot(name) for name in self.models]
            step = next_step(
                self.now,
                snapshot,
                self.free_bytes(),
                self.drains,
                self.copying,
                self.constants,
                budget_bytes=self.budget_bytes,
            )
            if step.look_again_at is not None:
                assert step.look_again_at > self.now
                self.timer = step.look_again_at
                self.at(self.timer, "look")
            if not step.acts:
                return
            self.check(step)
            self.apply(step)
        raise AssertionError("one moment needs more steps than there are models: the policy goes in circles")

    def apply(self, step: Step) -> None:
        self.drains = [drain for drain in self.drains if drain.target not in (*step.abandon, step.wake)]
        for name in step.evict:
            self.useless_wakes += not self.served_since_wake.get(name, 0)
            self.change(name, resident=False, draining=False)
        for name in step.freeze:
            self.frozen += 1
            self.change(
                name,
                resident=False,
                draining=False,
                frozen_bytes=self.models[name].working_bytes,
                frozen_since=self.now,
            )
            for running in self.running[name]:
                running.left, running.ends_at = running.ends_at - self.now, inf
        if step.drain:
            assert step.target is not None
            self.drains.append(Drain(step.target, step.drain))
        victims = {name for drain in self.drains for name in drain.victims}
        for name in self.models:
            self.change(name, draining=name in victims and self.models[name].resident)
        if step.wake:
            self.copying = step.wake
            self.swaps.append((self.now, step.wake))
            self.at(self.now + wake_seconds(self.models[step.wake], self.constants), "copied", step.wake)
        coming = self.models[self.copying].need_bytes if self.copying else 0
        assert self.held_bytes() + coming <= self.budget_bytes, "more bytes are held than the device has"

    def check(self, step: Step) -> None:
        assert not step.wake or self.copying is None
        for name in (*step.evict, *step.freeze, *step.drain):
            model = self.snapshot(name)
            assert model.resident
            assert not model.keep_resident
            assert not model.owed
            assert model.min_resident_until <= self.now
        assert all(not self.running[name] for name in step.evict), "an idle victim has requests in flight"
        assert all(self.models[name].freezable for name in step.freeze)
        if step.freeze:
            frozen = sum(m.working_bytes for m in (self.models[n] for n in step.freeze))
            frozen += sum(m.frozen_bytes for m in self.models.values() if not m.resident)
            for model in self.models.values():
                own = (
                    model.working_bytes if model.name in step.freeze else (0 if model.resident else model.frozen_bytes)
                )
                assert model.footprint_bytes + frozen - own <= self.budget_bytes, "frozen memory leaves no room"
