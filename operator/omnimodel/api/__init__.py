"""The resources of the API as pydantic models, their validation, and the CRDs made from them.

Everyone above may import it; it imports quantity and errors. Manifests come in through `parse`, which refuses in
sentences; `crd` and `reference` make crds/*.yaml and docs/manifest.md from the same models.
"""

from __future__ import annotations

from omnimodel.api.meta import API_VERSION, GROUP, VERSION, Condition, Metadata, OwnerReference, Part, Resource
from omnimodel.api.model import Limits, ModelSpec, OmniModel, Replicas, Residency, Resources, ServedName
from omnimodel.api.parse import KINDS, Place, parse, validate
from omnimodel.api.pool import OmniPool, PoolSpec, Volume
from omnimodel.api.pool_sources import PoolSources
from omnimodel.api.priority import PRIORITIES, priority_number
from omnimodel.api.process import OmniProcess, ProcessLimits, ProcessSpec, ProcessStatus
from omnimodel.api.status import Footprint, IsolationStatus, ModelStatus, PodEntry, PoolStatus, ResidencyEntry

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "PRIORITIES",
    "VERSION",
    "Condition",
    "Footprint",
    "IsolationStatus",
    "Limits",
    "Metadata",
    "ModelSpec",
    "ModelStatus",
    "OmniModel",
    "OmniPool",
    "OmniProcess",
    "OwnerReference",
    "Part",
    "Place",
    "PodEntry",
    "PoolSources",
    "PoolSpec",
    "PoolStatus",
    "ProcessLimits",
    "ProcessSpec",
    "ProcessStatus",
    "Replicas",
    "Residency",
    "ResidencyEntry",
    "Resource",
    "Resources",
    "ServedName",
    "Volume",
    "parse",
    "priority_number",
    "validate",
]
