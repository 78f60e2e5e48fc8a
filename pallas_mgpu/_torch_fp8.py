"""Training with products of 8-bit floats, as operators of PyTorch.

Blocks: x and the gradient have a scale for 128 elements of a row, the weight one for 128 x 128, all
computed from the values at hand. The gradient of the weight is a product of 16 bits: it sums over
the rows of x, along which these scales do not go.

Delayed: one scale for each array, computed from the largest magnitudes of earlier steps, so that no
array is read for its scale first. All three products have 8-bit operands; the gradient is
float8_e5m2. The magnitudes of a step come back as the "gradient" of the scales: operators stay
functions, and whoever owns the scales makes the next ones of them, as `Fp8Linear` does."""

from typing import Any

import torch
from torch import Tensor

from . import ops as _ops
from ._torch_ops import _dtype, _may_need_gradient, _no_gradients, _operator, matmul, register

ops: Any = _ops  # its stubs know the arrays of libraries, not tensors alone

_BLOCK = 128
_SQUARE = _BLOCK, _BLOCK
_LARGEST = 448.0, 448.0, 57344.0  # of float8_e4m3fn for x and the weight, e5m2 for the gradient
_E4, _BITS = torch.float8_e4m3fn, torch.uint8  # as which operators pass 8-bit floats on


def _by_scale_fake(x, scale, dtype="float8_e4m3fn"):
    kind = getattr(torch, dtype)
    return torch.empty_like(x, dtype=kind), x.new_empty((1,), dtype=torch.float32)


@_operator(_by_scale_fake)
def quantize_by_scale(
    x: Tensor, scale: Tensor, dtype: str = "float8_e4m3fn"
) -> tuple[Tensor, Tensor]:
    return ops.quantize_by_scale(x, scale, dtype=dtype)


register({"quantize_by_scale": quantize_by_scale})

# ---- scales of blocks ----------------------------------------------------------------------------


def _blocks_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _blocks_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    dx = fp8_input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
    dw = matmul(grad, x, transpose_a=True) if ctx.needs_input_grad[1] else None
    return dx, dw


@_operator(lambda grad, weight: grad.new_empty((grad.shape[0], weight.shape[1])))
def fp8_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad @ weight`` with scales of blocks."""
    q, scales = ops.quantize(grad, block=_BLOCK)
    w, of_w = ops.quantize(weight, block=_SQUARE)
    options = {"scale_a": scales, "scale_b": of_w.t().contiguous()}
    return ops.matmul(q, w, out_dtype=_dtype(grad.dtype), **options)


def _blocks_fake(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]))


@_operator(_blocks_fake, (_blocks_setup, _blocks_backward), ("x", "weight"))
def fp8_matmul_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` with scales of blocks."""
    q, scales = ops.quantize(x, block=_BLOCK)
    w, of_w = ops.quantize(weight, block=_SQUARE)
    options = {"transpose_b": True, "scale_a": scales, "scale_b": of_w}
    return ops.matmul(q, w, out_dtype=_dtype(x.dtype), **options)


# ---- delayed scales ------------------------------------------------------------------------------


def _delayed_fake(x, weight, scales):
    largest = x.new_empty((2,), dtype=torch.float32)
    kept = torch.empty_like(x, dtype=_BITS), torch.empty_like(weight, dtype=_BITS)
    return x.new_empty((x.shape[0], weight.shape[0])), *kept, largest


def _delayed_setup(ctx, inputs, output):
    ctx.save_for_backward(*output[1:], inputs[2])
    _no_gradients(ctx, *output[1:])


def _delayed_backward(ctx, grad, *_):
    wanted = ctx.needs_input_grad
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # it is recorded, but x and the weight are not there, for a refusal of second derivatives
        raise NotImplementedError(
            "pallas_mgpu::fp8_matmul_delayed has no second derivatives (create_graph=True)"
        )
    dx, dw, largest = fp8_delayed_backward(grad, *ctx.saved_tensors, wanted[0], wanted[1])
    return dx if wanted[0] else None, dw if wanted[1] else None, largest


def _delayed_backward_fake(grad, q, w, largest, scales, of_x=True, of_weight=True):
    none, like = grad.new_empty((0,)), torch.empty_like
    dx = like(q, dtype=grad.dtype) if of_x else none
    return dx, like(w, dtype=grad.dtype) if of_weight else none.clone(), torch.empty_like(scales)


