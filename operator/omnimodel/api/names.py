"""What to write instead of a field that does not exist: the nearest name, or the one another system's name means."""

from __future__ import annotations

import difflib
import re

from omnimodel.api.meta import Part
from omnimodel.api.tree import Path, dotted, fields, part_at, paths

# Names of other systems and of everyday language, without case, _ and -, and where their meaning is said here.
SYNONYMS: dict[str, str] = {
    "healthchecktimeout": "spec.limits.loadDeadline",
    "modelloadingtimeoutmillis": "spec.limits.loadDeadline",
    "loadtimeout": "spec.limits.loadDeadline",
    "startuptimeout": "spec.limits.loadDeadline",
    "swapbudget": "spec.limits.loadDeadline",
    "requesttimeout": "spec.limits.deadline",
    "timeout": "spec.limits.deadline",
    "holddeadline": "spec.limits.deadline",
    "maxwait": "spec.limits.deadline",
    "cmdstop": "spec.limits.drainTimeout",
    "terminationgraceperiodseconds": "spec.limits.drainTimeout",
    "graceperiod": "spec.limits.drainTimeout",
    "concurrencylimit": "spec.limits.concurrency",
    "maxconcurrency": "spec.limits.concurrency",
    "containerconcurrency": "spec.limits.concurrency",
    "targetrequests": "spec.limits.concurrency",
    "simultaneous": "spec.limits.concurrency",
    "parallel": "spec.limits.concurrency",
    "queuelength": "spec.limits.queue",
    "maxqueue": "spec.limits.queue",
    "ttl": "spec.residency.idleAfter",
    "unloadafter": "spec.residency.idleAfter",
    "keepalive": "spec.residency.idleAfter",
    "idletimeout": "spec.residency.idleAfter",
    "idleunload": "spec.residency.idleAfter",
    "reclaimafter": "spec.residency.idleAfter",
    "pin": "spec.residency.keepResident",
    "pinned": "spec.residency.keepResident",
    "persistent": "spec.residency.keepResident",
    "minresidency": "spec.residency.minResident",
    "priorityclass": "spec.residency.priority",
    "priorityclassname": "spec.residency.priority",
    "evictcost": "spec.residency.priority",
    "hooks": "spec.residency.preload",
    "server": "spec.runtime.engine",
    "backend": "spec.runtime.engine",
    "cmd": "spec.runtime.command",
    "entrypoint": "spec.runtime.command",
    "checkendpoint": "spec.runtime.healthPath",
    "healthcheck": "spec.runtime.healthPath",
    "environmentvariables": "spec.runtime.env",
    "environ": "spec.runtime.env",
    "arguments": "spec.runtime.args",
    "extraargs": "spec.runtime.args",
    "workdir": "spec.runtime.workingDir",
    "cwd": "spec.runtime.workingDir",
    "pip": "spec.runtime.environment.requirements",
    "packages": "spec.runtime.environment.requirements",
    "dependencies": "spec.runtime.environment.requirements",
    "image": "spec.runtime.environment.requirements",
    "precision": "spec.runtime.dtype",
    "torchdtype": "spec.runtime.dtype",
    "quantisation": "spec.runtime.quantization",
    "quant": "spec.runtime.quantization",
    "numthreads": "spec.runtime.threads",
    "nthreads": "spec.runtime.threads",
    "network": "spec.runtime.allowNetwork",
    "numctx": "spec.runtime.options.contextTokens",
    "nctx": "spec.runtime.options.contextTokens",
    "ctxsize": "spec.runtime.options.contextTokens",
    "contextlength": "spec.runtime.options.contextTokens",
    "contextsize": "spec.runtime.options.contextTokens",
    "maxmodellen": "spec.runtime.options.contextTokens",
    "numpredict": "spec.runtime.options.maxNewTokens",
    "parameters": "spec.servedNames[].defaults",
    "filters": "spec.servedNames[].defaults",
    "setparamsbyid": "spec.servedNames[].defaults",
    "setparams": "spec.servedNames[].defaults",
    "aliases": "spec.servedNames",
    "alias": "spec.servedNames",
    "modelname": "spec.servedNames",
    "servedmodelname": "spec.servedNames",
    "usemodelname": "spec.servedNames",
    "unlisted": "spec.servedNames[].listed",
    "features": "spec.capabilities",
    "paused": "spec.suspend",
    "disabled": "spec.suspend",
    "enabled": "spec.suspend",
    "minreplicas": "spec.replicas.min",
    "maxreplicas": "spec.replicas.max",
    "scaletarget": "spec.replicas.max",
    "from": "spec.source",
    "storageuri": "spec.source",
    "storage": "spec.source",
    "modeluri": "spec.source",
    "modelpath": "spec.source.path",
    "hf": "spec.source.huggingFace",
    "pvc": "spec.source.volume",
    "persistentvolumeclaim": "spec.source.volume",
    "memory": "spec.resources.deviceMemory",
    "gpumemory": "spec.resources.deviceMemory",
    "gpumem": "spec.resources.deviceMemory",
    "vram": "spec.resources.deviceMemory",
    "memorybudget": "spec.resources.deviceMemory",
    "ram": "spec.resources.hostMemory",
    "gpu": "spec.resources.devices",
    "gpus": "spec.resources.devices",
    "gpucount": "spec.resources.devices",
    "nvidia.com/gpu": "spec.resources.devices",
    "parallelism": "spec.resources.devices",
    "tensorparallelsize": "spec.resources.devices",
    "resourceprofile": "spec.pool",
    "runtimeclass": "spec.pool",
    "volumes": "spec.mounts",
    "volumemounts": "spec.mounts",
    "files": "spec.mounts",
    "readiness": "spec.probe",
    "readinessprobe": "spec.probe",
    "livenessprobe": "spec.probe",
    "expected": "spec.probe.expect",
    "body": "spec.probe.json",
    "cpus": "spec.resources.cpu",
    "podaffinity": "spec.affinity.together",
    "colocate": "spec.affinity.together",
    "antiaffinity": "spec.affinity.apart",
    "podantiaffinity": "spec.affinity.apart",
    "exclusiongroup": "spec.affinity.apart",
}
# Names that mean something that nobody has to say here.
REMARKS: dict[str, str] = {
    "port": "remove it: the system assigns ports",
    "host": "remove it: the system assigns addresses",
    "proxy": "remove it: the system assigns ports and addresses",
    "startport": "remove it: the system assigns ports",
    "macros": "use anchors of YAML, such as &base and <<: *base",
    "maxrunningmodels": "remove it: bytes decide, see spec.device.memory of the OmniPool",
    "memoryfraction": "a share is said once, in spec.device.memory of the OmniPool",
    "gpumemoryutilization": "write spec.resources.deviceMemory; a share is said in spec.device.memory of the OmniPool",
    "groups": "remove it: every model swaps; pin one with spec.residency.keepResident",
    "swap": "remove it: every model swaps; pin one with spec.residency.keepResident",
    "exclusive": "remove it: bytes decide who is resident together",
    "profiles": "remove it: bytes decide who is resident together; pin with spec.residency.keepResident",
    "matrix": "remove it: bytes decide who is resident together; pin with spec.residency.keepResident",
    "apikey": "remove it, or write spec.runtime.env: {NAME: {secretKeyRef: {name: NAME, key: KEY}}}",
    "nodeselector": "say it in spec.pod.nodeSelector of the OmniPool, and name that in spec.pool",
    "tolerations": "say it in spec.pod.tolerations of the OmniPool, and name that in spec.pool",
    "nodeaffinity": "say it in spec.pod.nodeSelector of the OmniPool, and name that in spec.pool",
    "stripparams": "remove it: taking fields out of a request is not in this version",
    "checks": "remove it: there are no checks beside spec.probe yet",
    "preprocess": "remove it: the handler of engine python does it",
    "postprocess": "remove it: the handler of engine python does it",
    "gpuindex": "remove it: which device is the system's choice; spec.resources.devices says how many",
    "devicemap": "remove it: which device is the system's choice; spec.resources.devices says how many",
}

