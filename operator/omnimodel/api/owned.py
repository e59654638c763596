"""What a manifest must not say because the system says it: arguments and variables it owns, and clear-text secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from omnimodel.api.meta import Rule, Violation
from omnimodel.api.runtime import Runtime

PATH = ("spec", "runtime")
_NO_PORT = "remove it: the system assigns ports and addresses"
_NAMES = "write it in spec.servedNames"
_KEY = "remove it: clients never reach the program itself; a key that it needs goes to spec.runtime.env as secretKeyRef"
_MEMORY = "write spec.resources.deviceMemory, such as 24Gi"
_DEVICES = "write spec.resources.devices, a count; which ones is the system's choice"
_CONTEXT = "write spec.runtime.options.contextTokens"
_BATCH = "write spec.runtime.options.maxBatch"
_FILE = "write its lines as spec.runtime.args: a file could say what the system says itself"
_SLEEP = "remove it: spec.residency says when the model leaves the device"

# Long options of foreign engines, spelt with hyphens, and what to do instead.
ARGUMENTS: dict[str, str] = {
    "port": _NO_PORT,
    "host": _NO_PORT,
    "uds": _NO_PORT,
    "served-model-name": _NAMES,
    "alias": _NAMES,
    "model-alias": _NAMES,
    "api-key": _KEY,
    "api-key-file": _KEY,
    "gpu-memory-utilization": _MEMORY,
    "mem-fraction-static": _MEMORY,
    "kv-cache-memory-bytes": "write spec.runtime.options.cacheMemory, such as 8Gi",
    "max-total-tokens": "write spec.runtime.options.cacheTokens",
    "max-num-seqs": _BATCH,
    "max-running-requests": _BATCH,
    "device": _DEVICES,
    "device-id": _DEVICES,
    "main-gpu": _DEVICES,
    "base-gpu-id": _DEVICES,
    "tensor-split": _DEVICES,
    "tensor-parallel-size": _DEVICES,
    "tp-size": _DEVICES,
    "tp": _DEVICES,
    "pipeline-parallel-size": _DEVICES,
    "pp-size": _DEVICES,
    "pp": _DEVICES,
    "data-parallel-size": _DEVICES,
    "dp-size": _DEVICES,
    "dp": _DEVICES,
    "enable-sleep-mode": _SLEEP,
    "enable-memory-saver": _SLEEP,
    "enable-weights-cpu-backup": _SLEEP,
    "model": "write it in spec.source",
    "model-path": "write it in spec.source",
    "hf-repo": "write it in spec.source.huggingFace",
    "hf-file": "write it in spec.source.huggingFace",
    "ctx-size": _CONTEXT,
    "n-ctx": _CONTEXT,
    "max-model-len": _CONTEXT,
    "context-length": _CONTEXT,
    "threads": "write spec.runtime.threads",
    "n-threads": "write spec.runtime.threads",
    "config-file": _FILE,  # and so is what begins like it: `config` of vllm and sglang
}
SHORT: dict[str, str] = {
    "-m": "model",
    "-a": "alias",
    "-c": "ctx-size",
    "-t": "threads",
    "-hf": "hf-repo",
    "-hfr": "hf-repo",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-p": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-d": "data-parallel-size",
    "-mg": "main-gpu",
    "-dev": "device",
}
# What engine command may not say either; its port it has to say, as {port}.
IN_COMMAND = (
    "api-key",
    "gpu-memory-utilization",
    "mem-fraction-static",
    "device",
    "device-id",
    "main-gpu",
    "base-gpu-id",
)
# The parser of an engine (argparse) takes any beginning of an option for it, and refuses one that could be several.
# Whether that of a program does nobody knows: there it takes so many letters, as in --gpu-mem.
ABBREVIATION = 4
WHOLE = ("mode",)  # options of their own that are the beginning of an owned one

ENVIRONMENT: tuple[tuple[str, str, str], ...] = (
    (
        (
            r"(CUDA|NVIDIA|HIP|ROCR|GGML_VK|ASCEND_RT|ONEAPI)_(VISIBLE_DEVICES|DEVICE_SELECTOR|DEVICE_ORDER)"
            r"|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|CUDA_MPS_.*|NVIDIA_DRIVER_CAPABILITIES"
        ),
        "pins the model to devices by index and breaks isolation",
        "remove it; spec.resources.devices says how many",
    ),
    (
        r".*_UNIFIED_MEMORY|CUDA_MANAGED_FORCE_DEVICE_ALLOC|XLA_PYTHON_CLIENT_(MEM_FRACTION|PREALLOCATE)",
        "takes memory past the budget and breaks isolation",
        "remove it; spec.resources.deviceMemory says how much",
    ),
    (
        r"LD_.*|PYTHON(HOME|STARTUP|INSPECT|USERBASE|BREAKPOINT)|BASH_ENV|GCONV_PATH|MALLOC_.*",
        "changes what the process loads and breaks isolation",
        "remove it; spec.runtime.environment.requirements brings libraries",
    ),
    (r"PYTHONPATH", "belongs to the system", "write spec.runtime.environment.path"),
    (
        r"(OMP|MKL|OPENBLAS|NUMEXPR|TORCH|VECLIB_MAXIMUM)_NUM_THREADS",
        "belongs to the system",
        "write spec.runtime.threads",
    ),
    (r"LLAMA_ARG_.*", "is an argument of the engine", "write the option that it stands for in spec.runtime.args"),
    (r"OMP_WAIT_POLICY|OMNI_.*|LISTEN_(FDS|PID|FDNAMES)", "belongs to the system", "remove it"),
    (r"HOME|TMPDIR|TMP|TEMP|PATH|USER|LOGNAME|HOSTNAME|PWD", "belongs to the sandbox", "remove it"),
)
SECRET_NAME = re.compile(
    r"((^|[-_])(TOKEN|SECRET|API_?KEY|ACCESS_?KEY(_ID)?|SECRET_?KEY|MASTER_?KEY|PRIVATE_?KEY|CREDENTIALS?)|"
    r"PASSWORD|PASSWD|PASSPHRASE|_PWD|"
    r"(OPENAI|ANTHROPIC|AZURE|COHERE|GEMINI|GROQ|MISTRAL|TOGETHER|HF|WANDB|NGC|ENCRYPTION|SIGNING|AUTH)_KEY)$",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|"
    r"glpat-[\w-]{16,}|nvapi-[\w-]{16,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{30,}|xox[abprs]-[\w-]{10,}|"
    r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@{$]+@)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)  # a variable, as shells and `env` take it
HARMLESS = {"", "none", "dummy", "empty", "null", "unused", "no-key", "not-needed", "a"}
_PORT = re.compile(r"(^|_)PORT$", re.IGNORECASE)
_REFERENCE = "write {name}: {{secretKeyRef: {{name: NAME, key: KEY}}}}"


def argument_rules() -> tuple[Rule, ...]:
    """What the API server can say of arguments: long options, in every spelling, a rule for each cure."""
    groups: dict[str, list[str]] = {}
    for name, cure in ARGUMENTS.items():
        groups.setdefault(cure, []).append(name)
    rules = []
    for cure, names in groups.items():
        own = [name for name in names if name in IN_COMMAND]
        rules.append(_argument_rule("self.engine == 'command' || ", "args", names, cure))
        if own:
            rules.append(_argument_rule("self.engine != 'command' || ", "args", own, cure))
            # `--device cpu` is for a program to know.
            rules.append(_argument_rule("", "command", [name for name in own if name != "device"], cure))
    return tuple(rules)


def _argument_rule(engines: str, field: str, names: Sequence[str], cure: str) -> Rule:
    option = f"(^|[ ])--?({'|'.join(names)})([= ]|$)"
    test = f"!line.lowerAscii().replace('_', '-').matches('{option}')"
    listed = ", ".join(f"--{name}" for name in names)
    problem = f"{listed} belong{'s' if len(names) == 1 else ''} to the system"
    return Rule(f"{engines}!has(self.{field}) || self.{field}.all(line, {test})", None, problem, cure, field)


def violations(runtime: Runtime) -> Iterator[Violation]:
    """What a runtime says that is not its to say."""
    yield from _arguments(runtime)
    yield from _command(runtime)
    yield from _environment(runtime)


def _arguments(runtime: Runtime) -> Iterator[Violation]:
    for index, line in enumerate(runtime.args):
        path = (*PATH, "args", index)
        tokens = _tokens(line)
        for position, token in enumerate(tokens):
            owned = _owned(token, least=ABBREVIATION if runtime.engine == "command" else 1)
            if owned and (runtime.engine != "command" or owned in IN_COMMAND):
                problem = f"--{owned} belongs to the system"
                yield Violation(path, problem, ARGUMENTS[owned], token.split("=")[0])
                break
            if runtime.engine == "command":
                variable = _variable(token)
                if variable:
                    yield Violation(path, *variable, token)
                    break
                following = tokens[position + 1] if position + 1 < len(tokens) else _at(runtime.args, index + 1)
                if _fixed_port(token, following):
                    yield Violation(path, "is a fixed port", "write {port}: the system assigns ports", line)
                    break
            if _is_secret(token, _following(runtime.args, index, tokens, position)):
                yield Violation(
                    path, "has a secret in clear text, and argv is readable by others", in_env(), secret=True
                )
                break


def _command(runtime: Runtime) -> Iterator[Violation]:
    for index, line in enumerate(runtime.command):
        path = (*PATH, "command", index)
        tokens = _tokens(line)
        for position, token in enumerate(tokens):
            owned = _owned(token, short=False)
            following = _following(runtime.command, index, tokens, position)
            if owned in IN_COMMAND and not (owned == "device" and following in ("cpu", "cuda", "auto")):
                yield Violation(path, f"--{owned} belongs to the system", ARGUMENTS[owned], token.split("=")[0])
                break
            variable = _variable(token)
            if variable:
                yield Violation(path, *variable, token)
                break
            if _fixed_port(token, following):
                yield Violation(path, "is a fixed port", "write {port}: the system assigns ports", token)
                break
            if _is_secret(token, following):
                yield Violation(
                    path, "has a secret in clear text, and argv is readable by others", in_env(), secret=True
                )
                break
    if runtime.engine == "command" and runtime.command:
        texts = [*runtime.command, *runtime.args, *(value for value in runtime.env.values() if isinstance(value, str))]
        if not any(re.search(r"\{\s*(port|socket)\s*\}", text) for text in texts):
            yield Violation(
                (*PATH, "command"),
                "does not say where the program takes its address",
                "write {port} or {socket} there, such as --port {port}",
            )


def _environment(runtime: Runtime) -> Iterator[Violation]:
    for name, value in runtime.env.items():
        path = (*PATH, "env", name)
        text = value if isinstance(value, str) else None
        for pattern, problem, cure in ENVIRONMENT:
            if re.fullmatch(pattern, name, re.IGNORECASE):
                yield Violation(path, f"{name} {problem}", cure)
                break
        else:
            if text is None:
                continue
            if text.startswith("os.environ/"):
                yield Violation(path, "is a reference of another system", _REFERENCE.format(name=name), text)
            elif (SECRET_NAME.search(name) and text.lower() not in HARMLESS) or SECRET_VALUE.search(text):
                yield Violation(path, "is a secret in clear text", _REFERENCE.format(name=name), secret=True)
            elif _PORT.search(name) and text.strip().isdecimal():
                yield Violation(path, "is a fixed port", 'write "{port}": the system assigns ports', text)


def in_env() -> str:
    """What to do with a secret."""
    return "pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}"


def _tokens(line: str) -> list[str]:
    try:
        tokens = shlex.split(line)
    except ValueError:
        tokens = line.split()
    # A shell's -c has a whole command line in one word, with ; between commands.
    return [part for token in tokens for part in (_parts(token) if re.search("[-=]", token) else [token])]


def _parts(token: str) -> list[str]:
    return token.replace(";", " ").split() if re.search(r"[\s;]", token) else [token]


def _at(lines: list[str], index: int) -> str:
    tokens = _tokens(lines[index]) if index < len(lines) else []
    return tokens[0] if tokens else ""


def _following(lines: list[str], index: int, tokens: list[str], position: int) -> str:
    if "=" in tokens[position]:
        return tokens[position].split("=", 1)[1]
    return tokens[position + 1] if position + 1 < len(tokens) else _at(lines, index + 1)


def _variable(token: str) -> tuple[str, str] | None:
    """What is wrong with a word that sets a variable for a program, and what to write; `path=` is not PATH there."""
    found = ASSIGNMENT.fullmatch(token)
    if found is None:
        return None
    wrong = (rule for rule in ENVIRONMENT if re.fullmatch(rule[0], found[1]))
    return next(((f"{found[1]} {problem}", cure) for _, problem, cure in wrong), None)


def _owned(token: str, *, short: bool = True, least: int = ABBREVIATION) -> str:
    """The owned option that a token is, in any spelling, or begins with so many letters; empty for none."""
    if not token.startswith("-") or re.fullmatch(r"-[0-9.]+", token):
        return ""
    word = token.split("=", 1)[0]
    if short and word in SHORT:
        return SHORT[word]
    name = word.lstrip("-").replace("_", "-").lower()
    if name in ARGUMENTS:
        return name
    if token.startswith("--") and len(name) >= least and name not in WHOLE:
        return next((known for known in ARGUMENTS if known.startswith(name)), "")
    return ""


def _fixed_port(token: str, following: str) -> bool:
    variable = ASSIGNMENT.fullmatch(token)
    if variable:
        return bool(_PORT.search(variable[1])) and variable[2].isdecimal()
    name, separator, value = token.lstrip("-").partition("=")
    if not token.startswith("-"):
        return False
    plain = name.replace("_", "-").lower()
    if re.fullmatch(r"-p[0-9]{2,5}", token):
        return True
    if plain == "port" or plain.endswith("-port") or token == "-p":  # noqa: S105
        return bool(re.fullmatch(r"[0-9]{2,5}", value if separator else following))
    return plain in ("bind", "listen", "address", "addr", "b") and bool(
        re.fullmatch(r"[^\s]*:[0-9]{2,5}", value if separator else following)
    )


def _is_secret(token: str, following: str) -> bool:
    if SECRET_VALUE.search(token):
        return True
    name = token.lstrip("-").split("=", 1)[0]
    named = (token.startswith("-") or ASSIGNMENT.fullmatch(token)) and SECRET_NAME.search(name.replace("-", "_"))
    return bool(named) and following.lower() not in HARMLESS and not following.startswith(("-", "{", "$", "/"))
