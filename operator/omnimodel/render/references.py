"""What a manifest refers to, resolved: config maps to their text, volumes to their paths, secrets to a digest."""

from __future__ import annotations

import base64
import hashlib
import posixpath
from collections.abc import Mapping
from typing import Any

from omnimodel.api import OmniModel, OmniPool
from omnimodel.api.mounts import Mount, MountSource
from omnimodel.api.references import KeyReference
from omnimodel.api.source import VolumeSource
from omnimodel.errors import ManifestError, Reason
from omnimodel.quantity import parse_bytes

Content = Mapping[str, bytes]
Config = Mapping[str, Mapping[str, Content]]  # "configmaps" and "secrets" -> name -> key -> bytes
_NAMES = {"configmaps": "ConfigMap", "secrets": "Secret"}


def config_value(model: OmniModel, config: Config, reference: KeyReference, field: str) -> str:
    """The text of a config map's key.

    Raises:
        ManifestError: there is no such key, or it is no text.
    """
    raw = _key(model, config, "configmaps", reference, field)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ManifestError(
            model.subject,
            f"key {reference.key} of ConfigMap {reference.name} is not UTF-8 text",
            "mount it instead",
            field=field,
        ) from None


def secret_reference(model: OmniModel, config: Config, reference: KeyReference, field: str) -> dict[str, str]:
    """A secret's key by name, with a digest of its value so that a change of it changes the process.

    Raises:
        ManifestError: there is no such key.
    """
    raw = _key(model, config, "secrets", reference, field)
    return {"name": reference.name, "key": reference.key, "digest": _digest(model, {reference.key: raw})}


def resolve_source(model: OmniModel, pool: OmniPool) -> dict[str, Any]:
    """The source as in the manifest, a volume of the pool with its path beside it.

    Raises:
        ManifestError: the pool has no such volume.
    """
    source = model.spec.source
    if source.volume is not None:
        return _volume(model, pool, source.volume, "spec.source.volume.name")
    return source.to_dict()


def volume_path(model: OmniModel, pool: OmniPool, name: str, sub_path: str | None, field: str) -> str:
    """Where a path in a volume of the pool is on the machine or in the pod.

    Raises:
        ManifestError: the pool has no such volume.
    """
    for volume in pool.spec.volumes:
        if volume.name == name:
            return posixpath.normpath(f"{volume.folder}/{sub_path or ''}")
    known = ", ".join(volume.name for volume in pool.spec.volumes)
    cure = f"write one of {known}" if known else f"add it to spec.volumes of {pool.subject}"
    raise ManifestError(
        model.subject, f"{name!r}: is no volume of {pool.subject}", cure, field=field, reason=Reason.SOURCE_NOT_FOUND
    )


def _volume(model: OmniModel, pool: OmniPool, source: VolumeSource, field: str) -> dict[str, Any]:
    path = volume_path(model, pool, source.name, source.sub_path, field)
    return {"volume": {"name": source.name, "subPath": source.sub_path or "", "path": path}}


def resolve_mounts(model: OmniModel, pool: OmniPool, config: Config) -> list[dict[str, Any]]:
    """The mounts, in the order of their paths, so that a mount inside another comes after it.

    Raises:
        ManifestError: one refers to what is not there.
    """
    found = []
    for index, mount in enumerate(model.spec.mounts):
        source = _mount_source(model, pool, config, mount, f"spec.mounts[{index}].source")
        if not mount.read_only:
            _check_writable(model, pool, mount, f"spec.mounts[{index}].readOnly")
        writable = isinstance(mount.source, MountSource) and mount.source.empty is not None
        found.append(
            {
                "name": mount.name,
                "source": source,
                "path": posixpath.normpath(mount.path),
                "readOnly": mount.read_only and not writable,
            }
        )
    return sorted(found, key=lambda item: str(item["path"]))


def _check_writable(model: OmniModel, pool: OmniPool, mount: Mount, field: str) -> None:
    volume = mount.source.volume if isinstance(mount.source, MountSource) else None
    for known in pool.spec.volumes:
        if volume is not None and known.name == volume.name and known.read_only:
            raise ManifestError(
                model.subject,
                f"false: volume {known.name} of {pool.subject} is read-only",
                f"remove readOnly: false, or write readOnly: false at the volume in {pool.subject}",
                field=field,
            )


