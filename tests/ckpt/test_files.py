"""What a save writes: the bytes that the reference library would, whoever saves, read by others."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as stn
import safetensors.torch as st
import torch
import transformers
from transformers import GPT2LMHeadModel, LlamaForCausalLM

import fsdpc
import fsdpc.torch
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.cli.ckpt import main
from fsdpc.models import GPT2

from .common import CONFIG, STRATEGIES, Odd, by_blocks, llama, sharded, values

ALL = [1, 2, 3, 4]


@pytest.mark.ranks(ALL)
@pytest.mark.parametrize("how", STRATEGIES)
def test_the_file_is_what_the_reference_library_writes(how: str, tmp_path: Path) -> None:
    model = llama(how)
    checkpoint.save(tmp_path / "c", {"model": model})
    full = {name: torch.from_numpy(t.numpy().copy()) for name, t in model.state_dict().items()}
    fsdpc.barrier()
    want = st.save(full, {"format": "pt"})
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == want
    written = {"config.json", "manifest.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "c").iterdir()} == written


@pytest.mark.ranks(ALL)
@pytest.mark.parametrize(
    "how, async_", [*((how, False) for how in STRATEGIES), ("FULL_SHARD", True), ("NO_SHARD", True)]
)
def test_odd_parameters(how: str, async_: bool, tmp_path: Path) -> None:
    model = sharded(Odd(), how)
    handle = checkpoint.save(tmp_path / "c", {"model": model}, async_=async_)
    if handle is not None:
        handle.wait()
        assert handle.done
    found = st.load_file(tmp_path / "c" / "model.safetensors")
    full = values(model)
    assert set(found) == set(full) - {"tied.weight"}  # it is wide.weight
    for name, tensor in found.items():
        own = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        assert own.numpy().tobytes() == full[name], name
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes.items() <= {name: tuple(t.shape) for name, t in found.items()}.items()


@pytest.mark.ranks([1, 3])
def test_async_copies_what_it_saves(tmp_path: Path) -> None:
    model = llama()
    before = values(model)
    handle = checkpoint.save(tmp_path / "c", {"model": model}, async_=True)
    for p in model.parameters():
        p.local.fill_(5.0)
    handle.wait()
    checkpoint.load(tmp_path / "c", {"model": model})
    assert values(model) == before


@pytest.mark.ranks([1, 2, 3])
def test_shards_and_their_index(tmp_path: Path) -> None:
    model = llama()
    checkpoint.save(tmp_path / "c", {"model": model}, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "c").glob("model-*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    full = {name: t.numpy() for name, t in model.state_dict().items()}
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in full.values())
    assert set(index["weight_map"]) == set(full)
    for file in files:
        for name, array in stn.load_file(tmp_path / "c" / file).items():
            assert index["weight_map"][name] == file
            assert (array == full[name]).all()
    fresh = fsdpc.fully_shard(llama("plain", seed=1))
    checkpoint.load(tmp_path / "c", {"model": fresh})
    assert values(fresh) == values(model)


@pytest.mark.ranks([1, 2])
def test_texts_are_those_of_the_json_module(tmp_path: Path) -> None:
    """The index and the manifest, with names that JSON escapes."""
    model, names = fsdpc.nn.Module(), ["\xe9", "\U0001f600", 'a"\\\n\x01\x7f']
    for name in names:
        setattr(model, name, fsdpc.nn.Parameter(fsdpc.tensor(np.ones(3, np.float32))))
    checkpoint.save(tmp_path / "c", {"model": model, "extra": {"\xe9": [1]}}, max_shard_bytes=13)
    index = (tmp_path / "c" / "model.safetensors.index.json").read_text()
    assert index == json.dumps(json.loads(index), indent=2, sort_keys=True) + "\n"
    text = (tmp_path / "c" / "manifest.json").read_text()
    content = json.loads(text)
    tensors, checksum = content.pop("tensors"), content.pop("checksum")
    assert list(tensors["model"]) == names and len(content["files"]) == 4
    head = json.dumps(content, indent=1, sort_keys=True).removesuffix("\n}")
    tail = json.dumps(tensors, separators=(",", ":"))
    assert text == f'{head},\n "tensors":{tail},\n "checksum":"{checksum}"\n}}\n'


@pytest.mark.ranks([1, 2])
def test_another_dtype(tmp_path: Path) -> None:
    model = llama()
    checkpoint.save(tmp_path / "c", {"model": model}, dtype="bfloat16")
    found = st.load_file(tmp_path / "c" / "model.safetensors")
    for name, t in model.state_dict().items():
        want = t.to(fsdpc.bfloat16).float().numpy()
        assert (found[name].float().numpy() == want).all(), name
    fresh = fsdpc.fully_shard(llama("plain", seed=1))
    checkpoint.load(tmp_path / "c", {"model": fresh})
    for name, t in fresh.state_dict().items():
        assert (t.numpy() == found[name].float().numpy()).all(), name


@pytest.mark.ranks([1, 4])
@pytest.mark.parametrize("how", STRATEGIES)
def test_the_manifest_says_who_wrote_it(how: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"model": llama(how)})
    content = json.loads((tmp_path / "c" / "manifest.json").read_text())
    world = fsdpc.world_size()
    rows = world if how == "NO_SHARD" else 2 if how.startswith("HYBRID") and world == 4 else 1
    sharded_ = [] if how == "plain" else [{"replicate": rows, "shard": world // rows}]
    assert (content["world"], content["meshes"]) == (world, sharded_)
    assert content["strategies"] == ([] if how == "plain" else [how])
    assert content["units"] == (0 if how == "plain" else 1 + CONFIG.layers)
    assert content["model_class"].endswith("Llama") and len(content["rng"]["ranks"]) == world
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["ls", str(tmp_path / "c")]) == 0
    mesh = f" ({how}; replicas x shards {rows} x {world // rows})" if how != "plain" else ""
    assert f"\nwritten by: {world} ranks{mesh}\nmodel: " in text.getvalue()


@pytest.mark.ranks([1, 4])
def test_strategies_that_were_asked_for_by_mesh_and_flag(tmp_path: Path) -> None:
    world = fsdpc.world_size()
    grid = (2, world // 2) if world > 1 else (1, 1)
    mesh = fsdpc.init_device_mesh("cpu", grid)
    hybrid = world > 1
    for i, (options, want) in enumerate([
        ({}, "FULL_SHARD"), ({"reshard_after_forward": False}, "SHARD_GRAD_OP"),
        ({"mesh": mesh}, "HYBRID_SHARD" if hybrid else "FULL_SHARD"),
        ({"mesh": mesh, "reshard_after_forward": False},
         "HYBRID_SHARD_ZERO2" if hybrid else "SHARD_GRAD_OP"),
        ({"mesh": fsdpc.init_device_mesh("cpu", (world, 1))},
         "NO_SHARD" if hybrid else "FULL_SHARD"),
    ]):  # fmt: skip
        native = by_blocks(llama("plain"), **options)
        torches = fsdpc.torch.fully_shard(torch.nn.Linear(5, 5), **options)
        for name, model in (("native", native), ("torch", torches)):
            checkpoint.save(tmp_path / f"{name}-{i}", {"model": model})
            content = json.loads((tmp_path / f"{name}-{i}" / "manifest.json").read_text())
            assert content["strategies"] == [want], (name, options)
            assert len(content["meshes"]) == 1 and content["units"] >= 1


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("files", ["one", "several"])
def test_transformers_reads_it(files: str, tmp_path: Path) -> None:
    model = llama()
    size = 60_000 if files == "several" else 5e9
    checkpoint.save(tmp_path / "c", {"model": model}, max_shard_bytes=size)
    full = model.state_dict()
    if fsdpc.rank() != 0:
        return
    config = _hf_config()
    config.save_pretrained(tmp_path / "c")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert set(found.state_dict()) == set(full)
    for name, t in found.state_dict().items():
        assert (t.numpy() == full[name].numpy()).all(), name


def _hf_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.dim,
        num_hidden_layers=CONFIG.layers,
        num_attention_heads=CONFIG.heads,
        intermediate_size=CONFIG.inner,
        tie_word_embeddings=False,
    )


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_it_reads_transformers(dtype: str, size: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = LlamaForCausalLM(_hf_config()).to(getattr(torch, dtype))
    if fsdpc.rank() == 0:
        theirs.save_pretrained(tmp_path / "c", max_shard_size=size)
    fsdpc.barrier()
    with fsdpc.deferred_init():
        model = fsdpc.models.Llama(CONFIG)
    by_blocks(model)
    report = checkpoint.load(tmp_path / "c", {"model": model}, names="llama")
    assert not report.missing and not report.unexpected
    for name, t in model.state_dict().items():
        assert (t.numpy() == theirs.state_dict()[name].float().numpy()).all(), name


@pytest.mark.ranks([1, 2])
def test_it_reads_gpt2_of_transformers(tmp_path: Path) -> None:
    """As it is; without the prefix of its head, with buffers that were stored once, by its name."""
    torch.manual_seed(3)
    theirs = GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=CONFIG.vocab_size,
            n_positions=32,
            n_embd=CONFIG.dim,
            n_layer=CONFIG.layers,
            n_head=CONFIG.heads,
            n_inner=4 * CONFIG.dim,
        )
    )
    if fsdpc.rank() == 0:
        theirs.save_pretrained(tmp_path / "c")
        theirs.transformer.save_pretrained(tmp_path / "base")
        buffers = {f"h.0.attn.{name}": torch.ones(1, 1, 32, 32) for name in ("bias", "masked_bias")}
        base = st.load_file(tmp_path / "base" / "model.safetensors")
        st.save_file({**base, **buffers}, tmp_path / "base" / "model.safetensors")
    fsdpc.barrier()
    theirs.eval()
    ids = np.arange(24).reshape(2, 12) % CONFIG.vocab_size
    want = theirs(torch.from_numpy(ids)).logits.detach().numpy()
    for folder, names in (("c", None), ("c", "gpt2"), ("base", "gpt2")):
        model = by_blocks(GPT2(CONFIG.with_(max_seq=32, inner=4 * CONFIG.dim))).eval()
        checkpoint.load(tmp_path / folder, {"model": model}, names=names)
        with fsdpc.no_grad():
            ours = model(ids).numpy()
        np.testing.assert_allclose(ours.reshape(want.shape), want, atol=2e-5)
    words = r"(?s)saved +now.*c_attn.*missing.*names='gpt2' fits it$"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.load(tmp_path / "base", {"model": model})


@pytest.mark.ranks([1, 2])
def test_names_of_ones_own(tmp_path: Path) -> None:
    """By a mapping, by a function; a family's names with and without the prefix of its head."""
    plain = llama("plain")
    want = values(plain)
    full = {name: t.numpy() for name, t in plain.state_dict().items()}
    if fsdpc.rank() == 0:
        mapped = {("embed" if name.endswith("embed_tokens.weight") else name): a
                  for name, a in full.items()}  # fmt: skip
        stn.save_file(mapped, tmp_path / "mapped.safetensors")
        stn.save_file({f"net.{n}": a for n, a in full.items()}, tmp_path / "deeper.safetensors")
        base = {name.removeprefix("model."): a for name, a in full.items()}
        computed = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
        stn.save_file({**base, **computed}, tmp_path / "base.safetensors")
    fsdpc.barrier()
    for file, names in (
        ("mapped", {"model.embed_tokens.weight": "embed"}),
        ("deeper", lambda name: f"net.{name}"),
        ("base", "llama"),
    ):
        model = llama(seed=1)
        checkpoint.load(tmp_path / f"{file}.safetensors", {"model": model}, names=names)
        assert values(model) == want, file
        with pytest.raises(CheckpointError, match="(?s)missing.*unexpected"):
            checkpoint.load(tmp_path / f"{file}.safetensors", {"model": model})
    with pytest.raises(ValueError, match="names must be 'llama', 'gpt2', a mapping or a function"):
        checkpoint.load(tmp_path / "base.safetensors", {"model": model}, names="bert")


