"""The admin API, health, metrics and the page."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.world import World, until
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.gateway.app import create_app, serve
from omnimodel.protocol.admin import ADMIN_PATH, OBJECTS_PATH, Event

LOST = DispatchError("agent default-0", "does not answer", reason=Reason.DRAINING, status=503)
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hello"}]}


def omnimodel(name: str, **residency: object) -> dict[str, object]:
    return {
        "kind": "OmniModel",
        "metadata": {"namespace": "default", "name": name},
        "spec": {},
        "status": {"residency": [residency]},
    }


@pytest.fixture
def full(world: World) -> World:
    world.system.kinds["OmniModel"] = [
        omnimodel("smollm2", tier="resident", deviceBytes=100, hostBytes=30, wakes=3, lastWakeSeconds=0.25),
        omnimodel("minilm", tier="warm", deviceBytes=0, hostBytes=20, swaps={"request": 2, "idle": 1}),
    ]
    status = {
        "budgetBytes": 1000,
        "residentBytes": 100,
        "overcommitRatio": 3.5,
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    world.system.kinds["OmniPool"] = [{"kind": "OmniPool", "metadata": {"name": "default"}, "status": status}]
    return world


async def test_whole_objects_are_listed(full: World) -> None:
    models = await (await full.get(OBJECTS_PATH + "/omnimodels")).json()

    assert models["kind"] == "OmniModelList"
    assert [item["metadata"]["name"] for item in models["items"]] == ["smollm2", "minilm"]
    one = await (await full.get(OBJECTS_PATH + "/omnimodels/default/minilm")).json()
    assert one["status"]["residency"][0]["tier"] == "warm"


@pytest.mark.parametrize("path", ["/omnimodels/default/none", "/omnimodels/other/minilm", "/pods"])
async def test_what_does_not_exist_is_404(full: World, path: str) -> None:
    assert (await full.get(OBJECTS_PATH + path)).status == 404


async def test_prune_is_passed_on_but_not_from_a_foreign_page(full: World) -> None:
    for query, dry_run in (("", "False"), ("?dryRun=true", "True")):
        answer = await full.post(ADMIN_PATH + "/prune" + query)
        assert (await answer.json())["removed"][0]["what"] == "default/gone (float32)"
        assert full.system.calls.pop() == ("prune", "", dry_run, 0.0)
    refused = await full.post(ADMIN_PATH + "/prune", headers={"Origin": "http://elsewhere.example.org"})
    assert refused.status == 403
    assert full.system.calls == []


async def test_wake_and_evict_are_passed_on(full: World) -> None:
    woken = await full.post(ADMIN_PATH + "/models/default/smollm2/wake?deadlineSeconds=7")
    assert await woken.json() == {"tier": "resident", "wakeSeconds": 0.1}
    kept = await full.post(ADMIN_PATH + "/models/default/minilm/evict")
    assert kept.status == 409
    assert "keepResident" in (await kept.json())["error"]["message"]
    assert full.system.calls == [("wake", "default", "smollm2", 7.0), ("evict", "default", "minilm", 300.0)]


async def test_a_foreign_web_page_cannot_make_a_browser_change_anything(full: World) -> None:
    path = ADMIN_PATH + "/models/default/smollm2/evict"
    foreign = await full.post(path, headers={"Origin": "http://evil.example"})
    assert (foreign.status, (await foreign.json())["error"]["type"]) == (403, "permission_error")
    assert not full.system.calls
    await full.post(ADMIN_PATH + "/models/default/smollm2/wake", headers={"Origin": full.url})
    assert full.system.calls


@pytest.mark.parametrize("query", ["deadlineSeconds=soon", "deadlineSeconds=-1", "deadlineSeconds=inf"])
async def test_a_wrong_deadline_is_refused(full: World, query: str) -> None:
    assert (await full.post(ADMIN_PATH + f"/models/default/smollm2/wake?{query}")).status == 400


async def test_logs_give_their_tail(full: World) -> None:
    response = await full.get(ADMIN_PATH + "/models/default/smollm2/logs?tail=2")

    assert await response.text() == "line 0\nline 1\n"
    assert (await full.get(ADMIN_PATH + "/models/default/none/logs")).status == 404
    assert (await full.get(ADMIN_PATH + "/models/default/smollm2/logs?tail=some")).status == 400


async def test_logs_are_followed_until_the_client_leaves(full: World) -> None:
    response = await full.session.get(full.url + ADMIN_PATH + "/models/default/smollm2/logs?tail=0&follow=true")
    assert response.status == 200
    await until(lambda: full.system.followers == 1)
    full.system.lines.put_nowait(b"new\n")
    assert await response.content.readline() == b"new\n"
    response.close()

    await until(lambda: full.system.followers == 0)


async def test_followed_logs_do_not_hold_up_the_end(full: World) -> None:
    response = await full.session.get(full.url + ADMIN_PATH + "/models/default/smollm2/logs?tail=1&follow")
    assert await response.content.readline() == b"line 0\n"
    async with asyncio.timeout(30):
        await full.listening.close()

    assert await response.read() == b""


async def test_a_log_that_breaks_off_ends_the_answer_and_nothing_else(full: World) -> None:
    """A second head in the middle of a body reads like a part of the log."""
    full.system.breaks = LOST
    response = await full.session.get(full.url + ADMIN_PATH + "/models/default/smollm2/logs?tail=1&follow=true")
    assert await response.content.readline() == b"line 0\n"
    full.system.lines.put_nowait(b"last\n")
    assert await response.content.readline() == b"last\n"
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.content.readline()
    assert (await full.get("/healthz")).status == 200


async def test_a_log_that_breaks_off_at_once_says_why(full: World) -> None:
    full.system.breaks = LOST
    full.system.lines.put_nowait(b"")
    response = await full.get(ADMIN_PATH + "/models/default/smollm2/logs?tail=0&follow=true")
    assert response.status == 503


async def test_a_failure_of_the_gateway_in_the_middle_of_a_log_ends_the_answer(full: World) -> None:
    full.system.breaks = RuntimeError("a fault")
    response = await full.session.get(full.url + ADMIN_PATH + "/models/default/smollm2/logs?tail=1&follow=true")
    assert await response.content.readline() == b"line 0\n"
    full.system.lines.put_nowait(b"last\n")
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()


async def test_any_number_of_lines_may_be_asked_for(full: World) -> None:
    full.system.most_lines = 3
    response = await full.get(ADMIN_PATH + "/models/default/smollm2/logs?tail=1e300")
    assert response.status == 200
    assert len((await response.text()).splitlines()) == 3


async def test_events_are_lines_of_json(full: World) -> None:
    full.system.happened = [Event(1.5, "OmniModel", "default", "smollm2", "Normal", "Woken", "woken in 0.1 s")]
    response = await full.get(ADMIN_PATH + "/events")
    (line,) = (await response.text()).splitlines()

    assert json.loads(line)["reason"] == "Woken"
    assert response.content_type == "application/x-ndjson"


async def test_status_is_what_the_system_says(full: World) -> None:
    assert await (await full.get(ADMIN_PATH + "/status")).json() == {"errors": [], "activity": []}


async def test_health_and_readiness(full: World) -> None:
    assert (await full.get("/healthz")).status == 200
    assert (await full.get("/readyz")).status == 200
    full.system.kinds["OmniPool"][0]["status"]["conditions"][0]["status"] = "False"
    unready = await full.get("/readyz")
    assert unready.status == 503
    assert await unready.json() == {"ready": False, "reasons": ["no pool is ready"]}


async def metrics_of(world: World) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = await (await world.get("/metrics")).text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_metrics_tell_requests_waits_tiers_and_swaps(full: World) -> None:
    await full.post("/v1/chat/completions", json=CHAT)
    await full.post("/v1/chat/completions", json={**CHAT, "refuse": True})
    found = await metrics_of(full)

    assert found[sample("omni_requests_total", model="smollm2", outcome="ok")] == 1
    assert found[sample("omni_requests_total", model="smollm2", outcome="refused")] == 1
    assert found[sample("omni_request_wait_seconds_count", model="smollm2")] == 2
    assert found[sample("omni_tier_bytes", tier="resident", memory="device")] == 100
    assert found[sample("omni_tier_bytes", tier="warm", memory="host")] == 20
    assert found[sample("omni_models", tier="warm")] == 1
    assert found[sample("omni_swaps_total", model="smollm2", pod="", cause="wake")] == 3
    assert found[sample("omni_swaps_total", model="minilm", pod="", cause="idle")] == 1
    assert found[sample("omni_pool_bytes", pool="default", kind="budget")] == 1000
    assert found[sample("omni_pool_overcommit_ratio", pool="default")] == 3.5


async def test_no_two_samples_are_of_the_same_series(full: World) -> None:
    """A model in two pods, and one of the same name in another namespace."""
    here = omnimodel("smollm2", pod="default-0", tier="resident", wakes=3, lastWakeSeconds=0.25)
    here["status"]["residency"].append(
        {"pod": "default-1", "tier": "warm", "wakes": 2, "lastWakeSeconds": 0.5, "wakeSeconds": 0.9, "hostBytes": 20,
         "lastWakeBytesPerSecond": 55_300_000_000}
    )  # fmt: skip
    there = omnimodel("smollm2", pod="default-0", tier="warm", wakes=7)
    there["metadata"]["namespace"] = "team"
    full.system.kinds["OmniModel"] = [here, there]
    pool = full.system.kinds["OmniPool"][0]
    full.system.kinds["OmniPool"].append({**pool, "metadata": {"name": "default", "namespace": "team"}})
    text = await (await full.get("/metrics")).text()
    names = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names))
    found = await metrics_of(full)
    assert found[sample("omni_swaps_total", model="smollm2", pod="default-0", cause="wake")] == 3
    assert found[sample("omni_swaps_total", model="smollm2", pod="default-1", cause="wake")] == 2
    assert found[sample("omni_swaps_total", model="team/smollm2", pod="default-0", cause="wake")] == 7
    assert found[sample("omni_last_wake_seconds", model="smollm2", pod="default-1")] == 0.5
    assert found[sample("omni_wake_seconds_total", model="smollm2", pod="default-1")] == 0.9
    assert found[sample("omni_last_wake_bytes_per_second", model="smollm2", pod="default-1")] == 55.3e9
    assert found[sample("omni_model_bytes", model="smollm2", pod="default-1", memory="host")] == 20
    assert found[sample("omni_pool_overcommit_ratio", pool="team/default")] == 3.5


async def test_tokens_are_told_of_who_counts_them(full: World) -> None:
    chat = omnimodel("smollm2", pod="default-0", tier="resident", promptTokens=37, generatedTokens=0)
    full.system.kinds["OmniModel"] = [chat, omnimodel("minilm", pod="default-0", tier="warm", requests=3)]
    told = {name: value for name, value in (await metrics_of(full)).items() if "tokens" in name[0]}
    assert told == {
        sample("omni_model_tokens_total", model="smollm2", pod="default-0", kind="prompt"): 37,
        sample("omni_model_tokens_total", model="smollm2", pod="default-0", kind="generated"): 0,
    }


async def test_power_and_energy_of_a_device_are_told_where_they_are_known(full: World) -> None:
    (pool,) = full.system.kinds["OmniPool"]
    assert not [name for name, _ in await metrics_of(full) if name.startswith("omni_device")]
    entry = {"pod": "default-0", "powerWatts": 1.0}  # of an agent in a cluster, and old: it tells the latest itself
    pool["status"] |= {"device": "cuda:0", "powerWatts": 310.5, "energyJoules": 184320.0, "pods": [entry]}
    found = await metrics_of(full)
    assert found[sample("omni_device_power_watts", pool="default", device="cuda:0")] == 310.5
    assert found[sample("omni_device_energy_joules_total", pool="default", device="cuda:0")] == 184320.0


async def test_power_and_energy_are_told_of_each_device_where_there_are_several(full: World) -> None:
    (pool,) = full.system.kinds["OmniPool"]
    several = [
        {"name": "cuda:0", "powerWatts": 310.5, "energyJoules": 184320.0},
        {"name": "cuda:1", "problem": "the driver reports Xid 79"},
        {"name": "cuda:2", "powerWatts": 90.5},
    ]
    pool["status"] |= {"device": "cuda:0 to cuda:2", "powerWatts": 401.0, "perDevice": several}
    found = await metrics_of(full)
    told = {name: value for name, value in found.items() if name[0].startswith("omni_device")}
    assert told == {
        sample("omni_device_power_watts", pool="default", device="cuda:0"): 310.5,
        sample("omni_device_energy_joules_total", pool="default", device="cuda:0"): 184320.0,
        sample("omni_device_power_watts", pool="default", device="cuda:2"): 90.5,
        sample("omni_device_energy_joules_total", pool="default", device="cuda:2"): 0.0,
    }


async def test_the_oldest_waiter_has_an_age(full: World) -> None:
    line = full.agent.add("cold", awake=False)
    held = asyncio.create_task(full.post("/v1/chat/completions", json={**CHAT, "model": "cold"}))
    await until(lambda: line.waiting)
    first = (await metrics_of(full))[sample("omni_oldest_waiter_seconds", model="cold")]
    second = (await metrics_of(full))[sample("omni_oldest_waiter_seconds", model="cold")]
    assert 0 <= first < second
    line.awake.set()
    await held

    assert sample("omni_oldest_waiter_seconds", model="cold") not in await metrics_of(full)


async def test_the_series_of_a_model_that_is_gone_go(full: World) -> None:
    full.agent.add("passing")
    await full.post("/v1/chat/completions", json={**CHAT, "model": "passing"})
    assert sample("omni_requests_total", model="passing", outcome="ok") in await metrics_of(full)
    del full.agent.lines["passing"]

    assert not [labels for _, labels in await metrics_of(full) if ("model", "passing") in labels]


async def test_the_page_is_self_contained(full: World) -> None:
    response = await full.get("/")
    page = await response.text()

    assert response.content_type == "text/html"
    assert "http://" not in page
    assert "https://" not in page
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "innerHTML" not in page, "names and messages come from outside"


async def test_a_port_that_is_taken_is_a_sentence(full: World) -> None:
    app = create_app(full.agent, full.system)
    with pytest.raises(OmniError, match=r"cannot be listened on: .*; choose another with --listen"):
        await serve(app, "127.0.0.1", full.listening.port)


async def test_many_connections_are_taken_at_once(full: World) -> None:
    async def one() -> int:
        async with aiohttp.ClientSession() as session, session.get(full.url + "/healthz") as response:
            return response.status

    assert set(await asyncio.gather(*(one() for _ in range(200)))) == {200}