def _mount_source(model: OmniModel, pool: OmniPool, config: Config, mount: Mount, field: str) -> Any:
    source = mount.source
    if not isinstance(source, MountSource):
        return True
    if source.volume is not None:
        return _volume(model, pool, source.volume, f"{field}.volume.name")
    if source.config_map is not None:
        content = _object(model, config, "configmaps", source.config_map.name, f"{field}.configMap.name")
        return _files(content)
    if source.secret is not None:
        content = _object(model, config, "secrets", source.secret.name, f"{field}.secret.name")
        return {"secret": {"name": source.secret.name, "digest": _digest(model, content)}}
    if source.empty is not None:
        return {"empty": {"sizeBytes": parse_bytes(source.empty.size)}}
    return {"files": dict(sorted((source.files or {}).items()))}


def _files(content: Content) -> dict[str, Any]:
    texts: dict[str, str] = {}
    binary: dict[str, str] = {}
    for key in sorted(content):
        try:
            texts[key] = content[key].decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content[key]).decode()
    return {"files": texts, **({"binaryFiles": binary} if binary else {})}


def fill_secrets(spec: dict[str, Any], secrets: Mapping[str, Content]) -> dict[str, Any]:
    """A process spec with its secrets in it, for the agent alone: never stored, shown or logged.

    Args:
        spec: as `ProcessSpec.to_dict` gives it.
        secrets: of the model's namespace: name to key to bytes.

    Raises:
        ManifestError: a secret is not there any more.
    """
    subject = f"OmniModel {spec['model']['namespace']}/{spec['model']['name']}"
    env = dict(spec["env"])
    for variable, reference in spec["secretEnv"].items():
        content, field = secrets.get(reference["name"]), f"spec.runtime.env.{variable}"
        if content is None:
            raise _missing(subject, "secrets", reference["name"], "", field)
        raw = content.get(reference["key"])
        if raw is None:
            raise _missing(subject, "secrets", reference["name"], reference["key"], field, tuple(content))
        env[variable] = raw.decode(errors="surrogateescape")
    mounts = []
    for mount in spec["mounts"]:
        source = mount["source"]
        if source is not True and "secret" in source:
            name = source["secret"]["name"]
            if name not in secrets:
                raise _missing(subject, "secrets", name, "", f"spec.mounts.{mount['name']}")
            source = {**source, **_files(secrets[name])}
        mounts.append({**mount, "source": source})
    return {**spec, "env": env, "mounts": mounts}


def _object(model: OmniModel, config: Config, kind: str, name: str, field: str) -> Content:
    content = config.get(kind, {}).get(name)
    if content is None:
        raise _missing(model.subject, kind, name, "", field)
    return content


def _key(model: OmniModel, config: Config, kind: str, reference: KeyReference, field: str) -> bytes:
    content = _object(model, config, kind, reference.name, f"{field}.name")
    if reference.key not in content:
        raise _missing(model.subject, kind, reference.name, reference.key, f"{field}.key", tuple(content))
    return content[reference.key]


def _missing(subject: str, kind: str, name: str, key: str, field: str, known: tuple[str, ...] = ()) -> ManifestError:
    what = f"{_NAMES[kind]} {name}"
    if key:
        cure = f"write one of {', '.join(sorted(known))}" if known else f"add the key to the {_NAMES[kind]}"
        return ManifestError(
            subject, f"{key!r}: is no key of {what}", cure, field=field, reason=Reason.SOURCE_NOT_FOUND
        )
    return ManifestError(
        subject,
        f"{name!r}: there is no {what} in its namespace",
        f"add a {_NAMES[kind]} of that name beside the manifest, or in the cluster",
        field=field,
        reason=Reason.SOURCE_NOT_FOUND,
    )


def _digest(model: OmniModel, content: Content) -> str:
    """Tells that a secret changed; salted with the model, so that equal secrets do not show as equal."""
    digest = hashlib.sha256(f"{model.key}/{model.metadata.uid}".encode())
    for key in sorted(content):
        for part in (key.encode(), content[key]):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()[:32]
