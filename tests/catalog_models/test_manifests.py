"""The manifests of the catalogue as documents: valid, complete, self-contained, and of different models."""

import ast
import re
from pathlib import Path

import pytest

from catalog_models.catalogue import OWN
from example_models import EXAMPLES, MODELS, manifests
from omnimodel.catalog import load
from omnimodel.quantity import parse_bytes

EVERY = pytest.mark.parametrize("name", MODELS)


def code(model):
    """Every inline file of a manifest, by its name."""
    found = dict((model["spec"]["runtime"].get("handler") or {}).get("files") or {})
    for mount in model["spec"].get("mounts") or ():
        if isinstance(mount["source"], dict):
            found |= mount["source"]["files"]
    return found


@pytest.mark.parametrize("folder", ["catalog", "llamacpp"])
def test_every_manifest_is_valid_without_a_note(folder):
    found = load(EXAMPLES / folder)
    assert [str(error) for error in found.errors] == []
    assert found.notes == ()
    assert len(found.objects) == sum(len(manifests(kind, folder)) for kind in ("OmniModel", "OmniPool"))


def test_there_are_at_least_twelve_different_models_of_several_engines_and_tasks():
    assert len({m["spec"]["source"]["package"]["sha256"] for m in MODELS.values()}) >= 12
    assert {m["spec"]["runtime"]["engine"] for m in MODELS.values()} == {"transformers", "python", "command"}
    tasks = {m["spec"]["runtime"]["task"] for m in MODELS.values()}
    assert tasks == {
        "text-generation",
        "embeddings",
        "text-classification",
        "automatic-speech-recognition",
        "text-to-speech",
        "infer",
    }


def test_no_name_is_served_by_two_models():
    names = list(MODELS)
    for model in MODELS.values():
        names += [served if isinstance(served, str) else served["name"] for served in model["spec"]["servedNames"]]
    assert len(names) == len(set(names))


def test_some_names_are_no_dns_labels():
    names = [served for model in MODELS.values() for served in model["spec"]["servedNames"] if isinstance(served, str)]
    assert any("/" in name for name in names)
    assert any(re.search("[A-Z]", name) for name in names)
    assert any("." in name for name in names)


@EVERY
def test_says_what_it_is_whose_it_is_and_how_to_check_it(name):
    spec = MODELS[name]["spec"]
    assert spec["description"]
    assert spec["capabilities"]
    assert spec["metadata"]["author"]
    assert spec["metadata"]["licence"] in ("Apache-2.0", "MIT")
    assert spec["probe"]["expect"]


@EVERY
def test_comes_from_a_pinned_wheel_and_points_at_no_file_beside_it(name):
    spec = MODELS[name]["spec"]
    (kind,) = spec["source"]
    assert kind == "package"
    assert re.fullmatch("[0-9a-f]{64}", spec["source"]["package"]["sha256"])
    assert all(mount["source"] is True or set(mount["source"]) == {"files"} for mount in spec.get("mounts") or ())
    for requirement in (spec["runtime"].get("environment") or {}).get("requirements") or ():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", requirement), f"{requirement} is not pinned"


@EVERY
def test_its_code_is_code_that_a_person_wants_to_copy(name):
    for file, text in code(MODELS[name]).items():
        tree = ast.parse(text)
        assert ast.get_docstring(tree), f"{file} does not say what it is for"
        assert max(map(len, text.splitlines())) <= 110, file
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "predict":
                assert ast.get_docstring(node), f"predict in {file} does not say what it answers"
                arguments = node.args.args[1:]
                assert all(argument.annotation for argument in arguments)
                assert node.returns


def test_only_small_models_are_kept_on_the_device():
    kept = [name for name, model in MODELS.items() if (model["spec"].get("residency") or {}).get("keepResident")]
    assert kept == ["silero-vad"]


def test_the_pool_has_a_budget_of_its_own_and_is_the_one_the_models_ask_for():
    (pool,) = manifests("OmniPool").values()
    assert pool["metadata"]["name"] == "default"
    assert parse_bytes(pool["spec"]["device"]["memory"]) <= 576 << 20
    assert all("pool" not in model["spec"] for model in MODELS.values())


def test_a_chat_can_be_frozen_for_every_other_model():
    (pool,) = manifests("OmniPool").values()
    needs = {
        name: parse_bytes(memory) >> 20
        for name, model in MODELS.items()
        if (memory := (model["spec"].get("resources") or {}).get("deviceMemory"))
    }
    frozen, kept = needs.pop("smollm2") - 256, 52  # its image has 257 MiB; what the kept model takes was measured
    assert frozen + kept + max(needs.values()) <= parse_bytes(pool["spec"]["device"]["memory"]) >> 20
    assert "priority" not in MODELS["smollm2"]["spec"]["residency"], "a higher one would keep it from being frozen"


def test_the_readme_names_every_model():
    readme = Path(EXAMPLES, "README.md").read_text()
    assert [name for name in MODELS if f"[{name}](catalog/{name}.yaml)" not in readme] == []
    assert len(OWN) + 1 == len(MODELS)
