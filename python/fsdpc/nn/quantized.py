"""Linear layers whose weights are quantised: 4 or 8 bits per element, frozen."""

from __future__ import annotations

from typing import Any

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.nn.layers import Linear
from fsdpc.nn.module import Module
from fsdpc.nn.parameter import Parameter, RowCode


class QuantizedLinear(Linear):
    """A linear layer over a quantised weight: y = x W^T + b.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimensions of x and y.
    bias : bool, default True
    scheme : {"nf4", "int4", "int8"}
        How elements are stored; see :func:`fsdpc.functional.quantize`.
    std : float, optional
        As for :class:`Linear`, whose initial values are encoded.
    dtype : dtype, default float32
        Of the bias, and of a weight or adapter that replaces the codes.

    Notes
    -----
    ``weight`` is (out_features, bytes), uint8 and frozen, as is the bias. A row has its codes and
    its scales, so that units shard it like any other parameter. A product dequantises a few rows or
    columns at a time to x's dtype, never the whole weight.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> layer = nn.QuantizedLinear(64, 2, scheme="nf4")
    >>> layer(fsdpc.ones(5, 64)).shape, layer.weight.shape, layer.weight.dtype.name
    ((5, 2), (2, 41), 'uint8')
    """

    scheme: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scheme: str = "nf4",
        std: float | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, std=std, dtype=dtype)
        quantize_layer(self, scheme)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return _core.quantized_linear(x, self.weight, self.scheme, self.bias)

    @property
    def dtype(self) -> _core.dtype:
        """The dtype of the bias, and of a weight or adapter that replaces the codes."""
        return self.weight._plain_dtype

    def dequantized(self, dtype: Any = None) -> Tensor:
        """Return an unsharded layer's weight, (out_features, in_features), by default float32."""
        codes = self.weight.detach()
        return _core.dequantize(codes, self.scheme, self.in_features, dtype or _core.float32)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme!r}"


def quantize_layer(layer: Any, scheme: str) -> None:
    """Encode and freeze the weight of a :class:`Linear`, which becomes a quantised layer."""
    _install(layer, scheme, RowCode(scheme, layer.in_features).quantized(layer.weight))


def _install(layer: Any, scheme: str, codes: Parameter) -> None:
    layer.weight = codes
    if layer.bias is not None:
        layer.bias.requires_grad = False
    object.__setattr__(layer, "scheme", scheme)
    object.__setattr__(layer, "__class__", QuantizedLinear)


def quantize_(model: Module, scheme: str = "nf4") -> list[str]:
    """Quantise the weights of a model's linear layers in place, and freeze them.

    Parameters
    ----------
    model : Module
        Not sharded. If its initialisation is deferred, so is encoding; loading encodes the values
        that it reads.
    scheme : {"nf4", "int4", "int8"}
        See :func:`fsdpc.functional.quantize`.

    Returns
    -------
    list of str
        Names of the layers, which are all of type :class:`Linear`; the output layers of
        ``fsdpc.models`` have another type and keep their weights.

    Raises
    ------
    ValueError
        The model has no linear layers that are not quantised, a weight is not finite, or the scheme
        is unknown.
    RuntimeError
        The model is sharded or has adapters, or modules share a weight.

    Notes
    -----
    After an error the model is unchanged.

    Examples
    --------
    >>> from fsdpc import nn
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> nn.quantize_(model, "int8")
    ['0', '2']
    """
    if scheme not in _core.weight_schemes:
        known = ", ".join(_core.weight_schemes)
        raise ValueError(f"scheme must be one of {known}, got {scheme!r}")
    layers = {name: m for name, m in model.named_modules() if type(m) is Linear}
    _check(model, layers)
    made = []
    for name, layer in layers.items():
        code = RowCode(scheme, layer.in_features)
        try:
            made.append(code.quantized(layer.weight))
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from None
    for layer, codes in zip(layers.values(), made, strict=True):
        _install(layer, scheme, codes)
    return list(layers)


def _check(model: Module, layers: dict[str, Any]) -> None:
    """Raise an error if the layers, of type Linear, are not what can be quantised."""
    for name, m in model.named_modules():
        if isinstance(m, Linear) and hasattr(m, "lora_A"):
            raise RuntimeError(f"'{name}' has an adapter: call quantize_() before lora.apply()")
    if not layers:
        coded = {m.scheme for m in model.modules() if isinstance(m, QuantizedLinear)}
        why = f": they are stored as {', '.join(sorted(coded))} already" if coded else ""
        raise ValueError(f"{type(model).__name__} has no linear layers to quantise{why}")
    users: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            users[id(p)] = users.get(id(p), 0) + 1
    for name, layer in layers.items():
        if layer.weight._unit is not None:
            raise RuntimeError("the model is sharded: call quantize_() before fully_shard()")
        if users[id(layer.weight)] > 1:
            raise RuntimeError(f"other modules use the weight of '{name}': it cannot be quantised")
