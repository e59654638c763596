"""The inputs and outputs of `predict`, read from its annotations, and their way to and from JSON.

The wire form is that of the Open Inference Protocol, version 2: tensors with a datatype, a shape and flat data.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnimodel.runtime.audio import read_wav
from omnimodel.runtime.requests import RequestError, invalid, refuse_others, unsupported
from omnimodel.runtime.sdk import Audio, Tensor

DATATYPES: dict[str, str] = {
    "BOOL": "bool",
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
_NAMES = {np.dtype(name): datatype for datatype, name in DATATYPES.items()}
_SCALARS: dict[type, str] = {str: "BYTES", bytes: "BYTES", bool: "BOOL", int: "INT64", float: "FP64"}


@dataclass(frozen=True)
class Argument:
    """One input of `predict`, or one output.

    Args:
        name: of the tensor and of the parameter.
        tensor: datatype and shape on the wire.
        form: how `predict` has it: `scalar`, `list`, `numpy`, `torch`, or `audio` (a WAV file in base64 on the wire).
        element: type of a scalar or of a list's elements.
        required: whether a request must have it.
    """

    name: str
    tensor: Tensor
    form: str
    element: type = object
    required: bool = True

    def describe(self) -> dict[str, Any]:
        """The tensor's entry in the metadata of the model."""
        return {"name": self.name, "datatype": self.tensor.datatype, "shape": list(self.tensor.shape)}


@dataclass(frozen=True)
class Signature:
    """What `predict` takes and returns; `outputs` is empty when only the answer itself says what is in it."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]


class SignatureProblem(TypeError):
    """Annotations that cannot be understood; the text says which and what to write instead."""


def read(predict: Callable[..., Any]) -> Signature:
    """Read the annotations of `predict`.

    Raises:
        SignatureProblem: a parameter has none, or one that has no tensor form.
    """
    try:
        hints = typing.get_type_hints(predict, include_extras=True)
    except Exception as error:
        raise SignatureProblem(f"the annotations of predict cannot be read: {error}") from error
    inputs = []
    for parameter in inspect.signature(predict).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SignatureProblem("predict takes *args or **kwargs; name every input and annotate it")
        if parameter.name not in hints:
            raise SignatureProblem(f"parameter {parameter.name} of predict has no annotation; write one, such as str")
        optional = parameter.default is not inspect.Parameter.empty
        inputs.append(_argument(parameter.name, hints[parameter.name], required=not optional))
    return Signature(tuple(inputs), _outputs(hints.get("return")))


def _argument(name: str, hint: Any, *, required: bool = True) -> Argument:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            return _argument(name, kinds[0], required=False)
    if hint is Audio:
        return Argument(name, Tensor("BYTES", (1,)), "audio", bytes, required)
    if isinstance(hint, type) and hint in _SCALARS:
        return Argument(name, Tensor(_SCALARS[hint], (1,)), "scalar", hint, required)
    if typing.get_origin(hint) is list and typing.get_args(hint)[0] in _SCALARS:
        element = typing.get_args(hint)[0]
        return Argument(name, Tensor(_SCALARS[element], (-1,)), "list", element, required)
    if typing.get_origin(hint) is typing.Annotated:
        kind, *notes = typing.get_args(hint)
        tensor = next((note for note in notes if isinstance(note, Tensor)), None)
        if tensor is not None:
            if tensor.datatype not in DATATYPES:
                known = ", ".join(DATATYPES)
                raise SignatureProblem(f"{name} has the datatype {tensor.datatype}; an array has one of {known}")
            module = getattr(kind if isinstance(kind, type) else typing.get_origin(kind), "__module__", "")
            return Argument(name, tensor, "torch" if module.split(".")[0] == "torch" else "numpy", object, required)
        return _argument(name, kind, required=required)
    raise SignatureProblem(
        f"{name} of predict is annotated {hint!r}; write str, bytes, int, float, bool, a list of one of these, "
        'or Annotated[np.ndarray, Tensor("FP32", (-1, 3))]'
    )


def _outputs(hint: Any) -> tuple[Argument, ...]:
    origin = typing.get_origin(hint)
    if origin is not None and getattr(origin, "__name__", "") in ("Iterator", "Generator", "Iterable"):
        return _outputs(typing.get_args(hint)[0])
    if hint is Audio:
        return (
            Argument("audio", Tensor("FP32", (-1,)), "numpy"),
            Argument("rate", Tensor("INT64", (1,)), "scalar", int),
        )
    if hint is None or origin is dict or hint is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return ()
    fields: Mapping[str, Any] | None = None
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        fields = typing.get_type_hints(hint, include_extras=True)
    try:
        if fields is not None:
            return tuple(_argument(name, kind) for name, kind in fields.items())
        return (_argument("output", hint),)
    except SignatureProblem:
        return ()  # an answer says itself what is in it


def decode(signature: Signature, body: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `predict` out of an inference request.

    Raises:
        RequestError: inputs are missing, unknown, or of another type or shape.
    """
    refuse_others(body, ("id", "inputs", "outputs", "parameters"))
    for name in _parameters("parameters", body):
        raise unsupported(f"parameters.{name}")
    inputs = body.get("inputs")
    if not isinstance(inputs, list) or not all(isinstance(entry, dict) for entry in inputs):
        raise invalid("inputs", "expected a list of objects with name, datatype, shape and data")
    known = {argument.name: argument for argument in signature.inputs}
    given: dict[str, Any] = {}
    for entry in inputs:
        name = entry.get("name")
        if not isinstance(name, str) or name not in known:
            names = ", ".join(known) or "none"
            raise invalid("inputs", f"there is no input {name!r}; the model has {names}")
        if name in given:
            raise invalid("inputs", f"input {name} is given twice")
        given[name] = _value(known[name], entry)
    for argument in signature.inputs:
        if argument.required and argument.name not in given:
            raise invalid("inputs", f"input {argument.name} is missing")
    return given


