"""Bodies of requests, as a process reads them."""

import json

import pytest

from omnimodel.runtime.requests import RequestError, read_object, text_of


@pytest.mark.parametrize(
    "body",
    [
        rb'{"input": "\ud83d\ude00"}',
        '{"input": "😀"}'.encode(),
        b'\xef\xbb\xbf{"input": "\xf0\x9f\x98\x80"}',
        '{"input": "😀"}'.encode("utf-16"),
    ],
    ids=["a pair of escapes", "UTF-8", "UTF-8 with its mark", "UTF-16"],
)
def test_a_body_is_text_however_it_is_written(body):
    assert read_object(body) == {"input": "😀"}


def test_an_escaped_backslash_is_none_of_a_pair():
    assert read_object(json.dumps({"input": r"\ud800"}).encode()) == {"input": r"\ud800"}


@pytest.mark.parametrize(
    "body",
    [
        rb'{"input": "a\ud800"}',
        rb'{"input": ["a", {"b": "\uDFFF"}]}',
        rb'{"\ud800": 1}',
        b'{"input": "\xed\xa0\x80"}',
        b'{"input": "\xff"}',
        b"[" * 100_000,
        b'{"input": ' + b"9" * 5000 + b"}",
    ],
    ids=["the first half", "deep inside", "a name", "half in UTF-8", "no UTF-8", "too deep", "too long a number"],
)
def test_what_is_no_text_is_refused_before_any_tokenizer_sees_it(body):
    with pytest.raises(RequestError) as caught:
        read_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_null_means_the_default_and_without_one_that_it_is_missing():
    assert text_of({"encoding_format": None}, "encoding_format", default="float") == "float"
    with pytest.raises(RequestError, match="Missing required parameter: voice"):
        text_of({"voice": None}, "voice")
