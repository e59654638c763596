"""What people must be able to say, and that it reads back the same."""

from __future__ import annotations

from typing import Any

import pytest

from api.builders import COMMAND, LLAMACPP, SGLANG, TRANSFORMERS, VLLM, model, pool
from omnimodel.api import Footprint, OmniModel, OmniPool, ResidencyEntry, parse, validate

SAID: list[tuple[str, dict[str, Any]]] = [
    ("names with capitals, dots, slashes and colons", {"servedNames": ["Qwen3-Coder-30B-A3B-Instruct-Q4_K_M", "gpt-oss:20b", "Qwen/Qwen3-8B"]}),
    ("a name with request defaults, unlisted", {"servedNames": [{"name": "tiny:high", "defaults": {"temperature": 0.1}, "listed": False}]}),
    ("a name of 96 characters", {"servedNames": ["x" * 96]}),
    ("memory as a quantity", {"resources__deviceMemory": "24Gi"}),
    ("memory as an integer", {"resources__deviceMemory": 25769803776}),
    ("memory as a text of digits", {"resources__deviceMemory": "25769803776"}),
    ("memory measured", {"resources__deviceMemory": "auto"}),
    ("cores as an integer", {"resources__cpu": 1}),
    ("cores as a text", {"resources__cpu": "1"}),
    ("cores as a fraction", {"resources__cpu": 0.5}),
    ("cores in thousandths", {"resources__cpu": "500m"}),
    ("idle for ever", {"residency__idleAfter": "never"}),
    ("pinned, and said twice", {"residency": {"keepResident": True, "idleAfter": "never"}}),
    ("a load of twenty minutes", {"limits__loadDeadline": "20m"}),
    ("no queue at all", {"limits__queue": 0}),
    ("priority as a word", {"residency__priority": "critical"}),
    ("priority as a number", {"residency__priority": 0}),
    ("one device, said", {"resources__devices": 1}),
    ("a server over several devices", {"runtime": LLAMACPP, "resources": {"devices": 2, "deviceMemory": "48Gi"}}),
    ("no quantization, said", {"runtime__quantization": "none"}),
    ("a type for whoever picks it", {"runtime": {**LLAMACPP, "dtype": "auto"}}),
    ("weights of eight bits", {"runtime__quantization": "int8"}),
    ("weights of eight bits with a point", {"runtime__quantization": "fp8", "runtime__dtype": "float16"}),
    ("weights of four bits", {"runtime__quantization": "int4"}),
    ("no other weights than the file's", {"runtime": {**LLAMACPP, "quantization": "none"}}),
    ("every option of a text generation", {"runtime": {**TRANSFORMERS, "options": {"contextTokens": 4096, "maxNewTokens": 256, "maxBatch": 8, "temperature": 0, "topP": 0.9, "topK": 40}}}),
    ("limits of a text generation", {"runtime": TRANSFORMERS, "limits": {"inputTokens": 4096, "outputTokens": 512}}),
    ("every option of an embedder", {"runtime": {"engine": "transformers", "task": "embeddings", "options": {"pooling": "cls", "normalize": False, "truncate": True}}}),
    ("options of a GGUF file", {"runtime": {**LLAMACPP, "options": {"contextTokens": 4096, "chatFormat": "chatml"}}}),
    ("every option of vllm", {"runtime": {**VLLM, "options": {"contextTokens": 8192, "maxBatch": 32, "cacheMemory": "8Gi"}, "args": ["--dtype", "bfloat16"]}}),
    ("a cache in plain bytes", {"runtime": {**VLLM, "options": {"cacheMemory": 8589934592}}}),
    ("every option of sglang", {"runtime": {**SGLANG, "task": "text-generation", "options": {"contextTokens": 8192, "maxBatch": 32, "cacheTokens": 65536}}}),
    ("options and threads of a command line", {"runtime": {**COMMAND, "args": ["--threads", "{{ threads }}"], "env": {"TOP": "{{ options.top | string }}"}, "threads": 4, "options": {"top": 5}}}),
    ("a server by command", {"runtime": {**COMMAND, "healthPath": "/healthz", "workingDir": "/tmp"}}),
    ("a server that takes its port from the environment", {"runtime": {"engine": "command", "command": ["serve"], "env": {"PORT": "{port}"}}}),
    ("a shell that starts a server", {"runtime": {"engine": "command", "command": ["bash", "-c", "exec serve --listen unix:{socket}"]}}),
    ("variables that a shell sets for a server", {"runtime": {"engine": "command", "command": ["bash", "-c", "FOO=bar LOG_LEVEL=info API_KEY=none HF_TOKEN=$KEY PORT={port} exec serve --port {port}"]}}),
    ("settings in words that only look like variables", {"runtime": {**COMMAND, "args": ["path=/models", "temp=0.5", "model.port=80", "--set=PORT=8080", "--env=LD_PRELOAD=/x", "--flag=NAME=value"]}}),
    ("adapters by name", {"runtime": {**VLLM, "args": ["--lora-modules", "home=/lora/home", "PATH=/lora/path"]}}),
    ("a program on a device type", {"runtime": {"engine": "command", "command": ["serve", "--port", "{port}", "--device", "cpu"]}}),
    ("an argument that only begins like one of ours", {"runtime": {**LLAMACPP, "args": ["--mode", "fast", "--kv-cache-dtype", "fp8"]}}),
    ("options of vllm that are near to ours", {"runtime": {**VLLM, "args": ["--max-num-batched-tokens", "8192", "--data-parallel-backend", "mp", "--dtype", "half", "-dcp", "1", "-O3", "-q", "fp8", "--seed=1", "--", "-1"]}}),
    ("options of sglang that are near to ours", {"runtime": {**SGLANG, "args": ["--dist-timeout", "9", "--max-prefill-tokens", "8192", "--pp-max-micro-batch-size", "4", "--model-impl", "auto", "--ep", "1", "--log-level", "info"]}}),
    ("short words that a program has for itself", {"runtime": {**COMMAND, "command": ["serve", "--port", "{port}", "-d", "--de", "x", "--b", "1"], "args": ["-p", "x", "--mem", "4", "-tp=2", "--ma=3"]}}),
    ("a negative number as an argument", {"runtime": {**LLAMACPP, "args": ["--max-lora-rank", "-1"]}}),
    ("variables that only look like secrets", {"runtime__env": {"MAX_TOKENS": "512", "TOKENIZERS_PARALLELISM": "false"}}),
    ("a key that is none", {"runtime__env": {"API_KEY": "none"}}),
    ("secrets and settings by reference", {"runtime__env": {"HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}}, "LANGUAGE": {"configMapKeyRef": {"name": "settings", "key": "language"}}}}),
    ("code from a config map", {"runtime__handler": {"entry": "handler:Handler"}, "runtime__environment": {"path": ["/code"]}, "mounts": [{"name": "code", "source": {"configMap": {"name": "handler"}}, "path": "/code"}]}),
    ("code from a package", {"runtime__handler": {"entry": "tiny.serving:Handler"}, "runtime__environment": {"requirements": ["tiny==1.0.2"]}}),
    ("every kind of mount", {"mounts": [
        {"name": "weights", "source": True, "path": "/model"},
        {"name": "voices", "source": {"volume": {"name": "models", "subPath": "voices"}}, "path": "/voices", "readOnly": False},
        {"name": "hub", "source": {"secret": {"name": "hub"}}, "path": "/secrets/hub"},
        {"name": "scratch", "source": {"empty": {"size": "64Mi"}}, "path": "/scratch"},
        {"name": "labels", "source": {"files": {"labels.txt": "cat\n"}}, "path": "/labels"},
    ]}),
    ("a hub repository with capitals", {"source": {"huggingFace": {"repo": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "7e27bd9f", "files": ["*.safetensors"]}}, "runtime": TRANSFORMERS}),
    ("free metadata and options", {"metadata": {"price": {"input": 0.1}, "owner": None}, "runtime__options": {"contextTokens": 4096, "stop": ["</s>"], "nothing": None}}),
    ("a probe with a form", {"probe": {"path": "/v1/audio/transcriptions", "form": {"language": "en", "file": {"base64": "UklGRg==", "filename": "a.wav", "contentType": "audio/wav"}}, "expect": [{"at": "/text", "matches": "(?i)hello"}]}}),
    ("a probe of every expectation", {"probe": {"path": "/v1/x", "json": {"input": "cat"}, "timeout": "5s", "afterWake": True, "expect": [
        {"at": "", "equals": None}, {"at": "/a", "equals": False}, {"at": "/b", "contains": "x"}, {"at": "/c/0", "near": 0.5, "within": 0.01},
        {"at": "/d", "near": [1, 2.5], "within": 0}, {"contentType": "audio/wav"}, {"minBytes": 100},
    ]}}),
    ("replicas", {"replicas": {"min": 0, "max": 1}}),
    ("groups to share pods with, and one to keep away from", {"affinity": {"together": ["rag", "search"], "apart": ["large"]}}),
    ("no groups, said", {"affinity": {"together": [], "apart": []}}),
]  # fmt: skip


@pytest.mark.parametrize("changes", [row[1] for row in SAID], ids=[row[0] for row in SAID])
def test_a_model_can_say_it_and_reads_back_the_same(changes: dict[str, Any]) -> None:
    document = model(**changes)
    resource, errors = validate(document)
    assert [str(error) for error in errors] == []
    assert isinstance(resource, OmniModel)
    written = resource.to_dict()
    assert written["spec"] == document["spec"]
    assert parse(written) == resource


POOLS: list[tuple[str, dict[str, Any]]] = [
    ("nothing", {}),
    ("a share of the device", {"device": {"type": "cuda", "count": 2, "memory": "80%"}}),
    ("a budget and a frame", {"device": {"memory": "512Mi", "frameSize": "16Mi"}, "hostMemory": "50%"}),
    ("limits and isolation", {"overcommit": {"limit": 8}, "isolation": {"level": "namespaces"}}),
    ("volumes", {"volumes": [{"name": "models", "path": "/srv/models"}, {"name": "hub", "persistentVolumeClaim": {"claimName": "hub"}}]}),
    ("volumes of images", {"volumes": [{"name": "voices", "image": {"reference": "registry.example.org/voices:1"}}, {"name": "fresh", "image": {"reference": "registry.example.org/fresh:1", "pullPolicy": "Always"}, "readOnly": True}]}),
    ("a claim for each store", {"store": {"volumeClaimTemplate": {"size": "100Gi", "storageClassName": "fast"}}}),
    ("stores", {"store": {"persistentVolumeClaim": {"claimName": "stores"}, "published": [{"name": "a", "persistentVolumeClaim": {"claimName": "a"}}, {"name": "b", "image": {"reference": "registry.example.org/catalogue:1"}}, {"name": "c", "path": "/srv/c"}]}}),
    ("a folder for stores", {"store": {"path": "/srv/omnimodel"}}),
    ("pods", {"replicas": 2, "pod": {"nodeSelector": {"gpu": "l4"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "resources": {"cpu": 0.5, "memory": "8Gi"}}}),
    ("where things come from", {"sources": {"packageIndex": "http://10.0.0.1:3141/simple", "extraPackageIndexes": ["https://wheels.example.org/simple"], "hubEndpoint": "https://hub.example.org", "proxy": {"https": "http://proxy.example.org:3128", "noProxy": [".example.org", "10.0.0.0/8"]}, "certificates": {"configMapKeyRef": {"name": "authorities", "key": "ca.crt"}}, "netrc": {"secretKeyRef": {"name": "fetching", "key": "netrc"}}, "hubToken": {"secretKeyRef": {"name": "fetching", "key": "token"}}}}),
]  # fmt: skip


@pytest.mark.parametrize("changes", [row[1] for row in POOLS], ids=[row[0] for row in POOLS])
def test_a_pool_can_say_it_and_reads_back_the_same(changes: dict[str, Any]) -> None:
    resource, errors = validate(pool(**changes))
    assert [str(error) for error in errors] == []
    assert isinstance(resource, OmniPool)
    assert resource.to_dict()["spec"] == changes


def test_an_object_of_the_api_server_is_accepted_whole() -> None:
    document = model()
    document["metadata"] |= {
        "namespace": "search",
        "uid": "9f1c",
        "generation": 3,
        "resourceVersion": "1234",
        "creationTimestamp": "2026-11-29T12:00:00Z",
        "deletionTimestamp": None,
        "finalizers": [],
        "managedFields": [{"manager": "kubectl", "operation": "Apply"}],
    }
    document["status"] = {
        "observedGeneration": 3,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": "2026-11-29T12:00:00Z"}],
        "residency": [{"pod": "default-0", "tier": "resident", "deviceBytes": 1024, "wakes": 2, "lastWakeSeconds": 0.02}],
        "fieldOfANewerVersion": 1,
    }  # fmt: skip
    resource = parse(document)
    assert isinstance(resource, OmniModel)
    assert resource.key == "search/tiny"
    assert resource.status.residency[0].tier == "resident"


def test_snake_case_is_for_python_only() -> None:
    entry = ResidencyEntry(pod="default-0", tier="warm", device_bytes=5)
    assert entry.to_dict() == {"pod": "default-0", "tier": "warm", "deviceBytes": 5}
    assert Footprint(weights_bytes=7).to_dict() == {"weightsBytes": 7}
    resource, errors = validate(model(residency={"idle_after": "5m"}))
    assert resource is None
    assert len(errors) == 1


def test_a_secret_never_stands_in_a_message() -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    for changes in (
        {"runtime__env": {"HF_TOKEN": secret}},
        {"runtime__env": {"SOMETHING": f"x {secret}"}},
        {"runtime": {**LLAMACPP, "args": ["--hf-token", secret]}},
        {"runtime": {**LLAMACPP, "args": [f"--hf-token={secret}"]}},
        {"runtime": {**COMMAND, "command": ["bash", "-c", f"TOKEN={secret} serve --port {{port}}"]}},
    ):
        _, errors = validate(model(**changes))
        assert errors
        assert all(secret not in str(error) for error in errors)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([1], "manifest: is no mapping; begin with apiVersion: omnimodel.io/v1alpha1"),
        ({"kind": "OmniModel", "metadata": {"name": "a"}}, "OmniModel default/a: apiVersion: is missing; write omnimodel.io/v1alpha1"),
        ({"apiVersion": "omnimodel.io/v1", "kind": "OmniModel"}, "OmniModel: apiVersion: 'omnimodel.io/v1': is no version of this API; write omnimodel.io/v1alpha1"),
        ({"apiVersion": "omnimodel.io/v1alpha1", "kind": "Omnimodel"}, "Omnimodel: kind: 'Omnimodel': is no kind of this API; write OmniModel"),
        ({"apiVersion": "omnimodel.io/v1alpha1", "kind": "Pool"}, "Pool: kind: 'Pool': is no kind of this API; write OmniPool"),
        ({"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniPool", "metadata": {"name": "GPU_1"}}, "OmniPool default/GPU_1: metadata.name: 'GPU_1': is no DNS label; write gpu-1 here, and the name that clients use in spec.servedNames"),
        ({"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniPool"}, "OmniPool: metadata: is missing; write metadata: {name: smollm2}"),
        ({"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniPool", "metadata": {"name": ""}}, "OmniPool: metadata.name: '': is empty; write lower-case letters, digits and hyphens, such as smollm2"),
    ],
    ids=["a list", "no version", "another version", "kind in another case", "half a kind", "name in capitals", "no metadata", "empty name"],
)  # fmt: skip
def test_the_head_of_a_manifest_is_refused_in_one_line(document: Any, expected: str) -> None:
    resource, errors = validate(document)
    assert resource is None
    assert str(errors[0]) == expected
