"""Files of a pool's sources, for the agent alone."""

from __future__ import annotations

import pytest

from omnimodel.api import OmniPool
from omnimodel.errors import ManifestError
from omnimodel.render import files_of_sources

CONFIG = {
    "configmaps": {"authorities": {"ca.crt": b"PEM"}},
    "secrets": {"fetching": {"netrc": b"machine x", "token": b"hf"}},
}


def pool(**sources) -> OmniPool:
    return OmniPool.model_validate({"metadata": {"name": "default"}, "spec": {"sources": sources}})


def secret(key: str, name: str = "fetching") -> dict:
    return {"secretKeyRef": {"name": name, "key": key}}


def test_each_reference_is_a_file() -> None:
    named = pool(
        certificates={"configMapKeyRef": {"name": "authorities", "key": "ca.crt"}},
        netrc=secret("netrc"),
        hubToken=secret("token"),
    )
    assert files_of_sources(named, CONFIG) == {"ca.crt": b"PEM", "netrc": b"machine x", "hub-token": b"hf"}
    assert files_of_sources(pool(), CONFIG) == {}


@pytest.mark.parametrize("reference", [secret("nertc"), secret("netrc", "fetchign")])
def test_a_key_that_is_not_there_is_named(reference: dict) -> None:
    with pytest.raises(ManifestError) as caught:
        files_of_sources(pool(netrc=reference), CONFIG)
    found = reference["secretKeyRef"]
    assert f"no key {found['key']} in a Secret {found['name']}" in str(caught.value)
