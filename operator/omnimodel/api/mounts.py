"""What a model sees in its file system besides its environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from omnimodel.api.amounts import Quantity
from omnimodel.api.fields import ABSOLUTE_PATH, Checked, Flag, Label, cel, refusal
from omnimodel.api.meta import Part, Rule
from omnimodel.api.references import ObjectName
from omnimodel.api.runtime import FileName, FileText
from omnimodel.api.source import VolumeSource

# A mount over one of these would hide or replace what the sandbox itself is made of.
SYSTEM_PATHS = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/tmp", "/omni")  # noqa: S108


class ConfigMapMount(Part):
    """A config map of the model's namespace, each key a file."""

    name: ObjectName = Field(description="Name of the config map.", examples=["handler"])


class SecretMount(Part):
    """A secret of the model's namespace, each key a file that only the model can read."""

    name: ObjectName = Field(description="Name of the secret.", examples=["hub"])


class EmptyMount(Part):
    """An empty folder in memory, gone with the process."""

    size: Quantity = Field(description="Its size, which counts against the model's memory.", examples=["64Mi"])


class MountSource(Part):
    """Where a mount's files come from: exactly one of these."""

    volume: VolumeSource | None = Field(
        default=None, description="A path in a volume of the pool.", examples=[{"name": "models", "subPath": "voices"}]
    )
    config_map: ConfigMapMount | None = Field(default=None, description="A config map.", examples=[{"name": "handler"}])
    secret: SecretMount | None = Field(default=None, description="A secret.", examples=[{"name": "hub"}])
    empty: EmptyMount | None = Field(
        default=None, description="An empty folder to write in.", examples=[{"size": "64Mi"}]
    )
    files: dict[FileName, FileText] | None = Field(
        default=None,
        max_length=32,
        description="Files with their text inline.",
        examples=[{"labels.txt": "cat\ndog\n"}],
    )
    rules = (
        Rule(
            "[has(self.volume), has(self.configMap), has(self.secret), has(self.empty), has(self.files)]"
            ".filter(x, x).size() == 1",
            lambda self: sum(getattr(self, name) is not None for name in type(self).model_fields) == 1,
            "needs exactly one of volume, configMap, secret, empty and files",
            "write configMap: {name: NAME}, for example, or source: true for the model's own source",
        ),
    )

    @property
    def writable(self) -> bool:
        """Whether a mount of it can be written to at all."""
        return self.empty is not None or self.volume is not None


def _own_source(value: Any) -> bool:
    if value is True:
        return True
    cure = "write true for the model's own source, or one of volume, configMap, secret, empty and files"
    raise refusal("is no source of a mount", cure)


OwnSource = Annotated[bool, Checked(_own_source, {"type": "boolean"})]


def _source_tag(value: Any) -> str:
    return "~from" if isinstance(value, (dict, Part)) else "~own"


def _mount_path(value: Any) -> str:
    path: str = ABSOLUTE_PATH.check(value)
    clean = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
    if clean == "/" or any(clean == system or clean.startswith(f"{system}/") for system in SYSTEM_PATHS):
        raise refusal("would hide a folder of the system", "write a path of its own, such as /models or /code")
    return path


SYSTEM_PATTERN = "|".join(path[1:] for path in SYSTEM_PATHS)
MountPath = Annotated[
    str,
    Checked(
        _mount_path,
        {
            **ABSOLUTE_PATH.schema,
            "x-kubernetes-validations": [
                *ABSOLUTE_PATH.schema["x-kubernetes-validations"],
                cel(
                    f"!self.matches('^/+([.]?/+)*(({SYSTEM_PATTERN})(/|$)|$)')",
                    "would hide a folder of the system",
                    "write a path of its own, such as /models or /code",
                ),
            ],
        },
    ),
]


class Mount(Part):
    """One mount."""

    name: Label = Field(description="Its name, unique in the model.", examples=["code"])
    source: Annotated[
        Annotated[OwnSource, Tag("~own")] | Annotated[MountSource, Tag("~from")], Discriminator(_source_tag)
    ] = Field(
        description="`true` for the model's own source (read-only), or one of volume, configMap, secret, empty, files.",
        examples=[{"configMap": {"name": "handler"}}],
    )
    path: MountPath = Field(description="Where the model sees it.", examples=["/code"])
    read_only: Flag = Field(
        default=True,
        description="Only a volume or an empty folder can be writable; an empty folder always is.",
        examples=[True],
    )
    rules = (
        Rule(
            "",
            lambda self: self.read_only or (isinstance(self.source, MountSource) and self.source.writable),
            "only a volume or an empty folder can be writable",
            "remove readOnly: false, or write source: {empty: {size: 64Mi}}",
            "readOnly",
        ),
    )
