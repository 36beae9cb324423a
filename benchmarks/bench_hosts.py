"""Compare training over hosts: fsdpc, torch FSDP2 and DDP on the same wires.

    python benchmarks/bench_hosts.py [--models llama-10M-fp32 ...] [--rates 1gbit none] [--hosts 2]
                                     [--ranks 2] [--engines fsdpc native fsdp2 ddp local ...]
                                     [--rounds 3]
    python benchmarks/bench_hosts.py --epoch [--rounds 3]
    python benchmarks/bench_hosts.py --wire [--rates 1gbit none] [--rounds 3]
    python benchmarks/bench_hosts.py --exchange --rates 100mbit [--hosts 4] [--rounds 3]

The hosts are network namespaces of this machine, joined by veth devices (and a bridge, if there are
more than two), which the benchmark makes and removes. It needs root, and `ip` and `tc` of iproute2.
`--rates` shapes both directions of each wire. Each host has its share of the cores to itself, or
shares one if there are fewer cores than hosts. A step and its turns are those of bench_torch.py;
engines use gloo. "native" is fsdpc's own LLaMA of the same shape; "native-openmpi" and
"native-mpich" are that over an MPI, started by its launcher, told to use TCP. "ENGINE:HYBRID_SHARD"
shards inside a host, "fsdpc:gather=int8,reduce=int8" compresses,
"fsdpc:NO_SHARD,replicas=powersgd8" and "ddp:powersgd8" sum in low rank, and with
"fsdpc:NO_SHARD,outer=10" replicas meet every 10 steps, whose mean counts. "Of it processor" is the
processor time of the first rank; if it fills the step, a core is the limit and the wire is not.
"Sent" is what the device of the first host sent in a step, all protocols counted. The floor of a
step is the greater of what it takes alone ("local", "native-alone": as many ranks, no
communication) and of those bytes at the wire's rate. "Simulated" is what fsdpc.simulate() makes of
the time alone and that rate, for fsdpc, with the constants above; "of free messages" is that where
they have no latency and cost no processor: what the order of a step's work takes, by any means.

`--epoch`: on an unshaped wire, a forward of a model whose weights nobody changed, less the same
model unsharded, over a round trip of the link: a frame there and back over gloo.

`--wire`: what a plain sender and receiver take for the bytes of a step of llama-10M-fp32, 40 MB
each way at once: the time, and of it the processor's on one host.

`--exchange`: what gloo alone takes for messages from every host to every other, as an exact step
sends them, and for an all-reduce in a ring, over the floor of their bytes at the wire's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import bench_torch
import common

import mpi_build
from net_hosts import ADDRESSES, Hosts, missing, net_hosts

ENGINES = ("fsdpc", "native", "fsdp2", "ddp", "local", "native-alone")
LATENCY = 1e-3  # seconds until a message is under way over gloo, as a timeline of both hosts showed
PAYLOAD = 1448 / 1514  # of the wire's bytes are not those of frames and TCP
FREE = (0.0, 1e30)  # latency, and bytes/s of a core, of messages that cost the wire alone
CORE = 0.87e9  # bytes/s of a core: fits an unshaped step of llama-10M-fp32 that was recorded
EXCHANGED = (4, 1 << 20)  # messages to each host, and their bytes: four units of a 10M model
WIRE_PORT, WIRE_PIECE, WIRE_PIECES, WARM_TURNS = 29617, 2_240_000, 18, 2  # as a unit's rows
RATES = {"10gbit": 10e9, "1gbit": 1e9, "100mbit": 1e8, "none": float("inf")}


def own_cores(host: int, n: int = 2) -> list[str]:
    """What is put before a command that runs on the cores of one of `n` hosts."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[host::n] or [cores[host % len(cores)]]
    return ["taskset", "-c", ",".join(map(str, mine))]


def on_own_cores(hosts: Hosts) -> list[list[str]]:
    """What is put before a command that runs on each host, on the host's own cores."""
    return [[*host, *own_cores(i, hosts.n)] for i, host in enumerate(hosts.inside)]


def turns_of(name: str, hosts: Hosts, rounds: int) -> list[dict[str, Any]]:
    """What one of TURNS finds in each round, with a rank on each host."""
    return [common.run_ranks(__file__, ["--turn", name], hosts.n, hosts=on_own_cores(hosts))
            for _ in range(rounds)]  # fmt: skip


