"""`omni gateway` as a process: where it listens for whom, and that it does not outlive what it depends on."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

import aiohttp
import pytest

from gateway_remote.world import Cluster, chat
from omnimodel.cli import gateway as command
from omnimodel.errors import OmniError


async def test_clients_and_those_who_run_it_have_addresses_of_their_own(cluster: Cluster) -> None:
    cluster.add(tier="resident")
    agents = ",".join(pod.address.url for pod in cluster.pods)
    options = ("--agents", agents, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--drain", "5")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omnimodel.cli", "gateway", *options, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    listening = re.compile(r"listening on (\S+)( for those who run this)?")
    addresses: dict[bool, str] = {}
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while len(addresses) < 2:
            found = listening.search((await process.stderr.readline()).decode())
            if found:
                addresses[bool(found[2])] = found[1]
        public, admin = addresses[False], addresses[True]
        async with session.post(public + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 200
        for address, status in ((public, 404), (admin, 200)):
            async with session.get(address + "/omni/v1/status") as response:
                assert response.status == status
        process.send_signal(signal.SIGTERM)
        rest = (await process.stderr.read()).decode()
        assert await process.wait() == 0, rest
    assert rest.rstrip().endswith("stopped")


async def test_it_ends_when_it_can_no_longer_follow_the_cluster() -> None:
    """An old table that is served for ever looks like a healthy gateway."""

    async def fail() -> None:
        raise RuntimeError("the token is no token")

    with pytest.raises(OmniError, match="the token is no token"):
        await command._first_of(asyncio.Event().wait(), asyncio.create_task(fail()))
