"""The live table: what a person sees while models are prepared, serve, and fail."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omnimodel.cli import live, output

ROOT = Path(__file__).parents[2]


def item(
    name: str, *, ready: str = "True", reason: str = "Serving", message: str = "", mib: float = 257.0, **entry: Any
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready, "reason": reason, "message": message}]
    if ready == "Unknown":
        conditions.append({"type": "Reconciling", "status": "True"})
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"runtime": {"task": "embeddings"}},
        "status": {
            "conditions": conditions,
            "residency": [{"tier": "cold", **entry}],
            "footprint": {"weightsBytes": mib * (1 << 20)},
        },
    }


POOL = {
    "metadata": {"name": "default"},
    "status": {
        "budgetBytes": 448 << 20, "residentBytes": 200 << 20, "freeBytes": 148 << 20, "device": "host",
        "overcommitRatio": 3.2, "isolation": {"level": "namespaces"},
    },
}  # fmt: skip


def shown(models: list[dict[str, Any]], errors: list[Any] | None = None, rows: int | None = None) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140, no_color=False).print(live.screen(models, [POOL], errors or [], rows=rows))
    return stream.getvalue()


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line


def test_memory_of_the_pool_is_on_top() -> None:
    first = shown([]).splitlines()[0]
    for part in (
        "pool default",
        "300 MiB of 448 MiB on host",
        "over-commit 3.20",
        "isolation namespaces",
    ):
        assert part in first


def test_an_empty_device_holds_no_bytes() -> None:
    pool = {**POOL, "status": {**POOL["status"], "freeBytes": 448 << 20}}
    stream = io.StringIO()
    Console(file=stream, width=140).print(live.screen([], [pool], []))
    assert " 0 B of 448 MiB on host" in stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_memory_of_the_pool_is_one_line_on_any_terminal(width: int) -> None:
    stream = io.StringIO()
    Console(file=stream, width=width).print(live.screen([item("a")], [POOL], []))
    lines = stream.getvalue().splitlines()
    assert "300 MiB of 448 MiB on host" in lines[0]
    assert lines[1].startswith("model")


def test_a_serving_model_has_tier_bytes_requests_and_last_wake() -> None:
    line = line_of(shown([item("a", tier="resident", requests=41, waiting=1, inFlight=1, lastWakeSeconds=0.021)]), "a")
    assert line.split() == ["a", "resident", "257", "MiB", "41", "+2", "21", "ms"]


def test_progress_has_a_percentage_only_when_it_is_known() -> None:
    known = item("a", ready="Unknown", reason="Publishing", phase="publishing", progress=0.47)
    unknown = item("b", ready="Unknown", reason="Building", phase="building", progress=-1)
    text = shown([known, unknown])
    assert re.search("publishing ━{9}╸? +47%$", line_of(text, "a").rstrip())  # of 20; the rest is in grey
    assert re.search("building +━{20}$", line_of(text, "b").rstrip())  # with a light that runs along it


def test_a_failed_model_says_why() -> None:
    text = shown([item("a", ready="False", reason="BadArtifact", message="cut off")])
    assert "BadArtifact: cut off" in line_of(text, "a")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_long_reason_is_cut_and_nothing_else_is(width: int) -> None:
    stream = io.StringIO()
    broken = item("broken", ready="False", reason="SourceNotFound", message="there is no such package " * 9)
    Console(file=stream, width=width).print(live.screen([item("efficientnet-lite0", requests=7), broken], [POOL], []))
    head, cut, whole = stream.getvalue().splitlines()[1:]
    assert head.split() == ["model", "tier", "bytes", "requests", "last", "wake"]
    assert whole.split() == ["efficientnet-lite0", "cold", "257", "MiB", "7", "-"]
    assert cut.split()[:6] == ["broken", "cold", "257", "MiB", "0", "-"]
    assert re.search("SourceNotFound: there.*…$", cut.rstrip())


def test_a_long_name_is_cut_and_nothing_else_is() -> None:
    stream = io.StringIO()
    models = [item("a-name-" * 9, tier="resident"), item("b", ready="False", reason="Crashed", message="again " * 20)]
    Console(file=stream, width=80).print(live.screen(models, [POOL], []))
    assert re.search(r"^a-name-a[a-z-]*… +resident +257 MiB +0 +- *$", stream.getvalue(), re.MULTILINE)
    assert re.search(r"^b +cold +257 MiB +0 +- +Crashed: .*… *$", stream.getvalue(), re.MULTILINE)


def test_a_file_below_the_working_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"{tmp_path}/catalog/a.yaml:9: OmniModel default/a: wrong"
    assert f"✗ {message[:30]}" in shown([], [{"message": message}])
    monkeypatch.chdir(tmp_path)
    assert "✗ catalog/a.yaml:9: OmniModel" in shown([], [{"message": message}])


def test_errors_of_manifests_stand_below() -> None:
    text = shown([item("a")], [{"message": "new.yaml:9: spec.residency.idleAfter: 0s is not a lifetime"}])
    assert "✗ new.yaml:9" in text.splitlines()[-1]


def test_when_not_all_fit_what_needs_a_look_comes_first() -> None:
    models = [item(f"m{number}", tier="cold") for number in range(9)]
    models += [item("resident", tier="resident"), item("broken", ready="False", reason="Crashed")]
    text = shown(models, rows=3)
    assert "resident" in text
    assert "broken" in text
    assert "… and 8 more" in text


def test_the_curl_line_chats_when_a_model_can() -> None:
    chat = item("smollm2")
    chat["spec"]["runtime"]["task"] = "text-generation"
    assert "/v1/chat/completions" in live.curl_line("http://x", [item("a"), chat])
    assert '"model": "smollm2"' in live.curl_line("http://x", [item("a"), chat])
    assert live.curl_line("http://x", [item("a")]) == "curl -s http://x/v1/models"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "-"), (None, "-"), (512, "512 B"), (1536, "1.5 KiB"), (257 << 20, "257 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes(value: int | None, text: str) -> None:
    assert output.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0004, "0.4 ms"), (0.021, "21 ms"), (3.25, "3.2 s"), (240, "4m"), (7200, "2h"), (200000, "2d")],
)
def test_durations(value: float | None, text: str) -> None:
    assert output.seconds(value) == text


def test_age_of_a_time() -> None:
    assert output.age("2026-11-29T12:00:00Z", 1795953605.0) == "5.0 s"
    assert output.age("", 0.0) == "-"
    assert output.age("2026-11-29T12:00:00Z", 0.0) == "0 s", "a clock that is behind is no reason to show nonsense"


def test_the_picture_of_the_readme_is_what_a_terminal_shows() -> None:
    models = [
        item("crepe", mib=84.9, tier="warm", requests=3, lastWakeSeconds=0.009),
        item("efficientnet-lite0", mib=17.9, tier="resident", requests=5, lastWakeSeconds=0.003),
        item("minilm", mib=86.1, tier="warm", requests=12, lastWakeSeconds=0.005),
        item("nanoguard", ready="Unknown", mib=0, phase="publishing", progress=0.47),
        item("silero-vad", mib=1.2, tier="resident", requests=8, lastWakeSeconds=0.002),
        item("smollm2", tier="resident", requests=41, inFlight=2, lastWakeSeconds=0.021),
        item("whisper-tiny", mib=144, tier="warm", requests=2, lastWakeSeconds=0.013),
        item("wordllama", mib=15.6),
    ]
    status = {**POOL["status"], "budgetBytes": 576 << 20, "freeBytes": 101 << 20, "overcommitRatio": 4.31}
    error = {
        "message": "examples/catalog/new.yaml:9: OmniModel default/new: spec.residency.idleAfter: '0s': 0s is not a "
        "lifetime; did you mean never? Else write a duration such as 5m"
    }
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True, color_system="standard", no_color=False)
    console.print(live.screen(models, [{**POOL, "status": status}], [error]))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]
    assert "\n".join(["```", *lines, "```"]) in (ROOT / "README.md").read_text("utf-8")
