"""Unknown fields, words, names and combinations that must be refused, each with one line."""

from __future__ import annotations

from typing import Any

MODELS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "health_check_timeout",
        {"health_check_timeout": 60},
        ["health_check_timeout: is an unknown field; did you mean spec.limits.loadDeadline?"],
    ),
    ("server", {"server": "VLLM"}, ["server: is an unknown field; did you mean spec.runtime.engine?"]),
    ("ttl", {"ttl": 300}, ["ttl: is an unknown field; did you mean spec.residency.idleAfter?"]),
    ("snake", {"residency__idle_after": "5m"}, ["residency.idle_after: is an unknown field; did you mean idleAfter?"]),
    ("snake spec", {"served_names": ["x"]}, ["served_names: is an unknown field; did you mean servedNames?"]),
    (
        "maxRunningModels",
        {"maxRunningModels": 2},
        ["maxRunningModels: is an unknown field; remove it: bytes decide, see spec.device.memory of the OmniPool"],
    ),
    ("unloadAfter", {"unloadAfter": 5}, ["unloadAfter: is an unknown field; did you mean spec.residency.idleAfter?"]),
    (
        "groups",
        {"groups": {}},
        ["groups: is an unknown field; remove it: every model swaps; pin one with spec.residency.keepResident"],
    ),
    ("simultaneous", {"simultaneous": 2}, ["simultaneous: is an unknown field; did you mean spec.limits.concurrency?"]),
    ("port", {"port": 80}, ["port: is an unknown field; remove it: the system assigns ports"]),
    ("typo", {"residency__idelAfter": "5m"}, ["residency.idelAfter: is an unknown field; did you mean idleAfter?"]),
    (
        "misplaced",
        {"keepResident": True},
        ["keepResident: is an unknown field; did you mean spec.residency.keepResident?"],
    ),
    (
        "stripParams",
        {"stripParams": "top_k"},
        ["stripParams: is an unknown field; remove it: taking fields out of a request is not in this version"],
    ),
    ("checks", {"checks": []}, ["checks: is an unknown field; remove it: there are no checks beside spec.probe yet"]),
    (
        "memoryFraction",
        {"resources__memoryFraction": 0.8},
        ["resources.memoryFraction: is an unknown field; a share is said once, in spec.device.memory of the OmniPool"],
    ),
    (
        "gpuMemory",
        {"resources__gpuMemory": "96Gi"},
        ["resources.gpuMemory: is an unknown field; did you mean spec.resources.deviceMemory?"],
    ),
    (
        "resourceProfile",
        {"resourceProfile": "nvidia-gpu-l4:1"},
        ["resourceProfile: is an unknown field; did you mean spec.pool?"],
    ),
    (
        "targetRequests",
        {"targetRequests": 3},
        ["targetRequests: is an unknown field; did you mean spec.limits.concurrency?"],
    ),
    ("minReplicas", {"minReplicas": 1}, ["minReplicas: is an unknown field; did you mean spec.replicas.min?"]),
    ("num_ctx", {"num_ctx": 4096}, ["num_ctx: is an unknown field; did you mean spec.runtime.options.contextTokens?"]),
    (
        "nonsense",
        {"zzz": 1},
        [
            "zzz: is an unknown field; possible are pool, servedNames, suspend, description, capabilities, metadata, source, runtime, resources, residency, mounts, limits, probe, replicas, affinity"
        ],
    ),
    (
        "podAntiAffinity",
        {"podAntiAffinity": {}},
        ["podAntiAffinity: is an unknown field; did you mean spec.affinity.apart?"],
    ),
    (
        "podAffinity",
        {"affinity": {"podAffinity": {}}},
        ["affinity.podAffinity: is an unknown field; did you mean spec.affinity.together?"],
    ),
    (
        "nodeAffinity",
        {"affinity": {"nodeAffinity": {}}},
        [
            "affinity.nodeAffinity: is an unknown field; say it in spec.pod.nodeSelector of the OmniPool, and name that in spec.pool"
        ],
    ),
    (
        "group in capitals",
        {"affinity": {"together": ["RAG"]}},
        ["affinity.together[0]: 'RAG': is no DNS label; write rag"],
    ),
    (
        "one group only",
        {"affinity": {"apart": "large"}},
        ["affinity.apart: 'large': is not a list; write apart: [large]"],
    ),
    (
        "too many groups",
        {"affinity": {"apart": [f"g{index}" for index in range(17)]}},
        ["affinity.apart: has more than 16 entries; write 16 at most"],
    ),
    (
        "together and apart",
        {"affinity": {"together": ["a", "rag"], "apart": ["rag"]}},
        [
            "affinity.apart: has a group that is in together as well; name it in one of the two: models of a group share pods, or never do"
        ],
    ),
    ("aliases", {"aliases": ["x"]}, ["aliases: is an unknown field; did you mean spec.servedNames?"]),
    (
        "modelLoadingTimeoutMillis",
        {"modelLoadingTimeoutMillis": 1},
        ["modelLoadingTimeoutMillis: is an unknown field; did you mean spec.limits.loadDeadline?"],
    ),
    ("storageUri", {"storageUri": "hf://a/b"}, ["storageUri: is an unknown field; did you mean spec.source?"]),
    ("image", {"image": "x"}, ["image: is an unknown field; did you mean spec.runtime.environment.requirements?"]),
    (
        "quant",
        {"runtime__quant": "Q4_K_M"},
        ["runtime.quant: is an unknown field; did you mean spec.runtime.quantization?"],
    ),
    (
        "engine case",
        {"runtime__engine": "Python"},
        [
            "runtime.engine: 'Python': is in the wrong case or spelling; write python; possible are transformers, python, llamacpp, vllm, sglang or command"
        ],
    ),
    (
        "engine vLLM",
        {"runtime__engine": "VLLM"},
        [
            "runtime.engine: 'VLLM': is in the wrong case or spelling; write vllm; possible are transformers, python, llamacpp, vllm, sglang or command"
        ],
    ),
    (
        "option cacheMemory of vllm left out",
        {"runtime": {"engine": "vllm"}},
        [
            "runtime.options: has no cacheMemory: engine vllm would take what it finds free on the GPU; add cacheMemory: 8Gi"
        ],
    ),
    (
        "option cacheTokens of sglang left out",
        {"runtime": {"engine": "sglang"}},
        [
            "runtime.options: has no cacheTokens: engine sglang would take what it finds free on the GPU; add cacheTokens: 65536"
        ],
    ),
    (
        "engine OLlama",
        {"runtime__engine": "OLlama"},
        [
            "runtime.engine: 'OLlama': is none of the possible words; write transformers, python, llamacpp, vllm, sglang or command"
        ],
    ),
    (
        "priority case",
        {"residency__priority": "High"},
        ["residency.priority: 'High': is in the wrong case or spelling; write high"],
    ),
    (
        "priority number",
        {"residency__priority": 2000},
        [
            "residency.priority: 2000: is no priority; write a whole number from 0 to 1000, or batch, low, normal, high, critical"
        ],
    ),
    (
        "priority text number",
        {"residency__priority": "500"},
        ["residency.priority: '500': is text, not a number; write 500 without quotes"],
    ),
    (
        "tier",
        {"residency__idleTier": "disk", "residency__idleAfter": "5m"},
        ["residency.idleTier: 'disk': is none of the possible words; write warm, parked or cold"],
    ),
    (
        "own alias",
        {"servedNames": ["tiny"]},
        ["servedNames[0]: 'tiny': is the model's own name; remove it: a model always answers to metadata.name"],
    ),
    ("twice", {"servedNames": ["a", "a"]}, ["servedNames[1]: 'a': is there twice; remove one"]),
    (
        "space",
        {"servedNames": ["my model"]},
        [
            "servedNames[0]: 'my model': is no name a client can send; write my-model; letters, digits and . _ : / @ + - are possible"
        ],
    ),
    (
        "long name",
        {
            "servedNames": [
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
            ]
        },
        [
            "servedNames[0]: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...: has 97 characters, and 96 are possible; write a shorter one"
        ],
    ),
    ("number name", {"servedNames": [42]}, ['servedNames[0]: 42: is not text; write it in quotes: "42"']),
    (
        "keep idle",
        {"residency__keepResident": True, "residency__idleAfter": "5m"},
        ["residency.idleAfter: '5m': keepResident and idleAfter exclude each other; remove idleAfter, or keepResident"],
    ),
    (
        "more replicas by load",
        {"replicas": {"min": 0, "max": 2}},
        ["replicas.max: 2: more pods by load are not in this version; leave max out, and write the min that it needs"],
    ),
    ("max without min", {"replicas__max": 2}, ["replicas.max: 2: max without min says half; add min, such as min: 1"]),
    (
        "min>max",
        {"replicas": {"min": 3, "max": 2}},
        ["replicas.min: 3: min is more than max; write a min that is at most max"],
    ),
    ("replicas int", {"replicas": 2}, ["replicas: 2: is not a mapping; write replicas: {min: 2}"]),
    (
        "devices index",
        {"resources__devices": "cuda:0"},
        ["resources.devices: 'cuda:0': is not a whole number; write how many devices, never an index, from 1 to 64"],
    ),
    (
        "devices list",
        {"resources__devices": [0]},
        ["resources.devices: [0]: is not a whole number; write how many devices, never an index, from 1 to 64"],
    ),
    (
        "devices zero",
        {"resources__devices": 0},
        ["resources.devices: 0: is less than is possible; write how many devices, never an index, from 1 to 64"],
    ),
    (
        "devices text",
        {"resources__devices": "1"},
        ["resources.devices: '1': is text, not a number; write 1 without quotes"],
    ),
    (
        "several devices",
        {"resources__devices": 2},
        [
            "resources.devices: 2: engines transformers and python keep a model on one device; write devices: 1, or engine: vllm, sglang, llamacpp or command"
        ],
    ),
    (
        "bool text",
        {"suspend": "true"},
        ["suspend: 'true': is neither true nor false; write true or false, without quotes"],
    ),
    ("pool name", {"pool": "GPU_Pool"}, ["pool: 'GPU_Pool': is no DNS label; write gpu-pool"]),
    ("null spec section", {"limits": None}, ["limits: has no value; write one, or remove the line"]),
]

