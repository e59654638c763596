"""A foreign server that leaks is ended at its limit, alone, and a fresh one serves who comes next."""

import pytest

from omnimodel.errors import DispatchError, Reason

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="session")]

LEAK_MIB = 12
SERVER = f"""
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

lost = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        lost.append(os.urandom({LEAK_MIB} << 20))
        self.answer({{"outputs": [{{"name": "served", "datatype": "INT64", "shape": [1], "data": [len(lost)]}}]}})

    def answer(self, body):
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_leaking_server_is_started_again_and_its_neighbour_does_not_notice(world):
    await world.apply(world.program("leaks", SERVER), world.manifest("m1", seed=1))
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    neighbour = world.instance("m1").process.pid
    served, reasons = [], []
    while served.count(1) < 2 and len(served) + len(reasons) < 20:  # how many each server has answered by then
        try:
            served.append(await world.ask("leaks"))
        except DispatchError as error:
            reasons.append(error.reason)
    assert reasons == [Reason.OUT_OF_MEMORY], "the one request in which it was ended"
    assert served == [*range(1, len(served)), 1]
    assert max(served) * LEAK_MIB <= 64
    assert world.instance("m1").process.pid == neighbour
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    world.check_ledger()