# ---- what does not fit is listed in full


@pytest.mark.ranks([1, 2])
def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    fsdpc.manual_seed(0)
    checkpoint.save(tmp_path / "c", {"model": Odd()})
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        checkpoint.load(tmp_path / "c", {"model": llama()})
    text = str(caught.value)
    for name in ("lm_head.weight", "model.norm.weight", "wide.weight", "narrow", "table"):
        assert f"'{name}'" in text, name
    fsdpc.manual_seed(0)
    model = fsdpc.fully_shard(fsdpc.nn.Linear(5, 8))
    checkpoint.save(tmp_path / "d", {"model": fsdpc.nn.Linear(5, 7)})
    with pytest.raises(CheckpointError, match=r"'weight' +\(7, 5\) +\(8, 5\)"):
        checkpoint.load(tmp_path / "d", {"model": model})


@pytest.mark.ranks([1, 2])
def test_not_strict_loads_what_is_there(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"model": fsdpc.nn.Linear(5, 7)})
    before = fsdpc.nn.Linear(5, 7, bias=False)
    fsdpc.fully_shard(before)
    report = checkpoint.load(tmp_path / "c", {"model": before}, strict=False)
    assert (report.missing, report.unexpected) == ([], ["bias"])


@pytest.mark.ranks([1, 2])
def test_a_tied_parameter_by_its_other_name(tmp_path: Path) -> None:
    model = Odd()
    full = {name: t.numpy() for name, t in model.state_dict().items() if name != "narrow"}
    want = full.pop("wide.weight") + 1
    if fsdpc.rank() == 0:
        stn.save_file({**full, "tied.weight": want}, tmp_path / "f.safetensors")
    fsdpc.barrier()
    fsdpc.fully_shard(model)
    report = checkpoint.load(tmp_path / "f.safetensors", {"model": model}, strict=False)
    assert (report.missing, report.unexpected) == (["narrow"], [])
    assert (fsdpc.full_tensor(model.wide.weight).numpy() == want).all()