POOLS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "index with a password",
        {"sources": {"packageIndex": "https://me:secret@packages.example.org/simple"}},
        ["sources.packageIndex: has a password in clear text in it; write a URL without USER:PASSWORD@"],
    ),
    (
        "further indexes alone",
        {"sources": {"extraPackageIndexes": ["https://wheels.example.org/simple"]}},
        [
            "sources.extraPackageIndexes: extraPackageIndexes without packageIndex; write packageIndex, the index that they are asked beside"
        ],
    ),
    ("pool typo", {"overCommit": {"limit": 3}}, ["overCommit: is an unknown field; did you mean overcommit?"]),
    (
        "pool unknown",
        {"gpu": 1},
        [
            "gpu: is an unknown field; possible are replicas, device, hostMemory, overcommit, isolation, location, volumes, pod, autoscale, updateStrategy, sources, store"
        ],
    ),
    (
        "autoscale by load",
        {"autoscale": {"min": 1, "max": 2}},
        ["autoscale.max: 2: pods by load are not in this version; write replicas instead of autoscale"],
    ),
    (
        "replicas autoscale",
        {"replicas": 2, "autoscale": {"min": 2, "max": 2}},
        ["replicas: 2: replicas and autoscale exclude each other; remove replicas, or autoscale"],
    ),
    (
        "overcommit",
        {"overcommit": {"limit": 0.5}},
        ["overcommit.limit: 0.5: is out of range; write a number from 1 to 1000"],
    ),
    (
        "level",
        {"isolation": {"level": "vm"}},
        ["isolation.level: 'vm': is none of the possible words; write namespaces, landlock or process"],
    ),
]
