"""Annotations of `predict` as tensors, and tensors as its arguments."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, TypedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnimodel.runtime import signature
from omnimodel.runtime.requests import RequestError
from omnimodel.runtime.sdk import Audio, Tensor


class Both(TypedDict):
    label: str
    score: float


@dataclasses.dataclass
class Point:
    x: Annotated[np.ndarray, Tensor("FP32", (-1,))]


def described(hint):
    def predict(value):
        pass

    predict.__annotations__ = {"value": hint}
    (argument,) = signature.read(predict).inputs
    return argument.tensor.datatype, argument.tensor.shape, argument.form, argument.required


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (str, ("BYTES", (1,), "scalar", True)),
        (bytes, ("BYTES", (1,), "scalar", True)),
        (list[str], ("BYTES", (-1,), "list", True)),
        (int, ("INT64", (1,), "scalar", True)),
        (float, ("FP64", (1,), "scalar", True)),
        (bool, ("BOOL", (1,), "scalar", True)),
        (list[float], ("FP64", (-1,), "list", True)),
        (str | None, ("BYTES", (1,), "scalar", False)),
        (Audio, ("BYTES", (1,), "audio", True)),
        (Annotated[np.ndarray, Tensor("UINT8", (2, -1))], ("UINT8", (2, -1), "numpy", True)),
        (Annotated[torch.Tensor, Tensor("FP16", (-1,))], ("FP16", (-1,), "torch", True)),
        (Annotated[str, "a note"], ("BYTES", (1,), "scalar", True)),
    ],
    ids=str,
)
def test_annotations_have_their_tensors(hint, expected):
    assert described(hint) == expected


@pytest.mark.parametrize(
    "hint", [dict, list, set[str], np.ndarray, str | int, Annotated[np.ndarray, Tensor("BF16", (1,))]]
)
def test_what_has_no_tensor_is_refused(hint):
    with pytest.raises(signature.SignatureProblem, match="value"):
        described(hint)


def test_arguments_without_names_are_refused():
    def predict(*values: str):
        pass

    with pytest.raises(signature.SignatureProblem, match=r"\*args"):
        signature.read(predict)


def test_outputs_come_from_typed_dicts_dataclasses_scalars_and_generators():
    def outputs(hint):
        def predict():
            pass

        predict.__annotations__ = {"return": hint}
        return [(found.name, found.tensor.datatype) for found in signature.read(predict).outputs]

    assert outputs(Both) == [("label", "BYTES"), ("score", "FP64")]
    assert outputs(Point) == [("x", "FP32")]
    assert outputs(str) == [("output", "BYTES")]
    assert outputs(Iterator[str]) == [("output", "BYTES")]
    assert outputs(dict[str, np.ndarray]) == []
    assert outputs(Audio) == [("audio", "FP32"), ("rate", "INT64")]


def numbers(datatype):
    dtype = np.dtype(signature.DATATYPES[datatype])
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return st.integers(int(info.min), int(info.max))
    return st.floats(-1000, 1000, width=16)


@given(
    st.sampled_from(sorted(signature.DATATYPES)).flatmap(
        lambda d: st.tuples(st.just(d), st.lists(numbers(d), max_size=20))
    )
)
def test_arrays_come_through_json_unchanged(case):
    datatype, values = case

    def predict(x):
        pass

    predict.__annotations__ = {"x": Annotated[np.ndarray, Tensor(datatype, (-1,))]}
    entry = {"name": "x", "datatype": datatype, "shape": [len(values)], "data": values}
    array = signature.decode(signature.read(predict), {"inputs": [entry]})["x"]
    (output,) = signature.encode({"x": array})
    assert output == entry


@pytest.mark.parametrize("values", [[300], [-1], [1.5], ["1"], [None], [True], [2**70]])
def test_values_that_do_not_fit_the_datatype_are_refused(values):
    def predict(x: Annotated[np.ndarray, Tensor("UINT8", (-1,))]):
        pass

    entry = {"name": "x", "datatype": "UINT8", "shape": [1], "data": values}
    with pytest.raises(RequestError, match=r"inputs\.x"):
        signature.decode(signature.read(predict), {"inputs": [entry]})


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"inputs": [{"name": ["x"]}]}, id="a name that is a list"),
        pytest.param({"inputs": [], "parameters": 5}, id="parameters that are a number"),
        pytest.param({"inputs": [], "parameters": ["x"]}, id="parameters that are a list"),
        pytest.param(
            {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": ["b"]}]},
            id="parameters of an input that are a list",
        ),
        pytest.param({"inputs": [{"name": "x", "datatype": {}, "shape": [1], "data": ["a"]}]}, id="an odd datatype"),
        pytest.param({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [[]], "data": ["a"]}]}, id="an odd shape"),
    ],
)
def test_a_request_of_the_wrong_types_is_refused(body: dict):
    def predict(x: str):
        pass

    with pytest.raises(RequestError):
        signature.decode(signature.read(predict), body)


def test_an_output_that_is_asked_for_by_no_text_is_refused():
    with pytest.raises(RequestError, match="objects with a name"):
        signature.select([{"name": "x"}], {"outputs": [{"name": ["x"]}]})


def test_nested_data_and_base64_are_read():
    def predict(x: Annotated[np.ndarray, Tensor("FP32", (2, 2))], b: bytes):
        pass

    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
        {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["AAE="], "parameters": {"content_type": "base64"}},
    ]
    found = signature.decode(signature.read(predict), {"inputs": inputs})
    assert found["x"].tolist() == [[1, 2], [3, 4]]
    assert found["b"] == b"\0\1"


def test_outputs_of_every_kind_are_encoded():
    found = {
        o["name"]: o
        for o in signature.encode(
            {"t": torch.ones(2, dtype=torch.bfloat16), "s": ["a", "b"], "n": 3, "r": b"\xff", "f": float("nan")}
        )
    }
    assert (found["t"]["datatype"], found["t"]["data"]) == ("FP32", [1, 1])
    assert found["s"]["data"] == ["a", "b"]
    assert (found["n"]["datatype"], found["n"]["shape"]) == ("INT64", [1])
    assert found["r"]["parameters"] == {"content_type": "base64"}
    assert found["f"]["data"] == [None]
