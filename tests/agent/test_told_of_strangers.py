"""What is remembered of failures, and what is believed of what a stranger's code has described."""

import pytest

from omnimodel.agent.failures import BACKOFF_SECONDS, HEALTHY_SECONDS, Failures
from omnimodel.agent.reporting import MOST_TENSORS, _tensors_of
from omnimodel.errors import OmniError


def test_who_has_worked_is_tried_again_at_once_and_who_fails_on_ever_more_rarely():
    error = OmniError("OmniModel default/m1", "it fell")
    failures, now = Failures(), 1000.0
    assert failures.note(error, now, verified=True) == 0.0
    for wait_seconds in (*BACKOFF_SECONDS, BACKOFF_SECONDS[-1]):
        now += 1.0
        assert failures.note(error, now, verified=True) == wait_seconds
        assert failures.waiting(now)
        assert not failures.waiting(now + wait_seconds)
    now += HEALTHY_SECONDS + 1.0
    assert failures.note(error, now, verified=True) == 0.0
    failures.recovered()
    assert failures.last is None


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
