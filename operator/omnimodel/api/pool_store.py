"""Where a pool keeps published images and environments, and where it finds those that others published."""

from __future__ import annotations

import posixpath
from typing import Annotated, Literal

from pydantic import Field

from omnimodel.api.amounts import Quantity
from omnimodel.api.fields import AbsolutePath, Label, choice, plain
from omnimodel.api.meta import Part, Rule
from omnimodel.api.mounts import SYSTEM_PATHS, SYSTEM_PATTERN
from omnimodel.api.references import ObjectName

IMAGE_VOLUME = "A container image, in a cluster; Kubernetes 1.33 with the feature ImageVolume, or 1.35."
PUBLISHED_PATH = "/stores"  # in a pod: where claims and images of published stores are mounted

SYSTEM_FOLDER = Rule(
    f"!has(self.path) || !self.path.matches('^/+([.]?/+)*({SYSTEM_PATTERN})?/*$')",
    lambda self: self.path is None or posixpath.normpath(f"/{self.path.lstrip('/')}") not in ("/", *SYSTEM_PATHS),
    "is a folder of the system",
    "write one such as /srv/models",
    "path",
)


class ClaimVolume(Part):
    """A persistent volume claim of the pool's namespace."""

    claim_name: ObjectName = Field(description="Name of the claim.", examples=["models"])


class ClaimTemplate(Part):
    """A persistent volume claim for each pod, which stays when the pod goes."""

    size: Quantity = Field(description="What is asked for.", examples=["100Gi"])
    storage_class_name: ObjectName | None = Field(
        default=None, description="Its storage class; the cluster's default when left out.", examples=["fast"]
    )


class ImageVolume(Part):
    """The files of a container image, which are only read."""

    reference: Annotated[str, plain(512, empty=False)] = Field(
        description="The image.", examples=["registry.example.org/omnimodel/catalogue:2026-11"]
    )
    pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], choice("Always", "IfNotPresent", "Never")] = (
        Field(
            default="IfNotPresent",
            description="When the node fetches it, as of a container.",
            examples=["IfNotPresent"],
        )
    )


class PublishedStore(Part):
    """A store that others filled (`omni publish`). It is read and never written."""

    name: Label = Field(description="Its name.", examples=["catalogue"])
    path: AbsolutePath | None = Field(default=None, description="A folder of the machine.", examples=["/srv/catalogue"])
    persistent_volume_claim: ClaimVolume | None = Field(
        default=None, description="A claim, in a cluster.", examples=[{"claimName": "catalogue"}]
    )
    image: ImageVolume | None = Field(
        default=None,
        description=IMAGE_VOLUME,
        examples=[{"reference": "registry.example.org/omnimodel/catalogue:2026-11"}],
    )
    rules = (
        Rule(
            "[has(self.path), has(self.persistentVolumeClaim), has(self.image)].filter(x, x).size() == 1",
            lambda self: sum(part is not None for part in (self.path, self.persistent_volume_claim, self.image)) == 1,
            "needs exactly one of path, persistentVolumeClaim and image",
            "write path: /srv/catalogue, for example, or persistentVolumeClaim: {claimName: catalogue}",
        ),
        SYSTEM_FOLDER,
    )

    @property
    def folder(self) -> str:
        """Where an agent finds it."""
        return self.path or f"{PUBLISHED_PATH}/{self.name}"


class PoolStore(Part):
    """The volume of a pod's own store, and stores with images that are published already."""

    volume_claim_template: ClaimTemplate | None = Field(
        default=None,
        description="A claim for each pod, made with it and kept when it goes. It stays as it is: a pool with another "
        "one is another pool.",
        examples=[{"storageClassName": "fast", "size": "100Gi"}],
    )
    persistent_volume_claim: ClaimVolume | None = Field(
        default=None,
        description="A claim that is there, in a cluster; each pod writes a folder of its own in it.",
        examples=[{"claimName": "stores"}],
    )
    path: AbsolutePath | None = Field(
        default=None,
        description="A folder of the machine; in a cluster each pod writes a folder of its own in it.",
        examples=["/srv/omnimodel"],
    )
    published: list[PublishedStore] = Field(
        default_factory=list,
        max_length=8,
        description="Stores that are looked into first, in this order, and never written.",
        examples=[[{"name": "catalogue", "persistentVolumeClaim": {"claimName": "catalogue"}}]],
    )

    @property
    def of_a_cluster(self) -> bool:
        """Whether it is a claim, which one machine has none of."""
        return self.volume_claim_template is not None or self.persistent_volume_claim is not None

    rules = (
        Rule(
            "[has(self.volumeClaimTemplate), has(self.persistentVolumeClaim), has(self.path)].filter(x, x).size() <= 1",
            lambda self: (
                sum(part is not None for part in (self.volume_claim_template, self.persistent_volume_claim, self.path))
                <= 1
            ),
            "needs at most one of volumeClaimTemplate, persistentVolumeClaim and path",
            "keep one: it is where this pool's pods write",
        ),
        SYSTEM_FOLDER,
    )
