"""Threads that carry the messages of a ``_core.Transport`` until the world ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fsdpc import _core

LOOK_S = 3600.0
LEAVE_S = 10.0
GRACE_S = 1.0  # for the watch to determine which rank died, after a connection broke

Work = Callable[[], None]

leaving: list[Work] = []  # to wait for after all groups are left


def start(
    transport: _core.Transport, rank: int, works: list[Work], close: Work = lambda: None
) -> None:
    """Run each function on a thread until the transport ends; call ``close`` on leaving the world.

    An exception in any of the functions ends the transport.
    """

    def guarded(work: Work) -> None:
        try:
            work()
        except _core.PeerError:
            pass  # the transport has ended
        except Exception as error:  # noqa: BLE001 - whatever the carrier raises ends the transport
            time.sleep(GRACE_S)
            transport.abort(f"rank {rank} lost its connection to other hosts: {error}")

    threads = [
        threading.Thread(target=guarded, args=(work,), name="fsdpc carrier", daemon=True)
        for work in works
    ]
    for thread in threads:
        thread.start()

    def leave() -> None:
        # Before the process ends, all data must be sent, and no thread may be inside torch, because
        # such a thread does not survive the end of Python.
        transport.close()
        for thread in threads:
            thread.join(GRACE_S if transport.failed else LEAVE_S)
        close()

    leaving.append(leave)
