"""Room on several devices: all of it or none, and nobody waits for ever for what another one has set aside."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omnimodel.agent.spread import Spread

DEVICES = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def placed(*devices: str) -> Spread:
    spread = Spread(len(devices))
    spread.place(devices)
    return spread


def test_of_one_device_it_is_always_the_turn_and_its_room_is_all_there_is() -> None:
    spread = placed("cuda:1")
    assert spread.is_turn_of("cuda:1")
    assert spread.set_aside("cuda:1", []) == []
    assert not spread.waits
    assert spread.is_turn_of("cuda:1")


def test_devices_have_their_turn_in_order_and_the_last_one_wakes() -> None:
    spread = placed("cuda:0", "cuda:2")
    assert (str(spread), spread.is_turn_of("cuda:0"), spread.is_turn_of("cuda:2")) == ("cuda:0, cuda:2", True, False)
    assert spread.set_aside("cuda:0", []) is None
    assert (spread.waits, spread.has_aside("cuda:0"), spread.has_aside("cuda:2")) == (True, True, False)
    assert (spread.is_turn_of("cuda:0"), spread.is_turn_of("cuda:2")) == (False, True)
    assert spread.set_aside("cuda:2", []) == []
    assert not spread.waits
    assert spread.is_turn_of("cuda:0")


def test_what_is_given_up_is_asked_for_from_the_first_on_again() -> None:
    spread = placed("cuda:0", "cuda:1", "cuda:2")
    spread.set_aside("cuda:0", [])
    spread.set_aside("cuda:1", [])
    spread.give_up()
    assert not spread.waits
    assert [name for name in DEVICES if spread.is_turn_of(name)] == ["cuda:0"]
    spread.set_aside("cuda:0", [])
    spread.place(("cuda:1", "cuda:3"))
    assert not spread.waits
    assert spread.is_turn_of("cuda:1")


@given(
    st.lists(st.sets(st.sampled_from(DEVICES), min_size=1), min_size=1, max_size=6),
    st.data(),
)
def test_models_over_the_same_devices_never_wait_for_each_other(wished: list[set[str]], data: st.DataObject) -> None:
    """Each device has room for one; whoever has all of its own leaves, and some device can always go on."""
    waiting = {number: placed(*sorted(devices)) for number, devices in enumerate(wished)}
    taken: dict[str, int] = {}
    while waiting:
        able = [
            (number, device)
            for number, spread in waiting.items()
            for device in spread.devices
            if device not in taken and spread.is_turn_of(device)
        ]
        assert able, "all wait for each other"
        number, device = data.draw(st.sampled_from(able))
        taken[device] = number
        if waiting[number].set_aside(device, []) is not None:
            del waiting[number]
            taken = {name: holder for name, holder in taken.items() if holder != number}
