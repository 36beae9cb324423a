"""simulate(): its clock on records that can be computed by hand, published rows, bad input."""

from __future__ import annotations

import gc
import json
import math
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import lora, nn, wrap
from fsdpc.models import Llama, ModelConfig, preset
from fsdpc.planning.simulate import Simulation, simulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
import bench_simulate  # noqa: E402

HALF = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
LLAMA_8B = ModelConfig(
    vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, inner=14336, max_seq=8192
)
WIDTH, LAYERS = 64, 4
BLOCK = 4 * WIDTH * WIDTH  # bytes of a layer in fp32
MODEL = LAYERS * BLOCK
H100 = {"device": "cuda", "mp_policy": HALF, "bandwidth": 400e9, "latency": 5e-6,
        "local_bandwidth": 360e9, "local_latency": 2e-6}  # fmt: skip


def llama(config: ModelConfig) -> Llama:
    with fsdpc.deferred_init():
        return Llama(config)


def stack() -> nn.Sequential:
    """Equal layers, each a unit; the root has no parameters."""
    with fsdpc.deferred_init():
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def play(hosts: int = 2, ranks: int = 1, **options: Any) -> Simulation:
    given = {"bandwidth": 1e6, "latency": 0.0, "flops": 1e9, "plan": wrap.by_class(nn.Linear)}
    return simulate(stack(), (8, WIDTH), hosts=hosts, ranks_per_host=ranks, **{**given, **options})


def fitted(model: Llama, shape: tuple[int, int], seconds: float, **options: Any) -> float:
    """The rate of computation by which a step takes so long."""
    found = simulate(model, shape, flops=1e15, **options)
    rate = found.flops / (seconds - found.exposed_total)
    again = simulate(model, shape, flops=rate, **options)
    assert again.step == pytest.approx(seconds, rel=1e-3)
    return rate


def test_one_rank_computes() -> None:
    found = play(hosts=1)
    # Forward, and backward of weights and, but in the first layer, of inputs: 2 m n k each.
    assert found.flops == (3 * LAYERS - 1) * 2 * 8 * WIDTH * WIDTH
    assert found.compute == found.flops / 1e9
    assert found.step == pytest.approx(found.compute)
    assert found.sent_between == found.sent_inside == found.messages == found.exposed_total == 0


def test_bytes_may_wait_for_computation() -> None:
    """What crosses takes its whole time, whatever is computed: once each way, half a model."""
    found = play(latency=1e-3, overlap=False)
    crossing = MODEL / 2  # gathers; sums are as many
    assert found.sent_between == pytest.approx(2 * crossing, rel=0.05)
    assert found.exposed["gather"] == pytest.approx(LAYERS * 1e-3 + crossing / 1e6, rel=0.05)
    assert found.exposed["reduce"] == pytest.approx(LAYERS * 1e-3 + crossing / 1e6, rel=0.05)
    assert found.step == pytest.approx(found.compute + found.exposed_total)


def test_overlap_hides_all_but_the_ends() -> None:
    """Of four layers the first gather and the last sum alone are waited for, if wires are quick."""
    apart, over = play(bandwidth=1e9, overlap=False), play(bandwidth=1e9)
    assert over.compute == apart.compute
    assert over.sent_between == apart.sent_between
    assert over.exposed["gather"] == pytest.approx(apart.exposed["gather"] / LAYERS)
    assert over.exposed["reduce"] == pytest.approx(apart.exposed["reduce"] / LAYERS)


def test_a_core_that_moves_bytes_does_not_compute() -> None:
    quick, busy = play(bandwidth=1e30), play(bandwidth=1e30, core_bandwidth=1e6)
    moved = 2 * quick.sent_between  # sent, and received
    assert busy.step == pytest.approx(quick.step + moved / 1e6, rel=1e-3)


