"""The ``fsdpc`` command; each subcommand imports its modules when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from fsdpc import _core
from fsdpc._version import __version__
from fsdpc.cli import ctrl_c
from fsdpc.cli.arguments import Parser
from fsdpc.display.text import never_raise
from fsdpc.distributed import hosts
from fsdpc.launching.elastic import parse_elastic
from fsdpc.monitor.config import show_config


class _Command(NamedTuple):
    """A command; its module's ``main`` receives the arguments that follow the command name."""

    module: str
    text: str


_COMMANDS = {
    "train": _Command("fsdpc.cli.train", "train a language model on text (fsdpc train --help)"),
    "data": _Command("fsdpc.cli.data", "turn text into tokens, and look at folders of them"),
    "generate": _Command("fsdpc.cli.generate",
                         "continue a text by a trained or published model"),
    "estimate": _Command("fsdpc.cli.estimate",
                         "show what each rank of a training run would hold"),
    "simulate": _Command("fsdpc.cli.simulate",
                         "show what a step would take and send on hosts that are not here"),
    "plan": _Command("fsdpc.cli.plan",
                     "show which ways to train fit a cluster, the fastest first"),
    "plot": _Command("fsdpc.cli.plot", "draw losses and rates of runs"),
    "ckpt": _Command("fsdpc.cli.ckpt", "look at checkpoints, check and convert them"),
}  # fmt: skip

_EPILOG = """\
examples:
  fsdpc run --ranks 2 script.py --its-own --options
  fsdpc run --ranks 4 -m package.module
  fsdpc run --ranks 8 --hosts first,second script.py
  fsdpc run --ranks 2 --max-restarts 3 script.py
  fsdpc run --elastic 2:4 --max-restarts 3 script.py
  fsdpc train --ranks 2 --preset 2M --steps 200
  fsdpc data tokenize notes/ --tokenizer tokenizer.json --output tokens
  fsdpc generate run/ "Once upon a time"
  fsdpc estimate --preset 70B --hosts 256 --ranks-per-host 8 --device cuda
  fsdpc simulate --preset 70B --hosts 256 --ranks-per-host 8 --tflops 400
  fsdpc info

Ranks are processes. They find each other without a TCP port, and all of them
end with this command.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fsdpc",
        description="Fully sharded data parallel training.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"fsdpc {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )

    run = commands.add_parser(
        "run",
        help="run a Python script on N ranks",
        description="Run a Python script (or -m MODULE) on N ranks of this machine, or of several "
        "hosts. Output carries the rank in front; when a rank fails the others get 5 s to report "
        "and are then ended.",
        usage="fsdpc run (--ranks N | --elastic MIN:MAX) [--hosts A,B]\n"
        "                 [OPTION ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        allow_abbrev=False,
    )
    size = run.add_mutually_exclusive_group(required=True)
    size.add_argument("--ranks", type=int, metavar="N", help="how many ranks, on all hosts")
    size.add_argument("--ranks-per-host", type=int, metavar="N", help="how many on each host")
    hosts.add_options(run)
    run.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="end all ranks after S seconds, with their stacks printed (default: never)",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="after a failure start all ranks again, at most N times (default: 0)",
    )
    size.add_argument(
        "--elastic",
        type=parse_elastic,
        metavar="MIN:MAX",
        help="start MAX ranks; after a restart that a killed rank caused go on with one fewer, "
        "never below MIN",
    )
    run.add_argument(
        "--fsdp2",
        action="store_true",
        help="let fsdpc's fully_shard take the place of torch's, in a script that was written for "
        "FSDP2",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script", metavar="SCRIPT", help="the script, or the module after -m")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="handed to the script"
    )

    for name, command in _COMMANDS.items():  # _run() passes their arguments on
        commands.add_parser(name, add_help=False, help=command.text)
    last = commands.add_parser(
        "flight", help="show the last operations of all ranks, as FlightRecorder wrote them"
    )
    last.add_argument("folder", metavar="FOLDER", help="that the recorders wrote to")
    last.add_argument("--rows", type=int, default=40, metavar="N", help="operations to show (40)")
    last.add_argument("--trace", metavar="FILE", help="write all of them for Perfetto too")
    commands.add_parser("info", help="show what fsdpc found and uses on this machine")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments without the program's name; by default ``sys.argv[1:]``.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as in a daemon: output goes nowhere
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        never_raise(stream)
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a closed pipe is handled
        return code
    except KeyboardInterrupt:
        print("fsdpc: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has exited, like `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(arguments: list[str]) -> int:
    try:
        _core.check_environment()  # here, so that it runs once, not on every rank
    except ValueError as error:
        print(f"fsdpc: {error}", file=sys.stderr)
        return 2
    if arguments and arguments[0] in _COMMANDS:  # argparse must not see their options
        module = import_module(_COMMANDS[arguments[0]].module)
        # Most ckpt commands read in C, perhaps for hours, and write nothing: Ctrl-C may end them at
        # once.
        if arguments[0] != "ckpt" or "convert" in arguments[:2]:
            ctrl_c.answer()
        return module.main(arguments[1:])
    ctrl_c.answer()
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    if options.command == "info":
        show_config()
        return 0
    if options.command == "flight":
        return _flight(options)
    try:
        hosts.check_options(options)
    except ValueError as error:
        parser.error(f"run: {error}")
    elastic = options.elastic
    if elastic is not None and not options.max_restarts:
        parser.error(f"run: --elastic {elastic} needs --max-restarts N")

    from fsdpc.distributed.environment import find_scheduler
    from fsdpc.launching import launcher

    tasks = find_scheduler(os.environ)
    if tasks is not None:
        print(
            f"fsdpc run: this is one of {os.environ[tasks.world_size]} tasks of {tasks.name}, and "
            "each would start all ranks: start one task, or the script without `fsdpc run`",
            file=sys.stderr,
        )
        return 2
    command = [*(["-m"] if options.module else []), options.script, *options.arguments]
    if options.fsdp2:
        if not options.module and not os.path.isfile(options.script):
            parser.error(f"run: no such script: {options.script}")
        command = ["-m", "fsdpc.torch", *command]
    try:
        if options.hosts is not None:
            names, each = hosts.check_hosts(options.hosts, options.ranks, options.ranks_per_host)
            hosts.run(command, names, each, launcher=options.launcher, agent=options.agent,
                      timeout=options.timeout)  # fmt: skip
        return launcher.run(
            command, elastic.most if elastic else options.ranks, timeout=options.timeout,
            max_restarts=options.max_restarts, least=elastic and elastic.least,
        )  # fmt: skip
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"fsdpc run: {error}", file=sys.stderr)
        return 2


def _flight(options: argparse.Namespace) -> int:
    from fsdpc.monitor import flight

    try:
        found = flight.merge(options.folder)
        if options.trace:
            found.save_trace(options.trace)
    except (OSError, ValueError) as error:
        print(f"fsdpc flight: {error}", file=sys.stderr)
        return 2
    print(found.timeline(max(1, options.rows)))
    return 0
