"""The command lines of engines vllm and sglang, which are nowhere run here, and what a llamacpp server is told of a GPU."""

import sys

import pytest

from omnimodel.runtime.engines import Setting, create, sglang, vllm
from omnimodel.runtime.engines.llamacpp import command_line
from omnimodel.runtime.engines.sleeping import SleepingEngine
from runtime.children import spec
from runtime.test_llama_gguf import write

OPTIONS = {"vllm": {"cacheMemory": "8Gi"}, "sglang": {"cacheTokens": 65536}}


def setting(engine, namespace="default", **more):
    found = spec("llm", engine=engine, task="text-generation", **{"options": OPTIONS[engine], **more})
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
