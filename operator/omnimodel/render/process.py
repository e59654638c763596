"""Model + pool -> process spec. Pure: the same input gives the same bytes, so a hash says whether anything changed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omnimodel.api import OmniModel, OmniPool, OmniProcess, ProcessSpec, ServedName, priority_number
from omnimodel.api.meta import API_VERSION
from omnimodel.api.owned import violations
from omnimodel.api.runtime import DEFAULT_TASK, FOREIGN
from omnimodel.api.tree import dotted
from omnimodel.errors import ManifestError
from omnimodel.quantity import AUTO, parse_bytes, parse_cpu, parse_duration, parse_lifetime
from omnimodel.render.engines import check_engine
from omnimodel.render.identity import hostname, user_id
from omnimodel.render.references import Config, config_value, resolve_mounts, resolve_source, secret_reference
from omnimodel.render.templates import expand

CONCURRENCY_GENERATION = 16  # a continuous batch; measured 4.5 to 4.8 times the tokens of one after another
CONCURRENCY_OTHER = 1
QUEUE = 256
DEADLINE_SECONDS = 600.0
LOAD_DEADLINE_SECONDS = 1200.0  # loads of 20 minutes are normal for large models
DRAIN_SECONDS = 30.0
REQUEST_BYTES = 32 << 20
RESPONSE_BYTES = 256 << 20
PROCESSES = 256
TMP_BYTES = 64 << 20
SHM_BYTES = 64 << 20
PROBE_SECONDS = 60.0

# What differs between two specs without the process having to be another one.
_NOT_THE_PROCESS = (
    "generation",
    "hash",
    "publishHash",
    "residency",
    "servedNames",
    "capabilities",
    "metadata",
    "probe",
    "deviceMemoryBytes",
    "suspend",
)
# Limits that the agent and its ingress keep, not the process.
_LIMITS_OF_AGENT = ("queue", "deadlineSeconds", "loadDeadlineSeconds", "drainSeconds")
# Options of engine transformers that its weights do not depend on; a handler may read any option while it builds.
_SERVING_OPTIONS = (
    "contextTokens",
    "maxNewTokens",
    "maxBatch",
    "temperature",
    "topP",
    "topK",
    "truncate",
    "pooling",
    "normalize",
)


def render(
    model: OmniModel,
    pool: OmniPool,
    config: Config | None = None,
    *,
    served_names: Sequence[str] | None = None,
    taken: Collection[int] = (),
) -> OmniProcess:
    """The process spec of a model in a pool.

    Args:
        model: checked, with uid and generation.
        pool: that it is assigned to.
        config: what its namespace has: `configmaps` and `secrets`, each name to key to bytes.
        served_names: names that were granted to it; all it asks for when None.
        taken: user ids of other models on the machine.

    Raises:
        ManifestError: it refers to what is not there, a template in it cannot be filled in, or its engine does not
            suit the pool.
    """
    check_engine(model, pool)
    granted = model.names if served_names is None else tuple(served_names)
    spec = _spec(model, pool, config or {}, granted, taken)
    publish = _hash(_published(spec))
    process = _hash({**_of_process(spec), "publishHash": publish})
    rendered = ProcessSpec.model_validate({**spec, "hash": process, "publishHash": publish}, by_name=False)
    return OmniProcess.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "OmniProcess",
            "metadata": _metadata(model),
            "spec": rendered,
        }
    )


def _metadata(model: OmniModel) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": model.metadata.name,
        "namespace": model.metadata.namespace,
        "labels": {"omnimodel.io/model": model.metadata.name, "omnimodel.io/pool": model.spec.pool},
        "generation": model.metadata.generation,
    }
    if model.metadata.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": "OmniModel",
                "name": model.metadata.name,
                "uid": model.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]
    return metadata


def _spec(
    model: OmniModel, pool: OmniPool, config: Config, names: Sequence[str], taken: Collection[int]
) -> dict[str, Any]:
    spec, runtime, metadata = model.spec, model.spec.runtime, model.metadata
    env, secret_env = _environment(model, config)
    args, command = _command_line(model)
    return {
        **told(model, names),
        "generation": metadata.generation,
        "pool": pool.metadata.name,
        "engine": runtime.engine,
        "handler": _handler(model),
        "environment": {
            "requirements": sorted(set(runtime.environment.requirements)),
            "paths": list(runtime.environment.path),
        },
        "source": resolve_source(model, pool),
        "args": args,
        "command": command,
        "env": env,
        "secretEnv": secret_env,
        "workingDir": runtime.working_dir or "",
        "healthPath": runtime.health_path or "",
        "dtype": runtime.dtype,
        "quantization": runtime.quantization,
        "threads": _threads(model),
        "options": dict(runtime.options),
        "mounts": resolve_mounts(model, pool, config),
        "network": runtime.allow_network,
        "identity": {
            "uid": user_id(metadata.namespace, metadata.name, metadata.uid, taken),
            "hostname": hostname(metadata.namespace, metadata.name),
        },
        "residency": _residency(model),
        "deviceMemoryBytes": _bytes(spec.resources.device_memory),
        "devices": spec.resources.devices,
        "probe": _probe(model),
        "suspend": spec.suspend,
        "isolationLevel": pool.spec.isolation.level,
    }


def told(model: OmniModel, names: Sequence[str]) -> dict[str, Any]:
    """The part of a process spec that gateways are told: it needs no pool, and nothing that the model refers to.

    Args:
        model: checked.
        names: that it was granted, or asks for.
    """
    spec, metadata = model.spec, model.metadata
    return {
        "model": {"namespace": metadata.namespace, "name": metadata.name, "uid": metadata.uid},
        "task": spec.runtime.task or DEFAULT_TASK,
        "limits": _limits(model),
        "servedNames": _served_names(model, names),
        "capabilities": list(spec.capabilities),
        "metadata": dict(spec.metadata),
    }


def _handler(model: OmniModel) -> dict[str, Any] | None:
    handler = model.spec.runtime.handler
    if handler is None:
        return None
    return {"entry": handler.entry, "files": dict(sorted(handler.files.items()))}


def _values(model: OmniModel) -> dict[str, Any]:
    """What `{{ }}` in args, command and env can name."""
    return {
        "name": model.metadata.name,
        "namespace": model.metadata.namespace,
        "options": dict(model.spec.runtime.options),
        "mounts": {mount.name: mount.path for mount in model.spec.mounts},
        "threads": _threads(model),
    }


def _command_line(model: OmniModel) -> tuple[list[str], list[str]]:
    """Arguments and command with their values, which say no more of what is the system's than a manifest may."""
    runtime = model.spec.runtime
    args = _expand_all(model, runtime.args, "spec.runtime.args")
    command = _expand_all(model, runtime.command, "spec.runtime.command")
    if (args, command) == (runtime.args, runtime.command):  # looked at already
        return args, command
    for wrong in violations(runtime.model_copy(update={"args": args, "command": command})):
        raise ManifestError(model.subject, f"with its values {wrong.problem}", wrong.cure, field=dotted(wrong.path))
    return args, command


