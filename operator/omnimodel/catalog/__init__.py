"""Manifests in files: load, watch, last good version. Controllers and the command line call it."""

from __future__ import annotations

from omnimodel.catalog.catalog import (
    Catalog,
    ConfigObject,
    Identity,
    Key,
    identity_keys,
    key_of,
    read_identities,
)
from omnimodel.catalog.load import load
from omnimodel.catalog.watch import watch

__all__ = [
    "Catalog",
    "ConfigObject",
    "Identity",
    "Key",
    "identity_keys",
    "key_of",
    "load",
    "read_identities",
    "watch",
]