def test_what_shares_a_link_shares_its_rate() -> None:
    """Nothing is computed, so a step takes as long as its bytes, in whichever order they go."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        found = play(flops=1e30, device="cuda", strategy=strategy)
        assert found.step == pytest.approx(found.sent_between / 1e6, rel=1e-6), strategy


@pytest.mark.parametrize(
    ("strategy", "passes"), [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 2)]
)
def test_rings_of_gpus(strategy: str, passes: int) -> None:
    """Each rank sends P (W-1)/W a pass, over hosts once each; the first layers' gathers ahead."""
    found = play(hosts=4, ranks=2, device="cuda", strategy=strategy)
    share = passes * MODEL * 7 / 8
    assert found.sent_between == pytest.approx(share)
    assert found.sent_inside == pytest.approx(share)  # of one rank of two
    assert found.messages == passes * LAYERS * 7


def test_hosts_send_once() -> None:
    """On CPUs P (H-1)/H a host, whatever its ranks; twice that for replicas."""
    for ranks in (1, 2, 8):
        found = play(hosts=4, ranks=ranks)
        values = 2 * 32 + LAYERS + 1  # two notes, and a byte of each parameter and one more
        headers = 112 * (2 * LAYERS + 1)
        assert found.sent_between == 2 * MODEL * 3 / 4 + 3 * ranks * (headers + values)
    hybrid, replicas = (play(hosts=4, ranks=2, strategy=s) for s in ("HYBRID_SHARD", "NO_SHARD"))
    assert hybrid.sent_between == pytest.approx(1.5 * MODEL, rel=0.1)
    assert replicas.sent_between == pytest.approx(1.5 * MODEL, rel=0.1)
    coded = play(hosts=4, ranks=2, strategy="NO_SHARD",
                 compression=fsdpc.Compression(reduce="int8"))  # fmt: skip
    assert coded.sent_between == pytest.approx(3 * MODEL / 4, rel=0.1)  # in one hop
    assert hybrid.exposed["gather"] == 0 == replicas.exposed["gather"]
    assert play(hosts=1, ranks=8, local_bandwidth=1e6).sent_between == 0


def test_reshard_after_forward() -> None:
    """GPUs gather again for backward, hosts of CPUs have kept what they were sent."""
    kept, again = (play(device="cuda", reshard_after_forward=flag) for flag in (False, 2))
    assert again.sent_between == pytest.approx(1.5 * kept.sent_between)
    assert play(reshard_after_forward=False).sent_between == play().sent_between


def test_micro_steps_gather_once_on_cpus() -> None:
    one, three = play(), play(accumulate=3)
    assert three.flops == 3 * one.flops
    assert three.sent_between == pytest.approx(2 * one.sent_between, rel=0.05)  # 1 + 3 of 1 + 1
    gpu, gpus = play(device="cuda"), play(device="cuda", accumulate=3)
    assert gpus.sent_between == pytest.approx(3 * gpu.sent_between)


def test_messages_and_memory_take_time() -> None:
    found = play(hosts=100, message=1e-3, bandwidth=math.inf, overlap=False)
    operations = 2 * LAYERS + 3  # gathers and sums; two epochs and an agreement
    assert found.messages == (operations * 2 - 2) * 99  # notes have no header
    assert found.exposed_total == pytest.approx(found.messages * 1e-3)
    slow = play(memory_bandwidth=1e9, hosts=1)
    assert slow.compute == pytest.approx(play(hosts=1).compute + LAYERS * WIDTH**2 * 32 / 1e9)


def test_the_disk_takes_time_and_no_memory() -> None:
    policy = fsdpc.OffloadPolicy(optimizer="disk", masters="disk", path="/not/looked/at")
    plain, slow = play(), play(offload_policy=policy, disk_bandwidth=1e6)
    moved = 24 * plain.memory.grad / 4  # two states and the masters, read and written
    assert slow.step - plain.step == pytest.approx(moved / 1e6)
    assert slow.memory.state == slow.memory.master == 0 and slow.padding == plain.padding
    assert slow.memory.file >= 12 * plain.memory.grad / 4
    assert "on a disk" in " ".join(str(slow).split())


