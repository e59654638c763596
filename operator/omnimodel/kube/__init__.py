"""A thin typed client of the Kubernetes API: apply, status, list, watch, events, leases.

Controllers and the command line call it; it knows nothing of models. Objects are JSON mappings, as the API gives them.
The package `kubernetes` is imported here and nowhere else.
"""

from __future__ import annotations

from omnimodel.kube.client import Calls, Kube, Page
from omnimodel.kube.election import Election
from omnimodel.kube.error import KubeError
from omnimodel.kube.events import Recorder
from omnimodel.kube.kinds import (
    CONFIG_MAPS,
    DEFINITIONS,
    DISRUPTION_BUDGETS,
    EVENTS,
    LEASES,
    MODELS,
    NODES,
    PODS,
    POOLS,
    PROCESSES,
    SECRETS,
    SERVICES,
    STATEFUL_SETS,
    Kind,
    key_of,
)
from omnimodel.kube.watch import Changed, Listed, Mirror, follow

__all__ = [
    "CONFIG_MAPS",
    "DEFINITIONS",
    "DISRUPTION_BUDGETS",
    "EVENTS",
    "LEASES",
    "MODELS",
    "NODES",
    "PODS",
    "POOLS",
    "PROCESSES",
    "SECRETS",
    "SERVICES",
    "STATEFUL_SETS",
    "Calls",
    "Changed",
    "Election",
    "Kind",
    "Kube",
    "KubeError",
    "Listed",
    "Mirror",
    "Page",
    "Recorder",
    "follow",
    "key_of",
]
