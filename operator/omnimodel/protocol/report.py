"""What an agent reports of its pool and of each model: the source of every status field."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessReport:
    """A model's process: `state` is one of starting, ready, draining."""

    instance: str
    pid: int
    state: str
    started_seconds: float
    private_bytes: int
    restarts: int
    isolation_level: str
    isolation_missing: tuple[str, ...] = ()
    cgroup: str = ""


@dataclass(frozen=True)
class ModelReport:
    """One model on one agent.

    Args:
        generation: of the spec that serves.
        tier: `resident`, `warm`, `parked` or `cold`.
        phase: what is being done: `fetching`, `building`, `queued` (to be published), `publishing`, `starting`,
            `waking`, `probing`, `draining`, `evicting`, `serving`, `idle`, `failed`, `suspended`; `progress` is its
            share done (0 to 1), below 0 when unknown.
        ready: it serves, or can be woken.
        reason, message: a `Reason` and a sentence when it is not ready; otherwise why it has the tier it has.
        weights_bytes, working_bytes: the measured footprint; 0 while unknown.
        idle_bytes: private memory of its process when it is idle, as measured; 0 while unknown.
        device_bytes, host_bytes: what it holds now, from the ledger.
        waiting, in_flight: requests.
        swaps: wakes and evictions by cause: `request`, `preload`, `check` (its known answer), `hand`, `room` (for
            another), `freeze`, `idle`, `host` (host memory is short), `end`.
        served, failed: requests since the agent began.
        prompt_tokens, generated_tokens: computed since the agent began; 0 where nobody counts them.
        wake_seconds: of all wakes together.
        last_wake_bytes_per_second: at which the last wake copied; 0 when nothing was missing.
        last_request_seconds, since_seconds: Unix time; 0 for never.
        store: the published store that its image comes from; empty for the agent's own.
        device: that it is placed on; empty while it is on none.
    """

    namespace: str
    name: str
    generation: int
    tier: str
    phase: str
    ready: bool
    progress: float = -1.0
    reason: str = ""
    message: str = ""
    weights_bytes: int = 0
    working_bytes: int = 0
    idle_bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    waiting: int = 0
    in_flight: int = 0
    served: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    wakes: int = 0
    evictions: int = 0
    swaps: dict[str, int] = field(default_factory=dict)
    last_wake_seconds: float = 0.0
    wake_seconds: float = 0.0
    last_wake_bytes_per_second: int = 0
    last_request_seconds: float = 0.0
    since_seconds: float = 0.0
    store: str = ""
    device: str = ""
    inputs: tuple[dict[str, object], ...] = ()
    outputs: tuple[dict[str, object], ...] = ()
    process: ProcessReport | None = None


@dataclass(frozen=True)
class DeviceReport:
    """One device of an agent: bytes of its ledger, and what is wrong with it when it is lost.

    Args:
        power_watts, energy_joules: a moment ago, and since its driver was loaded; 0 when nobody knows.
    """

    name: str
    budget_bytes: int = 0
    resident_bytes: int = 0
    promised_bytes: int = 0
    working_bytes: int = 0
    context_bytes: int = 0
    free_bytes: int = 0
    power_watts: float = 0.0
    energy_joules: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class PoolReport:
    """The pool on one agent: bytes of the ledger, the isolation that was reached, and its store's folder and volume.

    Args:
        budget_bytes, resident_bytes, promised_bytes, working_bytes, free_bytes: of all devices.
        context_bytes: of all devices, what processes hold beside frames and working memory.
        power_watts, energy_joules: of all devices a moment ago, and since their drivers were loaded; 0 when nobody
            knows.
        devices: each of them; empty where there is one.
    """

    pool: str
    node: str
    device: str
    budget_bytes: int
    resident_bytes: int
    promised_bytes: int
    working_bytes: int
    free_bytes: int
    host_budget_bytes: int
    host_bytes: int
    arena_bytes: int
    footprint_bytes: int
    isolation_level: str
    isolation_missing: tuple[str, ...]
    ready: bool
    reason: str = ""
    message: str = ""
    store_path: str = ""
    store_bytes: int = 0
    store_free_bytes: int = 0
    context_bytes: int = 0
    power_watts: float = 0.0
    energy_joules: float = 0.0
    devices: tuple[DeviceReport, ...] = ()


@dataclass(frozen=True)
class AgentReport:
    """Everything an agent knows, at one moment."""

    pool: PoolReport
    models: tuple[ModelReport, ...] = field(default_factory=tuple)