def test_a_model_is_left_as_it_was() -> None:
    fsdpc.manual_seed(3)
    model = Llama(preset("2M"))
    fsdpc.checkpoint_activations(model.blocks(), 2)
    ids = np.arange(16).reshape(1, 16)
    loss, before = float(model(ids, ids)), dict(model.named_parameters())
    options = {"hosts": 2, "ranks_per_host": 2, "bandwidth": 1e9, "latency": 0.0, "flops": 1e12}
    found = simulate(model, (1, 16), **options)
    assert type(model) is Llama and not hasattr(model, "_fsdpc_unit")
    assert all(p is before[name] for name, p in model.named_parameters())
    assert float(model(ids, ids)) == loss
    plain = simulate(llama(preset("2M")), (1, 16), **options)
    assert plain.flops < found.flops < 4 / 3 * plain.flops  # two of four blocks run again
    assert str(found).startswith("FULL_SHARD on 2 hosts x 2 ranks (cpu), mesh 1 x 4, 4 units")


class Keeper(nn.Module):
    """Keeps what it computes where nobody can take it back, or fails."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(8, 8), lambda x: kept.append(x)
        self.fails = False

    def forward(self, x: Any) -> Any:
        if self.fails:
            raise KeyError("no such word")
        y = self.inner(x)
        self.kept(y)
        return y


def test_what_a_forward_keeps_is_named() -> None:
    kept: list[Any] = []
    model, options = Keeper(kept), {"bandwidth": 1e9, "latency": 0.0, "flops": 1e9}
    with pytest.raises(RuntimeError, match="Keeper keeps .* bytes of tensors outside of the model"):
        simulate(model, (2, 8), hosts=1, ranks_per_host=2, **options)
    kept.clear()
    model.fails = True
    with pytest.raises(KeyError, match="no such word"):
        simulate(model, (2, 8), hosts=1, ranks_per_host=2, **options)
    model.fails = False
    assert type(model) is Keeper
    assert model(fsdpc.tensor(np.ones((2, 8), np.float32))).shape == (2, 8)
    assert fsdpc.memory_stats()["unsharded_bytes"] == 0


class Cyclic(nn.Module):
    """Leaves a cycle that holds a tensor, among the oldest objects if it `collects`."""

    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.inner, self.collects = nn.Linear(8, 8), collects

    def forward(self, x: Any) -> Any:
        cycle = [self.inner(x)]
        cycle.append(cycle)
        if self.collects:
            gc.collect()
        return cycle[0]


@pytest.mark.parametrize("collects", [False, True])
def test_cycles_go_without_a_look_at_older_objects(collects: bool) -> None:
    model, options = Cyclic(collects), {"bandwidth": 1e9, "latency": 0.0, "flops": 1e9}
    gc.disable()  # else Python might look at them for reasons of its own
    try:
        before = gc.get_stats()[2]["collections"]
        simulate(model, (2, 8), hosts=1, ranks_per_host=2, **options)
        assert not gc.isenabled()
        assert collects or gc.get_stats()[2]["collections"] == before
    finally:
        gc.enable()
    fsdpc.memory_plan(model, 1, (2, 8))
    assert gc.isenabled()


def test_zero_2_and_3_of_a_published_study() -> None:
    """SmolLM3-3B, 4 x H100, a sequence of 8,192: 0.974 s and 0.997 s a step."""
    model = llama(preset("SmolLM3-3B"))
    options = {**H100, "hosts": 1, "ranks_per_host": 4}
    rate = fitted(model, (1, 8192), 0.974, strategy="SHARD_GRAD_OP", **options)
    found = simulate(model, (1, 8192), flops=rate, strategy="FULL_SHARD", **options)
    assert found.step == pytest.approx(0.997, rel=0.05)


@pytest.mark.parametrize(("on_8", "on_128"), [(5762, 5605), (6667, 6514)])
def test_16_hosts_of_a_published_benchmark(on_8: int, on_128: int) -> None:
    """torchtitan's Llama 3.1 8B on 8 and 128 H100: tokens a second and GPU."""
    model = llama(LLAMA_8B)
    rate = fitted(model, (2, 8192), 2 * 8192 / on_8, hosts=1, ranks_per_host=8, **H100)
    found = simulate(model, (2, 8192), hosts=16, ranks_per_host=8, flops=rate, **H100)
    assert 2 * 8192 / found.step == pytest.approx(on_128, rel=0.05)


