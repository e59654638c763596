"""A source that is one GGUF file: what lies around it is neither needed nor looked at."""

from __future__ import annotations

from pathlib import Path

from omnimodel.runtime.engines.transformers import _checkpoint
from omnimodel.runtime.sdk import Source


def test_the_library_is_shown_a_folder_with_that_file_alone(tmp_path: Path) -> None:
    package, own = tmp_path / "package", tmp_path / "own"
    package.mkdir()
    own.mkdir()
    (package / "tiny.gguf").write_bytes(b"GGUF")
    (package / "config.json").write_text("{}")
    folder, name = _checkpoint(Source(package / "tiny.gguf"), own)
    assert [path.name for path in folder.iterdir()] == [name] == ["tiny.gguf"]
    assert folder.name == "package"
    assert (folder / name).read_bytes() == b"GGUF"