def _expand_all(model: OmniModel, texts: Sequence[str], field: str) -> list[str]:
    values = _values(model)
    return [expand(text, values, subject=model.subject, field=f"{field}[{index}]") for index, text in enumerate(texts)]


def _environment(model: OmniModel, config: Config) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    env: dict[str, str] = {}
    secret: dict[str, dict[str, str]] = {}
    values = _values(model)
    for name, value in sorted(model.spec.runtime.env.items()):
        field = f"spec.runtime.env.{name}"
        if isinstance(value, str):
            env[name] = expand(value, values, subject=model.subject, field=field)
        elif value.config_map_key_ref is not None:
            env[name] = config_value(model, config, value.config_map_key_ref, f"{field}.configMapKeyRef")
        elif value.secret_key_ref is not None:
            secret[name] = secret_reference(model, config, value.secret_key_ref, f"{field}.secretKeyRef")
    return env, secret


def _threads(model: OmniModel) -> int:
    threads, cpu = model.spec.runtime.threads, model.spec.resources.cpu
    if isinstance(threads, int):
        return threads
    return math.ceil(parse_cpu(cpu)) if cpu is not None else 0


def _bytes(value: int | str, default: int = 0) -> int:
    return default if value == AUTO else parse_bytes(value)


def _seconds(value: str | None, default: float) -> float:
    return default if value is None else parse_duration(value)