def _parameters(name: str, holder: Mapping[str, Any]) -> Mapping[str, Any]:
    found = holder.get("parameters") or {}
    if not isinstance(found, Mapping):
        raise invalid(name, "expected an object")
    return found


def _value(argument: Argument, entry: Mapping[str, Any]) -> Any:
    name = f"inputs.{argument.name}"
    refuse_others(entry, ("name", "datatype", "shape", "data", "parameters"))
    if entry.get("datatype") != argument.tensor.datatype:
        raise invalid(name, f"its datatype is {argument.tensor.datatype}, not {entry.get('datatype')}")
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise invalid(name, "its shape must be a list of sizes")
    wanted = argument.tensor.shape
    if len(shape) != len(wanted) or any(want not in (-1, size) for want, size in zip(wanted, shape, strict=True)):
        raise invalid(name, f"its shape is {list(wanted)}, not {shape}")
    flat = _flat(name, entry.get("data"))
    if len(flat) != math.prod(shape):
        raise invalid(name, f"{len(flat)} values do not fill the shape {shape}")
    if argument.tensor.datatype == "BYTES":
        return _texts(argument, name, flat, _parameters(f"{name}.parameters", entry))
    for parameter in _parameters(f"{name}.parameters", entry):
        raise unsupported(f"{name}.parameters.{parameter}")
    array = _array(name, flat, shape, argument.tensor.datatype)
    if argument.form == "scalar":
        return argument.element(array.reshape(-1)[0])
    if argument.form == "list":
        values: list[Any] = array.tolist()
        return values
    if argument.form == "torch":
        import torch

        return torch.from_numpy(array)
    return array