@pytest.mark.ranks(2)
def test_ranks_with_other_models_are_told(tmp_path: Path) -> None:
    model = fsdpc.nn.Linear(5, 7 + fsdpc.rank())
    with pytest.raises(fsdpc.MismatchError, match="ranks disagree on what to save"):
        checkpoint.save(tmp_path / "c", {"model": model})
    assert not (tmp_path / "c").exists()


@pytest.mark.ranks([1, 2])
def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    model = {"model": fsdpc.nn.Linear(2, 2)}
    for arguments, kind, text in (
        (dict(dtype="int32"), TypeError, "floating"),
        (dict(max_shard_bytes=0), ValueError, "max_shard_bytes"),
    ):
        with pytest.raises(kind, match=text):
            checkpoint.save(tmp_path / "c", model, **arguments)
    for state, kind, text in (
        ({"modle": 1}, ValueError, "modle"),
        ({"optimizer": 1}, ValueError, "takes the model too"),
        ({"model": 1}, TypeError, "must be a module"),
        ({**model, "data": 1}, TypeError, "state_dict"),
        ({**model, "extra": {"x": {1, 2}}}, ValueError, "'extra' of a checkpoint"),
        ({**model, "extra": object()}, ValueError, "'extra' of a checkpoint"),
    ):
        with pytest.raises(kind, match=text):
            checkpoint.save(tmp_path / "c", state)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="never committed"):
        checkpoint.load(tmp_path, model)


