"""An admission policy with the rules for models that the schema of a CRD cannot hold.

Where a value is a text or an object (an environment variable, a served name, a mount's source), rules of a schema do
not see it; those of a policy see every value as it is. The sentences are those of offline validation. What even this
cannot say needs a parser (regular expressions, Python): the operator says it in a condition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_args

import yaml

from omnimodel.api import owned
from omnimodel.api.meta import GROUP, VERSION, Part, Rule
from omnimodel.api.model import OmniModel
from omnimodel.api.mounts import Mount, MountSource
from omnimodel.api.names import LOCAL
from omnimodel.api.policy_options import option_problems
from omnimodel.api.probe import Expectation, Probe
from omnimodel.api.references import ValueFrom
from omnimodel.api.runtime import EnvName

NAME = f"{OmniModel.plural}.{GROUP}"
_HEADER = "# Made from operator/omnimodel/api by `omni crds --policy`. Do not edit.\n"
_TEXT_CURE = "write a text, or secretKeyRef: {name: NAME, key: KEY}"


def generate() -> dict[str, str]:
    """The policy and its binding as YAML text, by file name."""
    documents = (policy(), binding())
    texts = [yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True) for document in documents]
    return {f"{OmniModel.plural}.yaml": _HEADER + "---\n".join(texts)}


def binding() -> dict[str, Any]:
    """What makes the policy apply everywhere."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": NAME},
        "spec": {"policyName": NAME, "validationActions": ["Deny"]},
    }


def policy() -> dict[str, Any]:
    """All rules; a model that was stored before them may change in anything but its spec."""
    problems = {
        "namesProblems": _names(),
        "mountsProblems": _mounts(),
        "probeProblems": _probe(),
        "envProblems": _environment(),
        "argsProblems": _lines("args"),
        "commandProblems": _lines("command"),
        "addressProblems": _address(),
        "optionsProblems": option_problems(),
    }
    variables = {
        "runtime": "object.spec.?runtime.orValue({})",
        "engine": "variables.runtime.?engine.orValue('')",
        "args": "variables.runtime.?args.orValue([])",
        "command": "variables.runtime.?command.orValue([])",
        "env": "variables.runtime.?env.orValue({})",
        "texts": "variables.command + variables.args + "
        "variables.env.map(name, variables.env[name]).filter(value, type(value) == string)",
        "owned": _literal(owned.ARGUMENTS),
        "short": _literal(owned.SHORT),
        **problems,
        "problems": " + ".join(f"variables.{name}" for name in problems),
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            # What it cannot look at the operator does, and says it in a condition.
            "failurePolicy": "Ignore",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [GROUP],
                        "apiVersions": [VERSION],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": [OmniModel.plural],
                    }
                ]
            },
            "matchConditions": [
                {"name": "a-new-spec", "expression": "oldObject == null || oldObject.spec != object.spec"}
            ],
            "variables": [{"name": name, "expression": expression} for name, expression in variables.items()],
            "validations": [
                {
                    "expression": "variables.problems.size() == 0",
                    "messageExpression": "variables.problems.join(' | ')",  # a message is one line
                    "reason": "Invalid",
                }
            ],
        },
    }


def _literal(value: Any) -> str:
    """A value of CEL."""
    return json.dumps(value, ensure_ascii=False)


def _sentence(problem: str, cure: str) -> str:
    return _literal(f": {problem}; {cure}")


def _matches(value: str, pattern: str) -> str:
    """Whether a text has a pattern in it: RE2 has no lookbehind, but a boundary does the same here."""
    return f"{value}.matches({_literal(pattern.replace('(?<![A-Za-z0-9])', '(^|[^A-Za-z0-9])'))})"


def _found(*cases: tuple[str, str]) -> str:
    """The text of the first case that is true, else an empty one."""
    return "".join(f"{test} ? {text} : " for test, text in cases) + "''"


def _rule(part: type[Part], problem: str) -> Rule:
    """A rule across fields, by the beginning of its problem."""
    return next(rule for rule in part.rules if rule.problem.startswith(problem))


def _said(rule: Rule) -> str:
    return _sentence(rule.problem, rule.cure)


def _one_of(value: str, names: Iterable[str]) -> str:
    return f"[{', '.join(f'has({value}.{name})' for name in names)}].filter(x, x).size()"


def _names() -> str:
    own = _sentence("is the model's own name", "remove it: a model always answers to metadata.name")
    name = "(type(item) == string ? item : item.name)"
    earlier = f"(type(other) == string ? other : type(other) == map ? other.name : '') == {name}"
    case = _found(
        ("type(item) != string && type(item) != map", "': is not text; write it in quotes: \"' + string(item) + '\"'"),
        (f"{name} == object.metadata.name", own),
        (
            f"object.spec.servedNames.transformList(at, other, at < index && {earlier}).exists(x, x)",
            _sentence("is there twice", "remove one"),
        ),
    )
    return _each("object.spec.?servedNames.orValue([])", "item", "'spec.servedNames[' + string(index) + ']'", case)


