"""Text that grows token by token, with a byte-level tokenizer that splits every character it does not know."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from omnimodel.runtime.generation.tokens import Text, Tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokens.json").write_text(json.dumps({"chatTemplate": None, "specialTokens": {}, "maxLength": 100}))
    return Tokens(folder)


def pieces(tokens, ids, stops=()):
    text = Text(tokens, stops)
    found = []
    for count in range(1, len(ids) + 1):
        found.append(text.add(ids[:count]))
        if text.stopped:
            return found
    return [*found, text.end()]


@given(text=st.text(max_size=30))
def test_no_piece_has_half_a_character_and_all_pieces_are_the_text(tokens, text):
    found = pieces(tokens, tokens.encode(text))
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found if "\ufffd" not in text)


def test_a_character_comes_with_its_last_byte(tokens):
    assert pieces(tokens, tokens.encode("a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_a_text_that_ends_in_half_a_character_ends_in_the_replacement(tokens):
    ids = tokens.encode("é")[:1]
    assert "".join(pieces(tokens, ids)) == "\ufffd"


def test_special_tokens_are_no_text(tokens):
    ids = [*tokens.encode("yes"), tokens.tokenizer.token_to_id("<end>")]
    assert "".join(pieces(tokens, ids)) == "yes"


@given(
    text=st.text(alphabet="abc", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_is_never_given_out_not_even_its_beginning(tokens, text, stops):
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    found = "".join(pieces(tokens, tokens.encode(text), stops))
    assert not any(stop in found for stop in stops)
    if not places:
        assert found == text
    else:
        assert text.startswith(found)


@pytest.mark.parametrize(
    ("characters", "most", "expected"),
    [
        pytest.param(30_000, 1_000, False, id="short enough to be counted at once"),
        pytest.param(70_000, 40_000, False, id="not for sure"),
        pytest.param(90_000, 40_000, True, id="twice as many"),
        pytest.param(300_000, 1_000, True, id="more than any tokens are long"),
    ],
)
def test_a_long_text_is_known_to_have_too_many_tokens_before_it_is_all_of_them(tokens, characters, most, expected):
    assert tokens.exceeds("a" * characters, most) is expected
