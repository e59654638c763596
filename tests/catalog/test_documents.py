"""YAML as people and attackers write it: anchors and lines are kept, and nothing unsafe or unbounded is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnimodel.catalog import load
from omnimodel.catalog.documents import SIZE_LIMIT, documents


def values(text: str) -> list[Any]:
    found, errors = documents(text, "f.yaml")
    assert [str(error) for error in errors] == []
    return [document.value for document in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x {b: 1}\nc: *x\n", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  c: 3\n", {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}),
        ("a: &x {b: 1}\nc: &y {b: 2, d: 3}\ne: {<<: [*x, *y]}\n", {"a": {"b": 1}, "c": {"b": 2, "d": 3}, "e": {"b": 1, "d": 3}}),
        ("a: &x {b: {c: 1}}\nd: {<<: *x, b: {e: 2}}\n", {"a": {"b": {"c": 1}}, "d": {"b": {"e": 2}}}),
        ("a: 2026-11-29\n", {"a": "2026-11-29"}),
        ("a: 12:30:45\n", {"a": "12:30:45"}),
        ("a: gpt-oss:20b\n", {"a": "gpt-oss:20b"}),
        ("a: yes\nb: off\n", {"a": True, "b": False}),
        ("a: 0x10\nb: 1_000\nc: 0o17\n", {"a": 16, "b": 1000, "c": "0o17"}),
        ("a: |\n  one\n  two\n", {"a": "one\ntwo\n"}),
        ("a: ~\nb:\n", {"a": None, "b": None}),
        ("1: a\ntrue: b\n", {"1": "a", "true": "b"}),
        ("=: a\n", {"=": "a"}),
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("", None),
        ("---\n---\n", None),
    ],
)  # fmt: skip
def test_yaml_is_read_as_json_knows_it(text: str, expected: Any) -> None:
    assert values(text) == ([] if expected is None else [expected])


def test_every_field_has_its_line_merged_and_aliased_ones_where_they_are_written() -> None:
    text = "base: &b\n  x: 1\n  y: [1,\n    2]\n---\nspec:\n  a: 1\n  list:\n    - b: 2\n    - c: 3\n"
    _, second = documents(text, "f.yaml")[0]
    assert second.place.line(()) == 6
    assert second.place.line(("spec", "a")) == 7
    assert second.place.line(("spec", "list", 1, "c")) == 10
    assert second.place.line(("spec", "list", 1, "gone")) == 10
    merged = documents("a: &b\n  x: 1\nc:\n  <<: *b\n  y: 2\n", "f.yaml")[0][0]
    assert merged.place.line(("c", "x")) == 2
    assert merged.place.line(("c", "y")) == 5


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE: list[tuple[str, str, str]] = [
    ("a tag that makes an object", "a: !!python/object/apply:os.system ['true']\n", "f.yaml:1: manifest: a: has the tag !!python/object/apply:os.system; remove the tag"),
    ("a tag of its own", "a: !secret x\n", "f.yaml:1: manifest: a: has the tag !secret; remove the tag"),
    ("binary", "a: !!binary aGk=\n", "f.yaml:1: manifest: a: has the tag !!binary; remove the tag"),
    ("a set", "a: !!set {b, c}\n", "f.yaml:1: manifest: a: has the tag !!set; remove the tag"),
    ("an ordered mapping", "a: !!omap [b: 1]\n", "f.yaml:1: manifest: a: has the tag !!omap; remove the tag"),
    ("a key twice", "a:\n  b: 1\n  b: 2\n", "f.yaml:3: manifest: a.b: is there twice, here and in line 2; remove one"),
    ("a key twice in two spellings", "1: a\n'1': b\n", "f.yaml:2: manifest: 1: is there twice, here and in line 1; remove one"),
    ("a mapping as key", "? {a: 1}\n: b\n", "f.yaml:1: manifest: has a key that is no text; write a text as key"),
    ("a merge of no mapping", "a: &x [1]\nb: {<<: *x}\n", "f.yaml:1: manifest: b: merges (<<) what is no mapping; write <<: *anchor"),
    ("itself", "a: &a {b: *a}\n", "f.yaml:1: manifest: a.b: contains itself by an alias; remove the alias"),
    ("itself by a merge", "a: &a {<<: *a}\n", "f.yaml:1: manifest: a: contains itself by an alias; remove the alias"),
    ("billions of values in nine lines", LAUGHS, "is too much after following its aliases; write fewer aliases"),
    ("billions by merges", "a: &a {x0: 1, x1: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [{', '.join(['*' + (f'b{n - 1}' if n else 'a')] * 20)}]}}\n" for n in range(9)), "is too much after following its aliases; write fewer aliases"),
    ("a tab", "a:\n\tb: 1\n", "f.yaml:2: file: is no YAML: found character '\\t' that cannot start any token; indent with spaces, not with tabs"),
    ("not closed", "a: [1, 2\n", "f.yaml:2: file: is no YAML: expected ',' or ']', but got '<stream end>'; correct the line, or the one before it"),
    ("a colon in a text", "a: b: c\n", "f.yaml:1: file: is no YAML: mapping values are not allowed here; put the text in quotes, or correct the indentation"),
    ("an alias without anchor", "a: *gone\n", "f.yaml:1: file: is no YAML: found undefined alias 'gone'; define the anchor (&name) before its use (*name) in the same document"),
    ("a NUL", "a: \x00\n", "f.yaml: file: is no YAML: unacceptable character #x0000: special characters are not allowed; save it as UTF-8 text"),
    ("deep", "[" * 5000, "is nested too deeply; write it flatter"),
    ("deep but closed", "[" * 100 + "]" * 100, "is nested too deeply; write it flatter"),
    ("large", " " * (SIZE_LIMIT + 1), "f.yaml: file: has more than 4 MiB; split it"),
    ("a huge number", "a: " + "9" * 10000 + "\n", "f.yaml:1: manifest: a: has a number of 10000 digits; put it in quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_what_is_unsafe_or_unbounded_is_refused_in_one_line(text: str, expected: str) -> None:
    found, errors = documents(text, "f.yaml")
    assert not found
    assert len(errors) == 1
    assert str(errors[0]).endswith(expected)
    assert len(str(errors[0])) < 400


def test_documents_before_a_mistake_are_read(tmp_path: Path) -> None:
    found, errors = documents("a: 1\n---\nb: [\n", "f.yaml")
    assert [document.value for document in found] == [{"a": 1}]
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xef\xbb\xbfapiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n", ""),
        (b"a: 1\nb: \xe9\n", "file: is not UTF-8 text; save it as UTF-8"),
        ("a: 1".encode("utf-16"), "file: is not UTF-8 text; save it as UTF-8"),
    ],
    ids=["a mark of UTF-8", "Latin-1", "UTF-16"],
)
def test_files_are_utf_8(tmp_path: Path, raw: bytes, expected: str) -> None:
    (tmp_path / "a.yaml").write_bytes(raw)
    errors = [str(error) for error in load(tmp_path).errors]
    assert (not errors) if not expected else errors[0].endswith(expected)


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"\\\n\t #,?%@`~.0123<=")))
def test_any_text_gives_documents_or_errors_and_never_a_traceback(text: str) -> None:
    found, errors = documents(text, "f.yaml")
    assert all(error.problem for error in errors)
    assert all(document.place.line(()) >= 1 for document in found)
