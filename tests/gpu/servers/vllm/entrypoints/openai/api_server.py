"""Stands for vLLM's OpenAI server: its flags that the system gives, and its endpoints for sleep and wake."""

# ruff: noqa: N802  (methods have the names that http.server calls)
from __future__ import annotations

import argparse
import os
from urllib.parse import parse_qs, urlsplit

from standin import FAULT, Handler, Server, UnixThreads


class VllmHandler(Handler):
    sleeps = False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.say(200)
        elif self.path == "/is_sleeping" and dev_mode():
            self.say(200, {"is_sleeping": self.server_of.sleeping})
        else:
            self.say(404)

    def do_POST(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path == "/v1/chat/completions":
            self.chat()
        elif path == "/sleep" and dev_mode():
            self.body()
            if FAULT == "refuses" or not self.sleeps:
                self.say(500)
                return
            self.server_of.sleep(wait=query.get("mode") == ["wait"], backup=query.get("level", ["1"]) == ["1"])
            self.say(200)
        elif path == "/wake_up" and dev_mode():
            self.body()
            if FAULT == "insomnia":
                self.say(500)
                return
            self.server_of.wake()
            self.say(200)
        else:
            self.body()
            self.say(404)


def dev_mode() -> bool:
    return os.environ.get("VLLM_SERVER_DEV_MODE") == "1"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--kv-cache-memory-bytes", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    said = parser.parse_args()
    if said.gpu_memory_utilization > 0.1:
        raise SystemExit("ValueError: Free memory on device on startup is less than desired GPU memory utilization")
    VllmHandler.sleeps = said.enable_sleep_mode
    VllmHandler.server_of = Server(
        said.model, said.served_model_name, said.kv_cache_memory_bytes, backup=True, ranks=said.tensor_parallel_size
    )
    UnixThreads(said.uds, VllmHandler).serve_forever()


if __name__ == "__main__":
    main()
