"""Every manifest that must be refused is refused, with the lines that its table says."""

from __future__ import annotations

from typing import Any

import pytest

from api import refused_fields, refused_options, refused_places, refused_quantities, refused_runtime
from api.builders import model, pool
from omnimodel.api import validate

MODELS = [
    pytest.param(changes, expected, id=name)
    for table in (refused_fields, refused_places, refused_quantities, refused_runtime, refused_options)
    for name, changes, expected in table.MODELS
]
POOLS = [
    pytest.param(changes, expected, id=name)
    for table in (refused_fields, refused_places, refused_quantities)
    for name, changes, expected in table.POOLS
]


@pytest.mark.parametrize(("changes", "expected"), MODELS)
def test_a_model_is_refused_in_one_line(changes: dict[str, Any], expected: list[str]) -> None:
    resource, errors = validate(model(**changes))
    assert resource is None
    assert [str(error) for error in errors] == [f"OmniModel default/tiny: spec.{line}" for line in expected]


@pytest.mark.parametrize(("changes", "expected"), POOLS)
def test_a_pool_is_refused_in_one_line(changes: dict[str, Any], expected: list[str]) -> None:
    resource, errors = validate(pool(**changes))
    assert resource is None
    assert [str(error) for error in errors] == [f"OmniPool default/default: spec.{line}" for line in expected]
