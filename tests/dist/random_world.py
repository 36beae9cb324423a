"""Ranks that stay and run one case after another, so that a case costs milliseconds.

The parent draws cases and sends them; a rank answers with a checksum, or with a traceback and ends.
After a failure, or when an answer does not come, all are ended; the next case starts new ones.
That leaves drawing and shrinking to hypothesis in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import uuid
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import fsdpc

from .random_cases import Case

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0


class World:
    """Ranks of one size; use it in a with statement."""

    def __init__(self, size: int, **environment: str) -> None:
        self.size, self.environment = size, environment
        self.ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.wait()
        self.ranks = []

    def start(self) -> None:
        """Start all ranks."""
        run_id = uuid.uuid4().hex
        for rank in range(self.size):
            ours, theirs = Pipe()
            environment = {
                **os.environ,
                **self.environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "FSDPC_RUN_ID": run_id,
                "FSDPC_TIMEOUT_S": "30",
                "FSDPC_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            }
            command = [sys.executable, "-m", "tests.dist.random_world", str(theirs.fileno())]
            process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], cwd=ROOT
            )
            theirs.close()
            self.ranks.append((process, ours))

    def run(self, case: Case) -> list[int]:
        """Checksums of the ranks; AssertionError with all tracebacks and the case otherwise."""
        if not self.ranks:
            self.start()
        for _, pipe in self.ranks:
            pipe.send(case)
        answers: list[int | str] = []
        for _, pipe in self.ranks:
            try:
                answers.append(pipe.recv() if pipe.poll(ANSWER_S) else "no answer in time")
            except EOFError:
                answers.append("ended without an answer")
        if all(isinstance(answer, int) for answer in answers):
            return [int(answer) for answer in answers]
        self.close()
        texts = "\n".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
        raise AssertionError(f"{texts}\n{case.describe()}")


def serve(pipe: Connection) -> None:
    """What a rank does."""
    from .random_run import run_case

    fsdpc.init()
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            answer: int | str = run_case(case)
        except BaseException:
            answer = traceback.format_exc()
        pipe.send(answer)
        if isinstance(answer, str):
            os._exit(1)  # peers that wait for this rank are to see it end


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
