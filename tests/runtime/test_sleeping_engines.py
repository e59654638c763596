"""Engines vllm and sglang, whose servers are nowhere run here: their command lines, and the fence before a sleep.

What the agent makes of them is in tests/gpu/test_servers.py.
"""

import asyncio
import hashlib
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file

from omnimodel.runtime.engines import Setting, create, sglang, vllm
from omnimodel.runtime.engines.llamacpp import command_line
from omnimodel.runtime.engines.sleeping import SleepingEngine
from runtime.children import spec, until
from runtime.test_llama_gguf import write

OPTIONS = {"vllm": {"cacheMemory": "8Gi"}, "sglang": {"cacheTokens": 65536}}


def setting(engine, namespace="default", **more):
    found = spec("llm", engine=engine, task="text-generation", **{"options": dict(OPTIONS[engine]), **more})
    found["model"]["namespace"] = namespace
    mounts = [{"name": "source", "source": True, "path": "/omni/source"}]
    return Setting({**found, "mounts": mounts}, "", 0, 0, "cuda:0", 2)


def test_vllm_gets_its_cache_in_bytes_and_a_socket(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert vllm.command_line(setting("vllm", args=["--dtype", "bfloat16"])) == [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/omni/source"),
        *("--served-model-name", "llm", "--uds", "/tmp/engine.sock"),
        *("--enable-sleep-mode", "--gpu-memory-utilization", "0.01"),
        *("--kv-cache-memory-bytes", str(8 << 30), "--max-num-seqs", "8"),
        *("--dtype", "bfloat16"),
    ]


def test_sglang_gets_its_cache_in_tokens_and_a_port_and_keeps_its_weights():
    options = {"cacheTokens": 65536, "contextTokens": 8192, "maxBatch": 4}
    assert sglang.command_line(setting("sglang", options=options), 4711) == [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", "/omni/source"),
        *("--served-model-name", "llm", "--host", "127.0.0.1", "--port", "4711"),
        *("--enable-memory-saver", "--enable-weights-cpu-backup"),
        *("--max-total-tokens", "65536", "--max-running-requests", "4", "--context-length", "8192"),
    ]


def test_over_several_gpus_each_is_told_its_part_of_the_cache(tmp_path):
    argv = vllm.command_line(setting("vllm", devices=2))
    assert argv[argv.index("--tensor-parallel-size") + 1] == "2"
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(4 << 30)
    argv = sglang.command_line(setting("sglang", devices=4), 1)
    assert argv[argv.index("--tp-size") + 1] == "4"
    assert argv[argv.index("--max-total-tokens") + 1] == "65536"  # of each token every GPU has its part
    write(tmp_path / "model.gguf")
    argv = command_line(Setting(spec("llm", engine="llamacpp", devices=3), tmp_path, 0, 0, "cuda:0", 2), 1)
    at = argv.index("--tensor_split")
    assert argv[at + 1 : at + 5] == ["1", "1", "1", "--n_gpu_layers"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_is_called_as_gateways_call_its_model(engine):
    found = setting(engine, namespace="search")
    argv = vllm.command_line(found) if engine == "vllm" else sglang.command_line(found, 1)
    assert argv[argv.index("--served-model-name") + 1] == "search/llm"
    assert isinstance(create(found, lambda _: None), SleepingEngine)


def test_llamacpp_takes_the_gpu_where_there_is_one(tmp_path):
    write(tmp_path / "model.gguf")
    for device, layers in (("cuda:0", "-1"), ("host", None)):
        argv = command_line(Setting(spec("llm", engine="llamacpp"), tmp_path, 0, 0, device, 2), 1)
        assert (argv[argv.index("--n_gpu_layers") + 1] if "--n_gpu_layers" in argv else None) == layers


SERVERS = Path(__file__).parents[1] / "gpu/servers"


@asynccontextmanager
async def serving(tmp_path, monkeypatch, engine, **more):
    """The relay of an engine before a server that stands for the real one; and what that says of its weights."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    weights = np.arange(1 << 18, dtype=np.float32)
    (tmp_path / "source").mkdir()
    save_file({"weight": weights}, tmp_path / "source/model.safetensors")
    module = {"vllm": vllm, "sglang": sglang}[engine]
    monkeypatch.setattr(module, "ENVIRONMENT", {**module.ENVIRONMENT, "PYTHONPATH": str(SERVERS)})
    found = setting(engine, limits={"concurrency": 8, "drainSeconds": 20}, **more)
    found.spec["mounts"][0]["path"] = str(tmp_path / "source")
    found.spec["options"].update({"cacheMemory": "1Mi"} if engine == "vllm" else {"cacheTokens": 1024})
    ended = []
    relay = create(found, ended.append)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "model.sock"))
        server = await relay.listen(listener)
        connector = aiohttp.UnixConnector(str(tmp_path / "model.sock"))
        async with aiohttp.ClientSession("http://model", connector=connector) as session:
            try:
                await asyncio.to_thread(relay.wake, [])
                yield relay, session, hashlib.sha256(weights.tobytes()).hexdigest()[:16]
            finally:
                await asyncio.to_thread(relay.stop)
                server.close()
    assert ended == []


async def say(session, text):
    body = {"model": "llm", "messages": [{"role": "user", "content": text}]}
    async with session.post("/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_server_sleeps_when_its_requests_are_answered_and_takes_none_meanwhile(tmp_path, monkeypatch, engine):
    async with serving(tmp_path, monkeypatch, engine) as (relay, session, digest):
        for _ in range(2):
            slow = asyncio.create_task(say(session, "slow 1"))
            await until(lambda: relay.connections == 1)
            assert (await say(session, "after it"))[0] == 200
            falling = asyncio.create_task(asyncio.to_thread(relay.sleep))
            await until(lambda: not relay._accepting)
            status, answer = await say(session, "now")
            assert (status, answer["error"]["code"]) == (503, "not_resident")
            assert not slow.done()
            assert (await slow)[1]["choices"][0]["message"]["content"] == f"{digest} slow 1"
            assert await falling is True
            assert (await say(session, "asleep"))[0] == 503
            assert "restarted" not in await asyncio.to_thread(relay.wake, [])
            assert (await say(session, "awake"))[1]["choices"][0]["message"]["content"] == f"{digest} awake"
