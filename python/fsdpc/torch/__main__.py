"""``python -m fsdpc.torch SCRIPT``: run a script of FSDP2 with fsdpc's ``fully_shard``."""

from __future__ import annotations

import os
import runpy
import sys

from fsdpc.torch import install


def main(arguments: list[str]) -> None:
    """Run a script, or ``-m`` and a module, after :func:`fsdpc.torch.install`."""
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -m fsdpc.torch (SCRIPT | -m MODULE) [ARGUMENT ...]")
    if arguments[0] != "-m" and not os.path.isfile(arguments[0]):
        sys.exit(f"no such script: {arguments[0]}")
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