# Names that mean something only below another field.
LOCAL: dict[tuple[str, str], str] = {
    ("mounts", "mountpath"): "did you mean path?",
    ("mounts", "volume"): "did you mean source.volume?",
    ("mounts", "configmap"): "did you mean source.configMap?",
    ("mounts", "secret"): "did you mean source.secret?",
    ("mounts", "emptydir"): "did you mean source.empty?",
    ("mounts", "empty"): "did you mean source.empty?",
    ("mounts", "files"): "did you mean source.files?",
    ("source", "emptydir"): "did you mean empty?",
    ("env", "value"): "write the text itself: NAME: TEXT",
    ("env", "valuefrom"): "write secretKeyRef or configMapKeyRef without valueFrom",
    (
        "source",
        "oci",
    ): "oci:// is not fetched; mount a volume of the pool and write volume: {name: NAME, subPath: PATH}",
    ("source", "s3"): "s3:// is not fetched; mount the bucket as a volume of the pool and write volume: {name: NAME}",
    ("source", "gs"): "gs:// is not fetched; mount the bucket as a volume of the pool and write volume: {name: NAME}",
    ("source", "git"): "repositories are not fetched; write package, huggingFace, url or volume",
}


def normal(name: str) -> str:
    """A name without case, hyphens and underscores, in which spellings meet."""
    return re.sub(r"[-_ ]", "", name).lower()


def instead_of(kind: type[Part], path: Path) -> str:
    """What to write instead of the unknown field at a path of a kind.

    Args:
        kind: class of the resource.
        path: of the unknown field, its name last.
    """
    name = str(path[-1])
    wanted = normal(name)
    siblings = [field for part in part_at(kind, path[:-1]) for field in fields(part)]
    for sibling in siblings:
        if normal(sibling) == wanted:
            return f"did you mean {sibling}?"
    parent = next((str(element) for element in reversed(path[:-1]) if not isinstance(element, int)), "")
    above = str(path[-3]) if len(path) > 2 else ""
    for place in (parent, above):
        if (place, wanted) in LOCAL:
            return LOCAL[place, wanted]
    ours = kind.__name__ == "OmniModel" and path[0] == "spec"
    if ours and wanted in SYNONYMS and SYNONYMS[wanted] != dotted(path):
        return f"did you mean {SYNONYMS[wanted]}?"
    if ours and wanted in REMARKS:
        return REMARKS[wanted]
    elsewhere = [known for known in paths(kind) if normal(known[-1]) == wanted]
    if elsewhere:
        return f"did you mean {'.'.join(elsewhere[0])}?"
    near = _nearest(wanted, siblings)
    if near:
        return f"did you mean {near}?"
    far = {normal(known[-1]): ".".join(known) for known in reversed(paths(kind))}
    if ours:
        far = {**SYNONYMS, **far}
    match = difflib.get_close_matches(wanted, far, 1, 0.8)
    if match:
        return f"did you mean {far[match[0]]}?"
    return f"possible are {', '.join(siblings)}" if siblings else "remove it"


def _nearest(wanted: str, names: list[str]) -> str:
    by_normal = {normal(name): name for name in names}
    match = difflib.get_close_matches(wanted, by_normal, 1, 0.7)
    return by_normal[match[0]] if match else ""
