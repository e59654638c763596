"""What a runtime must not say: arguments, variables and secrets that the system owns, and engines that do not fit."""

from __future__ import annotations

import math
from typing import Any

from api.builders import SGLANG, VLLM

DEVICES = "write spec.resources.devices, a count; which ones is the system's choice"
PORT = "remove it: the system assigns ports and addresses"
FILE = "write its lines as spec.runtime.args: a file could say what the system says itself"
SPELT: list[tuple[str, str, str, str]] = [
    ("vllm", "-tp=2", "tensor-parallel-size", DEVICES),
    ("vllm", "-pp 2", "pipeline-parallel-size", DEVICES),
    ("vllm", "-p 2", "pipeline-parallel-size", DEVICES),
    ("vllm", "-dp 2", "data-parallel-size", DEVICES),
    ("vllm", "--po=1", "port", PORT),
    ("vllm", "--ud /x", "uds", PORT),
    ("sglang", "--tp 2", "tp", DEVICES),
    ("sglang", "--pp=2", "pp", DEVICES),
    ("sglang", "--dp 2", "dp", DEVICES),
    ("sglang", "--ho ::", "host", PORT),
    ("sglang", "--b 1", "base-gpu-id", DEVICES),
    ("vllm", "--config /x.yaml", "config-file", FILE),
    ("vllm", "--config_file=/x.json", "config-file", FILE),
    ("sglang", "--conf=/x.yaml", "config-file", FILE),
]
ENGINES: dict[str, dict[str, Any]] = {"vllm": VLLM, "sglang": {**SGLANG, "task": "text-generation"}}
MODELS: list[tuple[str, dict[str, Any], list[str]]] = [
    *(
        (
            f"spelt {engine} {line}",
            {"runtime": {**ENGINES[engine], "args": [line]}},
            [f"runtime.args[0]: '{line.replace('=', ' ').split()[0]}': --{owned} belongs to the system; {cure}"],
        )
        for engine, line, owned, cure in SPELT
    ),
    (
        "dtype",
        {"runtime__dtype": "bf16"},
        ["runtime.dtype: 'bf16': is none of the possible words; write auto, float32, bfloat16 or float16"],
    ),
    (
        "args --port 8000",
        {"runtime": {"engine": "llamacpp", "args": ["--port", "8000"]}},
        ["runtime.args[0]: '--port': --port belongs to the system; remove it: the system assigns ports and addresses"],
    ),
    (
        "args --port=8000",
        {"runtime": {"engine": "llamacpp", "args": ["--port=8000"]}},
        ["runtime.args[0]: '--port': --port belongs to the system; remove it: the system assigns ports and addresses"],
    ),
    (
        "args --port 8000",
        {"runtime": {"engine": "llamacpp", "args": ["--port 8000"]}},
        ["runtime.args[0]: '--port': --port belongs to the system; remove it: the system assigns ports and addresses"],
    ),
    (
        "args --host 0.0.0.0",
        {"runtime": {"engine": "llamacpp", "args": ["--host", "0.0.0.0"]}},
        ["runtime.args[0]: '--host': --host belongs to the system; remove it: the system assigns ports and addresses"],
    ),
    (
        "args --served-model-name x",
        {"runtime": {"engine": "llamacpp", "args": ["--served-model-name", "x"]}},
        [
            "runtime.args[0]: '--served-model-name': --served-model-name belongs to the system; write it in spec.servedNames"
        ],
    ),
    (
        "args --served_model_name=x",
        {"runtime": {"engine": "llamacpp", "args": ["--served_model_name=x"]}},
        [
            "runtime.args[0]: '--served_model_name': --served-model-name belongs to the system; write it in spec.servedNames"
        ],
    ),
    (
        "args --api-key k",
        {"runtime": {"engine": "llamacpp", "args": ["--api-key", "k"]}},
        [
            "runtime.args[0]: '--api-key': --api-key belongs to the system; remove it: clients never reach the program itself; a key that it needs goes to spec.runtime.env as secretKeyRef"
        ],
    ),
    (
        "args --gpu-memory-utilization 0.9",
        {"runtime": {"engine": "llamacpp", "args": ["--gpu-memory-utilization", "0.9"]}},
        [
            "runtime.args[0]: '--gpu-memory-utilization': --gpu-memory-utilization belongs to the system; write spec.resources.deviceMemory, such as 24Gi"
        ],
    ),
    (
        "args --gpu_memory_utilization=0.9",
        {"runtime": {"engine": "llamacpp", "args": ["--gpu_memory_utilization=0.9"]}},
        [
            "runtime.args[0]: '--gpu_memory_utilization': --gpu-memory-utilization belongs to the system; write spec.resources.deviceMemory, such as 24Gi"
        ],
    ),
    (
        "args --gpu-mem 0.9",
        {"runtime": {"engine": "llamacpp", "args": ["--gpu-mem", "0.9"]}},
        [
            "runtime.args[0]: '--gpu-mem': --gpu-memory-utilization belongs to the system; write spec.resources.deviceMemory, such as 24Gi"
        ],
    ),
    (
        "args --device cuda:1",
        {"runtime": {"engine": "llamacpp", "args": ["--device", "cuda:1"]}},
        [
            "runtime.args[0]: '--device': --device belongs to the system; write spec.resources.devices, a count; which ones is the system's choice"
        ],
    ),
    (
        "args --enable-sleep-mode",
        {"runtime": {"engine": "llamacpp", "args": ["--enable-sleep-mode"]}},
        [
            "runtime.args[0]: '--enable-sleep-mode': --enable-sleep-mode belongs to the system; remove it: spec.residency says when the model leaves the device"
        ],
    ),
    (
        "args --max-model-len 8192",
        {"runtime": {"engine": "llamacpp", "args": ["--max-model-len", "8192"]}},
        [
            "runtime.args[0]: '--max-model-len': --max-model-len belongs to the system; write spec.runtime.options.contextTokens"
        ],
    ),
    (
        "args --Port 1",
        {"runtime": {"engine": "llamacpp", "args": ["--Port", "1"]}},
        ["runtime.args[0]: '--Port': --port belongs to the system; remove it: the system assigns ports and addresses"],
    ),
    (
        "args -tp 2",
        {"runtime": {"engine": "llamacpp", "args": ["-tp", "2"]}},
        [
            "runtime.args[0]: '-tp': --tensor-parallel-size belongs to the system; write spec.resources.devices, a count; which ones is the system's choice"
        ],
    ),
    (
        "args --hf-token hf_abcdefghijklmnopqrstuvwx",
        {"runtime": {"engine": "llamacpp", "args": ["--hf-token", "hf_abcdefghijklmnopqrstuvwx"]}},
        [
            "runtime.args[0]: has a secret in clear text, and argv is readable by others; pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}",
            "runtime.args[1]: has a secret in clear text, and argv is readable by others; pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}",
        ],
    ),
    (
        "args --model x",
        {"runtime": {"engine": "llamacpp", "args": ["--model", "x"]}},
        ["runtime.args[0]: '--model': --model belongs to the system; write it in spec.source"],
    ),
    (
        "command fixed port",
        {"runtime": {"engine": "command", "command": ["serve", "--port", "8080"]}},
        [
            "runtime.command[1]: '--port': is a fixed port; write {port}: the system assigns ports",
            "runtime.command: does not say where the program takes its address; write {port} or {socket} there, such as --port {port}",
        ],
    ),
    *(
        (
            f"command fixed port {' '.join(words)}",
            {"runtime": {"engine": "command", "command": ["serve", *words, "--socket", "{socket}"]}},
            [f"runtime.command[1]: '{words[0]}': is a fixed port; write {{port}}: the system assigns ports"],
        )
        for words in (["-p8080"], ["-b", ":8080"], ["--addr=[::]:8080"], ["-b=:8080"])
    ),
    (
        "command no port",
        {"runtime": {"engine": "command", "command": ["serve"]}},
        [
            "runtime.command: does not say where the program takes its address; write {port} or {socket} there, such as --port {port}"
        ],
    ),
    (
        "shell command",
        {
            "runtime": {
                "engine": "command",
                "command": ["bash", "-c", "exec vllm serve --port 8000 --gpu-memory-utilization 0.9"],
            }
        },
        [
            "runtime.command[2]: '--port': is a fixed port; write {port}: the system assigns ports",
            "runtime.command: does not say where the program takes its address; write {port} or {socket} there, such as --port {port}",
        ],
    ),
    *(
        (
            f"shell command {words}",
            {"runtime": {"engine": "command", "command": ["bash", "-c", f"{words} exec prog --port {{port}}"]}},
            [f"runtime.command[2]: {problem}"],
        )
        for words, problem in (
            (
                "CUDA_VISIBLE_DEVICES=1 LD_PRELOAD=/x API_KEY=hunter2",
                "'CUDA_VISIBLE_DEVICES=1': CUDA_VISIBLE_DEVICES pins the model to devices by index and breaks isolation; remove it; spec.resources.devices says how many",
            ),
            (
                "export LD_PRELOAD=/x;",
                "'LD_PRELOAD=/x': LD_PRELOAD changes what the process loads and breaks isolation; remove it; spec.runtime.environment.requirements brings libraries",
            ),
            (
                "API_KEY=hunter2",
                "has a secret in clear text, and argv is readable by others; pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}",
            ),
            ("SERVER_PORT=8080", "'SERVER_PORT=8080': is a fixed port; write {port}: the system assigns ports"),
        )
    ),
    (
        "command env",
        {"runtime": {"engine": "command", "command": ["env", "OMP_NUM_THREADS=4", "prog", "{port}"]}},
        [
            "runtime.command[1]: 'OMP_NUM_THREADS=4': OMP_NUM_THREADS belongs to the system; write spec.runtime.threads",
        ],
    ),
    (
        "command quoted twice",
        {"runtime": {"engine": "command", "command": ["bash -c 'cd x; HOME=/y exec prog {port}'"]}},
        ["runtime.command[0]: 'HOME=/y': HOME belongs to the sandbox; remove it"],
    ),
    (
        "args of a command env",
        {
            "runtime": {
                "engine": "command",
                "command": ["env"],
                "args": ["CUDA_MPS_PIPE_DIRECTORY=/x", "prog", "{port}"],
            }
        },
        [
            "runtime.args[0]: 'CUDA_MPS_PIPE_DIRECTORY=/x': CUDA_MPS_PIPE_DIRECTORY pins the model to devices by index and breaks isolation; remove it; spec.resources.devices says how many",
        ],
    ),
    (
        "args of a command secret",
        {"runtime": {"engine": "command", "command": ["env"], "args": ["HF_TOKEN=hunter2", "prog", "{port}"]}},
        [
            "runtime.args[0]: has a secret in clear text, and argv is readable by others; pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}",
        ],
    ),
    (
        "command missing",
        {"runtime": {"engine": "command"}},
        ['runtime.command: engine command needs a command; write command: ["program", "--port", "{port}"]'],
    ),
    (
        "command text",
        {"runtime": {"engine": "command", "command": "serve --port {port}"}},
        [
            "runtime.command: 'serve --port {port}': is not a list; write command: [python, -m, myserver, --port, '{port}']"
        ],
    ),
    (
        "command secret",
        {
            "runtime": {
                "engine": "command",
                "command": ["serve", "--port", "{port}", "--api-key", "sk-abcdefghijklmnopqrstuvwxyz"],
            }
        },
        [
            "runtime.command[3]: '--api-key': --api-key belongs to the system; remove it: clients never reach the program itself; a key that it needs goes to spec.runtime.env as secretKeyRef",
            "runtime.command[4]: has a secret in clear text, and argv is readable by others; pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}",
        ],
    ),
    (
        "api key flag",
        {"runtime": {"engine": "command", "command": ["serve", "--port", "{port}", "--auth-token", "s3cret"]}},
        [
            "runtime.command[3]: has a secret in clear text, and argv is readable by others; pass it in spec.runtime.env as NAME: {secretKeyRef: {name: NAME, key: KEY}}"
        ],
    ),
    (
        "env CUDA_VISIBLE_DEVICES",
        {"runtime__env": {"CUDA_VISIBLE_DEVICES": "0"}},
        [
            "runtime.env.CUDA_VISIBLE_DEVICES: '0': CUDA_VISIBLE_DEVICES pins the model to devices by index and breaks isolation; remove it; spec.resources.devices says how many"
        ],
    ),
    (
        "env NVIDIA_VISIBLE_DEVICES",
        {"runtime__env": {"NVIDIA_VISIBLE_DEVICES": "all"}},
        [
            "runtime.env.NVIDIA_VISIBLE_DEVICES: 'all': NVIDIA_VISIBLE_DEVICES pins the model to devices by index and breaks isolation; remove it; spec.resources.devices says how many"
        ],
    ),
    (
        "env LD_PRELOAD",
        {"runtime__env": {"LD_PRELOAD": "/x.so"}},
        [
            "runtime.env.LD_PRELOAD: '/x.so': LD_PRELOAD changes what the process loads and breaks isolation; remove it; spec.runtime.environment.requirements brings libraries"
        ],
    ),
    (
        "env GGML_CUDA_ENABLE_UNIFIED_MEMORY",
        {"runtime__env": {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}},
        [
            "runtime.env.GGML_CUDA_ENABLE_UNIFIED_MEMORY: '1': GGML_CUDA_ENABLE_UNIFIED_MEMORY takes memory past the budget and breaks isolation; remove it; spec.resources.deviceMemory says how much"
        ],
    ),
    (
        "env GGML_VK_VISIBLE_DEVICES",
        {"runtime__env": {"GGML_VK_VISIBLE_DEVICES": "0"}},
        [
            "runtime.env.GGML_VK_VISIBLE_DEVICES: '0': GGML_VK_VISIBLE_DEVICES pins the model to devices by index and breaks isolation; remove it; spec.resources.devices says how many"
        ],
    ),
    (
        "env PYTHONPATH",
        {"runtime__env": {"PYTHONPATH": "/code"}},
        ["runtime.env.PYTHONPATH: '/code': PYTHONPATH belongs to the system; write spec.runtime.environment.path"],
    ),
    (
        "env OMP_NUM_THREADS",
        {"runtime__env": {"OMP_NUM_THREADS": "4"}},
        ["runtime.env.OMP_NUM_THREADS: '4': OMP_NUM_THREADS belongs to the system; write spec.runtime.threads"],
    ),
    (
        "env HF_TOKEN",
        {"runtime__env": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx"}},
        ["runtime.env.HF_TOKEN: is a secret in clear text; write HF_TOKEN: {secretKeyRef: {name: NAME, key: KEY}}"],
    ),
    (
        "env OPENAI_API_KEY",
        {"runtime__env": {"OPENAI_API_KEY": "os.environ/KEY"}},
        [
            "runtime.env.OPENAI_API_KEY: 'os.environ/KEY': is a reference of another system; write OPENAI_API_KEY: {secretKeyRef: {name: NAME, key: KEY}}"
        ],
    ),
    (
        "env MASTER_KEY",
        {"runtime__env": {"MASTER_KEY": "hunter2"}},
        ["runtime.env.MASTER_KEY: is a secret in clear text; write MASTER_KEY: {secretKeyRef: {name: NAME, key: KEY}}"],
    ),
    (
        "env SETTING",
        {"runtime__env": {"SETTING": "sk-abcdefghijklmnopqrstuvwxyz"}},
        ["runtime.env.SETTING: is a secret in clear text; write SETTING: {secretKeyRef: {name: NAME, key: KEY}}"],
    ),
    *(
        (
            f"env {name}",
            {"runtime__env": {name: value}},
            [
                f"runtime.env.{name}: is a secret in clear text; write {name}: {{secretKeyRef: {{name: NAME, key: KEY}}}}"
            ],
        )
        for name, value in (
            ("PGPASSWORD", "hunter2"),
            ("MYSQL_PWD", "hunter2"),
            ("OPENAI_KEY", "hunter2"),
            ("DATABASE_URL", "postgres://user:hunter2@db/models"),
            ("HTTP_PROXY", "http://user:hunter2@proxy:3128"),
        )
    ),
    (
        "env LLAMA_ARG_HOST",
        {"runtime__env": {"LLAMA_ARG_HOST": "::"}},
        [
            "runtime.env.LLAMA_ARG_HOST: '::': LLAMA_ARG_HOST is an argument of the engine; write the option that it stands for in spec.runtime.args"
        ],
    ),
    (
        "env PORT",
        {"runtime__env": {"PORT": "8080"}},
        ["runtime.env.PORT: '8080': is a fixed port; write \"{port}\": the system assigns ports"],
    ),
    ("env WORKERS", {"runtime__env": {"WORKERS": 4}}, ['runtime.env.WORKERS: 4: is not text; write it in quotes: "4"']),
    (
        "env DEBUG",
        {"runtime__env": {"DEBUG": True}},
        ['runtime.env.DEBUG: true: is not text; write it in quotes: "true"'],
    ),
    (
        "env 1A",
        {"runtime__env": {"1A": "x"}},
        ["runtime.env.1A: '1A': is no name of an environment variable; write letters, digits and _, such as LANG_CODE"],
    ),
    (
        "env OMNI_X",
        {"runtime__env": {"OMNI_X": "1"}},
        ["runtime.env.OMNI_X: '1': OMNI_X belongs to the system; remove it"],
    ),
    (
        "env both refs",
        {
            "runtime__env": {
                "A": {"secretKeyRef": {"name": "a", "key": "b"}, "configMapKeyRef": {"name": "a", "key": "b"}}
            }
        },
        [
            "runtime.env.A: needs exactly one of secretKeyRef and configMapKeyRef; write secretKeyRef: {name: NAME, key: KEY}"
        ],
    ),
    (
        "env value",
        {"runtime__env": {"A": {"value": "x"}}},
        ["runtime.env.A.value: is an unknown field; write the text itself: NAME: TEXT"],
    ),
    (
        "python no handler",
        {"runtime": {"engine": "python", "task": "infer"}},
        [
            "runtime.handler: engine python needs a handler; write handler: {entry: handler:Handler, files: {handler.py: CODE}}"
        ],
    ),
    (
        "handler elsewhere",
        {"runtime": {"engine": "transformers", "task": "text-generation", "handler": {"entry": "a:B"}}},
        ["runtime.handler: handler is for engine python only; remove it, or write engine: python"],
    ),
    (
        "task missing",
        {"runtime": {"engine": "transformers"}},
        [
            "runtime.task: engines transformers and python need a task; add task: text-generation, embeddings, text-classification, automatic-speech-recognition, text-to-speech or infer"
        ],
    ),
    (
        "args python",
        {"runtime__args": ["x"]},
        ["runtime.args: args are for foreign engines only; write what the engine shall know in options"],
    ),
    (
        "handler text",
        {"runtime__handler": "a:B"},
        ["runtime.handler: 'a:B': is not a mapping; write handler: {entry: a:B}"],
    ),
    (
        "handler from nowhere",
        {"runtime__handler": {"entry": "a:B"}},
        [
            "runtime.handler: the module of the handler comes from nowhere; add files with its code, or the folder of the mount that has it to environment.path"
        ],
    ),
    (
        "handler no file",
        {"runtime__handler": {"entry": "other:H", "files": {"handler.py": ""}}},
        [
            "runtime.handler.entry: 'other:H': names a module that is not in files; name the file after the module, such as handler.py for handler:Handler"
        ],
    ),
    (
        "handler syntax",
        {"runtime__handler": {"entry": "handler:H", "files": {"handler.py": "def x(:\n"}}},
        ["runtime.handler.files.handler.py: is no Python in line 1: invalid syntax; correct the code"],
    ),
    (
        "handler dotted",
        {"runtime__handler": {"entry": "handler.Handler", "files": {"handler.py": ""}}},
        ["runtime.handler.entry: 'handler.Handler': is no MODULE:CLASS; write handler:Handler"],
    ),
    (
        "handler py",
        {"runtime__handler": {"entry": "handler.py:Handler"}},
        ["runtime.handler.entry: 'handler.py:Handler': names a file, not a module; write handler:Handler"],
    ),
    (
        "file folders",
        {"runtime__handler": {"entry": "handler:H", "files": {"handler.py": "", "../x.py": ""}}},
        [
            "runtime.handler.files.../x.py: '../x.py': is no plain file name; write one such as handler.py, without folders"
        ],
    ),
    (
        "path outside",
        {"mounts": [{"name": "code", "source": True, "path": "/code"}], "runtime__environment": {"path": ["/other"]}},
        ["runtime.environment.path[0]: '/other': is in no mount; write a path under /code"],
    ),
    (
        "path no mounts",
        {"runtime__environment": {"path": ["/other"]}},
        ["runtime.environment.path[0]: '/other': is in no mount; add a mount that has it to spec.mounts"],
    ),
    (
        "workingDir outside",
        {"mounts": [{"name": "code", "source": True, "path": "/code"}], "runtime__workingDir": "/codes"},
        ["runtime.workingDir: '/codes': is in no mount; write a path under /code"],
    ),
    (
        "workingDir no mounts",
        {"runtime__workingDir": "/other"},
        ["runtime.workingDir: '/other': is in no mount; add a mount that has it to spec.mounts"],
    ),
    (
        "requirements path",
        {"runtime__environment": {"requirements": ["./x"]}},
        [
            "runtime.environment.requirements[0]: './x': is a path, and nothing points at a file beside the manifest; write NAME==VERSION"
        ],
    ),
    (
        "requirements option",
        {"runtime__environment": {"requirements": ["-r x.txt"]}},
        [
            "runtime.environment.requirements[0]: '-r x.txt': is an option of pip, not a requirement; write a requirement such as numpy==2.3.1"
        ],
    ),
    (
        "nan option",
        {"runtime__options": {"a": math.nan}},
        ["runtime.options.a: nan: is no number that JSON knows; write a finite number, or put it in quotes"],
    ),
    (
        "python task",
        {"runtime__task": "text-generation"},
        [
            "runtime.task: 'text-generation': engine python does not generate text for chats; write engine: transformers, or task: infer with a predict() that yields"
        ],
    ),
]
