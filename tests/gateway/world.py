"""What a test of the gateway talks to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway.standin import Agent, Process, System
from omnimodel.gateway.app import Listening
from omnimodel.gateway.gateway import Gateway


@dataclass
class World:
    """Everything a test talks to."""

    process: Process
    agent: Agent
    system: System
    session: aiohttp.ClientSession
    gateway: Gateway
    listening: Listening
    url: str

    async def post(self, path: str, **more: Any) -> aiohttp.ClientResponse:
        response = await self.session.post(self.url + path, **more)
        await response.read()
        return response

    async def get(self, path: str, **more: Any) -> aiohttp.ClientResponse:
        response = await self.session.get(self.url + path, **more)
        await response.read()
        return response


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        await asyncio.sleep(0.002)
