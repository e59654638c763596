"""Models without a process, as a gateway on one machine sees them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from omnimodel.api import OmniModel
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.local_backend import LocalBackend, RefusedModel
from omnimodel.errors import DispatchError
from omnimodel.protocol.dispatch import InferenceRequest, ModelCard


class Words:
    """A backend with a model `words` of namespace default."""

    def models(self) -> list[Any]:
        return [ModelCard("words", "default", ("words",), "embeddings", "warm", ready=True)]

    @contextlib.asynccontextmanager
    async def open(self, request: InferenceRequest):
        yield request.model


async def test_a_refused_model_is_its_own_whatever_another_namespace_calls_so() -> None:
    metadata = {"name": "words", "namespace": "team"}
    spec = {"source": {"path": "/words.gguf"}, "runtime": {"engine": "llamacpp"}, "limits": {"requestBytes": "64Mi"}}
    team = OmniModel.model_validate({"metadata": metadata, "spec": spec})
    refused = RefusedModel(team, Refusal("TooLarge", "it needs 9 GiB"), ("Team/Words",))
    backend = LocalBackend(Words(), lambda: [refused])
    first, second = backend.models()
    assert (first.name, first.ready, first.served_names) == ("team/words", False, ("Team/Words",))
    assert (first.task, first.request_bytes) == ("text-generation", 64 << 20)
    assert (second.name, second.ready) == ("words", True)
    with pytest.raises(DispatchError, match="it needs 9 GiB"):
        async with backend.open(InferenceRequest("team/words", "POST", "/v1/chat/completions", {}, b"")):
            pass
    async with backend.open(InferenceRequest("words", "POST", "/v1/embeddings", {}, b"")) as reached:
        assert reached == "words"
