"""References to secrets and config maps, and values that are text or such a reference."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from omnimodel.api.fields import Checked, refusal, text
from omnimodel.api.meta import Part, Rule

KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
ConfigKey = Annotated[str, text(KEY_PATTERN, "is no key of a config map", "write a key such as token or model.py", 253)]
ObjectName = Annotated[
    str,
    text(
        r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "is no name of an object",
        "write lower-case letters, digits, hyphens and dots",
        253,
    ),
]
TEXT_LIMIT = 4096


def text_or(tag: str) -> Discriminator:
    """Chooses between a plain text and an object; tags begin with ~ so that no field path shows them."""
    return Discriminator(lambda value: tag if isinstance(value, (dict, Part)) else "~text")


class KeyReference(Part):
    """A key of a secret or config map in the model's namespace."""

    name: ObjectName = Field(description="Name of the object.", examples=["hugging-face"])
    key: ConfigKey = Field(description="Key in it.", examples=["token"])


class ValueFrom(Part):
    """Where a value comes from."""

    secret_key_ref: KeyReference | None = Field(
        default=None,
        description="A key of a secret; it reaches the process by file, never by argv.",
        examples=[{"name": "hugging-face", "key": "token"}],
    )
    config_map_key_ref: KeyReference | None = Field(
        default=None, description="A key of a config map.", examples=[{"name": "settings", "key": "language"}]
    )
    rules = (
        Rule(
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            lambda self: (self.secret_key_ref is None) != (self.config_map_key_ref is None),
            "needs exactly one of secretKeyRef and configMapKeyRef",
            "write secretKeyRef: {name: NAME, key: KEY}",
        ),
    )


def _plain_value(value: Any) -> str:
    if isinstance(value, str):
        if len(value) > TEXT_LIMIT or "\0" in value:
            raise refusal(f"is longer than {TEXT_LIMIT} characters or has a NUL in it", "put it in a file of a mount")
        return value
    if isinstance(value, bool):
        raise refusal("is not text", f'write it in quotes: "{str(value).lower()}"')
    if isinstance(value, (int, float)):
        raise refusal("is not text", f'write it in quotes: "{value}"')
    raise refusal("is not text", "write a text, or secretKeyRef: {name: NAME, key: KEY}")


PlainValue = Annotated[str, Checked(_plain_value, {"type": "string", "maxLength": TEXT_LIMIT})]
EnvValue = Annotated[Annotated[PlainValue, Tag("~text")] | Annotated[ValueFrom, Tag("~from")], text_or("~from")]
