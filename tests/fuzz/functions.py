"""Productions of functions: those that are not exact, whose results are only moved about after
them, and those of pallas_mgpu.nn."""

from .expressions import FLOATS
from .function_table import ACTIVATIONS, ALONG, FUNCTIONS, PAIRS
from .kernels import Node

EXACT = ("relu", "relu6", "hard_tanh", "identity")


class Functions:
    def stores_inexact(self, shape, dtype):
        for _ in range(self.rng.randint(1, 4)):
            self.store_inexact(shape, dtype)

    def seg_functions(self):
        """Many of them, of small arrays."""
        for _ in range(self.rng.randint(8, 14)):
            self.store_inexact(self.shape(limit=512), self.rng.choice(FLOATS))

    def store_inexact(self, shape, dtype):
        """A function of tame numbers."""
        form = self.rng.random()
        if form < 0.55:
            self.feature("math")
            f = self.rng.choice(list(FUNCTIONS))
            t = FUNCTIONS[f]
            x = Node(f"{t.space}.{f}({{}}{t.options})", self.tame(shape, dtype, t.low, t.high))
        elif form < 0.7:
            self.feature("math of two")
            f = self.rng.choice(list(PAIRS))
            t = PAIRS[f]
            pair = (self.tame(shape, dtype, t.low, t.high) for _ in range(2))
            x = Node(f"{t.space}.{f}({{}}, {{}})", *pair)
        elif form < 0.85 or not shape:
            self.feature("activation")
            f = self.rng.choice(list(ACTIVATIONS))
            x = Node(f"plgpu.nn.{f}({{}})", self.tame(shape, dtype, -4, 4))
        else:
            return self.store_along(shape, dtype)
        if self.chance(0.3) and self.layout(shape):
            x = Node(f"plgpu.layout_cast({{}}, {self.layout(shape)})", x)
        if self.chance(0.3):
            return self.store_by_copy(shape, dtype, x)
        self.store(shape, dtype, value=x)

    def store_along(self, shape, dtype):
        """A function along the last axis, of which one result has one dim less."""
        self.feature("softmax")
        f = self.rng.choice(list(ALONG))
        x = Node(f"plgpu.nn.{f}({{}}, axis=-1)", self.tame(shape, dtype, -4, 4))
        self.store(shape[:-1] if f == "logsumexp" else shape, dtype, value=x)

    def tame(self, shape, dtype, low, high):
        return Node(f"jnp.clip({{}}, {low}, {high})", self.leaf(shape, dtype, "norm"))

    def make_nn(self, shape, dtype, kind):
        """A function of nn that is exact."""
        self.feature("nn")
        if len(shape) > 1 and shape[-1] <= 64 and self.chance(0.3):
            n, x = shape[-1], self.value(shape[:-1], "int32")
            return Node(f"plgpu.nn.one_hot({{}} % {n}, {n}, dtype=jnp.{dtype})", x)
        return Node(f"plgpu.nn.{self.rng.choice(EXACT)}({{}})", self.value(shape, dtype, kind))
