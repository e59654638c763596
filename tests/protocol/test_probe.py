"""Known answers: what counts as right, and that no answer of a stranger breaks the comparison."""

from __future__ import annotations

import json

import pytest

from omnimodel.protocol import probe as probes


def wrong(expectation: dict, answer: object, **headers: str) -> list[str]:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return probes.failures({"expect": [expectation]}, 200, headers, body)


@pytest.mark.parametrize(
    ("expectation", "answer"),
    [
        pytest.param({"at": "/a/0/b~1c", "equals": None}, {"a": [{"b/c": 1}]}, id="anything at a pointer"),
        pytest.param({"at": "/a", "equals": [1, 2]}, {"a": [1, 2]}, id="a list"),
        pytest.param({"at": "", "contains": "x"}, "axb", id="a text in the whole"),
        pytest.param({"at": "/a", "contains": "x"}, {"a": ["w", "x"]}, id="an entry of a list"),
        pytest.param({"at": "/a", "matches": "^P.*s$"}, {"a": "Paris"}, id="an expression"),
        pytest.param({"at": "/a", "near": 0.5, "within": 0.1}, {"a": 0.55}, id="a number that is near"),
        pytest.param({"at": "/a", "near": [1, 2], "within": 0.1}, {"a": [1.05, 1.95, 9]}, id="the first numbers"),
        pytest.param({"minBytes": 4}, b"1234", id="bytes"),
    ],
)
def test_right(expectation: dict, answer: object) -> None:
    assert wrong(expectation, answer) == []


@pytest.mark.parametrize(
    ("expectation", "answer", "says"),
    [
        pytest.param({"at": "/a", "equals": 1}, b"no JSON", "not JSON", id="no JSON"),
        pytest.param({"at": "/a", "equals": 1}, b"[" * 100_000, "not JSON", id="JSON without a bottom"),
        pytest.param({"at": "/a", "equals": 1}, "text", "nothing at /a", id="a key of a text"),
        pytest.param({"at": "/x", "equals": 1}, [1], "nothing at /x", id="a name in a list"),
        pytest.param(
            {"at": "/a", "near": 1.0, "within": 0.1}, {"a": int("9" * 4000)}, "not within", id="a huge number"
        ),
        pytest.param({"at": "/a", "near": 1.0, "within": 0.1}, b'{"a": NaN}', "not within", id="no number"),
        pytest.param({"at": "/a", "near": [1, 2], "within": 0.1}, {"a": [1]}, "not within", id="too few numbers"),
        pytest.param({"at": "/a", "matches": "^x"}, {"a": "Paris"}, "does not match", id="an expression"),
        pytest.param({"contentType": "audio/"}, b"", "content type is", id="another type"),
        pytest.param({"minBytes": 4}, b"123", "fewer than 4", id="too few bytes"),
    ],
)
def test_wrong(expectation: dict, answer: object, says: str) -> None:
    (found,) = wrong(expectation, answer)
    assert says in found
    assert len(found) < 1000


def test_a_status_says_it_all() -> None:
    assert probes.failures({"expect": [{"minBytes": 9}]}, 500, {}, b"boom") == [
        "the status is 500, and the answer boom"
    ]