@_operator(_delayed_backward_fake)
def fp8_delayed_backward(
    grad: Tensor,
    q: Tensor,
    w: Tensor,
    largest: Tensor,
    scales: Tensor,
    of_x: bool = True,
    of_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, and the largest magnitudes of x, the weight and the gradient."""
    of_q, of_w, of_g = scales.split(1)
    q, w = q.view(_E4), w.view(_E4)
    g, last = ops.quantize_by_scale(grad, of_g, dtype="float8_e5m2")
    dx = dw = grad.new_empty((0,))
    out_dtype = _dtype(grad.dtype)
    if of_x:
        dx = ops.matmul(g, w, scale_a=of_g, scale_b=of_w, out_dtype=out_dtype)
    if of_weight:
        options = {"transpose_a": True, "scale_a": of_g, "scale_b": of_q}
        dw = ops.matmul(g, q, out_dtype=out_dtype, **options)
    return dx, dw.clone() if dw is dx else dw, torch.cat((largest, last))


@_operator(_delayed_fake, (_delayed_setup, _delayed_backward), ("x", "weight"))
def fp8_matmul_delayed(
    x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x @ weight.T``, both operands as 8-bit floats by the given scales, and their largest
    magnitudes."""
    of_x, of_w, _ = scales.split(1)
    q, most = ops.quantize_by_scale(x, of_x)
    w, of_weight = ops.quantize_by_scale(weight, of_w)
    y = ops.matmul(q, w, transpose_b=True, scale_a=of_x, scale_b=of_w, out_dtype=_dtype(x.dtype))
    return y, q.view(_BITS), w.view(_BITS), torch.cat((most, of_weight))


def fp8_matmul(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` by products of 8-bit floats, forward and backward.

    x: (..., K); weight: (N, K); both float16 or bfloat16 (or float32 under autocast). Without
    ``scales``, operands are float8_e4m3fn with a scale for 128 elements of a row of x and of the
    gradient, and for 128 x 128 elements of the weight, and the gradient of the weight is a product
    of 16 bits. scales: float32, (3,), by which x, the weight (as float8_e4m3fn) and the gradient
    (as float8_e5m2) are divided; if it requires a gradient, that is no derivative but the largest
    magnitudes of the three, from which the next scales can be computed. Second derivatives raise
    NotImplementedError."""
    rows = x.reshape(-1, x.shape[-1])
    if scales is None:
        y = fp8_matmul_blocks(rows, weight)
    else:
        y = fp8_matmul_delayed(rows, weight, scales)[0]
    return y.reshape(*x.shape[:-1], weight.shape[0])


class Fp8Linear(torch.nn.Linear):
    """``torch.nn.Linear`` by :func:`fp8_matmul`, in training and evaluation.

    recipe: "blocks", scales of blocks, or "delayed", one scale for each of x, the weight and the
    gradient: the largest magnitude of up to ``history`` steps, times 2**margin, becomes the largest
    8-bit float. Steps are counted by forward passes after a backward pass. The scales of the first
    step are of its own x and weight. They are saved with the module."""

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        recipe="blocks",
        history=16,
        margin=0,
    ):
        if recipe not in ("blocks", "delayed"):
            raise ValueError(f"Fp8Linear: recipe must be 'blocks' or 'delayed', got {recipe!r}")
        if not isinstance(history, int) or history < 1:
            raise ValueError(f"Fp8Linear: history must be an int from 1, got {history!r}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe, self.margin = recipe, margin
        if recipe == "delayed":
            made = {"device": device, "dtype": torch.float32}
            self.register_buffer("scales", torch.ones(3, **made))
            self.register_buffer("history", torch.zeros(3, history, **made))
            self.register_buffer("largest", torch.zeros(3, **made))
            self._started = self._seen = False

    def extra_repr(self):
        return f"{super().extra_repr()}, recipe={self.recipe!r}"

    def _apply(self, fn, recurse=True):
        """Scales go where the weight goes, but stay float32."""
        kept = {k: v for k, v in self._buffers.items() if v is not None}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            new = self._buffers[name]
            if new.dtype != torch.float32:
                self._buffers[name] = value.to(new.device)
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._started = True

    @torch.no_grad()
    def _next_scales(self, x):
        """Those of a step that begins."""
        if self._seen:
            self.history.copy_(torch.cat((self.history[:, 1:], self.largest[:, None]), 1))
            self.largest.zero_()
        if not self._started:
            found = [v.detach().abs().max().to(torch.float32) for v in (x, self.weight)]
            top = torch.stack((*found, torch.zeros_like(found[0])))
        else:
            top = self.history.amax(1)
        if self._seen or not self._started:
            most = torch.tensor(_LARGEST, device=top.device)
            new = top * 2.0**self.margin / most
            self.scales.copy_(torch.where(top > 0, new, self.scales))
        self._started, self._seen = True, False

    def _keep(self, largest):
        """Of the hook of the scales: largest magnitudes since the last step."""
        torch.maximum(self.largest, largest, out=self.largest)
        self._seen = True

    def forward(self, x):
        scales = None
        if self.recipe == "delayed":
            if self.training and torch.is_grad_enabled():
                self._next_scales(x)
            scales = self.scales.clone()
            if _may_need_gradient(x) or _may_need_gradient(self.weight):
                scales.requires_grad_().register_hook(self._keep)
        y = fp8_matmul(x, self.weight, scales)
        return y if self.bias is None else y + self.bias.to(y.dtype)
