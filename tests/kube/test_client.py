"""Requests, watches, events and elections against a real API server."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import StreamReader, web

from kube.proxy import Proxy
from kube.world import until
from omnimodel.errors import OmniError
from omnimodel.kube import CONFIG_MAPS, EVENTS, LEASES, MODELS, POOLS, Election, Kube, KubeError, Mirror, Recorder


def config_map(name: str, namespace: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "data": data}


async def test_objects_are_made_read_changed_and_deleted(kube: Kube, namespace: str) -> None:
    assert await kube.get(CONFIG_MAPS, "a", namespace) is None
    made = await kube.apply(CONFIG_MAPS, config_map("a", namespace, x="1", y="2"), manager="one")
    assert made["data"] == {"x": "1", "y": "2"}
    changed = await kube.apply(CONFIG_MAPS, config_map("a", namespace, x="3"), manager="one")
    assert changed["data"] == {"x": "3"}
    page = await kube.list(CONFIG_MAPS, namespace, fields="metadata.name=a")
    assert [(item["kind"], item["metadata"]["name"]) for item in page.items] == [("ConfigMap", "a")]
    await kube.delete(CONFIG_MAPS, "a", namespace, uid="00000000-0000-0000-0000-000000000000")
    assert await kube.get(CONFIG_MAPS, "a", namespace) is not None  # another one than was meant
    await kube.delete(CONFIG_MAPS, "a", namespace)
    await kube.delete(CONFIG_MAPS, "a", namespace)
    assert await kube.get(CONFIG_MAPS, "a", namespace) is None


async def test_a_status_of_what_is_not_there_makes_nothing(kube: Kube, namespace: str) -> None:
    with pytest.raises(KubeError) as caught:
        await kube.patch_status(MODELS, "none", namespace, {"observedGeneration": 1}, manager="one")
    assert caught.value.missing


async def test_each_manager_has_its_own_entry_and_an_empty_status_takes_it_back(kube: Kube, namespace: str) -> None:
    await kube.apply(POOLS, {"metadata": {"name": "gpu", "namespace": namespace}, "spec": {}}, manager="person")
    for pod in ("gpu-0", "gpu-1"):
        await kube.patch_status(POOLS, "gpu", namespace, {"pods": [{"pod": pod}]}, manager=f"omni-agent.{pod}")
    found = await kube.patch_status(POOLS, "gpu", namespace, {}, manager="omni-agent.gpu-0")
    assert [entry["pod"] for entry in found["status"]["pods"]] == ["gpu-1"]
    await kube.remove_item(POOLS, "gpu", namespace, "/status/pods", 0, ("pod", "gpu-1"), "status")
    with pytest.raises(KubeError):
        await kube.remove_item(POOLS, "gpu", namespace, "/status/pods", 0, ("pod", "gpu-1"), "status")


async def test_a_refusal_says_what_the_server_says(kube: Kube, namespace: str) -> None:
    body = {"metadata": {"name": "gpu", "namespace": namespace}, "spec": {"replicas": -1}}
    with pytest.raises(KubeError, match=r"spec\.replicas") as caught:
        await kube.apply(POOLS, body, manager="person")
    assert caught.value.invalid


async def test_no_server_is_an_error_without_status(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(
        '{"apiVersion": "v1", "kind": "Config", "current-context": "x", "users": [{"name": "x", "user": {}}],'
        '"clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}],'
        '"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}]}'
    )
    async with await Kube.connect(str(path)) as kube:
        with pytest.raises(KubeError, match="does not answer") as caught:
            await kube.list(CONFIG_MAPS)
        assert caught.value.status == 0
    with pytest.raises(OmniError, match="no way to a cluster"):
        await Kube.connect(str(tmp_path / "none"))


async def test_a_list_longer_than_a_page_is_whole(kube: Kube, namespace: str, monkeypatch) -> None:
    from omnimodel.kube import client

    monkeypatch.setattr(client, "PAGE_ITEMS", 3)
    for number in range(8):
        await kube.apply(CONFIG_MAPS, config_map(f"m{number}", namespace, x="1"), manager="one")
    names = {item["metadata"]["name"] for item in (await kube.list(CONFIG_MAPS, namespace)).items}
    assert {f"m{number}" for number in range(8)} <= names


@contextlib.asynccontextmanager
async def mirrored(kube: Kube, namespace: str, **options: Any):
    mirror = Mirror(kube, CONFIG_MAPS, namespace, **options)
    task = asyncio.create_task(mirror.run())
    try:
        await mirror.wait_synced(30)
        yield mirror
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_mirror_says_when_it_knows_everything_also_when_that_is_nothing(kube: Kube, namespace: str) -> None:
    synced: list[int] = []
    none = "omnimodel.io/none=x"
    async with mirrored(kube, namespace, labels=none, on_synced=lambda: synced.append(1)) as mirror:
        assert mirror.items == {}
        assert synced == [1]


async def test_a_mirror_that_is_cancelled_as_news_arrive_ends(kube: Kube, namespace: str, monkeypatch) -> None:
    mirror = Mirror(kube, CONFIG_MAPS, namespace)
    task = asyncio.create_task(mirror.run())
    await mirror.wait_synced(30)
    feed, cancelled = StreamReader.feed_data, asyncio.Event()

    def cancel_too(self: StreamReader, data: bytes, *rest: Any) -> Any:
        fed = feed(self, data, *rest)
        if b'"type":"ADDED"' in data:  # whoever reads is woken, and then the cancel comes
            asyncio.get_running_loop().call_soon(task.cancel)
            cancelled.set()
        return fed

    monkeypatch.setattr(StreamReader, "feed_data", cancel_too)
    await kube.apply(CONFIG_MAPS, config_map("a", namespace, x="1"), manager="one")
    await cancelled.wait()
    ended, _ = await asyncio.wait({task}, timeout=10)
    task.cancel()
    assert ended, "the cancel was lost"
    assert task.cancelled()


async def test_a_mirror_follows_through_cuts_and_a_forgotten_past(
    api_cluster, kube: Kube, proxy: Proxy, namespace: str
) -> None:
    async with await Kube.connect(str(proxy.kubeconfig)) as watched, mirrored(watched, namespace) as mirror:
        for name in ("a", "b"):
            await kube.apply(CONFIG_MAPS, config_map(name, namespace, x="1"), manager="one")
        await until(lambda: {(namespace, "a"), (namespace, "b")} <= mirror.items.keys(), "both are there")

        expired = True

        async def gone(request: web.Request) -> web.Response | None:
            if expired and request.query.get("watch") == "true":
                said = {"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410}
                return web.json_response({"type": "ERROR", "object": said})
            return None

        proxy.before = gone
        proxy.cut()
        await kube.delete(CONFIG_MAPS, "a", namespace)
        await until(lambda: (namespace, "a") not in mirror.items, "a list shows what no event tells")
        expired = False
        proxy.cut()
        await kube.apply(CONFIG_MAPS, config_map("b", namespace, x="2"), manager="one")
        await until(lambda: mirror.items[namespace, "b"]["data"] == {"x": "2"}, "the change arrives")


async def test_a_stream_that_says_nothing_is_begun_anew(kube: Kube, namespace: str) -> None:
    async with mirrored(kube, namespace, silence_seconds=0.5) as mirror:
        await until(lambda: kube.calls["watch", "configmaps"] >= 3, "it asks again")
        assert kube.calls["list", "configmaps"] == 1  # from where it was
        assert mirror.age_seconds > 0


async def test_equal_events_are_one_event(kube: Kube, namespace: str) -> None:
    about = await kube.apply(CONFIG_MAPS, config_map("a", namespace), manager="one")
    about |= {"apiVersion": "v1", "kind": "ConfigMap"}
    for _ in range(2):
        recorder = Recorder(kube, "omni-test")
        for _ in range(3):
            await recorder.tell(about, "Tested", "it was tested")
    (event,) = [e for e in (await kube.list(EVENTS, namespace)).items if e["reason"] == "Tested"]
    assert (event["count"], event["message"], event["type"]) == (2, "it was tested", "Normal")


def election(kube: Kube, namespace: str, identity: str) -> Election:
    return Election(kube, namespace, "leader", identity, lease_seconds=2, renew_seconds=1.2, retry_seconds=0.1)


async def test_one_of_many_leads_and_the_next_takes_over(kube: Kube, namespace: str) -> None:
    elections = [election(kube, namespace, f"n{number}") for number in range(5)]
    tasks = [asyncio.create_task(e.run()) for e in elections]
    try:
        await until(lambda: any(e.leads for e in elections), "one leads")
        assert sum(e.leads for e in elections) == 1
        first = next(index for index, e in enumerate(elections) if e.leads)
        tasks[first].cancel()  # dies without a word
        overlap: list[int] = []

        def next_one() -> bool:
            leading = [index for index, e in enumerate(elections) if e.leads]
            overlap.append(len(leading))
            return any(index != first for index in leading)

        await until(next_one, "another leads")
        assert max(overlap) == 1
        second = next(index for index, e in enumerate(elections) if e.leads)
        tasks[second].cancel()
        await elections[second].resign()
        await until(
            lambda: any(e.leads for i, e in enumerate(elections) if i not in {first, second}), "the third leads"
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_leader_whose_lease_is_taken_ends(kube: Kube, namespace: str) -> None:
    one = election(kube, namespace, "one")
    task = asyncio.create_task(one.run())
    await until(lambda: one.leads, "it leads")

    async def usurp() -> bool:
        lease = await kube.get(LEASES, "leader", namespace)
        assert lease is not None
        try:
            await kube.replace(
                LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "usurper", "leaseDurationSeconds": 3600}}
            )
        except KubeError:
            return False
        return True

    await until(usurp, "the lease is taken")
    async with asyncio.timeout(10):
        await task
