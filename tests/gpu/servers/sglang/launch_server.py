"""Stands for SGLang's server: its flags that the system gives, and its endpoints for releasing and resuming memory."""

# ruff: noqa: N802  (methods have the names that http.server calls)
from __future__ import annotations

import argparse
import json

from standin import FAULT, Handler, Server, Threads

TOKEN_BYTES = 1024


class SglangHandler(Handler):
    saves = backup = False

    def do_GET(self) -> None:
        if self.path == "/health":  # it generates a token
            self.server_of.answer()
            self.say(200)
        else:
            self.say(404)

    def do_POST(self) -> None:
        if self.path == "/v1/chat/completions":
            self.chat()
        elif self.path in ("/release_memory_occupation", "/resume_memory_occupation"):
            json.loads(self.body())  # a body there has to be
            release = self.path.startswith("/release")
            if not self.saves or ("refuses" if release else "insomnia") == FAULT:
                self.say(400)
                return
            if release:
                self.server_of.sleep(wait=False, backup=self.backup)
            else:
                self.server_of.wake()
            self.say(200)
        else:
            self.body()
            self.say(404)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    parser.add_argument("--max-total-tokens", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
    said = parser.parse_args()
    SglangHandler.saves, SglangHandler.backup = said.enable_memory_saver, said.enable_weights_cpu_backup
    SglangHandler.server_of = Server(
        said.model_path,
        [],
        said.max_total_tokens * TOKEN_BYTES // said.tensor_parallel_size,
        backup=SglangHandler.backup,
        ranks=said.tensor_parallel_size,
    )
    Threads((said.host, said.port), SglangHandler).serve_forever()


if __name__ == "__main__":
    main()
