"""What a process says on its control channel: anything that is no message ends its sender, and nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.children import children, run
from omnimodel.agent.process import ProcessExit
from omnimodel.errors import ProcessError
from omnimodel.protocol.process import Ping

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make control groups and users"),
]


REPLY = "{'kind': 'reply', 'id': 1, 'ok': True"
MANY = "[os.open('/dev/null', os.O_RDONLY) for _ in range(200)]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("channel.sock.send(b'\\0not json')", "no JSON", id="what is no JSON"),
        pytest.param("channel.sock.send(b'\\0' + b'[' * 100000)", "no JSON", id="JSON without a bottom"),
        pytest.param("channel.sock.send(b'\\0[1]')", "no JSON object", id="what is no object"),
        pytest.param("channel.send({'id': 1})", "neither a reply nor", id="what says not what it is"),
        pytest.param("channel.send({'kind': [], 'id': 1})", "neither a reply nor", id="of a kind that is no text"),
        pytest.param(
            "channel.send({'kind': 'reply', 'id': [], 'ok': True})", "id is no whole", id="a reply to no number"
        ),
        pytest.param(
            "channel.send({'kind': 'reply', 'id': True, 'ok': True})", "id is no whole", id="a reply to a truth"
        ),
        pytest.param("channel.send({'kind': 'reply', 'ok': True})", "too few fields", id="a reply to nothing"),
        pytest.param("channel.send({'kind': 'reply', 'surprise': 1})", "'surprise'", id="fields that nobody knows"),
        pytest.param(f"channel.send({REPLY}, 'values': []}})", "values is no object", id="values that are a list"),
        pytest.param(f"channel.send({REPLY}, 'reason': []}})", "reason is no text", id="a reason that is a list"),
        pytest.param(
            f"channel.send({REPLY}, 'seconds': float('nan')}})", "out of range", id="a time that is no number"
        ),
        pytest.param(
            f"channel.send({REPLY}, 'values': {{'workingBytes': 'x'}}}})", "no whole number", id="bytes in letters"
        ),
        pytest.param(
            f"channel.send({REPLY}, 'values': {{'workingBytes': -1}}}})", "out of range", id="bytes below zero"
        ),
        pytest.param(
            f"channel.send({REPLY}, 'values': {{'abandoned': 1}}}})", "no truth value", id="a truth as a number"
        ),
        pytest.param("while True: channel.sock.send(b'\\1more')", "no end|flooded", id="a message without an end"),
        pytest.param("while True: progress('on', 0, 0)", "flooded", id="a flood of small ones"),
        pytest.param("while True: progress('x' * 60000, 0, 0)", "flooded", id="a flood of large ones"),
        pytest.param("channel.send({'kind': 'progress'}, [0])", "more than the 0 descriptors", id="a descriptor"),
        pytest.param(
            f"channel.sock.sendmsg([b'\\1'], [(1, 1, array('i', {MANY}))])", "more than the 0", id="many of them"
        ),
    ],
)
async def test_what_is_no_message_ends_its_sender_alone(tmp_path: Path, text: str, says: str) -> None:
    async with children(tmp_path) as many:
        neighbour, hostile = await many.make(), await many.make()
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProcessExit, match=says) as caught:
            await run(hostile, f"from array import array; {text}" if "while" not in text else text)
        assert "killed for what it said on its control channel" in caught.value.problem
        assert (await neighbour.command(Ping())).ok
        assert len(os.listdir("/proc/self/fd")) < opened


async def test_a_failure_of_any_length_can_be_said(tmp_path: Path) -> None:
    async with children(tmp_path) as many:
        process = await many.make()
        with pytest.raises(ProcessError, match="ValueError: ÿÿ") as caught:
            await run(process, "raise ValueError('ÿ' * 1_000_000)")
        assert len(caught.value.problem) < 10_000
        assert (await process.command(Ping())).ok
