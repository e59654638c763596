"""Sources, mounts, probes and volumes that must be refused, each with one line."""

from __future__ import annotations

from typing import Any

from api.builders import ABSENT

MODELS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "in mount",
        {"mounts": [{"name": "a", "source": True, "mountPath": "/x"}]},
        [
            "mounts[0].path: is missing; write path: /code",
            "mounts[0].mountPath: is an unknown field; did you mean path?",
        ],
    ),
    (
        "readonly case",
        {"mounts": [{"name": "a", "source": True, "path": "/x", "readonly": True}]},
        ["mounts[0].readonly: is an unknown field; did you mean readOnly?"],
    ),
    (
        "two sources",
        {
            "source": {
                "path": "/x",
                "url": {
                    "url": "https://e.org/x",
                    "sha256": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                },
            }
        },
        [
            "source: needs exactly one of path, package, huggingFace, url and volume; write package: {name: NAME, version: VERSION}, for example, and nothing beside it"
        ],
    ),
    (
        "no source",
        {"source": {}},
        [
            "source: needs exactly one of path, package, huggingFace, url and volume; write package: {name: NAME, version: VERSION}, for example, and nothing beside it"
        ],
    ),
    (
        "source missing",
        {"source": ABSENT},
        ["source: is missing; write source: {package: {name: wordllama, version: 0.4.0.post1}}"],
    ),
    (
        "source text",
        {"source": "hf://a/b"},
        ["source: 'hf://a/b': is not a mapping; write source: {package: {name: wordllama, version: 0.4.0.post1}}"],
    ),
    (
        "mount relative",
        {"mounts": [{"name": "code", "source": True, "path": "code"}]},
        ["mounts[0].path: 'code': is not an absolute path; write /code"],
    ),
    (
        "mount dots",
        {"mounts": [{"name": "code", "source": True, "path": "/a/../b"}]},
        ["mounts[0].path: '/a/../b': has .. in it and may leave its folder; write the path without .."],
    ),
    (
        "mount system",
        {"mounts": [{"name": "code", "source": True, "path": "/usr/lib"}]},
        [
            "mounts[0].path: '/usr/lib': would hide a folder of the system; write a path of its own, such as /models or /code"
        ],
    ),
    (
        "mount root",
        {"mounts": [{"name": "code", "source": True, "path": "/"}]},
        ["mounts[0].path: '/': would hide a folder of the system; write a path of its own, such as /models or /code"],
    ),
    (
        "mount false",
        {"mounts": [{"name": "code", "source": False, "path": "/code"}]},
        [
            "mounts[0].source: false: is no source of a mount; write true for the model's own source, or one of volume, configMap, secret, empty and files"
        ],
    ),
    (
        "mount two",
        {"mounts": [{"name": "code", "source": {"empty": {"size": "1Gi"}, "secret": {"name": "x"}}, "path": "/code"}]},
        [
            "mounts[0].source: needs exactly one of volume, configMap, secret, empty and files; write configMap: {name: NAME}, for example, or source: true for the model's own source"
        ],
    ),
    (
        "mount writable",
        {"mounts": [{"name": "code", "source": True, "path": "/code", "readOnly": False}]},
        [
            "mounts[0].readOnly: false: only a volume or an empty folder can be writable; remove readOnly: false, or write source: {empty: {size: 64Mi}}"
        ],
    ),
    (
        "mount twice",
        {
            "mounts": [
                {"name": "code", "source": True, "path": "/code"},
                {"name": "code", "source": True, "path": "/code"},
            ]
        },
        [
            "mounts[1].name: 'code': is there twice; give each mount a name of its own",
            "mounts[1].path: '/code': is the path of mount code as well; give each mount a path of its own",
        ],
    ),
    (
        "subpath",
        {"source": {"volume": {"name": "v", "subPath": "/abs"}}},
        ["source.volume.subPath: '/abs': is an absolute path; write it without the leading slash: abs"],
    ),
    (
        "subpath dots",
        {"source": {"volume": {"name": "v", "subPath": "../x"}}},
        ["source.volume.subPath: '../x': has .. in it and may leave its folder; write the path without .."],
    ),
    (
        "source relative",
        {"source": {"path": "models/x"}},
        ["source.path: 'models/x': is not an absolute path; write /models/x"],
    ),
    (
        "source home",
        {"source": {"path": "~/models"}},
        ["source.path: '~/models': is not an absolute path; write the whole of it, such as /home/NAME/models"],
    ),
    ("mount no name", {"mounts": [{"source": True, "path": "/x"}]}, ["mounts[0].name: is missing; write name: code"]),
    (
        "version range",
        {"source": {"package": {"name": "a", "version": ">=1.0"}}},
        ["source.package.version: '>=1.0': is no exact version; pin exactly one, such as 1.0"],
    ),
    (
        "version number",
        {"source": {"package": {"name": "a", "version": 0.1}}},
        ['source.package.version: 0.1: is not text; write it in quotes: "0.1"'],
    ),
    (
        "short sha",
        {"source": {"package": {"name": "a", "version": "1", "sha256": "abc"}}},
        [
            "source.package.sha256: 'abc': is no SHA-256; write the 64 lower-case hexadecimal digits that `sha256sum FILE` prints"
        ],
    ),
    (
        "hf url",
        {"source": {"huggingFace": {"repo": "hf://Qwen/Qwen3-8B"}}},
        [
            "source.huggingFace.repo: 'hf://Qwen/Qwen3-8B': is no repository; write Qwen/Qwen3-8B, with a file in files and a branch or commit in revision"
        ],
    ),
    (
        "hf tag",
        {"source": {"huggingFace": {"repo": "Qwen/Qwen3-8B-GGUF:Q4_K_M"}}},
        [
            "source.huggingFace.repo: 'Qwen/Qwen3-8B-GGUF:Q4_K_M': is no repository; write Qwen/Qwen3-8B-GGUF, with a file in files and a branch or commit in revision"
        ],
    ),
    (
        "s3",
        {
            "source": {
                "url": {"url": "s3://b/x", "sha256": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}
            }
        },
        [
            "source.url.url: 's3://b/x': s3:// is not fetched; mount the bucket as a volume of the pool and write volume: {name: NAME, subPath: PATH}, or give an https URL"
        ],
    ),
    (
        "url password",
        {
            "source": {
                "url": {
                    "url": "https://u:p@e.org/x",
                    "sha256": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                }
            }
        },
        ["source.url.url: has a password in clear text in it; write a URL without USER:PASSWORD@"],
    ),
    (
        "url no sha",
        {"source": {"url": {"url": "https://e.org/x"}}},
        ["source.url.sha256: is missing; write sha256: and the 64 digits that `sha256sum FILE` prints"],
    ),
    (
        "pvc",
        {
            "source": {
                "url": {
                    "url": "pvc://x/y",
                    "sha256": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                }
            }
        },
        [
            "source.url.url: 'pvc://x/y': pvc:// is not fetched by url; write volume: {name: NAME, subPath: PATH}, or path: /FOLDER"
        ],
    ),
    (
        "probe no body",
        {"probe": {"path": "/x", "expect": [{"minBytes": 1}]}},
        ["probe: needs exactly one of json and form; write json: {input: TEXT}, for example"],
    ),
    (
        "probe both",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "/a", "equals": 1}], "form": {"a": "b"}}},
        ["probe: needs exactly one of json and form; write json: {input: TEXT}, for example"],
    ),
    (
        "probe no expect",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": []}},
        ["probe.expect: has fewer than 1 entries; write 1 at least"],
    ),
    (
        "probe at alone",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "/a"}]}},
        [
            "probe.expect[0]: at needs exactly one of equals, contains, matches and near; write equals: VALUE beside it, for example"
        ],
    ),
    (
        "probe two matchers",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "/a", "equals": 1, "contains": "x"}]}},
        [
            "probe.expect[0]: at needs exactly one of equals, contains, matches and near; write equals: VALUE beside it, for example"
        ],
    ),
    (
        "probe near",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "/a", "near": 1}]}},
        ["probe.expect[0]: near and within belong together; write near: 0.689 and within: 0.01"],
    ),
    (
        "probe pointer",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "$.choices[0].text", "equals": 1}]}},
        ["probe.expect[0].at: '$.choices[0].text': is no JSON pointer; write /choices/0/text"],
    ),
    (
        "probe regex",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "/a", "matches": "("}]}},
        [
            "probe.expect[0].matches: '(': is no regular expression (missing ), unterminated subpattern at position 0); write one such as Paris|paris"
        ],
    ),
    (
        "probe base64",
        {
            "probe": {
                "path": "/x",
                "form": {"file": {"base64": "???", "filename": "a.wav"}},
                "expect": [{"minBytes": 1}],
            }
        },
        ["probe.form.file.base64: '???': is not base64; write what `base64 FILE` prints"],
    ),
    (
        "probe no at",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"equals": 1}]}},
        [
            "probe.expect[0]: needs exactly one of at, contentType and minBytes; write at: /POINTER with equals: VALUE, for example",
            "probe.expect[0]: equals, contains, matches and near need at; write at: /POINTER beside it",
        ],
    ),
    (
        "get body",
        {"probe": {"path": "/v1/x", "json": {"a": 1}, "expect": [{"at": "/a", "equals": 1}], "method": "GET"}},
        ["probe.method: 'GET': a GET has no body; remove json and form, or write method: POST"],
    ),
    (
        "list text",
        {"mounts": "x"},
        ["mounts: 'x': is not a list; write mounts: [{name: code, source: {configMap: {name: handler}}, path: /code}]"],
    ),
]

