#!/usr/bin/env python3
"""The test cluster by hand: `python tests/cluster up FOLDER`, and the other commands that --help lists."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # of this folder, cluster.py would be taken for the package

from cluster.cluster import Cluster, Level  # noqa: E402
from cluster.connection import ClusterError  # noqa: E402


def main() -> int:
    """Run one command; its exit code."""
    parser = argparse.ArgumentParser(prog="python tests/cluster", description="A real Kubernetes cluster for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in {
        "up": "build what is missing and start a cluster",
        "down": "end it; only FOLDER/logs stays",
        "status": "what runs, its memory in MiB, where things are",
        "kubeconfig": "the path of the administrator's kubeconfig",
        "image": "make a root file system an image of the node",
    }.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        command.add_argument("folder", help="where all state of the cluster lies")
        if name == "up":
            command.add_argument("--level", choices=("api", "node"), default="node")
        if name == "image":
            command.add_argument("name")
            command.add_argument("root", help="a folder: the root file system")
            command.add_argument("entrypoint", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    level: Level = getattr(options, "level", "node")
    cluster = Cluster(options.folder, level, lambda text: sys.stderr.write(f"{text}\n"))
    try:
        match options.command:
            case "up":
                cluster.up()
            case "down":
                cluster.down()
            case "status":
                sys.stdout.write(f"{json.dumps(cluster.status(), indent=1)}\n")
            case "kubeconfig":
                sys.stdout.write(f"{cluster.kubeconfig}\n")
            case "image":
                sys.stdout.write(f"{cluster.image(options.name, options.root, options.entrypoint)}\n")
    except (ClusterError, TimeoutError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
