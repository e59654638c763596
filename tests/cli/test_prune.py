"""`omni prune` against a running system."""

from __future__ import annotations

import json

from cli.conftest import Running


def test_it_says_what_would_go_and_what_came_free(system: Running) -> None:
    would = system.omni("prune", "--dry-run")
    assert would.returncode == 0
    head, row = would.stdout.splitlines()
    assert head.split() == ["KIND", "WHAT", "SIZE", "USED"]
    assert row.startswith("image   default/gone (float32)   3.0 MiB   ")
    assert would.stderr == "3.0 MiB would come free\n"
    assert system.omni("prune").stderr == "3.0 MiB came free\n"


def test_json_is_alone_on_stdout(system: Running) -> None:
    found = system.omni("prune", "--dry-run", "-o", "json")
    assert json.loads(found.stdout)["removed"][0]["kind"] == "image"
    assert found.stderr == ""
