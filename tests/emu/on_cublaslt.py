"""Trains on the emulated GPU with the fake cuBLASLt that argv[1] names; prints what came of it.

The perceptron is trained as training.py does, and then with a captured step and without.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import graphs
import training

import fsdpc


class Seen(ctypes.Structure):
    """The beginning of fake_cublaslt_seen."""

    _fields_ = [(name, ctypes.c_long) for name in ("heuristics", "products", "gelus", "slopes",
                                                   "forbidden")]


def main() -> None:
    """Train; the counts are of the first trainings, whose products are known."""
    fake = ctypes.CDLL(sys.argv[1])  # found by the loader from now on, as torch's would be
    fsdpc.set_default_device("cuda")
    results: dict[str, Any] = {"config": fsdpc.show_config(print_=False)["cuda"]}
    for dtype in ("fp32", "bf16"):
        results[dtype] = training.train("perceptron", dtype)
    seen = (ctypes.c_char * 256)()
    fake.fake_cublaslt_look(seen)
    counts = Seen.from_buffer(seen)
    results["counts"] = {name: getattr(counts, name) for name, _ in Seen._fields_}
    plain, graph = graphs.Run("perceptron", "bf16"), graphs.Run("perceptron", "bf16")
    plain.eager(graphs.STEPS)
    results["graphs"] = [plain.outcome(), graphs.with_a_graph(graph).outcome()]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
