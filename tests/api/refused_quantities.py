"""Amounts that must be refused: each with the one line that says what to write instead."""

from __future__ import annotations

import math
from typing import Any

MODELS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "idle zero",
        {"residency__idleAfter": 0},
        ["residency.idleAfter: 0: 0s is not a lifetime; did you mean never? Else write a duration such as 5m"],
    ),
    (
        "idle minus one",
        {"residency__idleAfter": -1},
        ["residency.idleAfter: -1: -1s is not a lifetime; did you mean never? Else write a duration such as 5m"],
    ),
    (
        "idle 0s",
        {"residency__idleAfter": "0s"},
        ["residency.idleAfter: '0s': 0s is not a lifetime; did you mean never? Else write a duration such as 5m"],
    ),
    (
        "bare 300",
        {"residency__idleAfter": 300},
        ["residency.idleAfter: 300: has no unit, and is not a duration; write 300s for seconds"],
    ),
    (
        "bare text 300",
        {"residency__idleAfter": "300"},
        ["residency.idleAfter: '300': has no unit, and is not a duration; write 300s for seconds"],
    ),
    ("5 min", {"residency__idleAfter": "5 min"}, ["residency.idleAfter: '5 min': is not a duration; write 5m"]),
    ("1d", {"residency__idleAfter": "1d"}, ["residency.idleAfter: '1d': is not a duration; write 24h"]),
    (
        "-1m",
        {"residency__idleAfter": "-1m"},
        ["residency.idleAfter: '-1m': -1m is not a lifetime; did you mean never? Else write a duration such as 5m"],
    ),
    ("Never", {"residency__idleAfter": "Never"}, ["residency.idleAfter: 'Never': is not a duration; write never"]),
    ("null", {"residency__idleAfter": None}, ["residency.idleAfter: has no value; write one, or remove the line"]),
    ("empty", {"residency__idleAfter": ""}, ["residency.idleAfter: '': is empty; write one such as 30s, 5m or 1h30m"]),
    (
        "deadline bare",
        {"limits__deadline": 300},
        ["limits.deadline: 300: has no unit, and is not a duration; write 300s for seconds"],
    ),
    (
        "deadline False",
        {"limits__deadline": False},
        ["limits.deadline: false: is not a duration; write one such as 30s, 5m or 1h30m"],
    ),
    *(
        (
            f"{field} {value!r}",
            {f"limits__{field}": value},
            [f"limits.{field}: {value!r}: is no time at all; write a duration such as 30s, or leave the field out"],
        )
        for field in ("deadline", "loadDeadline", "drainTimeout")
        for value in (0, "0")
    ),
    (
        "deadline never",
        {"limits__deadline": "never"},
        [
            "limits.deadline: 'never': is no duration here: everything that waits has a deadline; write one such as 30s, 5m or 1h30m"
        ],
    ),
    (
        "deadline 0",
        {"limits__deadline": "0s"},
        ["limits.deadline: '0s': is no time at all; write a duration such as 30s, or leave the field out"],
    ),
    (
        "load ms",
        {"limits__loadDeadline": 90000},
        ["limits.loadDeadline: 90000: has no unit, and is not a duration; write 90000s for seconds"],
    ),
    (
        "memory '24GB'",
        {"resources__deviceMemory": "24GB"},
        ["resources.deviceMemory: '24GB': has no unit of a quantity (GB); write 24G or 24Gi, which differ by 7 %"],
    ),
    (
        "memory '24 Gi'",
        {"resources__deviceMemory": "24 Gi"},
        ["resources.deviceMemory: '24 Gi': has a space in it; write 24Gi"],
    ),
    (
        "memory '24gb'",
        {"resources__deviceMemory": "24gb"},
        ["resources.deviceMemory: '24gb': has no unit of a quantity (gb); write 24G or 24Gi, which differ by 7 %"],
    ),
    (
        "memory '24g'",
        {"resources__deviceMemory": "24g"},
        ["resources.deviceMemory: '24g': has no unit of a quantity (g); write 24G or 24Gi, which differ by 7 %"],
    ),
    (
        "memory '24gib'",
        {"resources__deviceMemory": "24gib"},
        ["resources.deviceMemory: '24gib': has no unit of a quantity (gib); write 24Gi"],
    ),
    (
        "memory ''",
        {"resources__deviceMemory": ""},
        ["resources.deviceMemory: '': is empty; write a number with a unit, such as 24Gi or 1500M, or auto"],
    ),
    (
        "memory '80%'",
        {"resources__deviceMemory": "80%"},
        [
            "resources.deviceMemory: '80%': is a share, and a model asks for bytes; write a quantity such as 24Gi, or auto; a share belongs in spec.device.memory of an OmniPool"
        ],
    ),
    (
        "memory '80 %'",
        {"resources__deviceMemory": "80 %"},
        [
            "resources.deviceMemory: '80 %': is a share, and a model asks for bytes; write a quantity such as 24Gi, or auto; a share belongs in spec.device.memory of an OmniPool"
        ],
    ),
    (
        "memory 0.8",
        {"resources__deviceMemory": 0.8},
        [
            "resources.deviceMemory: 0.8: is a share, and a model asks for bytes; write a quantity such as 24Gi, or auto; a share belongs in spec.device.memory of an OmniPool"
        ],
    ),
    (
        "memory '0.8'",
        {"resources__deviceMemory": "0.8"},
        [
            "resources.deviceMemory: '0.8': is a share, and a model asks for bytes; write a quantity such as 24Gi, or auto; a share belongs in spec.device.memory of an OmniPool"
        ],
    ),
    (
        "memory '24m'",
        {"resources__deviceMemory": "24m"},
        ["resources.deviceMemory: '24m': means thousandths, 0.024 bytes; write 24Mi or 24Gi"],
    ),
    (
        "memory 24",
        {"resources__deviceMemory": 24},
        ["resources.deviceMemory: 24: is 24 bytes, and less than 1Mi makes no sense; write a quantity such as 24Gi"],
    ),
    (
        "memory '24'",
        {"resources__deviceMemory": "24"},
        ["resources.deviceMemory: '24': is 24 bytes, and less than 1Mi makes no sense; write a quantity such as 24Gi"],
    ),
    (
        "memory -5",
        {"resources__deviceMemory": -5},
        ["resources.deviceMemory: -5: is negative; write a quantity such as 24Gi"],
    ),
    (
        "memory '-5Gi'",
        {"resources__deviceMemory": "-5Gi"},
        ["resources.deviceMemory: '-5Gi': is negative; write a number with a unit, such as 24Gi or 1500M, or auto"],
    ),
    (
        "memory nan",
        {"resources__deviceMemory": math.nan},
        ["resources.deviceMemory: nan: is not a quantity; write a number with a unit, such as 24Gi or 1500M, or auto"],
    ),
    (
        "memory 'NaN'",
        {"resources__deviceMemory": "NaN"},
        [
            "resources.deviceMemory: 'NaN': is not a quantity; write a number with a unit, such as 24Gi or 1500M, or auto"
        ],
    ),
    (
        "memory None",
        {"resources__deviceMemory": None},
        ["resources.deviceMemory: has no value; write one, or remove the line"],
    ),
    (
        "memory True",
        {"resources__deviceMemory": True},
        ["resources.deviceMemory: true: is not a quantity; write a number with a unit, such as 24Gi or 1500M, or auto"],
    ),
    (
        "memory 'auto '",
        {"resources__deviceMemory": "auto "},
        [
            "resources.deviceMemory: 'auto ': is not a quantity; write a number with a unit, such as 24Gi or 1500M, or auto"
        ],
    ),
    (
        "memory 'lots'",
        {"resources__deviceMemory": "lots"},
        [
            "resources.deviceMemory: 'lots': is not a quantity; write a number with a unit, such as 24Gi or 1500M, or auto"
        ],
    ),
    (
        "host memory",
        {"resources__hostMemory": "8GB"},
        ["resources.hostMemory: '8GB': has no unit of a quantity (GB); write 8G or 8Gi, which differ by 7 %"],
    ),
    (
        "cpu words",
        {"resources__cpu": "two"},
        ["resources.cpu: 'two': is not a number of cores; write one such as 2, 0.5 or 500m"],
    ),
    (
        "cpu zero",
        {"resources__cpu": 0},
        ["resources.cpu: 0: is not a number of cores above 0; write one such as 2, 0.5 or 500m"],
    ),
    (
        "tier no idle",
        {"residency__idleTier": "cold"},
        [
            "residency.idleTier: 'cold': idleTier says where to go after idleAfter, which is not set; add idleAfter: 15m, or remove idleTier"
        ],
    ),
    ("spec list", {"resources": []}, ["resources: is not a mapping; write resources: {deviceMemory: 600Mi}"]),
    (
        "concurrency text",
        {"limits__concurrency": "4"},
        ["limits.concurrency: '4': is text, not a number; write 4 without quotes"],
    ),
    (
        "concurrency zero",
        {"limits__concurrency": 0},
        ["limits.concurrency: 0: is less than is possible; write a whole number from 1 to 4096"],
    ),
]

