"""A cluster that tests can talk to, whoever started it: its kubeconfig, kubectl and helm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterError(RuntimeError):
    """The cluster did not do what was asked.

    Args:
        message: which part did what, and how its log ends.
        stderr: what the program printed about it.
    """

    def __init__(self, message: str, stderr: str = "") -> None:
        super().__init__(f"{message}\n{stderr}" if stderr else message)
        self.stderr = stderr


class Connection:
    """kubectl and helm as the administrator of a cluster.

    Args:
        kubeconfig: how to reach it.
        bin: folder of kubectl and helm; empty for those on the search path.
    """

    def __init__(self, kubeconfig: Path, bin: Path | None = None) -> None:
        self._kubeconfig = kubeconfig
        self.bin = bin or Path()

    @classmethod
    def given(cls, kubeconfig: Path) -> Self:
        """The cluster of someone's kubeconfig, with the programs on the search path.

        Raises:
            ClusterError: there is no such file, or no kubectl.
        """
        if not kubeconfig.is_file():
            raise ClusterError(f"there is no kubeconfig {kubeconfig}")
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise ClusterError("there is no kubectl on the search path")
        return cls(kubeconfig, Path(kubectl).parent)

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        return self._kubeconfig

    def kubectl(self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl and return what it prints.

        Args:
            kubeconfig: another user's; the administrator's when left out.

        Raises:
            ClusterError: it failed; `stderr` has its words.
        """
        program = [str(self.bin / "kubectl"), "--kubeconfig", str(kubeconfig or self.kubeconfig)]
        return self._run([*program, *arguments], stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm and return what it prints.

        Raises:
            ClusterError: it failed; `stderr` has its words.
        """
        helm = self.bin / "helm"
        return self._run([str(helm if helm.exists() else "helm"), "--kubeconfig", str(self.kubeconfig), *arguments])

    def get(self, *arguments: str) -> Any:
        """What `kubectl get` with these arguments says, as JSON values."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: Mapping[str, Any], options: Iterable[str] = ()) -> str:
        """`kubectl apply` of objects; what it prints."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return self.kubectl("apply", *options, "-f", "-", stdin=document)

    def until(self, seconds: float) -> Iterator[None]:
        """Attempts at something, a moment between them.

        Raises:
            ClusterError: time is up; the caller leaves the loop before that, when it has what it waits for.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield
            time.sleep(0.1)
        raise ClusterError(f"not there after {seconds} s")

    def _environment(self) -> dict[str, str]:
        """What programs are told of the caller's environment: hardly anything, for it would lead them astray."""
        return {"PATH": f"{self.bin}:{SYSTEM_PATH}", "HOME": os.environ.get("HOME", "/")}

    def _run(self, command: Sequence[str], stdin: str | None = None, **options: Any) -> str:
        options = {"env": self._environment(), "stderr": subprocess.PIPE, **options}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, check=False, input=stdin, stdout=subprocess.PIPE, text=True, **options
        )
        if done.returncode:
            raise ClusterError(f"{' '.join(command)[:300]}: exit {done.returncode}", done.stderr or done.stdout)
        return done.stdout