def peak_beyond_now() -> Callable[[], int]:
    """Bytes that this process came to hold, at most, since the call."""
    def status(key: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition(f"{key}:")[2].split()[0]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin = status("VmRSS")
    return lambda: status("VmHWM") - begin


@pytest.mark.ranks([1, 2])
def test_memory_is_a_chunk(tmp_path: Path) -> None:
    """Of 48 MB neither saving nor loading holds a copy, converted or not; a thread's save one."""
    model = fsdpc.fully_shard(fsdpc.nn.Linear(4096, 3072, bias=False))
    saves = {"own": None, "half": "bfloat16"}
    checkpoint.save(tmp_path / "warm", {"model": model}, dtype="bfloat16")
    checkpoint.load(tmp_path / "warm", {"model": model})
    for name, dtype in saves.items():
        peak = peak_beyond_now()
        checkpoint.save(tmp_path / name, {"model": model}, dtype=dtype)
        assert peak() < 8 << 20, (name, peak())
        peak = peak_beyond_now()
        checkpoint.load(tmp_path / name, {"model": model})
        assert peak() < 8 << 20, (name, peak())
    own = (48 << 20) // fsdpc.world_size()
    for i in range(2):  # the second has the memory of the first
        peak = peak_beyond_now()
        checkpoint.save(tmp_path / f"async-{i}", {"model": model}, async_=True).wait()
        assert peak() < own * (i == 0) + (8 << 20), (i, peak())
