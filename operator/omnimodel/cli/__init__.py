"""The `omni` command: starts a system on this machine, and looks at and steers one that runs.

Composes every room below; nothing imports it. Results go to stdout, everything else to stderr. A command's module is
imported when the command is asked for, so that `omni --help` and shell completion stay quick.
"""

from __future__ import annotations

import itertools
import os
import sys

import click

from omnimodel.cli.exits import ExitCode, exit_code, report_error
from omnimodel.cli.lazy import LazyGroup

COMMANDS = {
    "up": ("omnimodel.cli.up", "Serve the manifests of a folder on this machine, and reconcile every edit."),
    "get": ("omnimodel.cli.get", "List models, pools or processes."),
    "describe": ("omnimodel.cli.describe", "Everything known about one model, in words."),
    "logs": ("omnimodel.cli.actions:logs", "What a model's process printed."),
    "events": ("omnimodel.cli.actions:events", "What happened, oldest first."),
    "wake": ("omnimodel.cli.actions:wake", "Make a model resident and wait for it."),
    "evict": ("omnimodel.cli.actions:evict", "Drain a model and free its device memory."),
    "prune": ("omnimodel.cli.prune", "Remove images, sources and environments that no model needs."),
    "check": ("omnimodel.cli.check", "Send each model its probe and compare the answer."),
    "top": ("omnimodel.cli.top", "Watch models and memory, live."),
    "validate": ("omnimodel.cli.manifests:validate", "Check manifests without running anything."),
    "plan": ("omnimodel.cli.plan", "Show what would be placed where, without starting anything."),
    "publish": ("omnimodel.cli.publish", "Publish models into a store, for pools without a way out."),
    "operator": ("omnimodel.cli.operator", "Reconcile the models and pools of a cluster."),
    "agent": ("omnimodel.cli.agent", "Serve a pool's models in a pod of a cluster."),
    "gateway": ("omnimodel.cli.gateway", "Answer requests by the agents of other pods or machines."),
    "crds": ("omnimodel.cli.crds", "Print the custom resource definitions."),
    "bench": ("omnimodel.cli.bench", "Measure this machine: swaps, spawns, the gateway."),
    "version": ("omnimodel.cli.version", "Print the version."),
}

EPILOG = (
    "Exit codes: 0 done; 1 it failed; 2 wrong usage or a bad manifest; 3 not found; 4 timed out; "
    "5 no system answers at the address; 130 stopped by Ctrl-C."
)


@click.group(
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--debug", is_flag=True, envvar="OMNI_DEBUG", help="Show tracebacks and log everything.")
@click.pass_context
def omni(context: click.Context, debug: bool) -> None:
    """Many models on few accelerators, from a folder of manifests."""
    context.obj = debug


def main() -> None:
    """The entry point: runs a command and ends the interpreter with its exit code."""
    sys.exit(run(sys.argv[1:]))


def _wants_debug(arguments: list[str]) -> bool:
    """Whether tracebacks are asked for: by the option, before the command, or the variable, as click reads it."""
    said = os.environ.get("OMNI_DEBUG", "").strip().lower() in ("1", "true", "t", "yes", "y", "on")
    return said or "--debug" in itertools.takewhile(lambda argument: argument.startswith("-"), arguments)


def run(arguments: list[str], command: click.Command = omni, name: str = "omni") -> int:
    """Run one command line; its exit code. Errors become one sentence on stderr, with `--debug` a traceback too."""
    debug, stdout = _wants_debug(arguments), sys.stdout
    try:
        return int(command.main(arguments, prog_name=name, standalone_mode=False) or ExitCode.DONE)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except SystemExit:
        if sys.stdout is stdout:
            raise
        # Whoever read our output has seen enough (`omni get models | head`): click has wrapped what is closed now, and
        # ends with 1.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return ExitCode.DONE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Exception as error:
        report_error(error, debug=debug)
        return exit_code(error)
