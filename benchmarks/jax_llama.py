"""The LLaMA of bench_strategies.py in plain JAX, its parameters sharded over two CPU devices.

jit places the collectives (GSPMD): parameters, gradients and AdamW states are split along their
first dimension that two divides, the batch along its rows, as FSDP does it.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_llama import BATCHES, measure
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdpc.models.config import preset as config_of


def init(c: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Weights as bench_llama's: normal 0.02, norms 1."""

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    def one() -> np.ndarray:
        return np.ones(c.dim, np.float32)

    kv = c.dim // c.heads * c.kv_heads
    layers = [
        {"q": matrix(c.dim, c.dim), "k": matrix(c.dim, kv), "v": matrix(c.dim, kv),
         "o": matrix(c.dim, c.dim), "gate": matrix(c.dim, c.inner), "up": matrix(c.dim, c.inner),
         "down": matrix(c.inner, c.dim), "n1": one(), "n2": one()}
        for _ in range(c.layers)
    ]  # fmt: skip
    params = {"embed": matrix(c.vocab_size, c.dim), "layers": layers, "norm": one()}
    if not c.tied:
        params["head"] = matrix(c.vocab_size, c.dim)
    return params


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """In fp32, as the others do it."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of (B, T, heads, d)."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def forward(params: Any, ids: Any, c: Any, dtype: Any) -> Any:
    """Logits (B, T, vocabulary)."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    rows, tokens = ids.shape
    d = c.dim // c.heads
    angles = jnp.arange(tokens)[:, None] / (10000.0 ** (jnp.arange(0, d, 2) / d))[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    x = params["embed"][ids]
    for p in params["layers"]:
        h = rms_norm(x, p["n1"], c.norm_eps)
        q, k, v = (
            (h @ p[n]).reshape(rows, tokens, heads, d)
            for n, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )
        mixed = jax.nn.dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        x = x + mixed.reshape(rows, tokens, c.dim) @ p["o"]
        h = rms_norm(x, p["n2"], c.norm_eps)
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    head = params["embed"] if c.tied else params["head"]
    return rms_norm(x, params["norm"], c.norm_eps) @ head.T


def run(preset: str, dtype_name: str) -> dict[str, Any]:
    """One turn: a step is forward, backward, clipping at 1.0 and AdamW over both devices."""
    c = config_of(preset)
    dtype = jnp.bfloat16 if dtype_name == "bf16" else jnp.float32
    mesh = Mesh(np.array(jax.devices()), ("shard",))

    def place(p: np.ndarray) -> Any:
        spec = PartitionSpec("shard") if p.shape[0] % 2 == 0 else PartitionSpec()
        return jax.device_put(p, NamedSharding(mesh, spec))

    params = jax.tree.map(place, init(c, np.random.default_rng(0)))
    zeros = jax.tree.map(jnp.zeros_like, params)
    count = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    state = (params, zeros, jax.tree.map(jnp.zeros_like, params), count)
    rows, seq = BATCHES[preset]
    ids = np.random.default_rng(0).integers(0, c.vocab_size, (2 * rows, seq + 1))
    data = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("shard")))

    def loss_of(params: Any, ids: Any) -> Any:
        logits = forward(params, ids[:, :-1], c, dtype).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1)
        return -chosen.mean()

    def train(state: Any, ids: Any) -> Any:
        params, m, v, n = state
        grads = jax.grad(loss_of)(params, ids)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        n = n + 1
        grads = jax.tree.map(lambda g: g * scale, grads)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
        c1, c2 = 1 - 0.9**n, 1 - 0.999**n
        params = jax.tree.map(
            lambda p, m, v: p * (1 - 3e-6) - 3e-4 * (m / c1) / (jnp.sqrt(v / c2) + 1e-8),
            params, m, v,
        )  # fmt: skip
        return params, m, v, n

    shardings = jax.tree.map(lambda a: a.sharding, state)
    compiled = jax.jit(train, donate_argnums=0, out_shardings=shardings)
    holder = [state]

    def step() -> None:
        holder[0] = jax.block_until_ready(compiled(holder[0], data))

    return {"seconds": measure(step)}
