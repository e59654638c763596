"""Loading files and folders: what is there, what is refused, what stays the same."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from catalog.files import model, write
from omnimodel.catalog import Catalog, identity_keys, load, read_identities

MONDAY = datetime(2026, 11, 30, 8, tzinfo=UTC)
TUESDAY = datetime(2026, 12, 1, 8, tzinfo=UTC)


def names(catalog: Catalog) -> list[str]:
    return [item.metadata.name for item in catalog.objects]


def messages(catalog: Catalog, folder: Path) -> list[str]:
    return [str(error).replace(f"{folder}/", "") for error in catalog.errors]


def test_a_folder_is_read_at_any_depth_without_hidden_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "team" / "a").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    write(tmp_path / "team" / "a", "one.yaml", model("one"))
    write(tmp_path, "two.yml", model("two"), model("three"))
    write(
        tmp_path,
        "four.json",
        '{"apiVersion": "omnimodel.io/v1alpha1", "kind": "OmniPool", "metadata": {"name": "four"}}',
    )
    write(tmp_path / ".git", "five.yaml", model("five"))
    write(tmp_path, ".six.yaml", model("six"))
    write(tmp_path, "seven.yaml~", "no: [yaml")
    write(tmp_path, "README.md", "no manifest")
    catalog = load(tmp_path)
    assert messages(catalog, tmp_path) == []
    assert names(catalog) == ["one", "three", "two", "four"]
    assert catalog.places["OmniModel", "default", "three"] == f"{tmp_path}/two.yml:8"


def test_paths_can_be_files_and_folders_and_each_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path, "one.yaml", model("one"))
    assert names(load([path, tmp_path, str(path)])) == ["one"]
    assert [str(error) for error in load(tmp_path / "gone").errors] == [
        f"{tmp_path}/gone: file: does not exist; give a file or a folder"
    ]


def test_one_object_in_two_places_names_both_and_the_first_stays(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    write(tmp_path, "b.yaml", model("two"), model("one", "text-generation"))
    catalog = load(tmp_path)
    assert messages(catalog, tmp_path) == [
        "b.yaml:8: OmniModel default/one: metadata.name: is there twice, here and in a.yaml:1; rename one, or remove it"
    ]
    assert names(catalog) == ["one", "two"]
    assert catalog.models[0].spec.runtime.task == "embeddings"
    assert messages(load(tmp_path, previous=catalog), tmp_path) == messages(catalog, tmp_path)


def test_who_had_a_name_first_keeps_it_wherever_the_other_file_sorts(tmp_path: Path) -> None:
    write(tmp_path, "b.yaml", model("one"))
    before = load(tmp_path)
    write(tmp_path, "a.yaml", model("one", "text-generation"))
    catalog = load(tmp_path, previous=before)
    assert catalog.models[0].spec.runtime.task == "embeddings"
    assert messages(catalog, tmp_path)[0].startswith("a.yaml:1: OmniModel default/one: metadata.name: is there twice")
    (tmp_path / "b.yaml").unlink()
    catalog = load(tmp_path, previous=catalog)
    assert catalog.models[0].spec.runtime.task == "text-generation"
    assert not catalog.errors


def test_one_object_twice_in_a_file(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"), model("one"))
    assert messages(load(tmp_path), tmp_path) == [
        "a.yaml:8: OmniModel default/one: metadata.name: is there twice, here and in a.yaml:1; rename one, or remove it"
    ]


def test_a_broken_file_changes_nothing_of_what_it_had(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"), model("two"))
    write(tmp_path, "b.yaml", model("three"))
    before = load(tmp_path)
    write(tmp_path, "a.yaml", model("one", "text-generation"), model("two", "nonsense"))
    write(tmp_path, "b.yaml", model("three", "text-generation"))
    broken = load(tmp_path, previous=before)
    (message,) = messages(broken, tmp_path)
    assert message.startswith(
        "a.yaml:13: OmniModel default/two: spec.runtime.task: 'nonsense': is none of the possible"
    )
    assert [item.spec.runtime.task for item in broken.models] == ["embeddings", "text-generation", "embeddings"]
    assert [item.metadata.generation for item in broken.models] == [1, 2, 1]
    again = load(tmp_path, previous=broken)
    assert messages(again, tmp_path) == messages(broken, tmp_path)
    write(tmp_path, "a.yaml", model("one", "text-generation"))
    cured = load(tmp_path, previous=again)
    assert not cured.errors
    assert names(cured) == ["one", "three"]
    assert cured.models[0].metadata.generation == 2


@pytest.mark.parametrize("text", ["a: [", "\tx: 1", "a: 1\na: 2\n", "\x00", "- &a [*a]"])
def test_a_file_that_is_no_yaml_keeps_its_last_good_version(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "a.yaml", model("one"))
    before = load(tmp_path)
    path.write_text(text, encoding="utf-8")
    broken = load(tmp_path, previous=before)
    assert names(broken) == ["one"]
    assert len(broken.errors) == 1


def test_a_file_that_was_never_good_gives_what_is_good_of_it(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"), model("two", "nonsense"))
    catalog = load(tmp_path)
    assert names(catalog) == ["one"]
    assert len(catalog.errors) == 1
    write(tmp_path, "a.yaml", model("one", "nonsense"), model("two"))
    catalog = load(tmp_path, previous=catalog)
    assert names(catalog) == ["one", "two"]
    assert len(catalog.errors) == 1
    write(tmp_path, "a.yaml", model("two"))
    assert names(load(tmp_path, previous=catalog)) == ["two"]


def test_a_deleted_file_takes_its_objects_along_even_when_it_was_broken(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", model("one"))
    before = load(tmp_path)
    path.write_text("a: [", encoding="utf-8")
    broken = load(tmp_path, previous=before)
    path.unlink()
    assert not load(tmp_path, previous=broken).objects


def test_uid_and_time_stay_and_the_generation_counts_changes_of_the_spec(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    first = load(tmp_path, now=lambda: MONDAY)
    metadata = first.models[0].metadata
    assert (metadata.generation, metadata.creation_timestamp) == (1, "2026-11-30T08:00:00Z")
    write(tmp_path, "moved.yaml", model("one").replace("name: one}", "name: one, labels: {team: search}}", 1))
    (tmp_path / "a.yaml").unlink()
    moved = load(tmp_path, previous=first, now=lambda: TUESDAY)
    assert moved.models[0].metadata.labels == {"team": "search"}
    assert moved.models[0].metadata.uid == metadata.uid
    assert (moved.models[0].metadata.generation, moved.models[0].metadata.creation_timestamp) == (
        1,
        "2026-11-30T08:00:00Z",
    )
    write(tmp_path, "moved.yaml", model("one", "text-generation"))
    changed = load(tmp_path, previous=moved, now=lambda: TUESDAY)
    assert (changed.models[0].metadata.uid, changed.models[0].metadata.generation) == (metadata.uid, 2)


def test_deleted_and_made_anew_is_another_object(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    first = load(tmp_path, now=lambda: MONDAY)
    (tmp_path / "a.yaml").unlink()
    empty = load(tmp_path, previous=first)
    write(tmp_path, "a.yaml", model("one"))
    anew = load(tmp_path, previous=empty, now=lambda: TUESDAY)
    assert anew.models[0].metadata.uid != first.models[0].metadata.uid
    assert anew.models[0].metadata.creation_timestamp == "2026-12-01T08:00:00Z"


def test_identities_live_over_a_restart(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", model("one"))
    first = load(tmp_path, now=lambda: MONDAY)
    kept = read_identities(identity_keys(first.identities))
    write(tmp_path, "a.yaml", model("one", "text-generation"))
    second = load(tmp_path, identities=kept, now=lambda: TUESDAY)
    assert second.models[0].metadata.uid == first.models[0].metadata.uid
    assert second.models[0].metadata.generation == 2


def test_what_the_api_server_added_does_no_harm(tmp_path: Path) -> None:
    write(
        tmp_path,
        "saved.yaml",
        model("one").replace(
            "metadata: {name: one}",
            "metadata: {name: one, uid: 9f1c, resourceVersion: '7', generation: 9, creationTimestamp: null,\n"
            "  managedFields: [{manager: kubectl}]}\n"
            "status: {observedGeneration: 9, conditions: []}",
        ),
    )
    catalog = load(tmp_path)
    assert messages(catalog, tmp_path) == []
    assert catalog.models[0].metadata.uid != "9f1c"
    assert catalog.models[0].metadata.generation == 1
    assert catalog.models[0].status.observed_generation == 0


def test_a_model_finds_the_pool_of_its_namespace_or_the_common_one(tmp_path: Path) -> None:
    pool = "apiVersion: omnimodel.io/v1alpha1\nkind: OmniPool\nmetadata: {{name: gpu, namespace: {0}}}\n"
    write(
        tmp_path,
        "a.yaml",
        pool.format("default"),
        pool.format("search"),
        model("one").replace("{name: one}", "{name: one, namespace: search}").replace("spec:", "spec:\n  pool: gpu"),
        model("two").replace("{name: two}", "{name: two, namespace: ads}").replace("spec:", "spec:\n  pool: gpu"),
        model("three").replace("spec:", "spec:\n  pool: gone"),
    )
    catalog = load(tmp_path)
    found = {item.metadata.name: catalog.pool_of(item) for item in catalog.models}
    assert {name: pool and pool.metadata.namespace for name, pool in found.items()} == {
        "one": "search",
        "two": "default",
        "three": None,
    }


CONFIG_MAP = (
    "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {language: en}\nbinaryData: {raw: /wA=}\n"
)
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: hub, namespace: search}\nstringData: {token: abc}\ndata: {other: eHl6}\n"


def test_config_maps_and_secrets_are_there_for_manifests(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", CONFIG_MAP, SECRET)
    catalog = load(tmp_path)
    assert messages(catalog, tmp_path) == []
    assert catalog.config("default") == {
        "configmaps": {"settings": {"language": b"en", "raw": b"\xff\x00"}},
        "secrets": {},
    }
    assert catalog.secrets("search") == {"hub": {"token": b"abc", "other": b"xyz"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONFIG_MAP.replace("en}", "7}"), "a.yaml:4: ConfigMap default/settings: data.language: is not text; put it in quotes"),
        (CONFIG_MAP.replace("/wA=", "x y"), "a.yaml:5: ConfigMap default/settings: binaryData.raw: is not base64; write it under data, or what `base64 -w0 FILE` prints"),
        (SECRET.replace("eHl6", "plain text"), "a.yaml:5: Secret search/hub: data.other: is not base64; write it under stringData, or what `base64 -w0 FILE` prints"),
        (CONFIG_MAP.replace("{language: en}", "{a/b: en}"), "a.yaml:4: ConfigMap default/settings: data: 'a/b': is no key; write letters, digits, hyphens, dots and _"),
        (CONFIG_MAP.replace("metadata: {name: settings}", "metadata: {}"), "a.yaml:3: ConfigMap: metadata.name: is missing; write metadata: {name: NAME}"),
    ],
    ids=["a number", "no base64", "a secret in clear text under data", "a key with a slash", "no name"],
)  # fmt: skip
def test_a_wrong_config_map_or_secret_is_refused_without_its_value(tmp_path: Path, text: str, expected: str) -> None:
    write(tmp_path, "a.yaml", text)
    assert messages(load(tmp_path), tmp_path) == [expected]


def test_other_kinds_are_left_out_with_a_note_and_misspelt_ones_are_errors(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n",
        "apiVersion: apps/v1\nkind: Deployment\n",
        "# only a comment\n",
        "apiVersion: omnimodel.io/v1alpha1\nkind: OmniModell\nmetadata: {name: a}\n",
        "kind: omnimodel\nmetadata: {name: b}\n",
        "models: {a: {cmd: llama-server}}\n",
        "just text\n",
    )
    catalog = load(tmp_path)
    assert [note.replace(f"{tmp_path}/", "") for note in catalog.notes] == [
        "a.yaml:1: v1/Service is left out",
        "a.yaml:5: apps/v1/Deployment is left out",
    ]
    assert messages(catalog, tmp_path) == [
        "a.yaml:11: OmniModell default/a: kind: 'OmniModell': is no kind of this API; write OmniModel",
        "a.yaml:14: omnimodel default/b: apiVersion: is missing; write omnimodel.io/v1alpha1",
        "a.yaml:14: omnimodel default/b: kind: 'omnimodel': is no kind of this API; write OmniModel",
        "a.yaml:17: manifest: apiVersion: is missing; write omnimodel.io/v1alpha1",
        "a.yaml:17: manifest: kind: is missing; write OmniModel or OmniPool",
        "a.yaml:19: manifest: is no mapping; begin with apiVersion: omnimodel.io/v1alpha1",
    ]
