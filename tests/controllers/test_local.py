"""The reconcile loop of one machine, on real files that change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from controllers.manifests import write_model, write_pool
from controllers.standin import StandInAgent, until
from omnimodel.api import ModelStatus, PoolStatus
from omnimodel.catalog import Identity
from omnimodel.controllers.local import LocalController
from omnimodel.controllers.local_backend import LocalBackend
from omnimodel.controllers.local_state import OBJECTS_FILE, IdentityFile
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.protocol.dispatch import InferenceRequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "catalog"
    path.mkdir()
    return path


@contextlib.asynccontextmanager
async def controlling(folder: Path, agent: StandInAgent, **options: Any):
    """A controller that runs on a folder."""
    identities = IdentityFile(folder.parent / OBJECTS_FILE)
    controller = LocalController(folder, agent, identities, **options)
    task = asyncio.create_task(controller.run())
    try:
        await until(lambda: agent.applied or task.done(), "the first round")
        if task.done():
            task.result()
        yield controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def model(controller: LocalController, name: str) -> dict[str, Any]:
    for item in controller.objects("OmniModel"):
        if item["metadata"]["name"] == name:
            return dict(item)
    return {}


def condition(controller: LocalController, name: str, kind: str = "Ready") -> tuple[str, str, str]:
    for found in model(controller, name).get("status", {}).get("conditions", ()):
        if found["type"] == kind:
            return found["status"], found["reason"], found["message"]
    return "", "", ""


def _told(agent: StandInAgent, reason: Reason) -> list[str]:
    return [event.message for _, event in agent.events._events if event.reason == reason]


async def test_a_new_file_becomes_a_process(folder: Path) -> None:
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        assert agent.names == []
        write_model(folder, "words")
        await until(lambda: agent.names == ["default/words"], "the process of words")
        assert condition(controller, "words")[0] == "True"


async def test_an_edit_is_a_new_generation(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the first process")
        before = model(controller, "words")["metadata"]
        write_model(folder, "words", flavour="better")
        await until(lambda: agent.applied[-1][0][0].spec.generation == 2, "the second generation")
        after = model(controller, "words")
        assert (after["metadata"]["generation"], after["metadata"]["uid"]) == (2, before["uid"])
        assert after["status"]["observedGeneration"] == 2


async def test_an_edit_that_changes_no_process_is_applied_too(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent):
        await until(lambda: agent.names, "the first process")
        write_model(folder, "words", extra="residency: {priority: high}")
        await until(lambda: agent.applied[-1][0][0].spec.residency.priority == 750, "the new priority")


async def test_a_deleted_file_takes_its_process_away(folder: Path) -> None:
    path = write_model(folder, "words")
    write_model(folder, "others")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: len(agent.names) == 2, "both processes")
        path.unlink()
        await until(lambda: agent.names == ["default/others"], "only the other one")
        assert not model(controller, "words")


async def test_a_broken_file_changes_nothing_and_its_error_is_shown(folder: Path) -> None:
    path = write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the first process")
        count = len(agent.applied)
        path.write_text(path.read_text().replace("engine: python", "engine: pyhton"))
        errors = await until(lambda: controller.status_lines()["errors"], "the error")
        assert errors[0]["file"].endswith("words.yaml")
        assert errors[0]["line"] > 0
        assert "python" in errors[0]["message"]
        assert (agent.names, len(agent.applied)) == (["default/words"], count)
        assert condition(controller, "words")[0] == "True"
        told = await until(lambda: _told(agent, Reason.INVALID_MANIFEST), "the event")
        assert len(told) == 1
        write_model(folder, "words", flavour="corrected")
        await until(lambda: not controller.status_lines()["errors"], "the error to go")
        await until(lambda: agent.applied[-1][0][0].spec.options == {"flavour": "corrected"}, "the corrected version")


async def test_one_broken_file_does_not_keep_the_others_out(folder: Path) -> None:
    (folder / "broken.yaml").write_text("{")
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names == ["default/words"], "the good one")
        assert controller.status_lines()["errors"]


async def test_a_model_that_turns_out_too_large_is_refused_and_stays_so(folder: Path) -> None:
    write_model(folder, "words")
    write_model(folder, "giant")
    agent = StandInAgent(budget_bytes=1 << 30, footprints={"default/giant": (2 << 30, 1 << 20)})
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names == ["default/words"], "the giant to be taken away")
        status, reason, message = condition(controller, "giant")
        assert (status, reason) == ("False", "TooLarge")
        assert "1.00 GiB" in message
        applied = len(agent.applied)
        for _ in range(3):
            agent.ring()
            await controller.wait_changed()
        assert len(agent.applied) == applied, "a refused model must not come and go"


async def test_a_suspended_model_has_no_process_and_says_so_to_clients(folder: Path) -> None:
    write_model(folder, "words", extra="suspend: true")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: model(controller, "words"), "the object")
        assert agent.names == []
        assert condition(controller, "words")[:2] == ("False", "Suspended")
        assert not controller.unsettled()
        backend = LocalBackend(_Nothing(), controller.refused)
        assert [(card.name, card.ready, card.reason) for card in backend.models()] == [("words", False, "Suspended")]
        with pytest.raises(DispatchError) as refusal:
            async with backend.open(InferenceRequest("words", "POST", "/v1/embeddings", {}, b"{}")):
                pass
        assert (refusal.value.status, refusal.value.reason) == (503, Reason.SUSPENDED)


async def test_models_to_be_apart_serve_all_the_same_and_are_told_that_a_machine_is_one_pod(folder: Path) -> None:
    agent = StandInAgent()
    for name in ("ant", "bee"):
        write_model(folder, name, extra="affinity: {apart: [large]}")
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names == ["default/ant", "default/bee"], "their processes")
        told = [event async for event in agent.events.follow(follow=False) if event.reason == "AffinityConflict"]
        assert [event.name for event in told] == ["bee"]
        assert "is to be apart from default/ant (group large), and one machine is one pod" in told[0].message
        assert condition(controller, "bee")[0] == "True"


class _Nothing:
    """A backend without models."""

    def models(self) -> list[Any]:
        return []


async def test_a_model_that_asks_for_several_copies_is_told_that_a_machine_holds_one(folder: Path) -> None:
    agent = StandInAgent()
    write_model(folder, "words", extra="replicas: {min: 3}")
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names == ["default/words"], "its process")
        told = [event async for event in agent.events.follow(follow=False) if event.name == "words"]
        assert [event.reason for event in told] == ["TooFewPods"]
        assert "replicas.min 3" in told[0].message
        assert condition(controller, "words")[0] == "True"


async def test_the_older_of_two_models_keeps_a_name(folder: Path) -> None:
    older = Identity("uid-1", "2020-01-01T00:00:00Z", 1, "of an earlier run")
    IdentityFile(folder.parent / OBJECTS_FILE).write({("OmniModel", "default", "zebra"): older})
    write_model(folder, "ant", extra="servedNames: [gpt]")
    write_model(folder, "zebra", extra="servedNames: [gpt]")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: len(agent.names) == 2, "both")
        names = {p.metadata.name: [n.name for n in p.spec.served_names] for p in agent.applied[-1][0]}
        assert names == {"zebra": ["zebra", "gpt"], "ant": ["ant"]}
        assert condition(controller, "ant", "NameConflict")[:2] == ("True", "NameTaken")
        assert condition(controller, "ant")[0] == "True"


async def test_a_model_of_a_missing_pool_says_which_pools_there_are(folder: Path) -> None:
    write_pool(folder, "small")
    write_model(folder, "words", extra="pool: large")
    async with controlling(folder, StandInAgent()) as controller:
        await until(lambda: model(controller, "words"), "the object")
        status, reason, message = condition(controller, "words")
        assert (status, reason) == ("False", "PoolNotFound")
        assert "large" in message
        assert "small" in message


async def test_this_machine_serves_one_pool_and_says_so_of_the_other(folder: Path) -> None:
    write_pool(folder, "blue")
    write_pool(folder, "green")
    write_model(folder, "words", extra="pool: blue")
    write_model(folder, "others", extra="pool: green")
    agent = StandInAgent()
    async with controlling(folder, agent, pool="green") as controller:
        await until(lambda: agent.names == ["default/others"], "the model of green")
        assert "--pool blue" in condition(controller, "words")[2]
        pools = {item["metadata"]["name"]: item["status"] for item in controller.objects("OmniPool")}
        assert pools["green"]["budgetBytes"] == 1 << 30
        assert pools["blue"]["conditions"][0]["status"] == "False"


async def test_without_a_pool_there_is_one_of_this_machine(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process")
        (pool,) = controller.objects("OmniPool")
        assert pool["metadata"]["name"] == "default"
        PoolStatus.model_validate(pool["status"])


async def test_memory_of_the_command_line_wins_over_the_pool(folder: Path) -> None:
    write_pool(folder, "default", "1Gi")
    agent = StandInAgent()
    async with controlling(folder, agent, memory="2Gi"):
        assert agent.applied[-1][1].spec.device.memory == "2Gi"


async def test_a_pool_that_is_not_described_ends_the_start_with_a_sentence(folder: Path) -> None:
    write_pool(folder, "small")
    with pytest.raises(OmniError, match="there are: small") as refusal:
        async with controlling(folder, StandInAgent(), pool="large"):
            pass
    assert refusal.value.reason == Reason.POOL_NOT_FOUND


async def test_a_failing_apply_later_on_is_told_and_tried_again(folder: Path) -> None:
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        agent.fail_apply = OmniError("OmniPool default", "the device is gone")
        write_model(folder, "words")
        await until(lambda: any("device is gone" in e.message for _, e in agent.events._events), "the event")
        agent.fail_apply = None
        await until(lambda: agent.names == ["default/words"], "the next try")
        assert condition(controller, "words")[0] == "True"


async def test_generations_go_on_after_a_restart(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process")
        uid = model(controller, "words")["metadata"]["uid"]
    write_model(folder, "words", flavour="edited while it was away")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process again")
        metadata = model(controller, "words")["metadata"]
        assert (metadata["uid"], metadata["generation"]) == (uid, 2)


async def test_ready_leaves_true_until_the_new_generation_serves(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process")
        assert not controller.unsettled()
        agent.say("default/words", generation=0, phase="publishing", progress=0.3)
        assert condition(controller, "words")[:2] == ("Unknown", "Publishing")
        assert controller.unsettled() == ["default/words"]
        assert controller.status_lines()["activity"] == [
            {"model": "default/words", "phase": "publishing", "progress": 0.3}
        ]
        agent.say("default/words", generation=1, phase="idle")
        assert condition(controller, "words")[0] == "True"


async def test_a_failed_model_is_settled_and_a_good_edit_recovers_it(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process")
        agent.say("default/words", ready=False, phase="failed", reason="BadArtifact", message="cut off")
        assert condition(controller, "words") == ("False", "BadArtifact", "cut off")
        assert not controller.unsettled()
        agent.reports.clear()
        write_model(folder, "words", flavour="good")
        await until(lambda: condition(controller, "words")[0] == "True", "Ready")


async def test_objects_are_what_the_schema_says(folder: Path) -> None:
    write_model(folder, "words")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process")
        item = model(controller, "words")
        ModelStatus.model_validate(item["status"])
        assert (item["apiVersion"], item["kind"]) == ("omnimodel.io/v1alpha1", "OmniModel")
        assert item["spec"]["runtime"]["engine"] == "python"
        (process,) = controller.objects("OmniProcess")
        assert process["spec"]["hash"]
        assert process["status"]["state"] == "stopped"
        assert controller.objects("Pod") == []


SECRET = """\
apiVersion: v1
kind: Secret
metadata: {name: hub}
stringData: {token: hunter2}
"""


async def test_secrets_reach_the_agent_and_nobody_else(folder: Path) -> None:
    (folder / "secret.yaml").write_text(SECRET)
    path = write_model(folder, "words")
    env = "    env: {TOKEN: {secretKeyRef: {name: hub, key: token}}}\n"
    path.write_text(path.read_text().replace("    options:", env + "    options:"))
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names, "the process")
        assert agent.applied[-1][0][0].spec.env["TOKEN"] == "hunter2"
        shown = json.dumps([controller.objects(kind) for kind in ("OmniModel", "OmniProcess")])
        assert "hunter2" not in shown
        count = len(agent.applied)
        (folder / "secret.yaml").write_text(SECRET.replace("hunter2", "hunter3"))
        await until(lambda: agent.applied[-1][0][0].spec.env["TOKEN"] == "hunter3", "the new value")
        assert len(agent.applied) == count + 1


async def test_a_missing_secret_refuses_one_model_by_name(folder: Path) -> None:
    path = write_model(folder, "words")
    env = "    env: {TOKEN: {secretKeyRef: {name: hub, key: token}}}\n"
    path.write_text(path.read_text().replace("    options:", env + "    options:"))
    write_model(folder, "others")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: agent.names == ["default/others"], "the other one")
        assert "hub" in condition(controller, "words")[2]


async def test_what_the_pools_sources_refer_to_reaches_the_agent_as_it_changes(folder: Path) -> None:
    (folder / "pool.yaml").write_text(
        "apiVersion: omnimodel.io/v1alpha1\nkind: OmniPool\nmetadata: {name: default}\n"
        "spec: {sources: {netrc: {secretKeyRef: {name: fetching, key: netrc}}}}\n"
    )
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: fetching}\nstringData: {netrc: %s}\n"
    agent = StandInAgent()
    async with controlling(folder, agent):
        await until(lambda: agent.attached == [{}], "what is missing is not there")
        assert any("no key netrc in a Secret fetching" in message for message in _told(agent, Reason.SOURCE_NOT_FOUND))
        for number, word in enumerate(("first", "second"), start=1):
            (folder / "secret.yaml").write_text(secret % word)
            await until(lambda number=number: len(agent.attached) > number, "the secret's content")
            assert agent.attached[-1] == {"netrc": word.encode()}


async def test_a_name_that_is_free_again_goes_to_who_waits_for_it(folder: Path) -> None:
    """The older one has no process, so that nothing but the name changes."""
    older = write_model(folder, "older", extra="suspend: true\nservedNames: [Words]")
    agent = StandInAgent()
    async with controlling(folder, agent) as controller:
        await until(lambda: model(controller, "older"), "the older model")
        write_model(folder, "younger", extra="servedNames: [Words]")
        await until(lambda: agent.names == ["default/younger"], "the younger model")
        names = lambda: [name.name for name in agent.applied[-1][0][0].spec.served_names]  # noqa: E731
        assert names() == ["younger"]
        older.unlink()
        await until(lambda: names() == ["younger", "Words"], "the name")


async def _steer(controller: LocalController, asked: str) -> None:
    if asked == "logs":
        controller.logs("default", "words", tail=1, follow=False)
    else:
        await getattr(controller, asked)("default", "words", 1.0)


@pytest.mark.parametrize("asked", ["wake", "evict", "logs"])
async def test_who_steers_a_model_without_a_process_is_told_why_it_has_none(folder: Path, asked: str) -> None:
    write_model(folder, "words", extra="suspend: true")
    async with controlling(folder, StandInAgent()) as controller:
        await until(lambda: model(controller, "words"), "the model")
        with pytest.raises(DispatchError) as refusal:
            await _steer(controller, asked)
        assert (refusal.value.status, refusal.value.reason) == (409, Reason.SUSPENDED)
        assert refusal.value.cure == "remove `suspend: true` from its manifest"
