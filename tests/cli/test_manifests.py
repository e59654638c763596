"""`validate`, `plan` and `crds`: nothing is started, and every answer names the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from controllers.manifests import write_model, write_pool
from omnimodel.cli import omni


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "catalog"
    path.mkdir()
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(omni, [str(argument) for argument in arguments])


def test_valid_manifests_say_so_on_stderr(folder: Path) -> None:
    write_model(folder, "words")
    done = run("validate", folder)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "1 model, 0 pools" in done.stderr


def test_an_error_is_one_line_with_place_and_cure(folder: Path) -> None:
    path = write_model(folder, "words")
    path.write_text(path.read_text().replace("engine: python", "egnine: python"))
    done = run("validate", folder)
    assert done.exit_code == 2
    lines = [line for line in done.stdout.splitlines() if "egnine" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}:9:")
    assert "engine" in lines[0].replace("egnine", "")


def test_two_models_with_one_served_name_are_told_with_file_and_line(folder: Path) -> None:
    write_model(folder, "ant", extra="servedNames: [gpt]")
    write_model(folder, "bee", extra="servedNames: [gpt]")
    done = run("validate", folder, "-o", "json")
    assert done.exit_code == 2
    errors = json.loads(done.stdout)["items"]
    ant, bee = (f"{folder / name}.yaml:1" for name in ("ant", "bee"))
    both = f'2 models have the served name "gpt": default/ant ({ant}) and default/bee ({bee}); only the oldest gets it'
    assert [(error["reason"], f"{error['file']}:{error['line']}") for error in errors] == [
        ("NameTaken", ant),
        ("NameTaken", bee),
    ]
    assert {error["problem"] for error in errors} == {both}, "a file has no age: neither is to blame"


def test_who_asks_for_the_full_name_of_another_model_is_told(folder: Path) -> None:
    write_model(folder, "ant", extra="servedNames: [default/bee]")
    write_model(folder, "bee")
    done = run("validate", folder)
    assert done.exit_code == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{folder / 'ant'}.yaml:1: OmniModel default/ant: spec.servedNames")
    assert f'"default/bee" is the full name of another model ({folder / "bee"}.yaml:1)' in line


def test_what_is_counted_is_one_or_several(folder: Path) -> None:
    write_pool(folder, "default")
    write_model(folder, "ant")
    assert run("validate", folder).stderr == "valid: 1 model, 1 pool\n"
    write_model(folder, "bee", extra="ttl: 300")
    assert run("validate", folder).stderr == "1 error; without it 1 model, 1 pool\n"


def test_a_model_of_a_missing_pool_is_told_where_pools_are_described(folder: Path) -> None:
    write_model(folder, "words", extra="pool: large")
    assert run("validate", folder).exit_code == 0, "its pool may be in files that were not given"
    write_pool(folder, "small")
    done = run("validate", folder)
    assert done.exit_code == 2
    assert "large" in done.stdout


def test_a_path_that_is_not_there_is_wrong_usage() -> None:
    assert run("validate", "/nonexistent").exit_code == 2


def test_plan_tells_ratio_sizes_and_what_excludes_what(folder: Path, tmp_path: Path) -> None:
    write_pool(folder, "default", "1Gi")
    for name, size in (("ant", "700Mi"), ("bee", "600Mi"), ("cat", "2Gi"), ("dog", "auto")):
        write_model(folder, name, extra=f"resources: {{deviceMemory: {size}}}")
    write_model(folder, "eel", extra="suspend: true")
    done = run("plan", folder, "--state-dir", tmp_path / "state")
    assert done.exit_code == 0
    assert "over-commit 1.27" in done.stdout
    assert "ant   not with bee" in done.stdout
    assert "TooLarge: needs 2.00 GiB" in done.stdout
    assert "Suspended" in done.stdout
    assert "unknown" in done.stdout
    assert "1 of them is not counted: nobody has measured its size yet" in done.stdout
    assert not (tmp_path / "state").exists(), "plan must not touch the state directory"


def test_validate_and_plan_tell_that_a_processor_is_one_device(folder: Path, tmp_path: Path) -> None:
    write_pool(folder, "default", "1Gi")
    path = write_model(folder, "ant", extra="resources: {devices: 2, deviceMemory: 700Mi}")
    assert "engines transformers and python keep a model on one device" in run("validate", folder).stdout
    before, _, _ = path.read_text().partition("  runtime:")
    path.write_text(before + "  runtime: {engine: llamacpp}\n")
    said = "asks for 2 devices, and OmniPool default/default has device.type: cpu, which is one"
    assert said in run("validate", folder).stdout
    assert f"TooLarge: {said}" in run("plan", folder, "--state-dir", tmp_path / "state").stdout


def test_plan_tells_what_of_the_affinity_one_machine_does_not_keep(folder: Path, tmp_path: Path) -> None:
    write_pool(folder, "default")
    write_pool(folder, "other")
    for name in ("ant", "bee"):
        write_model(folder, name, extra="affinity: {apart: [large]}")
    write_model(folder, "cat", extra="affinity: {together: [rag]}")
    write_model(folder, "dog", extra="pool: other\naffinity: {together: [rag]}")
    done = run("plan", folder, "--state-dir", tmp_path / "state")
    assert "is to be apart from default/ant (group large), and one machine is one pod: they take turns" in done.stdout
    assert "is to be together with default/cat (group rag), which is older and asks for pool default" in done.stdout


def test_plan_as_json(folder: Path, tmp_path: Path) -> None:
    write_pool(folder, "default", "1Gi")
    write_pool(folder, "other", "4Gi")
    write_model(folder, "ant", extra="resources: {deviceMemory: 700Mi}")
    write_model(folder, "bee", extra="pool: other\nresources: {deviceMemory: 2Gi}")
    done = run("plan", folder, "-o", "json", "--state-dir", tmp_path / "state")
    pools = {pool["pool"]: pool for pool in json.loads(done.stdout)["pools"]}
    assert [model["model"] for model in pools["default"]["models"]] == ["default/ant"]
    assert [model["model"] for model in pools["other"]["models"]] == ["default/bee"]
    assert pools["other"]["budgetBytes"] == 4 << 30
    assert pools["default"]["overcommitRatio"] == pytest.approx(700 / 1024, abs=0.001)


def test_plan_tries_another_budget(folder: Path, tmp_path: Path) -> None:
    write_model(folder, "ant", extra="resources: {deviceMemory: 700Mi}")
    done = run("plan", folder, "--memory", "350Mi", "-o", "json", "--state-dir", tmp_path / "state")
    (pool,) = json.loads(done.stdout)["pools"]
    assert [item["reason"] for item in pool["refused"]] == ["TooLarge"]


@pytest.mark.parametrize("value", ["24GB", "0", "-1Gi", "0.8", "lots"])
def test_a_budget_that_is_none_is_refused_with_a_cure(folder: Path, value: str) -> None:
    done = run("plan", folder, f"--memory={value}")
    assert done.exit_code == 2
    assert value in done.stderr


def test_crds_are_yaml_documents_and_fail_on_drift(tmp_path: Path) -> None:
    done = run("crds")
    assert {document["kind"] for document in yaml.safe_load_all(done.stdout)} == {"CustomResourceDefinition"}
    assert run("crds", "--output", tmp_path / "crds").exit_code == 0
    assert run("crds", "--check", tmp_path / "crds").exit_code == 0
    path = tmp_path / "crds" / "omnimodels.yaml"
    path.write_text(path.read_text() + "# touched\n")
    drifted = run("crds", "--check", tmp_path / "crds")
    assert drifted.exit_code == 1
    assert "omnimodels.yaml" in drifted.stderr
    assert "omnipools.yaml" not in drifted.stderr
