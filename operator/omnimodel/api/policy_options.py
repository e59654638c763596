"""The rules of an admission policy for the options of engines: known by engine and task, each with its own bounds."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

from omnimodel.api.fields import Checked
from omnimodel.api.names import SYNONYMS, normal
from omnimodel.api.options import OPTIONS, missing
from omnimodel.api.runtime import DEFAULT_TASK

_VALUE = "variables.runtime.options[name]"


def option_problems() -> str:
    """CEL for the problems of `runtime.options`, with `variables.runtime` and `variables.engine` known."""
    task = f"variables.runtime.?task.orValue({json.dumps(DEFAULT_TASK)})"
    key = f"variables.engine + ' ' + {task}"
    known = json.dumps({f"{engine} {name}": list(options) for (engine, name), options in OPTIONS.items()})
    spelt = json.dumps({key: _spellings(list(options)) for key, options in _by_key().items()})
    of_these = f"{known}[{key}]"
    unknown = (
        f"': is no option of engine ' + variables.engine + ' for ' + {task} + '; ' + "
        f"({of_these}.size() == 0 ? 'remove it: there are none' : "
        f"{spelt}[{key}][?name.replace('_', '').replace('-', '').lowerAscii()]"
        f".orValue('possible are ' + {of_these}.join(', ')))"
    )
    lacks = f"type({_VALUE}) == null_type ? ': has no value; write one, or remove the line' : {_by_name()}"
    text = f"name in {of_these} ? ({lacks}) : {unknown}"
    found = f"[{text}].filter(text, text != '').map(text, 'spec.runtime.options.' + name + text)"
    names = "variables.runtime.?options.orValue({}).map(name, name)"
    found_all = f"{names}.map(name, {found}).filter(f, f.size() > 0).map(f, f[0])"
    found_all = f"{found_all}{_missing(key, names)}"
    return f"{key} in {known} ? {found_all} : variables.engine == 'command' ? {_unused(names)} : []"


def _missing(key: str, names: str) -> str:
    """What is wrong without an option that has to be there: lists to be added to a list."""
    text = ""
    for (engine, task), options in OPTIONS.items():
        for name, option in options.items():
            if option.required:
                said = f"spec.runtime.options: {missing(engine, name)}; add {name}: {option.example}"
                lacks = f"{key} == '{engine} {task}' && !('{name}' in {names})"
                text += f" + ({lacks} ? [{json.dumps(said)}] : [])"
    return text


def _unused(names: str) -> str:
    """What engine command is told by fields that it sees only through a template."""
    nobody = "is read by nobody: engine command knows only its command line"
    inside = json.dumps(r"\{\{[^}]*\boptions\b[^}]*\b")
    end = json.dumps(r"\b[^}]*\}\}")
    named = f"variables.texts.exists(text, text.matches({inside} + name + {end}))"
    options = (
        f"{names}.filter(name, name.matches('^[A-Za-z0-9_]+$') && !{named}).map(name, 'spec.runtime.options.' + name + "
        f"': {nobody}; write {{{{ options.' + name + ' }}}} in command, args or env, or remove it')"
    )
    threads = json.dumps(r"\{\{[^}]*\bthreads\b[^}]*\}\}")
    told = "variables.runtime.?threads.orValue('auto') != 'auto'"
    return (
        f"{options} + ({told} && !variables.texts.exists(text, text.matches({threads})) ? "
        f"['spec.runtime.threads: {nobody}; write {{{{ threads }}}} in command, args or env, or remove it'] : [])"
    )


def _by_key() -> dict[str, list[str]]:
    return {f"{engine} {task}": list(options) for (engine, task), options in OPTIONS.items()}


def _spellings(options: list[str]) -> dict[str, str]:
    """What is meant by other spellings, and by the names of other systems."""
    meant = {word: place.rpartition(".")[2] for word, place in SYNONYMS.items() if ".options." in place}
    found = {word: option for word, option in meant.items() if option in options}
    found |= {normal(option): option for option in options}
    return {word: f"did you mean {option}?" for word, option in found.items()}


def _by_name() -> str:
    """What is wrong with the value of an option, by its name: an option is the same for every engine that has it."""
    forms: dict[str, Checked] = {}
    for options in OPTIONS.values():
        for name, option in options.items():
            forms.setdefault(name, option.form)
    return "".join(f"name == {json.dumps(name)} ? ({_of(form)}) : " for name, form in forms.items()) + "''"


def _of(form: Checked) -> str:
    if form.schema.get("x-kubernetes-int-or-string"):
        (rule,) = form.schema["x-kubernetes-validations"]
        fits = f"(type({_VALUE}) == int || type({_VALUE}) == string) && ({rule['rule'].replace('self', _VALUE)})"
        return f"{fits} ? '' : {json.dumps(': ' + rule['message'])}"
    kind = form.schema["type"]
    if kind == "boolean":
        return f"type({_VALUE}) == bool ? '' : {_refusal(form, 'x')}"
    if kind == "string":
        right = f"type({_VALUE}) == string"
        if "enum" in form.schema:
            right += f" && {_VALUE} in {json.dumps(form.schema['enum'])}"
        return f"{right} ? '' : {_refusal(form, 0)}"
    least, most = form.schema["minimum"], form.schema["maximum"]
    numeric = f"type({_VALUE}) == int" if kind == "integer" else f"type({_VALUE}) == int || type({_VALUE}) == double"
    return (
        f"!({numeric}) ? {_refusal(form, 'x')} : double({_VALUE}) < {float(least)} ? {_refusal(form, least - 1)} : "
        f"double({_VALUE}) > {float(most)} ? {_refusal(form, most + 1)} : ''"
    )


def _refusal(form: Checked, value: Any) -> str:
    """The sentence of offline validation about a value, as a text of CEL."""
    try:
        form.check(value)
    except PydanticCustomError as error:
        found = error.context or {}
        return json.dumps(f": {found['problem']}; {found['cure']}", ensure_ascii=False)
    raise AssertionError(f"{value!r} is right")
