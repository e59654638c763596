"""What the pods of a pool mount: their own folders, volumes of the pool, stores, sources and the token. Pure.

Every value is written as the API server gives it back, so that a comparison finds differences and nothing else.
"""

from __future__ import annotations

from typing import Any

from omnimodel.api import OmniPool
from omnimodel.api.pool import Volume
from omnimodel.api.pool_store import PoolStore, PublishedStore
from omnimodel.quantity import parse_bytes
from omnimodel.render import references_of_sources

STATE_PATH = "/var/lib/omnimodel"
STORE_PATH = "/var/lib/omnimodel-store"
STORE_VOLUME = "store"
SOURCES_PATH = "/etc/omnimodel/sources"
TOKEN_PATH = "/etc/omnimodel/token"  # noqa: S105 - a folder
TOKEN_KEY = "token"  # noqa: S105 - of the Secret, and the name of the file


def pod_volumes(pool: OmniPool, token_secret: str) -> list[dict[str, Any]]:
    """Volumes of a pod.

    Args:
        pool: checked.
        token_secret: name of the Secret with the token that pods ask of gateways; empty for none.
    """
    return [
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        *(_volume(_volume_name(volume), volume, read_only=volume.read_only) for volume in pool.spec.volumes),
        *_store_volumes(pool),
        *_sources_volume(pool),
        *_token_volume(token_secret),
    ]


def agent_mounts(pool: OmniPool, token_secret: str) -> list[dict[str, Any]]:
    """Where the agent finds them; the arguments are those of `pod_volumes`."""
    return [
        {"name": "state", "mountPath": STATE_PATH},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        *(
            {
                "name": _volume_name(volume),
                "mountPath": volume.folder,
                **({"readOnly": True} if volume.read_only else {}),
            }
            for volume in pool.spec.volumes
        ),
        *_store_mount(pool),
        *(
            {"name": _published_name(store), "mountPath": store.folder, "readOnly": True}
            for store in _store(pool).published
        ),
        *([{"name": "sources", "mountPath": SOURCES_PATH, "readOnly": True}] if _sources_volume(pool) else []),
        *([{"name": "token", "mountPath": TOKEN_PATH, "readOnly": True}] if token_secret else []),
    ]


def further_paths(pool: OmniPool, token_secret: str) -> dict[str, str]:
    """Variables of the agent that name what only some pods have; the arguments are those of `pod_volumes`."""
    paths = {
        "OMNI_STORE_DIR": STORE_PATH if _store_mount(pool) else "",
        "OMNI_SOURCES_DIR": SOURCES_PATH if _sources_volume(pool) else "",
        "OMNI_TOKEN_FILE": f"{TOKEN_PATH}/{TOKEN_KEY}" if token_secret else "",
    }
    return {name: path for name, path in paths.items() if path}


def claim_templates(pool: OmniPool) -> list[dict[str, Any]]:
    """The claim that each pod gets, and that stays when it goes."""
    template = _store(pool).volume_claim_template
    if template is None:
        return []
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": memory_quantity(parse_bytes(template.size))}},
    }
    if template.storage_class_name is not None:
        spec["storageClassName"] = template.storage_class_name
    return [{"metadata": {"name": STORE_VOLUME}, "spec": spec}]


def uses_node_folders(pool: OmniPool) -> bool:
    """Whether pods mount folders of their node."""
    store = _store(pool)
    paths = [*(volume.path for volume in pool.spec.volumes), store.path, *(other.path for other in store.published)]
    return any(path is not None for path in paths)


def memory_quantity(count: int) -> str:
    """Bytes as Kubernetes writes them back: the largest binary unit that leaves no remainder."""
    for power, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if count and count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return str(count)


def _volume(name: str, source: Volume | PublishedStore, *, read_only: bool) -> dict[str, Any]:
    """A volume of a pod: a claim, a container image, or a folder of the node."""
    if source.persistent_volume_claim is not None:
        claim = {"claimName": source.persistent_volume_claim.claim_name, **({"readOnly": True} if read_only else {})}
        return {"name": name, "persistentVolumeClaim": claim}
    if source.image is not None:
        image = {"reference": source.image.reference, "pullPolicy": source.image.pull_policy}
        return {"name": name, "image": image}
    return {"name": name, "hostPath": {"path": source.path, "type": "Directory"}}


def _volume_name(volume: Volume) -> str:
    return f"volume-{volume.name}"[:63]


def _store(pool: OmniPool) -> PoolStore:
    return pool.spec.store or PoolStore()


def _store_mount(pool: OmniPool) -> list[dict[str, Any]]:
    """Where the agent keeps what outlives its pod. In a volume that several pods have, each has a folder of its own."""
    store = _store(pool)
    mount = {"name": STORE_VOLUME, "mountPath": STORE_PATH}
    if store.volume_claim_template is not None:
        return [mount]
    if store.persistent_volume_claim is None and store.path is None:
        return []
    return [{**mount, "subPathExpr": "$(OMNI_POD_NAMESPACE)/$(OMNI_POD_NAME)"}]


def _store_volumes(pool: OmniPool) -> list[dict[str, Any]]:
    """Volumes of the store that is written, unless each pod has a claim of its own, and of those that are read."""
    store = _store(pool)
    volumes: list[dict[str, Any]] = []
    if store.persistent_volume_claim is not None:
        claim = {"claimName": store.persistent_volume_claim.claim_name}
        volumes.append({"name": STORE_VOLUME, "persistentVolumeClaim": claim})
    if store.path is not None:
        volumes.append({"name": STORE_VOLUME, "hostPath": {"path": store.path, "type": "DirectoryOrCreate"}})
    volumes += [_volume(_published_name(item), item, read_only=True) for item in store.published]
    return volumes


def _published_name(store: PublishedStore) -> str:
    return f"published-{store.name}"[:63]


def _sources_volume(pool: OmniPool) -> list[dict[str, Any]]:
    """Authorities, logins and token of the pool's sources, as files; pods start also when one is not there yet."""
    kinds = {"configmaps": "configMap", "secrets": "secret"}
    projected = [
        {kinds[kind]: {"name": key.name, "items": [{"key": key.key, "path": file}], "optional": True}}
        for file, (kind, key) in references_of_sources(pool).items()
    ]
    return [{"name": "sources", "projected": {"defaultMode": 0o400, "sources": projected}}] if projected else []


def _token_volume(secret: str) -> list[dict[str, Any]]:
    """The token as a file, for the agent alone: models have other users and groups, and do not see the folder."""
    if not secret:
        return []
    items = [{"key": TOKEN_KEY, "path": TOKEN_KEY}]
    # Of the group, too: a cluster may run the agent as another user than root, whose group is root's all the same.
    return [{"name": "token", "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}]