@pytest.mark.parametrize(
    ("wire", "dtype", "engine", "alone_ms", "measured_ms"),
    [row for rows in bench_simulate.RECORDED.values() for row in rows],
)
def test_two_hosts_of_recorded_rows(
    wire: str, dtype: str, engine: str, alone_ms: float, measured_ms: float
) -> None:
    """benchmarks/rows/hosts.jsonl: 10M on two hosts of CPU ranks, by what is computed."""
    found = bench_simulate.play_recorded(wire, dtype, engine, alone_ms)
    assert found.compute == pytest.approx(alone_ms / 1e3)
    assert found.step == pytest.approx(measured_ms / 1e3, rel=0.15)


def test_16384_ranks_take_no_memory_and_seconds() -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    world = {"hosts": 2048, "ranks_per_host": 8, "flops": 400e12, **H100}
    assert simulate(llama(preset("7B")), (1, 4096), **world).record.memory["unsharded"] > 10e9
    found = simulate(llama(preset("70B")), (1, 4096), **world)
    assert found.record.memory["unsharded"] > 100e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 500_000  # KiB
    assert time.process_time() - began < 20  # of the processor; both take 2 s
    assert found.padding > 0.3  # few thousand rows on more ranks
    assert found.memory.master < 0.03e9


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hosts": 0}, "hosts must be a whole number of at least 1, got 0"),
        ({"ranks_per_host": 1.5}, "ranks_per_host must be a whole number of at least 1, got 1.5"),
        ({"bandwidth": 0}, "bandwidth must be above 0, got 0"),
        ({"latency": -1.0}, "latency must be at least 0 and finite, got -1.0"),
        ({"flops": math.nan}, "flops must be above 0, got nan"),
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
        ({"message": math.inf}, "message must be at least 0 and finite, got inf"),
        ({"optimizer": "muon"}, "optimizer 'muon': one of adamw, adam, sgd, lion, rmsprop"),
        ({"strategy": "ZERO4"}, "no strategy 'ZERO4'"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"mesh": (2, 2)}, "mesh (2, 2) is not (replicate, shard) of 2 x 1 = 2 ranks"),
        ({"reshard_after_forward": 3}, "reshard_after_forward=3"),
        ({"ranks_per_host": 6, "mesh": (3, 4), "strategy": "HYBRID_SHARD"},
         "mesh (3, 4) on hosts of 6 ranks: 4 ranks that share shards must lie inside a host"),
        ({"plan": {"nothing.*": {}}}, "nothing.*"),
    ],
)  # fmt: skip
def test_bad_numbers_are_named(changed: dict[str, Any], said: str) -> None:
    options = {"hosts": 2, "ranks_per_host": 1, "bandwidth": 1e9, "latency": 0.0, "flops": 1e9}
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        simulate(stack(), (8, WIDTH), **{**options, **changed})


def test_bad_models_and_options_are_named() -> None:
    options: dict[str, Any] = {"hosts": 1, "ranks_per_host": 1, "bandwidth": 1e9, "latency": 0.0,
                               "flops": 1e9}  # fmt: skip
    with pytest.raises(TypeError, match="no option 'bandwith'; there are"):
        simulate(stack(), (8, WIDTH), bandwith=1, **options)
    with pytest.raises(ValueError, match="int is no fsdpc.nn.Module"):
        simulate(3, (8, WIDTH), **options)
    with pytest.raises(ValueError, match="give batch_shape, that of a rank's input of Sequential"):
        simulate(stack(), **options)
    with pytest.raises(ValueError, match=r"batch_shape must be of numbers from 1 on, got \(0, 3\)"):
        simulate(stack(), (0, 3), **options)
    moving = fsdpc.OffloadPolicy(activations="disk", path="/var/tmp")
    with pytest.raises(NotImplementedError, match="with activations on a disk"):
        simulate(stack(), (8, WIDTH), offload_policy=moving, **options)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdpc", "simulate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("config", [True, False])