def _flat(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise invalid(name, "its data must be a list")
    while values and isinstance(values[0], list):
        if not all(isinstance(value, list) for value in values):
            raise invalid(name, "its data is a list of unequal depth")
        values = [value for inner in values for value in inner]
    flat: list[Any] = values
    return flat


def _texts(argument: Argument, name: str, flat: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
    refuse_others(parameters, ("content_type",))
    encoding = parameters.get("content_type", "str")
    if encoding not in ("str", "base64"):
        raise invalid(f"{name}.parameters.content_type", f"it is str or base64, not {encoding!r}")
    if not all(isinstance(value, str) for value in flat):
        raise invalid(name, "BYTES are strings")
    values: list[Any] = list(flat)
    try:
        if encoding == "base64":
            values = [base64.b64decode(value, validate=True) for value in flat]
        if argument.element is bytes:
            values = [value if isinstance(value, bytes) else value.encode() for value in values]
        else:
            values = [value.decode() if isinstance(value, bytes) else value for value in values]
    except (binascii.Error, UnicodeError) as error:
        raise invalid(name, str(error)) from error
    if argument.form == "audio":
        return read_wav(values[0], field=name)
    return values[0] if argument.form == "scalar" else values


def _array(name: str, flat: Sequence[Any], shape: Sequence[int], datatype: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(DATATYPES[datatype])
    allowed: tuple[type, ...] = (bool,) if dtype.kind == "b" else (int,) if dtype.kind in "iu" else (int, float)
    if not all(isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)) for value in flat):
        raise invalid(name, f"its data does not hold {datatype} values")
    try:
        return np.array(flat, dtype=dtype).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise invalid(name, f"its data does not fit {datatype}: {error}") from error


def encode(answer: Any) -> list[dict[str, Any]]:
    """The outputs of an inference response out of what `predict` returned.

    Raises:
        TypeError: it returned something that has no tensor form; the text is for the handler's author.
    """
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        answer = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    if not isinstance(answer, Mapping):
        answer = {"output": answer}
    return [_output(str(name), value) for name, value in answer.items()]


def _output(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str | bytes):
        value = [value]
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | bytes) for item in value):
        return _strings(name, list(value))
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    if isinstance(value, dict) or value is None:
        raise TypeError(f"predict returned {type(value).__name__} for {name}; return an array, a number or text")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"predict returned a ragged list for {name}: {error}") from error
    if array.dtype.kind in "US":
        return _strings(name, array.reshape(-1).tolist(), list(array.shape))
    if array.dtype not in _NAMES:
        raise TypeError(f"predict returned {type(value).__name__} for {name}; return an array, a number or text")
    shape = list(array.shape) if array.ndim else [1]
    flat = array.reshape(-1)
    values = flat.tolist()
    if array.dtype.kind == "f" and not np.isfinite(flat).all():  # JSON has no NaN
        values = [number if math.isfinite(number) else None for number in values]
    return {"name": name, "datatype": _NAMES[array.dtype], "shape": shape, "data": values}


def _strings(name: str, values: list[str | bytes], shape: list[int] | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": shape or [len(values)]}
    if any(isinstance(value, bytes) for value in values):
        raw = [value if isinstance(value, bytes) else value.encode() for value in values]
        return {
            **entry,
            "data": [base64.b64encode(value).decode() for value in raw],
            "parameters": {"content_type": "base64"},
        }
    return {**entry, "data": values}


def select(outputs: list[dict[str, Any]], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The outputs that a request asks for; all when it names none.

    Raises:
        RequestError: it asks for one that the answer does not have.
    """
    asked = body.get("outputs")
    if not asked:
        return outputs
    if not isinstance(asked, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in asked
    ):
        raise invalid("outputs", "expected a list of objects with a name")
    by_name = {output["name"]: output for output in outputs}
    chosen = []
    for entry in asked:
        refuse_others(entry, ("name",))
        if entry["name"] not in by_name:
            raise RequestError(
                f"Invalid value for outputs: there is no output {entry['name']!r}; the model has {', '.join(by_name)}",
                param="outputs",
                code="invalid_value",
            )
        chosen.append(by_name[entry["name"]])
    return chosen
