"""What is believed of what a stranger's code has described."""

import pytest

from omnimodel.agent.reporting import MOST_TENSORS, _tensors_of


@pytest.mark.parametrize(
    "described",
    [
        pytest.param(5, id="a number"),
        pytest.param({"name": "x"}, id="an object"),
        pytest.param([["x"]], id="a list of lists"),
        pytest.param([{"name": "x", "datatype": "FP32"}], id="without a shape"),
        pytest.param([{"name": "x", "datatype": "FP32", "shape": ["-1"]}], id="a shape of words"),
        pytest.param([{"name": "x" * 300, "datatype": "FP32", "shape": [1]}], id="an endless name"),
        pytest.param([{"name": "x", "datatype": "FP32", "shape": [1]}] * (MOST_TENSORS + 1), id="endless"),
    ],
)
def test_tensors_that_an_image_describes_wrongly_count_as_none(described):
    good = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    assert _tensors_of(described) == ()
    assert _tensors_of([{**good, "surprise": "y" * 1000}]) == (good,)
