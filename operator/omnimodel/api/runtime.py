"""How a model is run: engine, task, handler, environment, arguments."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from omnimodel.api.fields import AbsolutePath, Checked, Flag, cel, choice, plain, refusal, text, whole
from omnimodel.api.meta import Part, Rule
from omnimodel.api.references import EnvValue

ENGINES = ("transformers", "python", "llamacpp", "vllm", "sglang", "command")
TASKS = (
    "text-generation",
    "embeddings",
    "text-classification",
    "automatic-speech-recognition",
    "text-to-speech",
    "infer",
)
FOREIGN = ("llamacpp", "vllm", "sglang", "command")
ON_GPU_ONLY = ("vllm", "sglang")
DEFAULT_TASK = "text-generation"  # of foreign engines
FILE_LIMIT = 262_144
_ENTRY = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
Engine = Literal["transformers", "python", "llamacpp", "vllm", "sglang", "command"]
Task = Literal[
    "text-generation", "embeddings", "text-classification", "automatic-speech-recognition", "text-to-speech", "infer"
]


def _entry_cure(value: str) -> str:
    match = re.fullmatch(r"([A-Za-z_][\w/.]*?)(?:\.py)?[.:]([A-Za-z_]\w*)", value, re.ASCII)
    if match:
        return f"write {match.group(1).replace('/', '.')}:{match.group(2)}"
    return "write MODULE:CLASS, such as handler:Handler"


_ENTRY_TEXT = text(_ENTRY, "is no MODULE:CLASS", _entry_cure, 253)


def _entry(value: Any) -> str:
    entry: str = _ENTRY_TEXT.check(value)
    if entry.partition(":")[0].endswith(".py"):
        raise refusal("names a file, not a module", f"write {entry.replace('.py:', ':')}")
    return entry


_NO_FILE = cel("!self.contains('.py:')", "names a file, not a module", "write MODULE:CLASS, such as handler:Handler")
Entry = Annotated[
    str,
    Checked(
        _entry,
        {
            **_ENTRY_TEXT.schema,
            "x-kubernetes-validations": [*_ENTRY_TEXT.schema["x-kubernetes-validations"], _NO_FILE],
        },
    ),
]
FileName = Annotated[
    str,
    text(
        r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", "is no plain file name", "write one such as handler.py, without folders", 128
    ),
]
EnvName = Annotated[
    str,
    text(
        r"^[A-Za-z_][A-Za-z0-9_]*$",
        "is no name of an environment variable",
        "write letters, digits and _, such as LANG_CODE",
        128,
    ),
]
FileText = Annotated[str, plain(FILE_LIMIT)]


class Handler(Part):
    """The class of engine python: its code inline, from a mount (environment.path) or from a package."""

    entry: Entry = Field(
        description="MODULE:CLASS; the module is in `files`, a mount or a package.",
        examples=["handler:Handler"],
    )
    files: dict[FileName, FileText] = Field(
        default_factory=dict,
        max_length=32,
        description="Files of Python code, name to text.",
        examples=[{"handler.py": "from omnimodel.runtime.sdk import Model\n..."}],
    )
    rules = (
        Rule(
            "!has(self.files) || self.files.all(name, name.matches('^[A-Za-z0-9_][A-Za-z0-9._-]*$'))",
            None,
            "is no plain file name",
            "write one such as handler.py, without folders",
            "files",
        ),
        Rule(
            "!has(self.files) || self.files.size() == 0 || (self.entry.split(':')[0] + '.py') in self.files",
            lambda self: not self.files or f"{self.entry.partition(':')[0]}.py" in self.files,
            "names a module that is not in files",
            "name the file after the module, such as handler.py for handler:Handler",
            "entry",
        ),
    )

    @property
    def module(self) -> str:
        """The module of the class."""
        return self.entry.partition(":")[0]


def _requirement(value: Any) -> str:
    line: str = plain(512, empty=False).check(value)
    if line.startswith("-"):
        raise refusal("is an option of pip, not a requirement", "write a requirement such as numpy==2.3.1")
    if re.search(r"://[^/]*@", line):
        raise refusal("has a password in clear text in it", "write a requirement without USER:PASSWORD@")
    if line.startswith((".", "/")) or line.endswith(".txt"):
        raise refusal("is a path, and nothing points at a file beside the manifest", "write NAME==VERSION")
    if not re.match(r"[A-Za-z0-9]", line) or "\n" in line:
        raise refusal("is no requirement", "write one such as numpy==2.3.1")
    return line


Requirement = Annotated[
    str,
    Checked(
        _requirement,
        {
            "type": "string",
            "minLength": 1,
            "maxLength": 512,
            "x-kubernetes-validations": [
                cel("self.matches('^[A-Za-z0-9]')", "is no requirement", "write one such as numpy==2.3.1")
            ],
        },
    ),
]


class Environment(Part):
    """The Python environment; equal ones are shared by models."""

    requirements: list[Requirement] = Field(
        default_factory=list,
        max_length=128,
        description="Requirements as pip writes them, pinned.",
        examples=[["numpy==2.3.1", "tiktoken==0.11.0"]],
    )
    path: list[AbsolutePath] = Field(
        default_factory=list,
        max_length=32,
        description="Folders of mounts that are added to sys.path.",
        examples=[["/code"]],
    )


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal("is no mapping", "write names and values, such as contextTokens: 4096")
    for key in value:
        if not isinstance(key, str):
            raise refusal(f"has the name {key!r}, which is not text", "write it in quotes")
    return value


def _threads(value: Any) -> Any:
    return value if value == "auto" and isinstance(value, str) else whole(1, 1024).check(value)


ThreadCount = Annotated[
    int | str,
    Checked(
        _threads,
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 16,
            "x-kubernetes-validations": [
                cel(
                    "type(self) == int ? int(self) >= 1 && int(self) <= 1024 : string(self) == 'auto'",
                    "is no number of threads",
                    "write a whole number from 1 to 1024, or auto",
                )
            ],
        },
    ),
]


class Runtime(Part):
    """How the model is run."""

    engine: Annotated[Engine, choice(*ENGINES)] = Field(
        description="Who computes: `transformers` and `python` (a handler of yours) swap by frames; `llamacpp` and "
        "`command` are servers of their own that are started and stopped; `vllm` and `sglang` are servers on a GPU "
        "that are put to sleep and woken.",
        examples=["transformers"],
    )
    task: Annotated[Task, choice(*TASKS)] | None = Field(
        default=None,
        description="What it does, and so which endpoints it answers; text-generation for foreign engines when left "
        "out.",
        examples=["text-generation"],
    )
    handler: Handler | None = Field(
        default=None,
        description="For engine python: the class.",
        examples=[{"entry": "handler:Handler", "files": {"handler.py": "class Handler: ..."}}],
    )
    environment: Environment = Field(
        default=Environment(),
        description="Python packages it needs.",
        examples=[{"requirements": ["numpy==2.3.1"]}],
    )
    args: list[Annotated[str, plain(4096)]] = Field(
        default_factory=list,
        max_length=128,
        description="Further arguments of a foreign engine. Port, host, name, key and device are the system's.",
        examples=[["--flash-attn", "on"]],
    )
    command: list[Annotated[str, plain(4096)]] = Field(
        default_factory=list,
        max_length=128,
        description="For engine command: argv, with {port} or {socket} where the program takes the address, and "
        "{devices} where it takes how many GPUs it sees.",
        examples=[["python", "-m", "myserver", "--port", "{port}"]],
    )
    health_path: AbsolutePath | None = Field(
        default=None,
        description="For engine command: answers 2xx when it can serve; a connection is enough when left out.",
        examples=["/health"],
    )
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict,
        max_length=128,
        description="Environment variables: a text, or a reference to a secret or config map.",
        examples=[{"LANGUAGE": "en", "TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    )
    working_dir: AbsolutePath | None = Field(
        default=None, description="Folder that the process starts in.", examples=["/work"]
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], choice("auto", "float32", "bfloat16", "float16")
    ] = Field(
        default="auto",
        description="For engines transformers and python: type of the weights on the device; auto asks the machine.",
        examples=["bfloat16"],
    )
    quantization: Annotated[Literal["none", "int8", "fp8", "int4"], choice("none", "int8", "fp8", "int4")] = Field(
        default="none",
        description="For engines transformers and python: 8 bits a weight of linear layers, or 4 and a scale for every "
        "32, in the store and on the device; they compute in dtype. On a processor `int8` is the fastest one.",
        examples=["int8"],
    )
    threads: ThreadCount = Field(
        default="auto",
        description="Threads of one forward pass; `auto` takes `resources.cpu`, or half of the machine's cores. Engine "
        "command gets them where it writes `{{ threads }}`.",
        examples=[2],
    )
    options: Annotated[
        dict[str, Any], Checked(_options, {"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    ] = Field(
        default_factory=dict,
        description="Options of the engine, by task (see the list of them below); a handler gets any.",
        examples=[{"contextTokens": 4096}],
    )
    allow_network: Flag = Field(default=False, description="Whether its sandbox has a network.", examples=[True])
    rules = (
        Rule(
            "self.engine != 'python' || has(self.handler)",
            lambda self: self.engine != "python" or self.handler is not None,
            "engine python needs a handler",
            "write handler: {entry: handler:Handler, files: {handler.py: CODE}}",
            "handler",
        ),
        Rule(
            "self.engine == 'python' || !has(self.handler)",
            lambda self: self.engine == "python" or self.handler is None,
            "handler is for engine python only",
            "remove it, or write engine: python",
            "handler",
        ),
        Rule(
            "self.engine != 'python' || !has(self.handler) || "
            "(has(self.handler.files) && self.handler.files.size() > 0) || (has(self.environment) && "
            "((has(self.environment.path) && self.environment.path.size() > 0) || "
            "(has(self.environment.requirements) && self.environment.requirements.size() > 0)))",
            lambda self: (
                self.engine != "python"
                or self.handler is None
                or bool(self.handler.files or self.environment.path or self.environment.requirements)
            ),
            "the module of the handler comes from nowhere",
            "add files with its code, or the folder of the mount that has it to environment.path",
            "handler",
        ),
        Rule(
            "self.engine != 'command' || (has(self.command) && self.command.size() > 0)",
            lambda self: self.engine != "command" or bool(self.command),
            "engine command needs a command",
            'write command: ["program", "--port", "{port}"]',
            "command",
        ),
        Rule(
            "self.engine == 'command' || !has(self.command)",
            lambda self: self.engine == "command" or "command" not in self.model_fields_set,
            "command is for engine command only",
            "remove it, or write engine: command; further arguments of an engine go to args",
            "command",
        ),
        Rule(
            "!(self.engine in ['transformers', 'python']) || !has(self.args)",
            lambda self: self.engine in FOREIGN or "args" not in self.model_fields_set,
            "args are for foreign engines only",
            "write what the engine shall know in options",
            "args",
        ),
        Rule(
            "self.engine == 'command' || !has(self.healthPath)",
            lambda self: self.engine == "command" or self.health_path is None,
            "healthPath is for engine command only",
            "remove it: the path of this engine is known",
            "healthPath",
        ),
        Rule(
            "!(self.engine in ['transformers', 'python']) || has(self.task)",
            lambda self: self.engine in FOREIGN or self.task is not None,
            "engines transformers and python need a task",
            f"add task: {', '.join(TASKS[:-1])} or {TASKS[-1]}",
            "task",
        ),
        Rule(
            "self.engine != 'llamacpp' || !has(self.task) || self.task in ['text-generation', 'embeddings']",
            lambda self: self.engine != "llamacpp" or self.task in (None, "text-generation", "embeddings"),
            "this engine does text-generation and embeddings only",
            "write one of the two, or engine: python",
            "task",
        ),
        Rule(
            "!(self.engine in ['vllm', 'sglang']) || !has(self.task) || self.task == 'text-generation'",
            lambda self: self.engine not in ON_GPU_ONLY or self.task in (None, "text-generation"),
            "this engine does text-generation only",
            "remove it, or write engine: transformers",
            "task",
        ),
        Rule(
            "self.engine != 'transformers' || !has(self.task) || !(self.task in ['text-to-speech', 'infer'])",
            lambda self: self.engine != "transformers" or self.task not in ("text-to-speech", "infer"),
            "engine transformers does not do this task",
            "write engine: python with a handler",
            "task",
        ),
        Rule(
            "self.engine != 'python' || !has(self.task) || self.task != 'text-generation'",
            lambda self: self.engine != "python" or self.task != "text-generation",
            "engine python does not generate text for chats",
            "write engine: transformers, or task: infer with a predict() that yields",
            "task",
        ),
        Rule(
            "self.engine in ['transformers', 'python'] || !has(self.dtype) || self.dtype == 'auto'",
            lambda self: self.engine not in FOREIGN or self.dtype == "auto",
            "dtype is for engines transformers and python only",
            "remove it: the file of weights, or an argument of the program, says it",
            "dtype",
        ),
        Rule(
            "self.engine in ['transformers', 'python'] || !has(self.quantization) || self.quantization == 'none'",
            lambda self: self.engine not in FOREIGN or self.quantization == "none",
            "quantization is for engines transformers and python only",
            "remove it: the file of weights, or an argument of the program, says it",
            "quantization",
        ),
    )
