"""Real model processes for the tests: published, forked, woken into real frames, and spoken to over their socket."""

import asyncio
import itertools
import json
import os
import select
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import aiohttp

from omnimodel.memory.devices.host import HostDevice
from omnimodel.memory.image import read_index
from omnimodel.protocol.channel import AsyncChannel, Channel, ChannelClosed, socket_pair
from omnimodel.protocol.process import Envelope, Evict, Ping, Progress, Publish, Start, Stop, Wake, decode

FRAME_BYTES = 16 << 20
DEADLINE_SECONDS = 120


class ForkServer:
    def __init__(self) -> None:
        ours, theirs = socket_pair()
        self.channel = Channel(ours)
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).parents[2] / "operator"),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forkserver.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self.channel.receive()

    def fork(self, instance: str, descriptors: list[int]) -> int:
        self.channel.send({"instance": instance}, descriptors)
        return self.channel.receive()[0]["pid"]

    def close(self) -> None:
        self.channel.close()
        self.process.wait(10)


class CommandFailed(Exception):
    def __init__(self, reply) -> None:
        super().__init__(f"{reply.message}\n{reply.detail}")
        self.reply = reply


class Child:
    """One process of a model."""

    numbers = itertools.count()

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.folder = folder
        self.instance = f"i{next(self.numbers)}"
        self.socket_path = f"/tmp/omni-test-{os.getpid()}-{self.instance}.sock"
        self.ids = itertools.count(1)
        self.generation = 1
        self.progress: list[Progress] = []
        self.spec: dict = {}
        self.session: aiohttp.ClientSession | None = None
        self.stopped = False
        listener = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError):
            os.unlink(self.socket_path)
        listener.bind(self.socket_path)
        listener.listen(512)
        ours, theirs = socket_pair()
        self.log_path = folder / f"{self.instance}.log"
        with open(self.log_path, "wb") as log:
            self.pid = server.fork(self.instance, [theirs.fileno(), listener.fileno(), log.fileno()])
        self.pidfd = os.pidfd_open(self.pid)
        theirs.close()
        listener.close()
        self.channel = AsyncChannel(ours)

    async def command(self, command, descriptors=(), *, generation=None, instance=None, command_id=None):
        envelope = Envelope(
            next(self.ids) if command_id is None else command_id,
            self.generation if generation is None else generation,
            instance or self.instance,
            command,
        )
        await self.channel.send(envelope.to_message(), descriptors)
        return await self.reply(envelope.id)

    async def reply(self, command_id):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                message = decode((await self.channel.receive())[0])
                if isinstance(message, Progress):
                    self.progress.append(message)
                elif message.id == command_id:
                    if not message.ok:
                        raise CommandFailed(message)
                    return message

    async def publish(self, spec, source, output, dtype="float32"):
        output.mkdir(parents=True, exist_ok=True)
        return await self.command(Publish(spec, str(source), str(output), dtype, 1))

    async def start(self, spec, image: Path, threads=1):
        self.spec = spec
        self.image = image
        size_bytes = read_index(image).bytes
        reply = await self.command(Start(spec, str(image), size_bytes, FRAME_BYTES, "host", threads))
        self.connect()
        return reply

    def connect(self):
        self.session = aiohttp.ClientSession(
            "http://model",
            connector=aiohttp.UnixConnector(self.socket_path, limit=0),
            timeout=aiohttp.ClientTimeout(120),
        )

    async def post(self, path, body=None, *, data=None):
        async with self.session.post(path, json=body, data=data) as response:
            content = await response.read()
            if response.content_type == "application/json":
                return response.status, json.loads(content)
            return response.status, content

    async def events(self, path, body):
        """Data of the server-sent events of an answer, in order."""
        async with self.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield line[6:].strip().decode()

    async def busy(self) -> bool:
        return (await self.command(Ping())).values["inFlight"] > 0

    async def idle(self) -> bool:
        return not await self.busy()

    def alive(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    async def ended(self):
        async with asyncio.timeout(DEADLINE_SECONDS):
            loop = asyncio.get_running_loop()
            done = asyncio.Event()
            loop.add_reader(self.pidfd, done.set)
            await done.wait()
            loop.remove_reader(self.pidfd)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def maps(self) -> str:
        return Path(f"/proc/{self.pid}/maps").read_text()

    def private_bytes(self) -> int:
        with open(f"/proc/{self.pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))

    async def stop(self, grace_seconds=2.0):
        if self.stopped:
            return
        self.stopped = True
        if self.session is not None:
            await self.session.close()
        if self.alive():
            with suppress(ChannelClosed, CommandFailed, TimeoutError):
                await self.command(Stop(grace_seconds))
            try:
                async with asyncio.timeout(5):
                    await self.ended()
            except TimeoutError:
                os.kill(self.pid, 9)
                await self.ended()
        self.channel.close()
        os.close(self.pidfd)
        with suppress(FileNotFoundError):
            os.unlink(self.socket_path)


class Frames:
    """The agent's side: a host device, and images in its frames."""

    def __init__(self) -> None:
        self.device = HostDevice(FRAME_BYTES)

    def fill(self, image: Path):
        size_bytes = read_index(image).bytes
        frames = self.device.create(-(-size_bytes // FRAME_BYTES))
        staged = self.device.stage(str(image / "image"), size_bytes)
        self.device.copy(staged, frames).wait(60)
        self.device.unstage(staged)
        return frames

    async def wake(self, child: Child, frames=None):
        frames = self.fill(child.image) if frames is None else frames
        await child.command(Wake([frame.id for frame in frames]), [frame.descriptor for frame in frames])
        return frames

    async def evict(self, child: Child, frames, *, freeze=False):
        reply = await child.command(Evict(freeze=freeze))
        self.scramble(frames)
        self.device.destroy(frames)
        return reply

    def scramble(self, frames):
        """Overwrite frames, as the next model would."""
        import ctypes

        for frame in frames:
            ctypes.memset(frame.handle.address, 0xEE, FRAME_BYTES)


def spec(name="tiny", *, engine="python", task="infer", **more):
    return {
        "model": {"namespace": "default", "name": name, "uid": "1"},
        "generation": 1,
        "engine": engine,
        "task": task,
        "dtype": "auto",
        "quantization": "none",
        "threads": 1,
        "options": {},
        "environment": {"requirements": [], "paths": []},
        "limits": {"concurrency": 8, "requestBytes": 8 << 20},
        "servedNames": [name],
        **more,
    }


def handler(text: str, entry="handler:Handler"):
    return {"entry": entry, "files": {"handler.py": text}}


async def until(condition, seconds=60):
    """Wait until a condition (a function, or a coroutine function) is true."""
    async with asyncio.timeout(seconds):
        while not (await found if asyncio.iscoroutine(found := condition()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def collect(events, into):
    """Put everything that comes into a list."""
    async for event in events:
        into.append(json.loads(event) if event.startswith("{") else event)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
