"""What a pool's sources refer to, resolved: authorities, logins and the hub's token as files for an agent."""

from __future__ import annotations

from omnimodel.api import OmniPool
from omnimodel.api.references import KeyReference
from omnimodel.errors import ManifestError, Reason
from omnimodel.render.references import Config

KINDS = {"configmaps": "ConfigMap", "secrets": "Secret"}


def references_of_sources(pool: OmniPool) -> dict[str, tuple[str, KeyReference]]:
    """File name -> `configmaps` or `secrets`, and the key in it."""
    sources = pool.spec.sources
    found: dict[str, tuple[str, KeyReference]] = {}
    if sources is not None and sources.certificates is not None:
        found["ca.crt"] = "configmaps", sources.certificates.config_map_key_ref
    if sources is not None and sources.netrc is not None:
        found["netrc"] = "secrets", sources.netrc.secret_key_ref
    if sources is not None and sources.hub_token is not None:
        found["hub-token"] = "secrets", sources.hub_token.secret_key_ref
    return found


def files_of_sources(pool: OmniPool, config: Config) -> dict[str, bytes]:
    """The content of those files, for the agent alone: never stored elsewhere, shown or logged.

    Args:
        pool: whose sources.
        config: what its namespace has.

    Raises:
        ManifestError: a config map, secret or key is not there.
    """
    found, namespace = {}, pool.metadata.namespace
    for file, (kind, reference) in references_of_sources(pool).items():
        content = config.get(kind, {}).get(reference.name, {})
        if reference.key not in content:
            raise ManifestError(
                pool.subject,
                f"there is no key {reference.key} in a {KINDS[kind]} {reference.name} of namespace {namespace}",
                f"add that key to a {KINDS[kind]} of this name and namespace, beside the manifest or in the cluster",
                field="spec.sources",
                reason=Reason.SOURCE_NOT_FOUND,
            )
        found[file] = content[reference.key]
    return found
