"""The book of an emulated GPU, on which many tests rest: what one process has is never taken for another's."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from gpu.emulated_book import SLOTS, Book


def test_every_process_has_a_slot_of_its_own(tmp_path):
    book = Book(tmp_path / "book", 1 << 20, 0)
    identities = [(number % 7, 1 + number % 11, number) for number in range(SLOTS)]
    slots = {ctypes.addressof(book.claim(identity)) for identity in identities}
    assert len(slots) == SLOTS
    assert {ctypes.addressof(book.claim(identity)) for identity in identities[:50]} <= slots
    book.claim(identities[5]).bytes = 3
    assert dict(book.processes()) == {}  # none of them is there, and all slots are free again
    assert book.used_bytes() == 0
