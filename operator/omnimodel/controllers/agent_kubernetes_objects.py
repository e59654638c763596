"""Objects of the API server as an agent in a pod reads them: processes, and the secrets that they refer to."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from omnimodel.api import OmniProcess, ProcessSpec
from omnimodel.errors import OmniError, Reason
from omnimodel.render import fill_secrets


def secret_names(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Secrets that a process spec refers to, by its variables and its mounts."""
    names = {reference["name"] for reference in spec["secretEnv"].values()}
    for mount in spec["mounts"]:
        source = mount["source"]
        if isinstance(source, Mapping) and "secret" in source:
            names.add(source["secret"]["name"])
    return tuple(sorted(names))


def read(item: Mapping[str, Any]) -> OmniProcess | OmniError:
    """An OmniProcess, or why this agent cannot read it."""
    try:
        return OmniProcess.model_validate(item)
    except ValidationError as error:
        metadata = item["metadata"]
        return unreadable(f"OmniProcess {metadata['namespace']}/{metadata['name']}", error)


def unreadable(subject: str, error: ValidationError) -> OmniError:
    """What is wrong with an object that this agent cannot read."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return OmniError(
        subject,
        f"{where}: {first['msg']}: this agent cannot read it",
        "run agent and operator of one version",
        reason=Reason.INVALID_MANIFEST,
    )


def with_secrets(process: OmniProcess, secrets: Mapping[tuple[str, str], Mapping[str, bytes]]) -> OmniProcess:
    """The process as the agent gets it: with its secrets, and without the names of other pods.

    Raises:
        OmniError: a secret, or a key of it, is missing.
    """
    namespace = process.metadata.namespace
    own = {name: content for (place, name), content in secrets.items() if place == namespace}
    spec = {**fill_secrets(process.spec.to_dict(), own), "pods": []}
    return process.model_copy(update={"spec": ProcessSpec.model_validate(spec)})


def content(item: Mapping[str, Any]) -> Mapping[str, bytes]:
    """What a Secret holds, by key."""
    return {key: base64.b64decode(text) for key, text in (item.get("data") or {}).items()}