def _limits(model: OmniModel) -> dict[str, Any]:
    limits, resources, runtime = model.spec.limits, model.spec.resources, model.spec.runtime
    batching = runtime.engine in FOREIGN or runtime.task == "text-generation"
    return {
        "concurrency": limits.concurrency or (CONCURRENCY_GENERATION if batching else CONCURRENCY_OTHER),
        "queue": QUEUE if limits.queue is None else limits.queue,
        "deadlineSeconds": _seconds(limits.deadline, DEADLINE_SECONDS),
        "loadDeadlineSeconds": _seconds(limits.load_deadline, LOAD_DEADLINE_SECONDS),
        "drainSeconds": _seconds(limits.drain_timeout, DRAIN_SECONDS),
        "requestBytes": _bytes(limits.request_bytes or AUTO, REQUEST_BYTES),
        "responseBytes": _bytes(limits.response_bytes or AUTO, RESPONSE_BYTES),
        "inputTokens": limits.input_tokens or 0,
        "outputTokens": limits.output_tokens or 0,
        "processes": limits.processes or PROCESSES,
        "tmpBytes": _bytes(limits.tmp or AUTO, TMP_BYTES),
        "shmBytes": _bytes(limits.shm or AUTO, SHM_BYTES),
        "memoryBytes": _bytes(resources.host_memory),
        "cpuMillis": math.ceil(parse_cpu(resources.cpu) * 1000) if resources.cpu is not None else 0,
    }


def _residency(model: OmniModel) -> dict[str, Any]:
    residency = model.spec.residency
    return {
        "priority": priority_number(residency.priority),
        "minResidentSeconds": _seconds(residency.min_resident, 0.0),
        "idleAfterSeconds": None if residency.idle_after is None else parse_lifetime(residency.idle_after),
        "idleTier": residency.idle_tier or "parked",
        "keepResident": residency.keep_resident,
        "preload": residency.preload,
    }


def _probe(model: OmniModel) -> dict[str, Any] | None:
    probe = model.spec.probe
    if probe is None:
        return None
    found = probe.to_dict()
    found.pop("timeout", None)
    return {
        "method": "POST",
        "afterWake": False,
        **found,
        "timeoutSeconds": _seconds(probe.timeout, PROBE_SECONDS),
    }


def _served_names(model: OmniModel, granted: Sequence[str]) -> list[dict[str, Any]]:
    known = {item.name: item for item in model.spec.served_names if isinstance(item, ServedName)}
    found = []
    for name in granted:
        item = known.get(name)
        found.append(
            {"name": name, "defaults": dict(item.defaults) if item else {}, "listed": item.listed if item else True}
        )
    return found


def _of_process(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What another process is needed for when it changes."""
    concerns = {key: value for key, value in spec.items() if key not in _NOT_THE_PROCESS}
    concerns["source"] = _place(spec["source"])
    limits = {key: value for key, value in spec["limits"].items() if key not in _LIMITS_OF_AGENT}
    return {**concerns, "limits": limits}


def _published(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What another image is needed for when it changes."""
    own = spec["engine"] == "python"
    serving = () if own else _SERVING_OPTIONS
    code = bool(spec["environment"]["paths"])
    return {
        "source": _place(spec["source"]),
        "engine": spec["engine"],
        "task": spec["task"],
        "handler": spec["handler"],
        "dtype": spec["dtype"],
        "quantization": spec["quantization"],
        "options": {key: value for key, value in spec["options"].items() if key not in serving},
        "environment": spec["environment"],
        # A handler whose code comes from a mount is another one when the mount is.
        "mounts": spec["mounts"] if own and code else [],
    }


def _place(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A source in a volume is the same as one at its path."""
    return {"path": source["volume"]["path"]} if "volume" in source else source


def _hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
