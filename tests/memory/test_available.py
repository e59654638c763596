"""How much memory is left: the machine's, or less under a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnimodel.memory.devices.available import available_bytes

MIB = 1 << 20


def machine(root: Path, available_mib: int, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 8192 kB\nMemAvailable:   {available_mib << 10} kB\nHugePages_Total: 0\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version2(limit: str, used_mib: int, cache_mib: int = 0) -> dict[str, str]:
    cache = f"anon 1\nfile {cache_mib * MIB}\ninactive_file {cache_mib * MIB}\nactive_file 0\n"
    return {"memory.max": limit, "memory.current": str(used_mib * MIB), "memory.stat": cache}


def version1(limit: int, used_mib: int, cache_mib: int) -> dict[str, str]:
    cache = f"cache 5\ntotal_inactive_file {cache_mib * MIB}\ntotal_active_file 0\ninactive_file 7\nactive_file 9\n"
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(used_mib * MIB),
        "memory.stat": cache,
    }


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected_mib"),
    [
        pytest.param("", {}, 1000, id="no control groups"),
        pytest.param("0::/\n", {}, 1000, id="the root group has no limit"),
        pytest.param("0::/a\n", under("a", version2("max", 900)), 1000, id="no limit set"),
        pytest.param("0::/a\n", under("a", version2(str(600 * MIB), 400)), 200, id="a limit"),
        pytest.param("0::/a\n", under("a", version2(str(600 * MIB), 400, 150)), 350, id="page cache is room"),
        pytest.param("0::/a\n", under("a", version2(str(600 * MIB), 700)), 0, id="over its limit"),
        pytest.param(
            "0::/a/b\n",
            under("a", version2(str(500 * MIB), 450)) | under("a/b", version2("max", 10)),
            50,
            id="the limit of a group above",
        ),
        pytest.param(
            "0::/../host/pod\n",
            version2(str(300 * MIB), 100),
            200,
            id="a container that sees its own group as the root",
        ),
        pytest.param(
            "5:memory:/x\n0::/x\n", under("memory/x", version1(600 * MIB, 500, 200)), 300, id="version 1, with cache"
        ),
        pytest.param(
            "5:memory:/x\n", under("memory/x", version1((1 << 63) - 4096, 500, 0)), 1000, id="version 1 without"
        ),
        pytest.param("0::/a\n", under("a", version2("none", 1)), 1000, id="a file nobody understands"),
    ],
)
def test_available(tmp_path, cgroup, files, expected_mib):
    assert available_bytes(machine(tmp_path, 1000, cgroup, files)) == expected_mib * MIB


def test_this_machine():
    assert 0 < available_bytes() < 1 << 50