def join_gloo() -> tuple[int, int]:
    """Join the other ranks of a turn over gloo; return this rank and their number."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['BENCH_STORE']}", rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    return dist.get_rank(), dist.get_world_size()


def mpiexec(family: str, ranks: int, hosts: Hosts, command: list[str]) -> list[str]:
    """What starts a command on all ranks of all hosts by this MPI, over TCP."""
    compiler = Path(mpi_build.find_compilers()[family])
    launcher = str(compiler.with_name(compiler.name.replace("mpicc", "mpiexec")))
    addresses = ADDRESSES[: hosts.n]
    each = str(ranks // hosts.n)
    network = ADDRESSES[0].rpartition(".")[0] + ".0/24"
    options = {
        "openmpi": ["--mca", "plm_rsh_agent", str(hosts.agent), "--mca", "btl", "tcp,self",
                    "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network,
                    "--bind-to", "none"],
        "mpich": ["-launcher", "ssh", "-launcher-exec", str(hosts.agent), "-iface", "v0",
                  "-hosts", ",".join(addresses), "-ppn", each],
    }[family]  # fmt: skip
    words = [*hosts.inside[0], launcher, *options]
    for i, address in enumerate(addresses):
        words += [":"] if i else []
        words += ["--host", f"{address}:{each}"] if family == "openmpi" else []
        words += ["-n", each, *own_cores(i, hosts.n)]
        words += command
    return words


def run_by_mpi(family: str, words: list[str], ranks: int, hosts: Hosts) -> dict[str, Any]:
    """What :func:`common.run_ranks` does, less the memory, on ranks that this MPI starts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = {"BENCH_RESULT": str(result), "OMP_NUM_THREADS": "1",
                 "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # fmt: skip
        command = ["env", *(f"{name}={value}" for name, value in given.items()), sys.executable,
                   bench_torch.__file__, *words]  # fmt: skip
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(mpiexec(family, ranks, hosts, command), env=os.environ | root, check=True,
                       stdout=subprocess.DEVNULL, timeout=600)  # fmt: skip
        return {**json.loads(result.read_text()), "peak_pss_bytes": float("nan")}


def measure(model: str, engine: str, ranks: int, hosts: Hosts) -> tuple[float, ...]:
    """Median ms of a step in one turn, the first rank's processor ms, MB sent, peak PSS in MiB."""
    before = hosts.sent_bytes()
    words = ["turn", "--turn", engine, model]
    found: dict[str, Any]
    if engine.partition(":")[0] in bench_torch.BY_MPI:
        found = run_by_mpi(engine.partition(":")[0].partition("-")[2], words, ranks, hosts)
    else:
        found = common.run_ranks(bench_torch.__file__, words, ranks, hosts=on_own_cores(hosts))
    steps = sum(bench_torch.step_counts(engine))
    sent = (hosts.sent_bytes() - before) / steps / 1e6
    return (statistics.median(found["seconds"]) * 1e3, found["processor"] * 1e3, sent,
            found["peak_pss_bytes"] / 2**20)  # fmt: skip


def simulated(
    model: str, ranks: int, rate: str, alone_ms: float, strategy: str = "", hosts: int = 2,
    latency: float = LATENCY, core: float = CORE,
) -> Any:
    """Return simulate() of a LLaMA whose computation takes as long as alone.

    An empty strategy is FULL_SHARD.
    """
    import fsdpc

    _, preset, dtype = model.split("-")
    policy = fsdpc.MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = fsdpc.MixedPrecisionPolicy(
            param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32
        )
    with fsdpc.deferred_init():
        built = fsdpc.models.Llama(fsdpc.models.preset(preset))

    def step(flops: float) -> fsdpc.Simulation:
        return fsdpc.simulate(
            built, bench_torch.LLAMAS[preset], hosts=hosts, ranks_per_host=ranks // hosts,
            bandwidth=min(RATES[rate], 1e12) / 8 * PAYLOAD, latency=latency, flops=flops,
            core_bandwidth=core, mp_policy=policy, strategy=strategy or "FULL_SHARD",
        )  # fmt: skip

    return step(step(1e12).flops / alone_ms * 1e3)


def run(model: str, engines: list[str], n: int, ranks: int, rate: str, rounds: int) -> None:
    """The rows of one model on `n` hosts with wires of one rate."""
    with net_hosts(n, rate) as hosts:
        turns: dict[str, list[tuple[float, ...]]] = {e: [] for e in engines}
        for _ in range(rounds):
            for engine in engines:
                turns[engine].append(measure(model, engine, ranks, hosts))
    ms = {e: statistics.median(t[0] for t in ts) for e, ts in turns.items()}
    for engine in engines:
        name, _, strategy = engine.partition(":")
        native = name in bench_torch.NATIVE
        alone = ms.get("native-alone" if native else "local", float("nan"))
        _, used, sent, pss = (statistics.median(column) for column in zip(*turns[engine]))
        wire = sent * 1e6 * 8 / RATES[rate] * 1e3
        row = [rate, model, f"{n}, {ranks}", engine, common.spread([t[0] for t in turns[engine]]),
               f"{ms[engine] / ms[engines[0]]:.2f}", f"{ms[engine] / max(alone, wire):.2f}",
               f"{used:.0f}", f"{sent:.1f}", f"{pss:,.0f}", "", ""]  # fmt: skip
        known = name in ("fsdpc", "native") and "=" not in strategy
        if known and model.startswith("llama-") and alone == alone:
            for i, cost in enumerate([(LATENCY, CORE), FREE]):
                found = simulated(model, ranks, rate, alone, strategy, n, *cost)
                row[i - 2] = f"{found.step * 1e3:.0f}"
        common.row([str(cell).replace("nan", "") for cell in row])


def epoch_turn() -> dict[str, Any]:
    """Microseconds of an epoch in which nothing changed, and of a round trip."""
    import torch
    import torch.distributed as dist

    import fsdpc
    from fsdpc import nn
    from fsdpc.torch import _mesh, _transport

    rank, _ = join_gloo()
    world = _mesh.join()
    plain, sharded = nn.Linear(8, 8), nn.Linear(8, 8)
    fsdpc.fully_shard(sharded)
    x, frame = fsdpc.tensor([[1.0] * 8]), torch.empty(_transport.FRAME, dtype=torch.uint8)

    def us(run: Callable[[], object], times: int = 400) -> float:
        """The median of many."""
        taken = []
        for _ in range(times):
            world.barrier()
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[times // 4 :]) * 1e6

    def there_and_back() -> None:
        for way in (0, 1):
            if rank == way:
                dist.send(frame, 1 - rank)
            else:
                dist.recv(frame, 1 - rank)

    with fsdpc.no_grad():
        epoch = us(lambda: sharded(x)) - us(lambda: plain(x))
    return {"epoch": epoch, "round trip": us(there_and_back)}


def run_epoch(rounds: int) -> None:
    """The row of an epoch."""
    with net_hosts() as hosts:
        turns = turns_of("epoch", hosts, rounds)
    columns = [[turn[key] for turn in turns] for key in ("epoch", "round trip")]
    epoch, trip = (statistics.median(column) for column in columns)
    common.table(["epoch, unchanged, us", "round trip of the link, us", "epoch over round trips"],
                 [[*map(common.spread, columns), f"{epoch / trip:.2f}"]])  # fmt: skip


def wire_turn() -> dict[str, Any]:
    """Milliseconds of 40 MB there and 40 MB back at once, over one connection."""
    import socket
    import threading

    if os.environ["RANK"] == "0":
        with socket.create_server((ADDRESSES[0], WIRE_PORT)) as server:
            peer, _ = server.accept()
    else:
        while True:
            try:
                peer = socket.create_connection((ADDRESSES[0], WIRE_PORT))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    out, into = bytearray(WIRE_PIECE), bytearray(WIRE_PIECE)

    def send() -> None:
        for _ in range(WIRE_PIECES):
            peer.sendall(out)

    taken = []
    with peer:
        for _ in range(WARM_TURNS + 8):
            begin, used = time.perf_counter(), time.process_time()
            sender = threading.Thread(target=send)
            sender.start()
            for _ in range(WIRE_PIECES):
                peer.recv_into(into, WIRE_PIECE, socket.MSG_WAITALL)
            sender.join()
            taken.append((time.perf_counter() - begin, time.process_time() - used))
    wall, used = (statistics.median(c[WARM_TURNS:]) * 1e3 for c in zip(*taken, strict=True))
    return {"wall": wall, "cpu": used}


def run_wire(rates: list[str], rounds: int) -> None:
    """The rows of a plain sender and receiver."""
    rows = []
    for rate in rates:
        with net_hosts(rate=rate) as hosts:
            turns = turns_of("wire", hosts, rounds)
        rows.append([rate, *(common.spread([t[key] for t in turns]) for key in ("wall", "cpu"))])
    common.table(["wire", "40 MB each way, ms", "of it the processor's, ms"], rows)


def exchange_turn() -> dict[str, Any]:
    """Seconds of an exchange of messages, and of an all-reduce of as many bytes."""
    import torch
    import torch.distributed as dist

    rank, n = join_gloo()
    messages, size = EXCHANGED
    out = torch.zeros(size, dtype=torch.uint8)
    into = torch.empty(messages, n, size, dtype=torch.uint8)
    whole = torch.zeros(messages * n * size // 8)  # a ring sends 2 (n - 1) / n of it

    def exchange() -> None:
        works: list[Any] = []
        for tag in range(messages):
            for i in range(1, n):
                works.append(dist.irecv(into[tag, rank - i], (rank - i) % n, tag=tag))
                works.append(dist.isend(out, (rank + i) % n, tag=tag))
        for work in works:
            work.wait()

    def seconds(move: Callable[[], object]) -> float:
        """The slowest rank's time, at its median."""
        taken = []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            move()
            all_taken = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(all_taken, op=dist.ReduceOp.MAX)
            taken.append(float(all_taken))
        return statistics.median(taken[1:])

    found = {"exchange": seconds(exchange), "ring": seconds(lambda: dist.all_reduce(whole))}
    dist.destroy_process_group()
    return found


def run_exchange(rates: list[str], n: int, rounds: int) -> None:
    """The rows of gloo's own exchanges among `n` hosts."""
    rows = []
    sent = EXCHANGED[0] * EXCHANGED[1] * (n - 1)
    for rate in rates:
        with net_hosts(n, rate) as hosts:
            turns = turns_of("exchange", hosts, rounds)
        floor = sent * 8 / PAYLOAD / RATES[rate]
        rows.append([rate, str(n), f"{floor:.2f}",
                     *(common.spread([t[key] / floor for t in turns])
                       for key in ("exchange", "ring"))])  # fmt: skip
    common.table(["wire", "hosts", "floor s", "exchange over it", "ring all-reduce over it"], rows)


TURNS = {"epoch": epoch_turn, "wire": wire_turn, "exchange": exchange_turn}


def main() -> None:
    """Run the chosen rows."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--models", nargs="+", default=["llama-10M-fp32", "llama-10M-bf16"],
                   choices=bench_torch.MODELS)  # fmt: skip
    p.add_argument("--engines", nargs="+", default=ENGINES)
    p.add_argument("--rates", nargs="+", default=["1gbit", "none"], choices=RATES)
    p.add_argument("--hosts", type=int, default=2)
    p.add_argument("--ranks", type=int, help="over all hosts (default: one each)")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--epoch", action="store_true", help="an epoch in which nothing changed, alone")
    p.add_argument("--wire", action="store_true", help="what plain sockets take, alone")
    p.add_argument("--exchange", action="store_true", help="gloo's messages among all hosts, alone")
    p.add_argument("--turn", choices=TURNS, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        common.leave_result(TURNS[o.turn]())
        return
    if o.exchange and "none" in o.rates:
        p.error("--exchange compares with the rate of a wire: name --rates other than none")
    if reason := missing():
        print(f"bench_hosts.py {reason}: skipped")
        return
    common.header()
    if o.epoch:
        run_epoch(o.rounds)
        return
    if o.wire:
        run_wire(o.rates, o.rounds)
        return
    if o.exchange:
        run_exchange(o.rates, o.hosts, o.rounds)
        return
    common.table(["wire", "model", "hosts, ranks", "engine", "ms a step (range)",
                  f"over {o.engines[0]}'s", "over the floor", "of it processor", "MB sent a step",
                  "peak PSS MiB", "simulated ms", "of free messages"], [])  # fmt: skip
    for rate in o.rates:
        for model in o.models:
            run(model, list(o.engines), o.hosts, o.ranks or o.hosts, rate, o.rounds)


if __name__ == "__main__":
    main()