POOLS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "volume two",
        {"volumes": [{"name": "a", "path": "/x", "persistentVolumeClaim": {"claimName": "x"}}]},
        [
            "volumes[0]: needs exactly one of path, persistentVolumeClaim and image; write path: /srv/models, or persistentVolumeClaim: {claimName: models}, for example"
        ],
    ),
    (
        "volume nowhere",
        {"volumes": [{"name": "a"}]},
        [
            "volumes[0]: needs exactly one of path, persistentVolumeClaim and image; write path: /srv/models, or persistentVolumeClaim: {claimName: models}, for example"
        ],
    ),
    (
        "volume image and path",
        {"volumes": [{"name": "a", "path": "/x", "image": {"reference": "registry.example.org/models:1"}}]},
        [
            "volumes[0]: needs exactly one of path, persistentVolumeClaim and image; write path: /srv/models, or persistentVolumeClaim: {claimName: models}, for example"
        ],
    ),
    (
        "volume image to write",
        {"volumes": [{"name": "a", "image": {"reference": "registry.example.org/models:1"}, "readOnly": False}]},
        ["volumes[0].readOnly: false: an image is only read; remove readOnly: false, or have a claim to write to"],
    ),
    (
        "volume image without name",
        {"volumes": [{"name": "a", "image": {"pullPolicy": "Never"}}]},
        ["volumes[0].image.reference: is missing; write reference: 'registry.example.org/omnimodel/catalogue:2026-11'"],
    ),
    (
        "volume image as of a pod",
        {"volumes": [{"name": "a", "image": {"reference": "registry.example.org/models:1", "pullPolicy": "always"}}]},
        [
            "volumes[0].image.pullPolicy: 'always': is in the wrong case or spelling; write Always; possible are Always, IfNotPresent or Never"
        ],
    ),
    (
        "volume twice",
        {"volumes": [{"name": "a", "path": "/x"}, {"name": "a", "path": "/y"}]},
        ["volumes[1].name: 'a': is there twice; give each volume a name of its own"],
    ),
    (
        "volume root",
        {"volumes": [{"name": "a", "path": "/etc"}]},
        ["volumes[0].path: '/etc': is a folder of the system; write one such as /srv/models"],
    ),
    (
        "store two",
        {"store": {"path": "/x", "volumeClaimTemplate": {"size": "1Gi"}}},
        [
            "store: needs at most one of volumeClaimTemplate, persistentVolumeClaim and path; keep one: it is where this pool's pods write"
        ],
    ),
    (
        "store root",
        {"store": {"path": "/"}},
        ["store.path: '/': is a folder of the system; write one such as /srv/models"],
    ),
    (
        "store without size",
        {"store": {"volumeClaimTemplate": {"storageClassName": "fast"}}},
        ["store.volumeClaimTemplate.size: is missing; write size: 100Gi"],
    ),
    (
        "published nowhere",
        {"store": {"published": [{"name": "a"}]}},
        [
            "store.published[0]: needs exactly one of path, persistentVolumeClaim and image; write path: /srv/catalogue, for example, or persistentVolumeClaim: {claimName: catalogue}"
        ],
    ),
    (
        "published twice",
        {"store": {"published": [{"name": "a", "path": "/x"}, {"name": "a", "path": "/y"}]}},
        ["store.published[1].name: 'a': is there twice; give each store a name of its own"],
    ),
    (
        "published writable",
        {"store": {"published": [{"name": "a", "path": "/x", "readOnly": False}]}},
        ["store.published[0].readOnly: is an unknown field; did you mean spec.volumes.readOnly?"],
    ),
]