def test_quantised_models(config: bool) -> None:
    """Codes have no gradients, and neither their dtype nor a policy's is a forward's."""
    model, shape = (llama(preset("2M")), (2, 64)) if config else (stack(), (8, WIDTH))
    given: dict[str, Any] = {"hosts": 2, "ranks_per_host": 1, "bandwidth": 1e9, "latency": 0.0,
                             "flops": 1e9, "mp_policy": HALF}  # fmt: skip
    plain = simulate(model, shape, **given)
    nn.quantize_(model)
    lora.apply(model, 2)
    assert fsdpc.memory_plan(model, 2, shape, mp_policy=HALF).activation > 0
    found = simulate(model, shape, **given)
    assert 0.5 < found.flops / plain.flops < 1.1  # no products for gradients of weights
    assert found.memory.unsharded <= plain.memory.unsharded / 2 and 0 <= found.padding < 0.5


def test_command(tmp_path: Path) -> None:
    words = ["--hosts", "2", "--tflops", "0.05", "--bandwidth", "1", "--dtype", "fp32"]
    done = run("--preset", "10M", "--batch", "2", "--seq", "256", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["llama 10M, 10,081,600 parameters",
                         "2 hosts x 1 rank (cpu), batch 2 x 256 tokens a rank, fp32"]  # fmt: skip
    assert lines[2].startswith("assumed: --ranks-per-host 1, --device cpu, --model llama,")
    result = done.stdout[done.stdout.index("FULL_SHARD on") :]
    assert result.startswith("FULL_SHARD on 2 hosts x 1 rank (cpu), mesh 1 x 2, 8 units")
    assert re.findall(r"^[a-z]+", result, re.M) == ["step", "sent", "memory", "padding", "products"]
    assert all(len(line) <= 80 for line in lines)
    config = tmp_path / "config.json"
    ours = {"vocab_size": 256, "dim": 320, "layers": 8, "heads": 5, "inner": 864}
    theirs = {"vocab_size": 256, "hidden_size": 320, "num_hidden_layers": 8, "rope_theta": 1e4,
              "num_attention_heads": 5, "intermediate_size": 864, "head_dim": 64}  # fmt: skip
    for content in (ours, theirs):
        config.write_text(json.dumps(content))
        again = run("--config", str(config), "--batch", "2", "--seq", "256", *words)
        assert again.stdout.endswith(result), again.stderr
        assert f"llama of {config}, 10,081,600 parameters" in again.stdout
    done = run("--preset", "2M", "--seq", "64", *words, "--lora", "4", "--quantize", "nf4")
    assert done.stdout.startswith("llama 2M with LoRA of rank 4 over nf4, "), done.stderr


def test_command_names_bad_values(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"dim": 4096, "colour": 1}')
    for words, said in (
        (["--hosts", "0"], "--hosts must be at least 1, got 0"),
        (["--quantize", "nf4"], "--quantize needs --lora RANK"),
        (["--bandwidth", "-3"], "--bandwidth must be above 0, got -3.0"),
        (["--latency", "nan"], "--latency must be at least 0, got nan"),
        (["--mesh", "3x4", "--hosts", "2"], "mesh (3, 4) is not (replicate, shard) of 2 x 1 = 2"),
        (["--config", str(config)], "unexpected keyword argument 'colour'"),
        (["--config", str(tmp_path / "none")], "none"),
    ):
        done = run(*words)
        assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
        assert done.stderr.startswith("fsdpc simulate: ") and "Traceback" not in done.stderr
