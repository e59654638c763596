"""Under which keys the image of a model is looked for."""

from __future__ import annotations

from omnimodel.agent.forms import Forms

FRAME = 1 << 20
SPEC = {"publishHash": "0" * 64, "dtype": "bfloat16"}


def test_the_best_form_is_looked_for_first_and_the_one_for_everybody_last():
    raw, packed = Forms(), Forms(packed_frame_bytes=FRAME)
    assert raw.keys(SPEC) == (f"{'0' * 40}-bfloat16",)
    assert packed.keys(SPEC) == (f"{'0' * 40}-bfloat16.packed1048576", *raw.keys(SPEC))
    assert Forms("float16").dtype({"dtype": "auto"}) == "float16"
    assert Forms("float16").dtype(SPEC) == "bfloat16"
