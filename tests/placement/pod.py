"""Several devices over time: each is a `Device` with the residency policy, and what waits is placed on one of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf

from omnimodel.placement.devices import DeviceState, Stay, choose_device
from omnimodel.placement.state import Constants, ModelState, wake_seconds
from placement.device import Device, Request


class Pod:
    """Drive devices through one trace; `run` returns how long each request was held.

    Args:
        models: by name; all begin on the first device, warm.
        budgets: of each device.
        restart_seconds: what it takes to start a process on another device.
        moves: whether models may change their device.
    """

    def __init__(
        self,
        models: dict[str, ModelState],
        budgets: Iterable[int],
        constants: Constants,
        *,
        restart_seconds: float,
        moves: bool = True,
    ) -> None:
        self.now = 0.0
        self.restart_seconds = restart_seconds
        self.moves = moves
        self.moved: list[tuple[float, str, str, str]] = []
        self.moved_at: dict[str, float] = {}
        self.numbers = count()
        self.events: list[tuple[float, int, Device | None, str, object]] = []
        self.devices = {f"d{number}": Device({}, budget, constants) for number, budget in enumerate(budgets)}
        held: dict[str, list[int]] = {name: [] for name in models}
        running = {name: [] for name in models}
        for device in self.devices.values():
            device.held, device.running = held, running
            device.at = partial(self.at, device)  # type: ignore[method-assign]
        self.devices["d0"].models.update(models)

    def at(self, device: Device | None, time: float, what: str, value: object = None) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), device, what, value))

    def where(self, name: str) -> str:
        return next(key for key, device in self.devices.items() if name in device.models)

    def run(self, requests: Iterable[Request]) -> list[float]:
        ordered = sorted(requests, key=lambda r: r.arrival)
        waited = [inf] * len(ordered)
        for device in self.devices.values():
            device.requests, device.waited = ordered, waited
        for index, request in enumerate(ordered):
            self.at(None, request.arrival, "arrive", index)
        while self.events:
            time, _, device, what, value = heapq.heappop(self.events)
            if what == "look" and device is not None and time != device.timer:
                continue
            assert time >= self.now
            self.now = time
            for each in self.devices.values():
                each.now = time
            target = device or self.devices[self.where(ordered[value].model)]
            getattr(target, what)(value)
            if what == "copied":
                target.change(value, start_seconds=0.0)
            self.settle()
        stuck = [i for name in self.devices["d0"].held for i in self.devices["d0"].held[name]]
        assert not stuck, f"never served: {stuck}"
        return waited

    def settle(self) -> None:
        for device in self.devices.values():
            self.place()
            device.settle()

    def place(self) -> None:
        if not self.moves:
            return
        for here, device in self.devices.items():
            for name in [name for name in device.models if self.may_go(device, name)]:
                states = [self.state(key) for key in self.devices]
                model = device.snapshot(name)
                found = choose_device(model, self.stay(device, name, here), states).device
                if found != here:
                    self.moved.append((self.now, name, here, found))
                    self.moved_at[name] = self.now
                    device.drains = [drain for drain in device.drains if drain.target != name]
                    self.devices[found].models[name] = replace(
                        device.models.pop(name), draining=False, start_seconds=self.restart_seconds
                    )
                    for victim in device.models:
                        draining = any(victim in drain.victims for drain in device.drains)
                        device.change(victim, draining=draining and device.models[victim].resident)

    def stay(self, device: Device, name: str, here: str) -> Stay:
        since = self.moved_at.get(name, 0.0)
        wakes = [time for time, woken in device.swaps if woken == name and time >= since]
        again = max(0, len(wakes) - 1) * wake_seconds(device.models[name], device.constants)
        return Stay(here, True, self.now - since, again, self.restart_seconds)

    def may_go(self, device: Device, name: str) -> bool:
        model = device.snapshot(name)
        if model.resident or model.in_flight or not model.queue or device.copying == name:
            return False
        return model.oldest(self.now) > self.moved_at.get(name, -inf)

    def state(self, key: str) -> DeviceState:
        device = self.devices[key]
        models = {name: device.snapshot(name) for name in device.models}
        targets = {drain.target for drain in device.drains}
        waiting = {
            name: m.need_bytes for name, m in models.items() if m.waiters and not m.resident and name != device.copying
        }
        return DeviceState(
            key,
            self.now,
            device.budget_bytes,
            device.free_bytes(),
            models,
            coming={name: need for name, need in waiting.items() if name not in targets},
            reserved={name: need for name, need in waiting.items() if name in targets},
            constants=device.constants,
        )