POOLS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "pool memory '80 %'",
        {"device__memory": "80 %"},
        ["device.memory: '80 %': is not a share from 1% to 100%; write 80%"],
    ),
    (
        "pool memory '0.8%'",
        {"device__memory": "0.8%"},
        ["device.memory: '0.8%': is not a share from 1% to 100%; did you mean 80%?"],
    ),
    (
        "pool memory '120%'",
        {"device__memory": "120%"},
        ["device.memory: '120%': is not a share from 1% to 100%; write one such as 80%"],
    ),
    (
        "pool memory '0%'",
        {"device__memory": "0%"},
        ["device.memory: '0%': is not a share from 1% to 100%; write one such as 80%"],
    ),
    (
        "pool memory 0.8",
        {"device__memory": 0.8},
        ["device.memory: 0.8: is neither a quantity nor a share; did you mean 80%?"],
    ),
    (
        "pool memory '0.8'",
        {"device__memory": "0.8"},
        ["device.memory: '0.8': is neither a quantity nor a share; did you mean 80%?"],
    ),
    (
        "pool memory nan",
        {"device__memory": math.nan},
        ["device.memory: nan: is not a quantity; write a number with a unit, such as 24Gi or 1500M, or 80%, or auto"],
    ),
    (
        "pool memory '24GB'",
        {"device__memory": "24GB"},
        ["device.memory: '24GB': has no unit of a quantity (GB); write 24G or 24Gi, which differ by 7 %"],
    ),
    (
        "pool memory ''",
        {"device__memory": ""},
        ["device.memory: '': is empty; write a number with a unit, such as 24Gi or 1500M, or 80%, or auto"],
    ),
    ("pool memory None", {"device__memory": None}, ["device.memory: has no value; write one, or remove the line"]),
    ("pool memory -1", {"device__memory": -1}, ["device.memory: -1: is negative; write a quantity such as 24Gi"]),
    (
        "pool memory 'all'",
        {"device__memory": "all"},
        ["device.memory: 'all': is not a quantity; write a number with a unit, such as 24Gi or 1500M, or 80%, or auto"],
    ),
    (
        "device type",
        {"device__type": "GPU"},
        ["device.type: 'GPU': is none of the possible words; write auto, cpu or cuda"],
    ),
]
