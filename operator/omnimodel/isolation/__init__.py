"""A sandbox for one model's process: the ladder `namespaces` > `landlock` > `process`.

The agent makes a `SandboxPlan`; the zygote forks with `fork_isolated`; the child calls `enter` before any of the
model's code runs, and gets to know what it `Reached`. `probe` says beforehand what a machine allows. The agent and the
runtime may call it.
"""

from __future__ import annotations

from omnimodel.isolation.enter import enter
from omnimodel.isolation.fork import fork_ahead, fork_isolated
from omnimodel.isolation.plan import Level, Mount, Reached, SandboxPlan

__all__ = ["Level", "Mount", "Reached", "SandboxPlan", "enter", "fork_ahead", "fork_isolated"]