def _each(items: str, item: str, place: str, case: str) -> str:
    """The problems of the items of a list: where it is and what the case says of it."""
    found = f"[{case}].filter(text, text != '').map(text, {place} + text)"
    return f"{items}.transformList(index, {item}, {found}).map(found, found).filter(f, f.size() > 0).map(f, f[0])"


def _mounts() -> str:
    source = "mount.source"
    kinds = [field.alias or name for name, field in MountSource.model_fields.items()]
    writable = f"type({source}) == map && (has({source}.empty) || has({source}.volume))"
    case = _found(
        (
            f"type({source}) != map && {source} != true",
            "'.source' + "
            + _sentence(
                "is no source of a mount",
                "write true for the model's own source, or one of volume, configMap, secret, empty and files",
            ),
        ),
        (
            f"type({source}) == map && {_one_of(source, kinds)} != 1",
            f"'.source' + {_said(_rule(MountSource, 'needs exactly one'))}",
        ),
        (
            f"has(mount.readOnly) && mount.readOnly == false && !({writable})",
            f"'.readOnly' + {_said(_rule(Mount, 'only a volume'))}",
        ),
    )
    return _each("object.spec.?mounts.orValue([])", "mount", "'spec.mounts[' + string(index) + ']'", case)


def _probe() -> str:
    probe = "object.spec.probe"
    get = f"(has({probe}.method) && {probe}.method == 'GET' && !has({probe}.json) && !has({probe}.form))"
    body = (
        f"!has({probe}) || {get} || has({probe}.json) != has({probe}.form) ? [] : "
        f"['spec.probe' + {_said(_rule(Probe, 'needs exactly one'))}]"
    )
    matchers = ("equals", "contains", "matches", "near")
    case = _found(
        (
            f"has(expectation.at) && {_one_of('expectation', matchers)} != 1",
            _said(_rule(Expectation, "at needs exactly one")),
        ),
        ("has(expectation.near) != has(expectation.within)", _said(_rule(Expectation, "near and within"))),
    )
    place = "'spec.probe.expect[' + string(index) + ']'"
    expected = _each("object.spec.?probe.?expect.orValue([])", "expectation", place, case)
    form = "object.spec.?probe.?form.orValue({})"
    base64 = _sentence("is not base64", "write what `base64 FILE` prints")
    files = (
        f"{form}.transformList(name, value, type(value) == map && has(value.base64) && "
        r"!value.base64.matches('^([A-Za-z0-9+/]\\s*)+(=\\s*){0,2}$') ? "
        f"'spec.probe.form.' + name + '.base64' + {base64} : '').filter(text, text != '')"
    )
    return f"({body}) + {expected} + {files}"


def _environment() -> str:
    message = get_args(EnvName)[1].schema["x-kubernetes-validations"][0]["message"]
    value = "variables.env[name]"
    cases = [(f"!{_matches('name', r'^[A-Za-z_][A-Za-z0-9_]*$')}", _literal(f": {message}"))]
    references = [field.alias or field_name for field_name, field in ValueFrom.model_fields.items()]
    unknown = f"{value}.filter(key, !(key in {_literal(references)}))"
    instead = {key: cure for (place, key), cure in LOCAL.items() if place == "env"}
    known = _literal(f"possible are {', '.join(references)}")
    of_key = f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in instead.items())}}}"
    cases += [
        (
            f"type({value}) == map && {unknown}.size() > 0",
            f"'.' + {unknown}[0] + ': is an unknown field; ' + {of_key}[?{unknown}[0].lowerAscii()].orValue({known})",
        ),
        (f"type({value}) == map && {_one_of(value, references)} != 1", _said(_rule(ValueFrom, "needs exactly one"))),
        (
            f"type({value}) == int || type({value}) == double || type({value}) == bool",
            f"': is not text; write it in quotes: \"' + string({value}) + '\"'",
        ),
        (f"type({value}) != map && type({value}) != string", _sentence("is not text", _TEXT_CURE)),
    ]
    for pattern, problem, cure in owned.ENVIRONMENT:
        cases.append((_matches("name", f"(?i)^({pattern})$"), f"': ' + name + {_literal(f' {problem}; {cure}')}"))
    reference = "'; write ' + name + ': {secretKeyRef: {name: NAME, key: KEY}}'"
    named = f"({_matches('name', f'(?i){owned.SECRET_NAME.pattern}')} && !({value}.lowerAscii() in {_harmless()}))"
    is_port = f"{_matches('name', '(?i)(^|_)PORT$')} && {value}.matches('^[ ]*[0-9]+[ ]*$')"
    port = _sentence("is a fixed port", 'write "{port}": the system assigns ports')
    cases += [
        (f"type({value}) != string", "''"),
        (f"{value}.startsWith('os.environ/')", f"': is a reference of another system' + {reference}"),
        (f"{named} || {_matches(value, owned.SECRET_VALUE.pattern)}", f"': is a secret in clear text' + {reference}"),
        (is_port, port),
    ]
    found = f"[{_found(*cases)}].filter(text, text != '').map(text, 'spec.runtime.env.' + name + text)"
    return f"variables.env.map(name, {found}).filter(f, f.size() > 0).map(f, f[0])"


