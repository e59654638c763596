"""What every resource has: apiVersion, kind, metadata, conditions, and the rules across fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from omnimodel.api.fields import Flag, Label, Name, choice, plain, whole

GROUP: Final = "omnimodel.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "omnimodel.io/v1alpha1"


@dataclass(frozen=True)
class Rule:
    """A constraint across fields, said once for offline validation and for the API server.

    Args:
        cel: the rule over `self`; empty when CEL cannot say it.
        holds: the same over the parsed part; None where `checks` says it offline with more of an eye for the place.
        problem, cure: the sentence, the same in both places.
        field: the field that the refusal points at, relative to the part, in dots.
    """

    cel: str
    holds: Callable[[Any], bool] | None
    problem: str
    cure: str
    field: str = ""


@dataclass(frozen=True)
class Violation:
    """A broken constraint: `path` has field names as in YAML and list indices."""

    path: tuple[str | int, ...]
    problem: str
    cure: str
    value: Any = None
    secret: bool = False


class Part(BaseModel):
    """A part of a manifest: strict, immutable, camelCase outside and snake_case inside."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        ser_json_inf_nan="constants",
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The part as JSON values with the names of YAML, and only what was set."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def violations(self, path: tuple[str | int, ...] = ()) -> Iterator[Violation]:
        """The broken rules of this part and of all parts in it."""
        for rule in type(self).rules:
            if rule.holds is not None and not rule.holds(self):
                names = tuple(rule.field.split(".")) if rule.field else ()
                yield Violation((*path, *names), rule.problem, rule.cure)
        for name, info in type(self).model_fields.items():
            yield from _inside(getattr(self, name), (*path, info.alias or name))

    def has(self, name: str) -> bool:
        """Whether a field (snake_case) was written."""
        return name in self.model_fields_set and getattr(self, name) is not None


def _inside(value: Any, path: tuple[str | int, ...]) -> Iterator[Violation]:
    if isinstance(value, Part):
        yield from value.violations(path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _inside(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(item, (*path, str(key)))


class Observed(Part):
    """A part of a status: what a newer agent says beyond it is left out, not refused."""

    model_config = ConfigDict(extra="ignore")


LabelMap = dict[str, Annotated[str, plain(4096)]]
Time = Annotated[str, plain(40)]  # RFC 3339


class OwnerReference(Part):
    """The object that this one is deleted with."""

    api_version: Annotated[str, plain(100)]
    kind: Annotated[str, plain(63)]
    name: Annotated[str, plain(253)]
    uid: Annotated[str, plain(64)]
    controller: Flag | None = None
    block_owner_deletion: Flag | None = None


class Metadata(Part):
    """Name, labels and what the system keeps about an object."""

    name: Name = Field(description="Name of the object, a DNS label.", examples=["smollm2"])
    namespace: Label = Field(default="default", description="Namespace of the object.", examples=["default"])
    labels: LabelMap = Field(
        default_factory=dict, description="Labels to select objects by.", examples=[{"team": "search"}]
    )
    annotations: LabelMap = Field(
        default_factory=dict, description="Free text for other tools.", examples=[{"owner": "search@example.org"}]
    )
    uid: Annotated[str, plain(64)] = ""
    generation: Annotated[int, whole(0, 2**62)] = 0
    creation_timestamp: Time = ""
    deletion_timestamp: Time | None = None
    deletion_grace_period_seconds: int | None = None
    resource_version: Annotated[str, plain(64)] | None = None
    generate_name: Annotated[str, plain(253)] | None = None
    self_link: Annotated[str, plain(1024)] | None = None
    owner_references: list[OwnerReference] | None = None
    finalizers: list[str] | None = None
    managed_fields: list[dict[str, Any]] | None = None


class Condition(Observed):
    """One condition of a status, as Kubernetes writes them."""

    type: Annotated[str, plain(316, empty=False)] = Field(
        description="Ready, or abnormal when True: Reconciling, Stalled.", examples=["Ready"]
    )
    status: Annotated[Literal["True", "False", "Unknown"], choice("True", "False", "Unknown")] = Field(
        description="True, False or Unknown.", examples=["True"]
    )
    reason: Annotated[str, plain(1024)] = Field(default="", description="One CamelCase word.", examples=["Serving"])
    message: Annotated[str, plain(32768)] = Field(
        default="", description="One sentence for a person.", examples=["serves"]
    )
    last_transition_time: Time = Field(
        default="", description="When `status` changed last.", examples=["2026-11-29T12:00:00Z"]
    )
    observed_generation: Annotated[int, whole(0, 2**62)] = Field(
        default=0, description="Generation of the spec that the condition speaks of.", examples=[3]
    )


class Resource(Part):
    """An object of the API: `kind`, metadata, spec and status."""

    api_version: Literal["omnimodel.io/v1alpha1"] = API_VERSION
    metadata: Metadata
    namespaced: ClassVar[bool] = True
    plural: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def subject(self) -> str:
        """`Kind namespace/name`, as errors and logs name it."""
        return f"{type(self).__name__} {self.key}"

    def to_dict(self) -> dict[str, Any]:
        """The whole object as JSON values, with apiVersion and kind first."""
        rest = super().to_dict()
        rest.pop("apiVersion", None)
        rest.pop("kind", None)
        return {"apiVersion": API_VERSION, "kind": type(self).__name__, **rest}

    def with_metadata(self, **changes: Any) -> Self:
        """A copy with some fields (snake_case) of its metadata replaced."""
        return self.model_copy(update={"metadata": self.metadata.model_copy(update=changes)})
