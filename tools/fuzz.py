"""Build and run the fuzz targets (tests/fuzz/fuzz_*.c) with clang's libFuzzer, ASan and UBSan.

    python tools/fuzz.py [seconds]

What a target finds new is added to its corpus in tests/fuzz/corpus, which is kept small; tests of
tests/ckpt run that corpus too. A crash stops the run and leaves its input in build/fuzz.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import native

TARGETS = native.ROOT / "tests" / "fuzz"
OUT = native.ROOT / "build" / "fuzz"
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
             "-fno-sanitize-recover=all")  # fmt: skip


def build(source: Path) -> Path:
    """Compile a target with the layers it needs; returns the executable."""
    library = native.Builder(OUT, ["clang"], [*SANITIZED, "-fsanitize=fuzzer-no-link"])
    objects = library.compile(native.sources(["base", "ckpt"]))
    main = library.compile([source])
    return native.Builder(OUT, ["clang"], [*SANITIZED, "-fsanitize=fuzzer"]).link(
        [*main, *objects], OUT / "bin" / source.stem
    )


def run(program: Path, seconds: int) -> int:
    """Fuzz for so long, then fold what was new into the corpus."""
    corpus = TARGETS / "corpus" / program.stem.removeprefix("fuzz_")
    found = OUT / "found" / program.stem
    found.mkdir(parents=True, exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    prefix = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run(
        [*prefix, str(program), f"-max_total_time={seconds}", "-max_len=2048", "-verbosity=0",
         "-print_final_stats=1", f"-dict={TARGETS / 'safetensors.dict'}",
         f"-artifact_prefix={OUT}/", str(found), str(corpus)]
    )  # fmt: skip
    if done.returncode == 0:
        subprocess.run([*prefix, str(program), "-merge=1", "-verbosity=0", str(corpus),
                        str(found)], check=True)  # fmt: skip
    return done.returncode


def main() -> int:
    """Run every target for the seconds given (600)."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    return max(run(build(source), seconds) for source in sorted(TARGETS.glob("fuzz_*.c")))


if __name__ == "__main__":
    sys.exit(main())
