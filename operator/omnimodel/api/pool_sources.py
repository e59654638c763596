"""Where a pool fetches packages, models and files from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from omnimodel.api.fields import plain
from omnimodel.api.meta import Part, Rule
from omnimodel.api.references import KeyReference
from omnimodel.api.source import Url


class ConfigMapKey(Part):
    """A key of a config map in the pool's namespace."""

    config_map_key_ref: KeyReference = Field(
        description="Config map and key.", examples=[{"name": "authorities", "key": "ca.crt"}]
    )


class SecretKey(Part):
    """A key of a secret in the pool's namespace."""

    secret_key_ref: KeyReference = Field(description="Secret and key.", examples=[{"name": "fetching", "key": "netrc"}])


class Proxy(Part):
    """HTTP proxies on the way out."""

    http: Url | None = Field(default=None, description="For http URLs.", examples=["http://proxy.example.org:3128"])
    https: Url | None = Field(default=None, description="For https URLs.", examples=["http://proxy.example.org:3128"])
    no_proxy: list[Annotated[str, plain(253, empty=False)]] = Field(
        default_factory=list,
        max_length=64,
        description="Hosts, and domains with a dot before them, that are reached without.",
        examples=[[".example.org", "127.0.0.1"]],
    )


class PoolSources(Part):
    """Where packages, models and files come from. What is left out is as the agent's own environment says."""

    package_index: Url | None = Field(
        default=None,
        description="Package index for package sources and for environments, instead of the one that pip is set to.",
        examples=["https://packages.example.org/simple"],
    )
    extra_package_indexes: list[Url] = Field(
        default_factory=list,
        max_length=16,
        description="Further indexes that are asked beside `packageIndex`.",
        examples=[["https://wheels.example.org/simple"]],
    )
    hub_endpoint: Url | None = Field(
        default=None,
        description="Endpoint that huggingFace sources are fetched from.",
        examples=["https://hub.example.org"],
    )
    proxy: Proxy | None = Field(
        default=None,
        description="Proxies of everything that is fetched.",
        examples=[{"https": "http://proxy.example.org:3128", "noProxy": [".example.org"]}],
    )
    certificates: ConfigMapKey | None = Field(
        default=None,
        description="Authorities to trust, in PEM, instead of those of the system.",
        examples=[{"configMapKeyRef": {"name": "authorities", "key": "ca.crt"}}],
    )
    netrc: SecretKey | None = Field(
        default=None,
        description="Logins by host, in the format of .netrc.",
        examples=[{"secretKeyRef": {"name": "fetching", "key": "netrc"}}],
    )
    hub_token: SecretKey | None = Field(
        default=None,
        description="Token for the hub.",
        examples=[{"secretKeyRef": {"name": "fetching", "key": "token"}}],
    )
    rules = (
        Rule(
            "!has(self.extraPackageIndexes) || self.extraPackageIndexes.size() == 0 || has(self.packageIndex)",
            lambda self: not self.extra_package_indexes or self.package_index is not None,
            "extraPackageIndexes without packageIndex",
            "write packageIndex, the index that they are asked beside",
            "extraPackageIndexes",
        ),
    )