def _harmless() -> str:
    return _literal(sorted(owned.HARMLESS))


def _words(line: str) -> str:
    """The words of a line; quotes are those of a shell, and so is what ends a command."""
    return f"""{line}.replace('"', '').replace("'", '').replace(';', ' ').split(' ').filter(w, w != '')"""


def _lines(field: str) -> str:
    """What arguments say that is not theirs to say: the first problem of each line."""
    lines = f"variables.{field}"
    argument = field == "args"
    plain = "word.split('=')[0].replace('_', '-').lowerAscii()"
    least = f"(variables.engine == 'command' ? {owned.ABBREVIATION} : 1)" if argument else str(owned.ABBREVIATION)
    begun = (
        f"(word.startsWith('--') && {plain}.size() >= {least} + 2 && !({plain}.substring(2) in "
        f"{_literal(owned.WHOLE)}) ? variables.owned.map(k, k).filter(k, k.startsWith({plain}.substring(2))) : [])"
    )
    exact = f"(word.startsWith('--') && {plain}.substring(2) in variables.owned ? [{plain}.substring(2)] : {begun})"
    short = "word.split('=')[0]"
    names = f"({short} in variables.short ? [variables.short[{short}]] : {exact})" if argument else exact
    ours = f"{names}.filter(o, o in {_literal(owned.IN_COMMAND)}"
    ours += " || variables.engine != 'command')" if argument else " && o != 'device')"
    belongs = f"': --' + {ours}[0] + ' belongs to the system; ' + variables.owned[{ours}[0]]"
    value = "(word.contains('=') ? word.substring(word.indexOf('=') + 1) : next)"
    bare = "word.replace('_', '-').lowerAscii().split('=')[0]"
    fixed = (
        f"word.startsWith('-') && (({bare}.matches('^--?([a-z-]*-)?port$') || word == '-p') && "
        f"{value}.matches('^[0-9]{{2,5}}$') || word.matches('^-p[0-9]{{2,5}}$') || "
        f"{bare}.matches('^--?(bind|listen|address|addr|b)$') && "
        f"{value}.matches('^[^ ]*:[0-9]{{2,5}}$'))"
    )
    fixed = f"({fixed} || word.matches('(?i)^([a-z_][a-z0-9_]*_|_)?PORT=[0-9]+$'))"
    if argument:
        fixed = f"variables.engine == 'command' && {fixed}"
    secret_name = _matches(f"{bare}.replace('-', '_')", f"(?i){owned.SECRET_NAME.pattern}")
    named = f"(word.startsWith('-') || word.matches('^[A-Za-z_][A-Za-z0-9_]*=')) && {secret_name}"
    secret = (
        f"{_matches('word', owned.SECRET_VALUE.pattern)} || {named} && "
        f"!({value}.lowerAscii() in {_harmless()}) && !{value}.matches('^[-{{$/]')"
    )
    sets = "word.contains('=') && !word.startsWith('-')" + (" && variables.engine == 'command'" if argument else "")
    variables = [
        (
            f"{sets} && {_matches('word', f'^({pattern})=')}",
            f"': ' + word.split('=')[0] + {_literal(f' {problem}; {cure}')}",
        )
        for pattern, problem, cure in owned.ENVIRONMENT
    ]
    case = _found(
        (f"{ours}.size() > 0", belongs),
        *variables,
        (fixed, _sentence("is a fixed port", "write {port}: the system assigns ports")),
        (secret, _sentence("has a secret in clear text, and argv is readable by others", owned.in_env())),
    )
    first = f"(index + 1 < {lines}.size() ? {_words(f'{lines}[index + 1]')}.map(w, w) + [''] : [''])[0]"
    following = f"(at + 1 < words.size() ? words[at + 1] : {first})"
    per_line = (
        f"[{_words('line')}].map(words, words.transformList(at, word, [{following}].map(next, {case})[0])"
        f".filter(text, text != ''))[0]"
    )
    placed = f"{per_line}.map(text, 'spec.runtime.{field}[' + string(index) + ']' + text)"
    return f"{lines}.transformList(index, line, {placed}).filter(f, f.size() > 0).map(f, f[0])"


def _address() -> str:
    lacks = _sentence(
        "does not say where the program takes its address",
        "write {port} or {socket} there, such as --port {port}",
    )
    takes = _matches("text", r"\{\s*(port|socket)\s*\}")
    return (
        "variables.engine == 'command' && variables.command.size() > 0 && "
        f"!variables.texts.exists(text, {takes}) ? ['spec.runtime.command' + {lacks}] : []"
    )
