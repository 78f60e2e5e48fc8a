"""Trains a small transformer whose layers are kernels of pallas_mgpu.ops, beside the same model
made of PyTorch's own functions.

A block is RMS norm, attention with rotary embedding, RMS norm and a gated MLP; the loss is the
cross entropy of the next token. Both models begin with the same weights and see the same batches,
so their losses stay close to each other. Each sequence counts upwards by its own step, modulo the
size of the vocabulary, so to continue one, a model must compare two of its tokens.

    python examples/frameworks/transformer_block.py

trains for 300 steps on a GPU. Without one, it trains a smaller model for 5 steps on the
interpreter. Options change the sizes.
"""

import argparse
import math

import torch
import torch.nn.functional as F

import pallas_mgpu.torch as pt

HEAD = 64


class Kernels:
    """The functions of a layer, by kernels."""

    rms_norm = staticmethod(pt.rms_norm)

    @staticmethod
    def gated_linear(x, w):
        return pt.gated_matmul(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[1] // 2)

    @staticmethod
    def linear(x, w):
        return pt.matmul(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[1])

    @staticmethod
    def attention(q, k, v, cos, sin):
        return pt.attention(q, k, v, causal=True, cos=cos, sin=sin)

    @staticmethod
    def loss(logits, targets):
        return pt.cross_entropy(logits, targets).mean()


class Reference:
    """The same functions, by PyTorch."""

    @staticmethod
    def rms_norm(x, w):
        return F.rms_norm(x, w.shape, w, 1e-6)

    @staticmethod
    def rotary(x, cos, sin):
        a, b = x.float().chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    @staticmethod
    def gated_linear(x, w):
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def linear(x, w):
        return x @ w

    @classmethod
    def attention(cls, q, k, v, cos, sin):
        q, k = cls.rotary(q, cos, sin), cls.rotary(k, cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)

    @staticmethod
    def loss(logits, targets):
        return F.cross_entropy(logits.float(), targets)


class Block(torch.nn.Module):
    """One layer. kv_heads: heads of keys and values, each of which serves several of queries."""

    def __init__(self, f, width, kv_heads):
        super().__init__()
        self.f, self.heads, self.kv_heads = f, width // HEAD, kv_heads
        hidden = 2 * width
        self.norm1 = torch.nn.Parameter(torch.ones(width))
        self.norm2 = torch.nn.Parameter(torch.ones(width))
        self.qkv = _weight(width, (self.heads + 2 * kv_heads) * HEAD)
        self.out = _weight(width, width)
        self.gate_up = _weight(width, 2 * hidden)
        self.down = _weight(hidden, width)

    def forward(self, x, cos, sin):
        f, (batch, length, width) = self.f, x.shape
        qkv = f.linear(f.rms_norm(x, self.norm1), self.qkv)
        qkv = qkv.view(batch, length, self.heads + 2 * self.kv_heads, HEAD)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
        o = f.attention(q, k, v, cos, sin)
        x = x + f.linear(o.reshape(batch, length, width), self.out)
        return x + f.linear(f.gated_linear(f.rms_norm(x, self.norm2), self.gate_up), self.down)


class Model(torch.nn.Module):
    """Embedding, blocks, and the logits of the next token."""

    def __init__(self, f, vocabulary, width, layers):
        super().__init__()
        self.f = f
        self.embedding = torch.nn.Parameter(torch.randn(vocabulary, width))
        kv_heads = max(width // HEAD // 2, 1)
        self.blocks = torch.nn.ModuleList(Block(f, width, kv_heads) for _ in range(layers))
        self.norm = torch.nn.Parameter(torch.ones(width))
        self.logits = _weight(width, vocabulary)

    def forward(self, tokens, targets):
        x, length = self.embedding[tokens], tokens.shape[1]
        position = torch.arange(length, device=x.device, dtype=torch.float32)
        frequency = torch.arange(HEAD // 2, device=x.device) * (-2 / HEAD * math.log(10000))
        angles = position[:, None] * frequency.exp()
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.f.linear(self.f.rms_norm(x, self.norm), self.logits)
        return self.f.loss(logits.flatten(0, 1), targets.flatten())


def _weight(rows, columns):
    return torch.nn.Parameter(torch.randn(rows, columns) / math.sqrt(rows))


def batches(vocabulary, size, length, steps, device):
    """(tokens, targets) of sequences that count in steps of their own."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(0, vocabulary, (size, 1), generator=generator)
        step = torch.randint(1, 8, (size, 1), generator=generator)
        sequence = (start + step * torch.arange(length + 1)) % vocabulary
        yield sequence[:, :-1].to(device), sequence[:, 1:].to(device)


def train(f, arguments, data):
    """The loss of each step."""
    torch.manual_seed(0)
    a = arguments
    model = Model(f, a.vocabulary, a.width, a.layers).to(a.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in data:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, on_gpu, on_cpu in (
        ("steps", 300, 5),
        ("width", 256, 64),
        ("layers", 2, 2),
        ("batch", 16, 4),
        ("length", 128, 32),
        ("vocabulary", 128, 128),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{on_gpu} on a GPU, {on_cpu} without one")
        parser.set_defaults(**{name: (on_gpu, on_cpu)})
    a = parser.parse_args(argv)
    for name, value in vars(a).items():
        if isinstance(value, tuple):
            setattr(a, name, value[a.device == "cpu"])
    data = list(batches(a.vocabulary, a.batch, a.length, a.steps, a.device))
    losses = [train(f, a, data) for f in (Kernels, Reference)]
    print("step  kernels  PyTorch")
    for i in range(0, a.steps, max(a.steps // 10, 1)):
        print(f"{i:4}  {losses[0][i]:7.4f}  {losses[1][i]:7.4f}")
    return losses


if __name__ == "__main__":
    main()
