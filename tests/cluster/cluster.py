"""A real one-node Kubernetes cluster for tests, with all its state in one folder.

    with Cluster(tmp_path, level="node") as cluster:
        cluster.image("app:dev", rootfs, ["/bin/app"])  # -> localhost/app:dev
        cluster.kubectl("apply", "-f", "app.yaml")

Level "api" is etcd, kube-apiserver and kube-controller-manager: enough for CRDs and controllers,
and needs no root. Level "node" is everything, with real pods, in Linux namespaces of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import string
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from cluster.access import NODE, ask, write_certificates, write_kubeconfigs
from cluster.connection import ClusterError, Connection
from cluster.host import (
    Process,
    add_link,
    cgroups,
    free_ports,
    inhabitants,
    make_cgroup,
    remove_cgroup,
    remove_link,
    stuck,
)
from cluster.image import write_image

Level = Literal["api", "node"]

HERE = Path(__file__).resolve().parent
DNS = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"
SANDBOX_END_SECONDS = 90  # the first process of a sandbox ends after all others, its mounts and its networks
HIDDEN = [Path("/run"), Path("/var/lib"), Path("/var/log")]  # etc/sandbox.sh gives the node its own


def build(level: Level, log: Callable[[str], object] = str) -> Path:
    """Build what is missing of the programs of a level; the folder they lie in.

    Raises:
        ClusterError: a program could not be built.
    """
    command = [str(HERE / "build"), level]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        told: list[str] = []
        for line in child.stderr or ():
            told.append(line.rstrip())
            log(told[-1])
        folder = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise ClusterError(f"{' '.join(command)}: exit {child.returncode}", "\n".join(told[-25:]))
    return Path(folder.splitlines()[-1])


class Cluster(Connection):
    """One cluster. `down` leaves only `logs` in its folder, which `up` may then use again.

    Args:
        folder: where all its state lies.
        level: what runs in it.
        log: is told of each stage that is reached.
        shared: folders of this machine that pods of the runtime class "machine" see, read-only, where they are here.
        orphans: whether it outlives this program; if not, it dies with it, however that ends.
    """

    def __init__(
        self,
        folder: Path | str,
        level: Level = "node",
        log: Callable[[str], object] = str,  # by default it says nothing
        *,
        shared: Sequence[Path] = (),
        orphans: bool = True,
    ) -> None:
        self.folder = Path(folder).resolve()
        super().__init__(self.folder / "admin.kubeconfig")
        self.level: Level = level
        self.url = ""
        self.token = ""
        self.number: int | None = None  # the sandbox's link, cgroup and addresses are named by it
        self.processes: dict[str, Process] = {}
        self._log = log
        self._shared = tuple(shared)
        self._orphans = orphans
        self._began = time.monotonic()
        self._values: dict[str, object] = {}  # what the files in etc/ have filled in
        self._load()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def image(self, name: str, root: Path | str, entrypoint: Sequence[str]) -> str:
        """Make an image of a root file system, give it to the node and return its full name.

        Args:
            name: NAME or NAME:TAG, with or without localhost/ before it.
            root: the folder that becomes its only layer, owners and modes as they are.
            entrypoint: program and first arguments.
        """
        if self.level != "node":
            raise ClusterError("only a cluster of level node runs images")
        # Without a host in its name the kubelet would not find it; tagged latest, not look for it.
        full = name if name.startswith("localhost/") else f"localhost/{name}"
        full += "" if ":" in full else ":dev"
        archive = self.folder / "image.tar"
        write_image(archive, full, Path(root), entrypoint)
        ctr = [*self._enter(), str(self.bin / "ctr"), "--namespace=k8s.io"]
        self._run([*ctr, "images", "import", str(archive)])
        archive.unlink()
        return full

    def status(self) -> dict[str, Any]:
        """What runs, and the MiB of memory that each holds (None: it is dead)."""
        memory = {name: process.resident() for name, process in self.processes.items()}
        places = {"kubeconfig": str(self.kubeconfig), "bin": str(self.bin), "url": self.url}
        return {"level": self.level, **places, "processes": memory} if memory else {}

    def up(self) -> None:
        """Build what is not built yet, start the cluster, and return once it is ready."""
        if self._record.exists():
            raise ClusterError(f"{self.folder} holds a cluster already: take it down first")
        if self.folder.exists() and any(path.name != "logs" for path in self.folder.iterdir()):
            raise ClusterError(f"{self.folder} holds other things: `down` would remove them")
        self._began = time.monotonic()
        self.bin = build(self.level, self._log)
        self._say("the programs are built")
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        (self.folder / "logs").mkdir(parents=True)
        self._save()
        try:
            if self.level == "node":
                self._start_sandbox()
            self._start_control_plane()
            if self.level == "node":
                self._start_node()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End what `up` started and nothing else, and remove its data."""
        if not self._record.exists():
            return
        # The first process of the sandbox takes every process, mount and interface in it along, once each of them has
        # been reaped: by nsenter outside those that it started, which it does not while it stands still.
        for process in self.processes.values():
            process.resume()
        if "init" in self.processes:
            try:
                self.processes["init"].kill(SANDBOX_END_SECONDS)
            except TimeoutError as error:
                there = inhabitants(self.number) if self.number is not None else []
                error.add_note("\n".join(["in its cgroups:", *there, "not to be ended:", *stuck()]))
                raise
        for process in reversed(self.processes.values()):
            process.kill()
        if self.number is not None:
            remove_link(self.number)
            for group in cgroups(self.number):
                remove_cgroup(group)
        self.processes, self.number = {}, None
        for path in self.folder.iterdir():
            if path.name != "logs":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def silent_kubelet(self) -> Iterator[None]:
        """The kubelet stands still for as long as the context lasts."""
        waiting = self.processes["kubelet"]
        os.kill(waiting.children()[0], signal.SIGSTOP)
        for _ in self.until(10):  # nsenter stops with what it waits for, and continues it when it goes on
            if waiting.stopped():
                break
        try:
            yield
        finally:
            waiting.resume()

    def kill_api_server(self) -> None:
        """End the API server at once; its store and everything else goes on."""
        self.processes["kube-apiserver"].kill()

    def start_api_server(self) -> None:
        """Start the API server that was killed. Like all that is started here it ends with the thread that did so."""
        self._start("kube-apiserver")

    def wait_for_api_server(self) -> None:
        """Return once the API server is ready."""
        self._wait("kube-apiserver", "/readyz", 90, lambda: self._get("/readyz") is not None)

    def _start_sandbox(self) -> None:
        """Make the namespaces of the node, and its link to the machine."""
        if os.geteuid() != 0:
            raise ClusterError("level node needs root (level api does not)")
        for used in (self.folder, self.bin):
            if any(used.is_relative_to(path) for path in HIDDEN):
                raise ClusterError(f"{used}: the node cannot see into {', '.join(map(str, HIDDEN))}")
        unshare = ["unshare", "--mount-proc", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        self._spawn("sandbox", [*unshare, str(self.bin / "pause")])
        self._wait("sandbox", "its first process", 10, self._find_init)
        self.number = add_link(self.processes["init"].pid)
        self._save()
        for group in cgroups(self.number):
            make_cgroup(group)
        host, node = (f"10.203.{self.number}.{side}" for side in (1, 2))
        values = {"node": NODE, "folder": str(self.folder), "address": node, "gateway": host}
        self._run([*self._enter(), "sh", str(HERE / "etc/sandbox.sh")], env=self._environment() | values)
        self._say("the sandbox is ready")

    def _start_control_plane(self) -> None:
        sandbox = self.number is not None
        address = f"10.203.{self.number}.2" if sandbox else "127.0.0.1"
        etcd, peer, api = (2379, 2380, 6443) if sandbox else free_ports(3)
        self.url = f"https://{address}:{api}"
        self._values = {
            "folder": self.folder,
            "bin": self.bin,
            "node": NODE,
            "number": self.number,
            "address": address,
            "listen": "0.0.0.0" if sandbox else address,
            "endpoints": "lease" if sandbox else "none",
            "etcd_port": etcd,
            "peer_port": peer,
            "api_port": api,
        }
        write_certificates(self.folder, address)
        self.token = write_kubeconfigs(self.folder, self.url)
        self._start("etcd")
        self._start("kube-apiserver")
        if sandbox:
            self._start_containerd()
        self.wait_for_api_server()
        self._say("kube-apiserver is ready")
        self._start("kube-controller-manager")
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait("kube-controller-manager", account, 60, lambda: self._get(account) is not None)
        self._say("kube-controller-manager is ready")

    def _start_containerd(self) -> None:
        for name in ("containerd.toml", "pods.conflist", "kubelet.yaml", "kube-proxy.yaml"):
            self._write(f"etc/{name}", self._filled((HERE / "etc" / name).read_text()))
        self._write("machine.json", json.dumps(self._specification()))
        self._start("containerd")
        inside = Path("/proc", str(self.processes["init"].pid), "root")
        socket = inside / "run/containerd/containerd.sock"
        self._wait("containerd", "its socket", 30, socket.exists)
        for name in ("pause", "coredns"):
            root = self.folder / "images" / name
            root.mkdir(parents=True)
            shutil.copy2(self.bin / name, root)
            self.image(f"{name}:cluster", root, [f"/{name}"])
        self._say("containerd is ready")

    def _specification(self) -> dict[str, Any]:
        """What containers of the runtime class "machine" are made from, before the kubelet adds its own."""
        specification: dict[str, Any] = json.loads(self._run([str(self.bin / "ctr"), "oci", "spec"]))
        del specification["process"]["rlimits"]  # other runtime classes set none, and in a user namespace none can be
        for folder in map(str, self._shared):
            bound = {"destination": folder, "type": "bind", "source": folder, "options": ["rbind", "ro"]}
            specification["mounts"].append(bound)
        return specification

    def _start_node(self) -> None:
        for name in ("kube-scheduler", "kubelet", "kube-proxy"):
            self._start(name)
        for name in ("coredns", "machine"):
            self.kubectl("apply", "-f", str(HERE / f"etc/{name}.yaml"))
        self._wait("kubelet", "the node to be Ready", 90, self._node_ready)
        self._say("the node is ready")
        self._wait("kubelet", "CoreDNS", 90, self._dns_ready)
        self._say("CoreDNS is ready")

    def on_node(self, *command: str, stdin: str = "") -> str:
        """What a command prints that is run in the network of the node.

        Raises:
            ClusterError: it failed; `stderr` has its words.
        """
        target = f"--target={self.processes['init'].pid}"
        return self._run(["nsenter", target, "--net", "--", *command], stdin=stdin)

    @property
    def _record(self) -> Path:
        return self.folder / "cluster.json"

    def _enter(self) -> list[str]:
        """What runs a command inside the sandbox."""
        if "init" not in self.processes:
            return []
        target = f"--target={self.processes['init'].pid}"
        return ["nsenter", target, "--mount", "--net", "--pid", "--ipc", "--uts"]

    def _load(self) -> None:
        if self._record.exists():
            kept = json.loads(self._record.read_text())
            self.level, self.number = kept["level"], kept["number"]
            self.bin, self.url, self.token = Path(kept["bin"]), kept["url"], kept["token"]
            self.processes = {name: Process(*process) for name, process in kept["processes"].items()}

    def _save(self) -> None:
        kept = {key: getattr(self, key) for key in ("level", "bin", "url", "token", "number", "processes")}
        self._write("cluster.json", json.dumps(kept, indent=1, default=str))

    def _say(self, text: str) -> None:
        self._log(f"[{time.monotonic() - self._began:5.1f} s] {text}")

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _filled(self, text: str) -> str:
        return string.Template(text).substitute(self._values)

    def _environment(self) -> dict[str, str]:
        """Nothing of the caller's: a proxy or a KUBECONFIG of theirs would lead astray."""
        return super()._environment() | {"HOME": str(self.folder)}

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        # Of level node the sandbox's first process matters, and that one dies with unshare.
        bound = [] if self._orphans else ["setpriv", "--pdeathsig", "KILL", "--"]
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [*bound, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = Process.of(child.pid) or Process(child.pid, 0)
        child.returncode = 0  # Process.kill reaps it, if need be from a later program
        self._save()

    def _start(self, name: str) -> None:
        flags = tomllib.loads(self._filled((HERE / "etc/flags.toml").read_text()))[name]
        given = {flag: value if isinstance(value, str) else json.dumps(value) for flag, value in flags.items()}
        program = [*self._enter(), str(self.bin / name)]
        self._spawn(name, program + [f"--{flag}={value}" for flag, value in given.items()])

    def _wait(self, name: str, what: str, seconds: float, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            alive = self.processes[name].alive()
            if not alive or time.monotonic() > deadline:
                end = (self.folder / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
                why = f"not there after {seconds} s" if alive else "it ended"
                raise ClusterError(f"{name}: waiting for {what}: {why}. Its log ends:", "\n".join(end))
            time.sleep(0.05)

    def _get(self, path: str) -> dict[str, Any] | None:
        return ask(self.url + path, self.token, self.folder / "ca.crt")

    def _node_ready(self) -> bool:
        conditions = (self._get(f"/api/v1/nodes/{NODE}") or {}).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _dns_ready(self) -> bool:
        return bool((self._get(DNS) or {}).get("status", {}).get("readyReplicas"))

    def _find_init(self) -> bool:
        for pid in self.processes["sandbox"].children():
            init = Process.of(pid)
            if init and init.name() == "pause":  # the mounts are made by then
                self.processes["init"] = init
                self._save()
        return "init" in self.processes
