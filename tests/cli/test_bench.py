"""What benchmarks compute from what they see; their measurements are made by `make bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Running
from example_models import EXAMPLES
from omnimodel.agent.supply import HOST_FRAME_BYTES
from omnimodel.catalog import load
from omnimodel.cli.bench.contention import contention
from omnimodel.cli.bench.gateway import STREAM_TOKENS, Stream, _take
from omnimodel.cli.bench.report import Report, Row, percentile
from omnimodel.cli.bench.swap import _copy, comparable
from omnimodel.cli.bench.system import System, frame_bytes, on_one_thread
from omnimodel.cli.client import Client


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (Row("a", 0.9, goal=0.8, at_least=True), True),
        (Row("a", 0.7, goal=0.8, at_least=True), False),
        (Row("a", 4.9, "ms", goal=5.0), True),
        (Row("a", 5.1, "ms", goal=5.0), False),
        (Row("a", 5.1, "ms"), None),
    ],
    ids=["above a lower bound", "below it", "below an upper bound", "above it", "only reported"],
)
def test_goals(row: Row, met: bool | None) -> None:
    assert row.met is met


def test_a_report_is_written_with_its_machine_and_fails_on_failures(tmp_path: Path) -> None:
    report = Report("swap")
    report.add("wake", 21.0, "ms", goal=5.0)
    report.finish(tmp_path / "deep" / "swap.json")
    body = json.loads((tmp_path / "deep" / "swap.json").read_text())
    assert body["rows"][0]["met"] is False
    assert body["machine"]["cores"] >= 1
    report.failures.append("swap 3: another answer")
    with pytest.raises(SystemExit) as ended:
        report.finish(None)
    assert ended.value.code == 1


def test_answers_are_compared_without_what_differs_each_time() -> None:
    first = b'{"id": "1", "created": 5, "choices": [{"text": "Paris", "id": "x"}]}'
    again = b'{"id": "2", "created": 6, "choices": [{"text": "Paris", "id": "y"}]}'
    other = b'{"id": "2", "created": 6, "choices": [{"text": "Rome", "id": "y"}]}'
    assert comparable(first) == comparable(again)
    assert comparable(first) != comparable(other)
    assert comparable(b"RIFF\x00\xff") == b"RIFF\x00\xff"


def stream(*lines: str) -> Stream:
    seen = Stream()
    for line in lines:
        _take(seen, line, 0.1)
    return seen


DELTA = 'data: {"choices": [{"delta": {"content": "a"}}]}'
LAST = 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}'
USAGE = f'data: {{"choices": [], "usage": {{"completion_tokens": {STREAM_TOKENS}}}}}'


@pytest.mark.parametrize(
    ("lines", "whole"),
    [
        ((": held", DELTA, LAST, USAGE, "data: [DONE]"), True),
        ((DELTA, LAST, USAGE), False),
        ((DELTA, USAGE, "data: [DONE]"), False),
        ((DELTA, LAST, USAGE.replace(str(STREAM_TOKENS), "3"), "data: [DONE]"), False),
        ((DELTA, 'data: {"error": {"message": "gone"}}', LAST, USAGE, "data: [DONE]"), False),
    ],
    ids=["whole", "no end", "no reason to finish", "fewer tokens than asked for", "an error in between"],
)
def test_a_stream_is_whole_or_not(lines: tuple[str, ...], whole: bool) -> None:
    assert stream(*lines).whole is whole


def test_the_copy_comparison_measures_something_real() -> None:
    report = Report("swap")
    _copy(report, 32 << 20, 4 << 20, 1, 1)
    assert [row.value > 0 for row in report.rows] == [True, True, True]


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [((), 0.99, 0.0), ((3.0,), 0.5, 3.0), (tuple(range(1, 101)), 0.99, 99), ((4.0, 1.0, 2.0, 3.0), 0.5, 2.0)],
    ids=["none", "one", "a hundred", "unsorted"],
)
def test_percentiles(values: tuple[float, ...], share: float, found: float) -> None:
    assert percentile(values, share) == found


def test_only_chat_models_of_a_copied_catalogue_are_put_on_one_thread() -> None:
    original = {model.metadata.name: model.spec for model in load(EXAMPLES / "catalog").models}
    with on_one_thread(EXAMPLES / "catalog") as folder:
        copied = {model.metadata.name: model.spec for model in load(folder).models}
        assert frame_bytes(folder) == HOST_FRAME_BYTES
    assert copied.keys() == original.keys()
    assert {name for name, spec in copied.items() if spec != original[name]} == {"smollm2"}
    assert copied["smollm2"].runtime.threads == 1


def test_many_clients_are_answered_and_each_wrong_answer_is_counted(system: Running) -> None:
    report = Report("swap")
    contention(report, System(Client(system.address), None, 0), 20, 4, 1)
    figures = {row.name: row.value for row in report.rows}
    assert figures["questions of many clients"] == 20
    assert 0 < figures["wrong answers among them"] < 20
    assert figures["refused, to be sent again"] == 0
    assert report.failures
    assert {failure.partition(":")[0].rpartition("/")[2] for failure in report.failures} == {"wrong"}
