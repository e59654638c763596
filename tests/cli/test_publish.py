"""`omni publish` as a person runs it, and `omni up` served from what it published."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agent.fetching import wheel
from agent.package_index import PackageIndex
from cli.conftest import environment
from cli.linear import POOL, QUESTION, write_linear, write_weights
from memory.test_published import tree
from omnimodel.agent.kept import KeptLock
from running import Up

pytestmark = pytest.mark.slow

FOREIGN = """\
apiVersion: omnimodel.io/v1alpha1
kind: OmniModel
metadata: {name: foreign}
spec:
  source: {package: {name: tiny-weights, version: "1.0", path: tiny_weights/__init__.py}}
  runtime: {engine: command, command: [serve, --port, "{port}"]}
"""


def omni(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnimodel.cli", *arguments]
    return subprocess.run(
        command, env=environment(place / "state"), capture_output=True, text=True, timeout=300, check=False
    )


def test_what_was_published_is_served_where_its_source_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    catalog, store = tmp_path / "catalog", tmp_path / "store"
    catalog.mkdir()
    write_weights(tmp_path / "weights.safetensors")
    write_linear(catalog, "one", tmp_path / "weights.safetensors")
    write_linear(catalog, "absent", tmp_path / "absent.safetensors")
    (catalog / "foreign.yaml").write_text(FOREIGN)
    wheel(tmp_path / "shelf")
    publish = ["publish", str(catalog), "--store", str(store)]

    with PackageIndex(tmp_path / "shelf") as index:
        (catalog / "pool.yaml").write_text(f"{POOL}  sources: {{packageIndex: {index.url}/simple}}\n")
        done = omni(tmp_path, *publish, "-o", "json")
    assert done.returncode == 1, done.stderr
    assert f"error: OmniModel default/absent: its source {tmp_path}/absent.safetensors does not exist" in done.stderr
    found = {model["model"]: model for model in json.loads(done.stdout)["models"]}
    assert found["default/one"]["bytes"] == 4096
    assert (store / "store" / "images" / found["default/one"]["digest"]).is_dir()
    assert (found["default/absent"]["failed"], found["default/absent"]["digest"]) == (True, "")
    assert (found["default/foreign"]["failed"], found["default/foreign"]["digest"]) == (False, "")
    assert found["default/foreign"]["source"]
    assert len(list((store / "sources" / "fetched").iterdir())) == 1

    (catalog / "absent.yaml").unlink()
    (catalog / "foreign.yaml").unlink()
    (tmp_path / "weights.safetensors").unlink()
    done = omni(tmp_path, *publish)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["MODEL", "DTYPE", "SIZE", "DIGEST", "default/one", "float32", "4.0", "KiB",
                                   found["default/one"]["digest"]]  # fmt: skip
    assert "fetching" not in done.stderr

    before = tree(store)
    published = f"  store: {{published: [{{name: catalogue, path: {store}}}]}}\n"
    (catalog / "pool.yaml").write_text(POOL + published)
    up = Up(catalog, tmp_path / "state")
    try:
        assert up.ready()["failed"] == []
        assert up.infer("one", QUESTION)[0] == 200
        models = json.loads(up.omni("get", "models", "-o", "json").stdout)["items"]
        assert models[0]["status"]["residency"][0]["store"] == "catalogue"
        described = up.omni("describe", "one").stdout
        assert "its image is in the published store catalogue" in described
        assert f"{tmp_path}/state, " in described
        pools = json.loads(up.omni("get", "pools", "-o", "json").stdout)["items"]
        assert pools[0]["status"]["store"]["path"] == str(tmp_path / "state")
        assert pools[0]["status"]["store"]["freeBytes"] > 0
    finally:
        up.stop()
    assert tree(store) == before


def test_one_system_writes_a_store_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "pool.yaml").write_text(POOL)
    with closing(KeptLock("a test", tmp_path / "store")):
        done = omni(tmp_path, "publish", str(tmp_path / "catalog"), "--store", str(tmp_path / "store"))
    assert done.returncode == 1
    assert "is written by another system" in done.stderr


def test_a_pool_of_gpus_is_published_for_where_there_is_none(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    catalog, store = tmp_path / "catalog", tmp_path / "store"
    catalog.mkdir()
    write_weights(tmp_path / "weights.safetensors")
    write_linear(catalog, "one", tmp_path / "weights.safetensors")
    manifest = catalog / "one.yaml"
    manifest.write_text(manifest.read_text().replace("    dtype: float32\n", ""))
    (catalog / "pool.yaml").write_text(POOL.replace("type: cpu", "type: cuda"))
    done = omni(tmp_path, "publish", str(catalog), "--store", str(store), "-o", "json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["models"]
    assert found["dtype"] == "bfloat16"
    assert (store / "store" / "images" / found["digest"] / "image").exists()  # too small to be packed
