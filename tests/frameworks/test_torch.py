"""Kernels as operators of PyTorch: what torch.library promises of an operator, on the CPU, where
kernels run on the interpreter. Nothing cuts a graph of gradients silently."""

import contextlib
import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops import _open_rows

torch = pytest.importorskip("torch")
pt = pytest.importorskip("pallas_mgpu.torch")
adapter = pytest.importorskip("pallas_mgpu._torch")
opcheck = torch.library.opcheck
F32 = np.float32
P = torch.ops.pallas_mgpu
pytestmark = pytest.mark.usefixtures("on_interpreter")


def spec(*shape):
    return plgpu.ShapeDtypeStruct(shape, F32)


@plgpu.specialize
def scale(x, *, by: float = 2.0):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * by

    return plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype))


def scale_backward(ctx, grad):
    return scale_op(grad, by=ctx.inputs[1]), None


scale_op = plgpu.torch_op(scale, name="test_torch::scale", backward=scale_backward)


@plgpu.kernel(out_type=(spec(8), spec(8)))
def sum_and_difference(x_ref, y_ref, sum_ref, difference_ref):
    sum_ref[...] = x_ref[...] + y_ref[...]
    difference_ref[...] = x_ref[...] - y_ref[...]


two_op = plgpu.torch_op(
    sum_and_difference,
    name="test_torch::two",
    backward=lambda ctx, s, d: (s + d, s - d),
)


# ---- torch_op ------------------------------------------------------------------------------------


def test_schema():
    assert str(scale_op.op._schema) == "test_torch::scale(Tensor x, float by=2.) -> Tensor"
    assert "(Tensor x_ref, Tensor y_ref) -> (Tensor, Tensor)" in str(two_op.op._schema)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    x = torch.randn(4, 8, requires_grad=requires_grad)
    opcheck(scale_op.op, (x, 3.0))
    y = torch.randn(8, requires_grad=requires_grad)
    opcheck(two_op.op, (y, torch.randn(8)))


def test_gradient():
    x = torch.randn(4, 8, requires_grad=True)
    scale_op(x, by=3.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4, 8), 3.0))


def test_compile_does_not_specialise_sizes():
    """One graph for all sizes: the shape of the result is an expression of those of the arguments,
    though the function makes a kernel for each size."""

    def f(x):
        return scale_op(x.sin(), by=2.0).cos()

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for n in (3, 5, 7):
        x = torch.randn(n, 8)
        torch.testing.assert_close(compiled(x), f(x))
    assert len(graphs) == 1


def test_compile_with_gradients():
    compiled = torch.compile(
        lambda x: scale_op(x.sin()).sum(), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (2, 3, 6):
        x = torch.randn(n, 4, requires_grad=True)
        compiled(x).backward()
        torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_export():
    class Module(torch.nn.Module):
        def forward(self, x):
            return scale_op(x) + 1

    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Module(), (torch.ones(3, 4),), dynamic_shapes={"x": {0: batch}})
    assert "test_torch.scale" in program.graph_module.code
    x = torch.randn(5, 4)
    torch.testing.assert_close(program.module()(x), 2 * x + 1)


LOAD = """
import sys, torch
import pallas_mgpu.torch
program = torch.export.load(sys.argv[1])
print(program.module()(torch.arange(40.0).view(5, 8)).tolist())
"""


def test_export_to_another_process(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, x):
            return pt.softmax(x * 0.1) + 1

    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(Module(), (torch.ones(3, 8),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "program.pt2"], capture_output=True, text=True
    )
    want = torch.softmax(torch.arange(40.0).view(5, 8) * 0.1, -1) + 1
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout or done.stderr)), want)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        y = scale_op(torch.ones(3, 4))
        assert isinstance(y, FakeTensor) and y.shape == (3, 4)
        with pytest.raises(TypeError, match="torch_op"):
            scale(torch.ones(3, 4))


def test_func():
    x, y = torch.randn(3, 8), torch.randn(8)
    double = torch.func.vmap(two_op, in_dims=(0, None))
    torch.testing.assert_close(double(x, y), (x + y, x - y))

    def loss(x, y):
        return two_op(x, y)[0].pow(2).sum()

    by_one = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))
    torch.testing.assert_close(by_one(x, y), (2 * (x + y), 2 * (x + y)))
    gradient = torch.func.grad(lambda x, y: double(x, y)[0].pow(2).sum(), argnums=(0, 1))
    torch.testing.assert_close(gradient(x, y), (2 * (x + y), 2 * (x + y).sum(0)))
    _, pull = torch.func.vjp(lambda x: scale_op(x, by=5.0), x)
    torch.testing.assert_close(pull(x)[0], 5 * x)


def test_vmap_is_one_launch(monkeypatch):
    calls = []
    x, y = torch.randn(3, 8), torch.randn(8)
    op = plgpu.torch_op(sum_and_difference, name="test_torch::launches")
    monkeypatch.setattr(adapter, "_loop", lambda op: calls.append(op))
    torch.func.vmap(op, in_dims=(0, None))(x, y)
    assert not calls and hasattr(torch.ops.test_torch, "launches__vmap_0_n")


def test_no_second_derivative():
    x = torch.randn(8, requires_grad=True)
    (g,) = torch.autograd.grad(ops.softmax(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="softmax_backward"):
        g.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.randn(8), torch.randn(8))
        with pytest.raises(NotImplementedError, match="softmax has no derivative for forward"):
            pt.softmax(dual)
    with pytest.raises(NotImplementedError, match="softmax has no derivative for forward"):
        torch.func.jvp(pt.softmax, (torch.randn(8),), (torch.randn(8),))


def softmax_loss(x):
    return pt.softmax(x).pow(2).sum()


def product_loss(x):
    w = torch.linspace(-1, 1, 64).view(8, 8).bfloat16()
    return pt.matmul(x.bfloat16(), w).float().pow(3).sum()


@pytest.mark.parametrize("outer", ["grad", "jacrev", "hessian", "jvp", "backward"])
def test_levels_of_torch_func_see_each_other(outer):
    """Second derivatives by nested transformations are right, or refused: never zero."""

    def second(f, x):
        def first(x):
            return torch.func.grad(f)(x).pow(2).sum()

        if outer == "backward":
            x = x.clone().requires_grad_()
            return torch.autograd.grad(first(x), x)[0]
        if outer == "jvp":
            return torch.func.jvp(first, (x,), (x,))[1]
        if outer == "hessian":
            return torch.func.hessian(f)(x)
        return getattr(torch.func, outer)(first)(x)

    with pytest.raises(NotImplementedError, match="pallas_mgpu::softmax"):
        second(softmax_loss, torch.randn(8))
    x = torch.randn(4, 8)
    if outer in ("grad", "jacrev", "backward"):  # gradients of products are products

        def theirs(x):
            w = torch.linspace(-1, 1, 64).view(8, 8)
            return (x @ w).pow(3).sum()

        want = second(theirs, x)
        error = (second(product_loss, x) - want).abs().max()
        assert error < 6e-2 * want.abs().max()


def write_sum(x) -> None:
    sum_and_difference(x, x, out=(x, torch.empty_like(x)))


writing_op = plgpu.torch_op(write_sum, name="test_torch::write_sum", mutates="x")


@pytest.mark.parametrize("axis", [0, 1, None])
def test_vmap_of_aliases(axis):
    """Operators are functional: a mapped alias is a value like others."""

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    kernel = pl.pallas_call(body, spec(8), input_output_aliases={0: 0})
    op = plgpu.torch_op(kernel, name=f"test_torch::alias_{axis}")
    x, y = torch.randn({0: (3, 8), 1: (8, 3), None: (8,)}[axis]), torch.randn(3, 8)
    before, want = x.clone(), torch.func.vmap(torch.add, (axis, 0))(x, y)
    torch.testing.assert_close(torch.func.vmap(op, (axis, 0))(x, y), want)
    assert torch.equal(x, before)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: (x.sum(), x.t())])
def test_results_that_are_arguments(view):
    name = f"test_torch::view_{abs(hash(view))}"
    result = (
        tuple[torch.Tensor, torch.Tensor] if isinstance(view(torch.ones(2, 2)), tuple) else None
    )

    def f(x):
        return view(x)

    f.__annotations__ = {"return": result} if result else {}
    op = plgpu.torch_op(f, name=name)
    with pytest.raises(RuntimeError, match="returns one of its arguments, or a view"):
        op.op(torch.ones(3, 3))


def summed(xs: list[torch.Tensor]) -> torch.Tensor:
    return sum(ops.softmax(x.contiguous()) for x in xs)


def test_lists_of_tensors():
    op = plgpu.torch_op(summed, name="test_torch::summed", backward=lambda ctx, g: [g])
    x = torch.randn(3, 8)
    torch.testing.assert_close(op([x, x]), 2 * torch.softmax(x, -1))
    opcheck(op.op, ([x, x],))
    with pytest.raises(NotImplementedError, match="test_torch::summed: an argument is a list"):
        op([x, x.clone().requires_grad_()])


def test_lists_of_views():
    op = plgpu.torch_op(summed, name="test_torch::summed_views")
    x = torch.randn(4, 3, 8)
    want = 2 * torch.softmax(x, -1)
    torch.testing.assert_close(torch.func.vmap(lambda x: op([x, x]))(x), want)
    torch.testing.assert_close(op([x[0].t(), x[0].t()]), 2 * torch.softmax(x[0].t(), -1))


def write_and_return(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None = None):
    sum_and_difference(x, x, out=(y, torch.empty(8)))
    if z is not None:
        z.copy_(x)
    return x + 1, y


write_and_return.__annotations__["return"] = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("backward", [None, lambda ctx, *grads: (2 * grads[2], None, None)])
def test_arguments_that_are_returned(backward):
    """The very tensor, however the call is made; and arguments that are not there."""
    name = f"test_torch::returning_{backward is None}"
    op = plgpu.torch_op(write_and_return, name=name, mutates=("y", "z"), backward=backward)
    x = torch.ones(8)
    opcheck(op.op, (x, torch.zeros(8), None))
    for z in (None, torch.zeros(8)):
        for context in (contextlib.nullcontext(), torch.autocast("cpu")):
            y = torch.zeros(8)
            with context:
                first, second = op(x, y, z)
            assert second is y and (y == 2).all() and (first == 2).all()
            assert z is None or torch.equal(z, x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, y):
        first, second = op(x, y)
        second += 1
        return first

    y = torch.zeros(8)
    assert (compiled(x, y) == 2).all() and (y == 3).all()
    if backward is not None:
        x = torch.ones(8, requires_grad=True)
        op(x, y := torch.zeros(8))
        y.sum().backward()
        assert (x.grad == 2).all()


def test_arguments_that_are_returned_in_some_calls_only():
    def sometimes(x: torch.Tensor, again: bool) -> torch.Tensor:
        x.add_(1)
        return x if again else x + 1

    sometimes.__annotations__ = {"x": torch.Tensor, "again": bool, "return": torch.Tensor}
    op = plgpu.torch_op(sometimes, name="test_torch::sometimes", mutates="x")
    x = torch.zeros(4)
    with torch.autocast("cpu"):
        assert op(x, True) is x
        with pytest.raises(TypeError, match="not those of an earlier call"):
            op(x, False)


SHAPES = {
    "max": lambda n: (max(n, 4),),
    "min": lambda n: (n, min(n, 8)),
    "ceil": lambda n: (n, math.ceil(n / 2)),
    "bits": lambda n: (n, n.bit_length()),
    "cdiv": lambda n: (pl.cdiv(n, 3) * 3 + 1,),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_expressions_do_not_follow(name):
    """Sizes become constants where the shape of a result is another function of them."""
    shape = SHAPES[name]

    @plgpu.specialize
    def filled(x):
        def body(x_ref, o_ref):
            o_ref[...] = jnp.full(o_ref.shape, 3.0, np.float32)

        return plgpu.kernel(body, out_type=spec(*shape(x.shape[0])))

    op = plgpu.torch_op(filled, name=f"test_torch::shape_{name}")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    f = torch.compile(lambda x: [*op(x).shape], fullgraph=True, dynamic=True, backend=counter)
    for n in (6, 9, 3, 17):
        assert f(torch.ones(n)) == [*shape(n)]
    assert (counter.frame_count == 1) == (name == "cdiv")


def test_more_results_than_annotated():
    @plgpu.specialize
    def two(x):
        def body(x_ref, o_ref, p_ref):
            o_ref[...] = p_ref[...] = x_ref[...]

        like = plgpu.ShapeDtypeStruct(x.shape, x.dtype)
        return plgpu.kernel(body, out_type=[like, like])

    op = plgpu.torch_op(two, name="test_torch::two_results")
    for x in (torch.ones(8, requires_grad=True), torch.ones(8, device="meta")):
        with pytest.raises(TypeError, match="test_torch::two_results: the function returned 2"):
            op(x)


def test_without_backward():
    op = plgpu.torch_op(sum_and_difference, name="test_torch::no_backward")
    s, _ = op(torch.ones(8, requires_grad=True), torch.ones(8))
    assert s.requires_grad
    with pytest.raises(NotImplementedError, match="test_torch::no_backward has no gradient"):
        s.sum().backward()


def write_double(x, y):
    sum_and_difference(x, x, out=(x, y))


def test_mutates():
    op = plgpu.torch_op(write_double, name="test_torch::write", mutates=("x", "y"))
    assert "Tensor(a0!) x" in str(op.op._schema)
    x, y = torch.ones(8), torch.ones(8)
    before = x._version
    assert op.op(x, y) is None
    assert x.sum() == 16 and y.sum() == 0 and x._version > before
    with pytest.raises(RuntimeError, match="test_torch::write writes to its arguments"):
        op(torch.ones(8, requires_grad=True).clone(), y)


def add_into(x, y) -> None:
    sum_and_difference(x, y, out=(x, torch.empty_like(y)))


def test_mutates_with_backward():
    """A functional operator, and a function that writes."""
    op = plgpu.torch_op(
        add_into, name="test_torch::add_into", mutates="x", backward=lambda ctx, g: (g, g)
    )
    assert "!" not in str(op.op._schema)
    x, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    z = x * 1
    op(z, y)
    torch.testing.assert_close(z, x + y)
    (z * z).sum().backward()
    torch.testing.assert_close(y.grad, 2 * (x + y).detach())
    plain = torch.ones(8)
    op(plain, torch.ones(8))
    assert plain.sum() == 16


def test_public_path_alone(monkeypatch):
    """Without what is private in torch, every call goes through the dispatcher."""
    monkeypatch.setattr(adapter, "_PROBES", None)
    x = torch.randn(4, 8, requires_grad=True)
    scale_op(x).sum().backward()
    assert (x.grad == 2).all()
    torch.testing.assert_close(scale_op(x.detach()), 2 * x.detach())


def test_results_by_the_public_way_alone():
    """Without torch's private allocators, and with them, calls give tensors of the same kind."""
    x = torch.randn(8)
    try:
        _core.use_private_torch(False)
        found = sum_and_difference(x, x)
    finally:
        _core.use_private_torch(True)
    again = sum_and_difference(x, x)
    for a, b in zip(found, again):
        assert type(a) is type(b) is torch.Tensor and a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda: torch.randn(8), False),
        (lambda: torch.randn(8, requires_grad=True), True),
        (lambda: torch.nn.Parameter(torch.randn(8)), True),
        (lambda: torch.nn.Parameter(torch.randn(8), requires_grad=False), False),
        (lambda: torch.randn(8, requires_grad=True) * 2, True),
        (lambda: (torch.randn(8, requires_grad=True) * 2).detach(), False),
    ],
)
def test_whether_a_tensor_requires_grad(make, wanted, private):
    """By what is private in torch, and by the attribute."""

    def one_more(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    out = plgpu.ShapeDtypeStruct((8,), np.float32)
    kernel = plgpu.kernel(one_more, out_type=out, interpret=True)
    x = make()
    try:
        _core.use_private_torch(private)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(kernel(x), x.detach() + 1)
    finally:
        _core.use_private_torch(True)
    assert any("requires grad" in str(w.message) for w in caught) == wanted


def test_selective_checkpointing():
    """What the policy does not save is computed again, by the operator."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    def policy(ctx, op, *args, **kwargs):
        saved = op is P.matmul.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def f(a, b):
        return pt.rms_norm(pt.matmul(a, b)).float().pow(2).sum()

    a, b = half(8, 16).requires_grad_(), half(16, 24).requires_grad_()
    want = torch.autograd.grad(f(a, b), (a, b))
    y = checkpoint(
        f,
        a,
        b,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    for got, expected in zip(torch.autograd.grad(y, (a, b)), want):
        torch.testing.assert_close(got, expected)


def test_dtensor_names_the_operator():
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = DTensor.from_local(half(4, 8), mesh, [Replicate()])
        with pytest.raises(Exception, match="pallas_mgpu.rms_norm"):
            pt.rms_norm(x)
    finally:
        dist.destroy_process_group()


def no_schema(*xs):
    return xs[0]


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: plgpu.torch_op(no_schema), ValueError),
        (lambda: plgpu.torch_op(scale, name=""), ValueError),
        (lambda: plgpu.torch_op(scale, name="test_torch::o", mutates=3), TypeError),
        (lambda: plgpu.torch_op(scale, name="test_torch::p", backward=3), TypeError),
        (lambda: plgpu.torch_op(scale, name="test_torch::q", backward=(scale,)), TypeError),
        (lambda: plgpu.torch_op(scale, name="test_torch::r", fake=3), TypeError),
        (
            lambda: plgpu.torch_op(sum_and_difference, name="test_torch::s", mutates="x_ref"),
            ValueError,
        ),
        (lambda: plgpu.torch_op(3), TypeError),
        (lambda: plgpu.as_torch_kernel(3), TypeError),
        (lambda: plgpu.torch_op(scale, name="a::b::c"), ValueError),
        (lambda: plgpu.torch_op(scale, name="test_torch::scale"), ValueError),
        (lambda: plgpu.torch_op(scale, name="test_torch::m", mutates="z"), ValueError),
        (lambda: plgpu.torch_op(lambda x, *, y=None: x, name="test_torch::n"), ValueError),
    ],
)
def test_errors_of_torch_op(make, error):
    with pytest.raises(error, match="torch_op|as_torch_kernel"):
        make()


# ---- kernels that are no operators ---------------------------------------------------------------


def test_a_kernel_warns_once_where_it_cuts_the_graph():
    @plgpu.kernel(out_type=spec(8))
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    x = torch.ones(8, requires_grad=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        copy(x)
    with pytest.warns(UserWarning, match="copy: an argument requires grad"):
        assert not copy(x).requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy(x)
    for given in (x, torch.ones(8)):
        with pytest.raises(RuntimeError, match="out= is a tensor that requires grad"):
            copy(given, out=torch.zeros(8, requires_grad=True))


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("how", ["kernel", "operator", "function", "inference"])
def test_autograd_sees_what_is_written(how, private):
    """As of torch's own operations in place: a tensor that was saved must not change."""
    write = {
        "kernel": lambda x: sum_and_difference(x, x, out=(x, torch.empty(8))),
        "operator": writing_op,
        "function": lambda x: ops.softmax(torch.ones(8), out=x),
        "inference": torch.inference_mode()(lambda x: ops.softmax(torch.ones(8), out=x)),
    }[how]
    x, w = torch.ones(8), torch.ones(8, requires_grad=True)
    try:
        _core.use_private_torch(private)
        loss = (w * x).sum()
        write(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            y = torch.ones(8)
        write(y)  # has no version
    finally:
        _core.use_private_torch(True)


def test_a_kernel_under_vmap_says_what_to_do():
    with pytest.raises(TypeError, match="torch_op"):
        torch.func.vmap(lambda x: sum_and_difference(x, x)[0])(torch.ones(3, 8))


def test_nested_tensors():
    @plgpu.kernel(out_type=spec(8))
    def total(pair, o_ref):
        o_ref[...] = pair["x"][...] + pair["y"][...]

    x = torch.arange(8.0)
    torch.testing.assert_close(total({"x": x, "y": x}), 2 * x)
    with pytest.warns(UserWarning, match="total: an argument requires grad"):
        total({"x": x.clone().requires_grad_(), "y": x})
    with pytest.raises(TypeError, match="meta"):
        total({"x": x.to("meta"), "y": x})


def test_results_that_torch_has_not():
    small = plgpu.ShapeDtypeStruct((8,), "int4")
    kernel = plgpu.kernel(lambda x, o: o.__setitem__(..., x[...].astype("int4")), out_type=small)
    with pytest.raises(NotImplementedError, match="dtype int4: PyTorch has no tensors of it"):
        kernel(torch.ones(8))


class Weight(torch.nn.Parameter):
    """As libraries of models have them."""


def test_subclasses_of_parameters():
    w = Weight(half(8).float())
    y = ops.rms_norm(torch.ones(3, 8), w)
    y.sum().backward()
    torch.testing.assert_close(w.grad, torch.full((8,), 3.0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pt.rms_norm(torch.ones(3, 8), w), y)


def test_tensors_without_data():
    x = torch.empty(6, 8, device="meta")
    y = pt.matmul(x, torch.empty(8, 5, device="meta"), activation="silu")
    assert y.is_meta and y.shape == (6, 5)
    assert pt.linear_cross_entropy(x, x, torch.empty(6, device="meta")).shape == ()
    for y in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_mkldnn()):
        with pytest.raises(TypeError, match="softmax: .*to_dense"):
            pt.softmax(y)


def test_traced_calls_are_recorded():
    traced = torch.jit.trace(lambda x: pt.softmax(x) + 1, (half(4, 8),))
    x = half(3, 8)
    torch.testing.assert_close(traced(x), pt.softmax(x) + 1)


def test_subclass_without_dispatch():
    class Named(torch.Tensor):
        pass

    x = torch.ones(8).as_subclass(Named)
    assert sum_and_difference(x, x)[0].sum() == 16


# ---- ops -----------------------------------------------------------------------------------------


def half(*shape):
    return torch.randn(*shape).to(torch.float16)


def gradients(f, *xs):
    xs = [x.detach().clone().requires_grad_() for x in xs]
    y = f(*xs)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y, *torch.autograd.grad(y, xs, g)]


def compare(ours, theirs, *xs, tolerance=4e-2):
    """Results and gradients; `theirs` computes in float32."""
    found = gradients(ours, *xs)
    want = gradients(lambda *a: theirs(*(x.float() for x in a)).to(found[0].dtype), *xs)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


F = torch.nn.functional
ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_matmul(activation):
    act = ACTIVATIONS[activation]
    compare(
        lambda a, b, bias: ops.matmul(a, b, bias=bias, activation=activation),
        lambda a, b, bias: act(a @ b + bias),
        half(20, 72),
        half(72, 40),
        half(40),
        tolerance=6e-2,
    )


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_matmul_transposed(ta, tb):
    a, b = half(*((24, 20) if ta else (20, 24))), half(*((40, 24) if tb else (24, 40)))
    compare(
        lambda a, b: ops.matmul(a, b, transpose_a=ta, transpose_b=tb),
        lambda a, b: (a.T if ta else a) @ (b.T if tb else b),
        a,
        b,
    )


@pytest.mark.parametrize(
    "a, b", [((3, 20, 72), (72, 40)), ((20, 72), (3, 72, 40)), ((2, 1, 20, 72), (3, 72, 40))]
)
def test_matmul_of_batches(a, b):
    """A batch that is broadcast gets the sum of the gradients."""
    compare(
        lambda a, b, bias: pt.matmul(a, b, bias, activation="silu"),
        lambda a, b, bias: F.silu(a @ b + bias),
        half(*a),
        half(*b) * 0.2,
        half(40),
        tolerance=6e-2,
    )


def test_a_gradient_that_does_not_exist_is_named():
    angles = torch.rand(10, 16, requires_grad=True)
    y = pt.rotary(half(2, 10, 3, 32).requires_grad_(), angles.cos(), angles.detach().sin())
    with pytest.raises(NotImplementedError, match="rotary has no gradient by cos"):
        y.sum().backward()


def test_norms():
    x, w, b = half(6, 130), half(130), half(130)
    compare(ops.rms_norm, lambda x, w: F.rms_norm(x, (130,), w, 1e-6), x, w)
    compare(ops.layer_norm, lambda x, w, b: F.layer_norm(x, (130,), w, b), x, w, b)
    compare(lambda x: ops.softmax(x, axis=0), lambda x: torch.softmax(x, 0), x)
    compare(ops.column_sums, lambda x: x.sum(0), x)


def test_ragged_dot():
    sizes = torch.tensor([5, 0, 9], dtype=torch.int32)

    def theirs(x, w):
        parts = [x[:5] @ w[0], x[5:14] @ w[2], torch.zeros(6, 40) + 0 * x[:6] @ w[0]]
        return torch.cat(parts)

    compare(lambda x, w: ops.ragged_dot(x, w, sizes), theirs, half(20, 72), half(3, 72, 40))


def test_mixed_matmul():
    weights, scales = torch.randint(-9, 9, (40, 128), dtype=torch.int8), half(2, 40) * 0.1

    def theirs(x, s):
        return x @ (weights.view(40, 2, 64) * s.t().unsqueeze(2)).view(40, 128).t()

    compare(lambda x, s: ops.mixed_matmul(x, weights, s), theirs, half(7, 128) * 0.1, scales)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return o.transpose(1, 2)

    q, k, v = half(1, 100, 4, 64), half(1, 100, 2, 64), half(1, 100, 2, 64)
    compare(lambda q, k, v: ops.attention(q, k, v, causal=causal), theirs, q, k, v)
    compare(lambda q, k, v: P.attention(q, k, v, causal), theirs, q, k, v)


def test_attention_of_any_batch(monkeypatch):
    """Kernels that are told the batch by one more operand, also in a compiled function."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)

    def ours(q, k, v):
        return P.attention(q, k, v, True)

    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, n in ((2, 50), (3, 33), (4, 140)):
        q, k, v = half(batch, n, 4, 64), half(batch, n, 2, 64), half(batch, n, 2, 64)
        compare(lambda *x: ops.attention(*x, causal=True), theirs, q, k, v)
        compare(compiled, theirs, q, k, v)
    one, other = (half(batch, 200, 2, 64) for batch in (2, 5))
    assert ops.attention.kernel(*[one] * 3).kernel is ops.attention.kernel(*[other] * 3).kernel
    plgpu.clear_caches()


def test_attention_with_options():
    """Bias with a gradient, window and softcap; packed sequences are those of a batch."""
    q, k, v, bias = half(1, 90, 2, 64), half(1, 90, 1, 64), half(1, 90, 1, 64), half(1, 2, 90, 90)

    def theirs(q, k, v, bias):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        s = 5 * torch.tanh(q @ k.transpose(2, 3) * 64**-0.5 / 5) + bias
        distance = torch.arange(90)[None] - torch.arange(90)[:, None]
        s = s.masked_fill((distance > 0) | (distance < -20), -torch.inf)
        return (s.softmax(-1) @ v).transpose(1, 2)

    def ours(q, k, v, bias):
        return pt.attention(q, k, v, True, bias=bias, window=(20, None), softcap=5.0)

    compare(ours, theirs, q, k, v, bias)
    starts = torch.tensor([0, 30, 60, 90], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}

    def batched(q, k, v):
        return ops.attention(*(x.half().view(3, 30, -1, 64) for x in (q, k, v))).view(1, 90, 2, 64)

    compare(lambda q, k, v: ops.attention(q, k, v, **packed), batched, q, k, v)


def test_attention_with_rotary():
    """As rotating q and k by operators of their own."""
    q, k, v, angles = half(1, 40, 2, 64), half(1, 70, 1, 64), half(1, 70, 1, 64), torch.rand(70, 32)
    cos, sin = angles.cos(), angles.sin()
    how = {"bottom_right": True, "window": (20, 0)}

    def apart(q, k, v):
        q, k = pt.rotary(q.half(), cos[30:], sin[30:]), pt.rotary(k.half(), cos, sin)
        return pt.attention(q, k, v.half(), **how)

    compare(lambda q, k, v: pt.attention(q, k, v, cos=cos, sin=sin, **how), apart, q, k, v)
    compare(lambda q, k, v: ops.attention(q, k, v, cos=cos, sin=sin, **how), apart, q, k, v)
    y = pt.attention(q.requires_grad_(), k, v, cos=angles.requires_grad_(), sin=sin, **how)
    with pytest.raises(NotImplementedError, match="attention_lse has no gradient by cos"):
        y.sum().backward()


def test_gated_linear_unit():
    gate, up = half(5, 6, 34), half(5, 6, 34)
    compare(ops.gated_linear_unit, lambda g, u: F.silu(g) * u, gate, up)
    both = torch.cat([gate, up], -1)

    def geglu(x):
        g, u = x.chunk(2, -1)
        return F.gelu(g, approximate="tanh") * u

    compare(lambda x: ops.gated_linear_unit(x, activation="gelu"), geglu, both)


@pytest.mark.parametrize("transposed", [False, True])
def test_gated_matmul(transposed):
    def theirs(x, w):
        g, u = (x @ (w.t() if transposed else w)).chunk(2, -1)
        return F.silu(g) * u

    x, w = half(20, 72), half(72, 2 * 48) * 0.1
    w = w.t().contiguous() if transposed else w
    compare(lambda x, w: pt.gated_matmul(x, w, transpose_b=transposed), theirs, x, w)
    compare(lambda x, w: ops.gated_matmul(x, w, transpose_b=transposed), theirs, x, w)
    compare(lambda x, w: P.gated_matmul(x, w, "silu", transposed), theirs, x, w)
    gate, up = (v.contiguous() for v in w.chunk(2, 0 if transposed else 1))

    def of_two(x, gate, up):
        return theirs(x, torch.cat([gate, up], 0 if transposed else 1))

    options = {"transpose_b": transposed}
    compare(lambda x, g, u: ops.gated_matmul(x, g, u, **options), of_two, x, gate, up)
    compare(lambda x, g, u: pt.gated_matmul(x, g, up=u, **options), of_two, x, gate, up)
    compare(lambda x, g, u: P.gated_matmul(x, g, "silu", transposed, u), of_two, x, gate, up)
    compare(
        lambda u: ops.gated_matmul(x, gate, u, **options),
        lambda u: of_two(x.float(), gate.float(), u),
        up,
    )


def test_rotary():
    angles = torch.rand(10, 16)

    def theirs(x):
        a, b = x.chunk(2, -1)
        c, s = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    compare(lambda x: ops.rotary(x, angles.cos(), angles.sin()), theirs, half(2, 10, 3, 32))


def test_cross_entropy():
    targets = torch.tensor([3, -100, 0, 40])

    def theirs(x):
        return F.cross_entropy(x, targets, reduction="none")

    compare(lambda x: pt.cross_entropy(x, targets), theirs, half(4, 41), tolerance=1e-3)


@pytest.mark.parametrize("chunk", [0, 32, 8])
def test_linear_cross_entropy(chunk):
    """All rows at once, few chunks, and many, which are added up in float32."""
    targets = torch.randint(0, 50, (70,))
    targets[3] = -100

    def theirs(x, w):
        return F.cross_entropy(x @ w.T, targets)

    compare(
        lambda x, w: pt.linear_cross_entropy(x, w, targets, chunk=chunk),
        theirs,
        half(70, 64),
        half(50, 64),
        tolerance=5e-3,
    )


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_linear_cross_entropy_times_a_number(factor):
    """backward scales the gradients in place, unless that is by 1; again would be twice."""
    x, w, targets = half(20, 64).requires_grad_(), half(300, 64).requires_grad_(), torch.arange(20)
    loss = pt.linear_cross_entropy(x, w, targets) * factor
    got = torch.autograd.grad(loss, (x, w), retain_graph=True)
    wide = [v.detach().double().requires_grad_() for v in (x, w)]
    want = F.cross_entropy(wide[0] @ wide[1].T, targets) * factor
    for a, b in zip(got, torch.autograd.grad(want, wide)):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=1e-2 * float(b.abs().max()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, (x, w))


def test_linear_cross_entropy_of_frozen_weights():
    x, w, targets = half(20, 64), half(50, 64), torch.arange(20)
    want = torch.autograd.grad(pt.linear_cross_entropy(x.requires_grad_(), w, targets), x)
    w.requires_grad_()
    loss = pt.linear_cross_entropy(x, w, targets)
    both = torch.autograd.grad(2 * loss, (x, w), retain_graph=True)
    torch.testing.assert_close(both[0], 2 * want[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # the gradient of the weight was scaled in its place
    with torch.no_grad():
        _, dx, dw = P.linear_cross_entropy_gradients(x, w, targets, -100, 0, False, False)
        assert dx.numel() == dw.numel() == 0


def test_adamw():
    """Beside torch's own, with a learning rate that changes."""
    make = {pt.AdamW: [], torch.optim.AdamW: []}
    for kind, found in make.items():
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(5, 7))
        more = [torch.nn.Parameter(torch.randn(3, 600)) for _ in range(11)]  # of two launches
        groups = [{"params": [w], "lr": 0.1}, {"params": more, "weight_decay": 0.1}]
        optimizer = kind(groups, weight_decay=0.3)

        def loss(step, w=w, more=more):
            some = more if step != 2 else more[3:]  # the others' steps are not counted
            sum((p.sin() ** 2).sum() for p in (w, *some)).backward()

        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.zero_grad()
            optimizer.step(lambda step=step: loss(step))
        found += [p.detach() for p in (w, *more)]
    for ours, theirs in zip(*make.values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="AdamW: betas"):
        pt.AdamW([w], betas=(1.0, 0.9))


def test_linear_cross_entropy_has_no_second_derivative():
    x, w = half(20, 64).requires_grad_(), half(50, 64)
    loss = pt.linear_cross_entropy(x, w, torch.arange(20))
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    want = torch.autograd.grad(F.cross_entropy(x.float() @ w.float().T, torch.arange(20)), x)[0]
    torch.testing.assert_close(g, want, rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy_backward"):
        g.sum().backward()


def test_linear_cross_entropy_under_vmap():
    """What is mapped does not know that autograd outside records it."""
    x, w = half(2, 20, 64).requires_grad_(), half(50, 64)

    def loss(x):
        return pt.linear_cross_entropy(x, w, torch.arange(20))

    got = torch.autograd.grad(torch.func.vmap(loss)(x).sum(), x)[0]
    for part, g in zip(x, got):
        part = part.detach().requires_grad_()
        torch.testing.assert_close(g, torch.autograd.grad(loss(part), part)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_goes_on_from_a_saved_state(dtype):
    """Moments stay float32, whatever the parameters are."""
    w = torch.nn.Parameter(torch.randn(5, 7).to(dtype))
    first = pt.AdamW([{"params": [torch.nn.Parameter(torch.ones(2))]}, {"params": [w], "lr": 0.1}])
    for _ in range(3):
        w.grad = torch.randn(5, 7).to(dtype)
        first.step()
    again = torch.nn.Parameter(w.detach().clone())
    second = pt.AdamW([{"params": [torch.nn.Parameter(torch.ones(2))]}, {"params": [again]}])
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        w.grad = torch.randn(5, 7).to(dtype)
        again.grad = w.grad.clone()
        first.step()
        second.step()
    assert torch.equal(w, again)


def checked():
    a, b = half(20, 72).requires_grad_(), half(72, 40).requires_grad_()
    x, w, sizes = half(6, 130).requires_grad_(), half(130).requires_grad_(), [5, 0, 9]
    sizes, r = torch.tensor(sizes, dtype=torch.int32), half(3, 72, 40).requires_grad_()
    ints, plain = torch.randint(-9, 9, (40, 128), dtype=torch.int8), x.detach()
    q, k = half(1, 33, 2, 64).requires_grad_(), half(1, 40, 1, 64).requires_grad_()
    return {
        "matmul": (a, b, None, None, None, "silu"),
        "matmul_products": (a, b, half(40).requires_grad_(), None, None, "gelu"),
        "activation_backward": (plain, plain, "gelu", False, True, torch.float32),
        "rms_norm": (x, w),
        "layer_norm": (x, w, w),
        "add_rms_norm": (x, half(6, 130).requires_grad_(), w),
        "add_layer_norm": (x, half(6, 130).requires_grad_(), w, w),
        "softmax": (x,),
        "ragged_dot": (a, r, sizes),
        "transposed_ragged_dot": (a, half(20, 30).requires_grad_(), sizes),
        "mixed_matmul": (half(7, 128).requires_grad_(), ints, half(2, 40)),
        "column_sums": (x,),
        "rms_norm_backward": (plain, plain, w.detach()),
        "layer_norm_backward": (plain, plain, w.detach(), None, True),
        "softmax_backward": (plain, plain),
        "gated_linear_unit": (x,),
        "gated_linear_unit_backward": (plain[:, :65].contiguous(), plain),
        "cross_entropy_backward": (*(torch.rand(6), plain, torch.arange(6), torch.rand(6)),),
        "gated_matmul": (a, b),
        "gated_matmul_products": (a, b, "gelu"),
        "gated_matmul_backward": (half(20, 20), half(20, 40), b.detach(), "gelu"),
        "gated_matmul_products of two": (a, b, "silu", False, half(72, 40).requires_grad_()),
        "gated_matmul_input_gradient": (half(20, 80), half(72, 40), half(72, 40)),
        "gated_matmul_weight_gradients": (a.detach(), half(20, 80), True),
        "rotary": (q, torch.rand(33, 32), torch.rand(33, 32)),
        "rotary with norm": (
            *(q, torch.rand(33, 32), torch.rand(33, 32), half(64).requires_grad_()),
        ),
        "rotary_backward": (
            *(q.detach(), q.detach(), torch.rand(33, 32), torch.rand(33, 32), half(64)),
        ),
        "cross_entropy_lse": (x, torch.randint(0, 130, (6,))),
        "linear_cross_entropy_gradients": (a, b.detach().t().contiguous(), torch.arange(20)),
        "linear_cross_entropy_backward": (torch.tensor(2.0), *(half(9, 16) for _ in range(4))),
        "quantize": (plain, "int8", 32),
        "dequantize": (plain.to(torch.int8), torch.rand(6)),
        "quantize_by_scale": (plain, torch.tensor([0.01]), "int8"),
        "fp8_input_gradient": (half(20, 40), half(40, 72)),
        "fp8_matmul_blocks": (a, half(40, 72).requires_grad_()),
        "fp8_matmul_delayed": (a, half(40, 72).requires_grad_(), torch.full((3,), 0.1)),
        "fp8_delayed_backward": (
            *(half(20, 40), torch.zeros(20, 72, dtype=torch.uint8)),
            *(torch.ones(40, 72, dtype=torch.uint8), torch.ones(2), torch.ones(3)),
        ),
        "attention": (q, k, k, True),
        "attention_lse": (q, k, k),
        "attention_backward": (
            *(q.detach(), q.detach(), k.detach(), k.detach(), q.detach(), torch.zeros(1, 2, 33)),
            *(half(1, 1, 33, 40), None, None, None, True, None, [9, -1], True, 3.0, 0.0, True),
        ),
        "attention_lse with bias": (
            *(q, k, k, True, None, half(1, 2, 1, 40).requires_grad_(), None, None),
            *(torch.tensor([3], dtype=torch.int32), None, False, None, 0.25),
        ),
        "attention_lse with other values": (q.detach(), k.detach(), half(1, 40, 1, 128)),
        "attention with rotary": (
            *(q, k, k, True, None, None, None, None, None, None, False, None, 0.0),
            *(torch.rand(40, 32), torch.rand(40, 32)),
        ),
        **checked_of_inference(),
    }


def checked_of_inference():
    """Of operators without a gradient."""
    one, cache, pages = half(2, 1, 4, 64), half(2, 40, 2, 64), half(5, 16, 2, 64)
    lengths, table = (
        torch.tensor(x, dtype=torch.int32) for x in ([17, 40], [[3, 1, 4], [2, 0, 1]])
    )
    x, seed, scale = half(6, 128), torch.tensor([7], dtype=torch.int32), torch.rand(2) + 0.5
    eight = torch.randint(-9, 9, (5, 16, 2, 64), dtype=torch.int8)  # opcheck cannot multiply float8
    plain = (*(None,) * 4, None, False, None, 0.0, None, None)  # bias to sin
    return {
        "attention_decode": (one, cache, cache, lengths),
        "attention_decode_lse": (*(one, pages, pages, lengths, table), torch.rand(4)),
        "attention_decode of 8 bits": (
            *(one, eight, eight, lengths, table, None, None, scale, scale),
            *(True, [9, -1], 20.0),
        ),
        "mla_decode": (half(2, 1, 4, 128), half(2, 40, 128), lengths, None, 128),
        "mla_decode_lse": (half(2, 2, 4, 192), half(5, 16, 192), lengths, table, 128, True),
        "merge_attention": (half(3, 1, 5, 2, 64), torch.rand(3, 1, 2, 5)),
        "merge_attention_lse": (half(3, 1, 5, 2, 64), torch.rand(3, 1, 2, 5)),
        "append_pages": (pages, pages.clone(), one[:, :, :2], one[:, :, 2:], table, lengths),
        "append_pages of 8 bits": (
            *(eight.clone(), eight.clone(), one[:, :, :2], one[:, :, 2:], table, lengths),
            *(torch.rand(50, 32), torch.rand(50, 32), scale, scale),
        ),
        "attention of caches": (
            half(2, 3, 4, 64),
            pages,
            pages,
            True,
            None,
            *plain,
            lengths,
            None,
            table,
        ),
        "sample": (x, seed, 20, 0.9, 0.7),
        "sample of rows": (
            *(x, seed, None, None, 1.0, torch.arange(6, dtype=torch.int32)),
            *(torch.rand(6), torch.rand(6)),
        ),
        "rms_norm_quantize": (x, half(128), 1e-6, "int8", 32),
        "gated_linear_unit_quantize": (x, half(6, 128), "gelu", "int8", 32),
        "adamw": (
            *(x, half(6, 128), torch.rand(6, 128), torch.rand(6, 128)),
            torch.tensor([1e-3, 0.9, 0.99, 1e-8, 0.1, 3]),
        ),
    }


def test_opcheck_of_all_ops():
    """cross_entropy is cross_entropy_lse without its second result."""
    from pallas_mgpu import _torch_ops

    assert {name.partition(" ")[0] for name in checked()} == {*_torch_ops._MADE} - {"cross_entropy"}


@pytest.mark.parametrize("name", checked())
def test_opcheck_of_ops(name):
    args = checked()[name]
    opcheck(getattr(P, name.partition(" ")[0]).default, args, rtol=6e-2, atol=6e-2)


def test_autocast():
    x = torch.ones(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pt.matmul(x, x).dtype == torch.bfloat16
        assert pt.rms_norm(x).dtype == torch.float32
        w = torch.randn(16, 8, requires_grad=True)
        pt.linear_cross_entropy(x, w, torch.arange(8)).backward()  # of bfloat16
        for y in (x, x.clone().requires_grad_()):  # functions of ops compute with what they get
            assert ops.matmul(y, x).dtype == torch.float32
    assert w.grad.dtype == torch.float32


def empty_cases():
    sizes, linear = torch.zeros(2, dtype=torch.int32), F.linear
    return {
        "matmul": (lambda a, b: pt.matmul(a, b, activation="silu"), lambda a, b: F.silu(a @ b),
                   half(0, 16), half(16, 8)),
        "matmul of no K": (pt.matmul, torch.matmul, half(3, 0), half(0, 8)),
        "matmul with bias": (pt.matmul, lambda a, b, c: linear(a, b.t(), c),
                             half(0, 16), half(16, 8), half(8)),
        "layer_norm": (pt.layer_norm, lambda x, w, b: F.layer_norm(x, (16,), w, b),
                       half(2, 0, 16), half(16), half(16)),
        "gated_matmul": (lambda x, w, u: pt.gated_matmul(x, w, up=u),
                         lambda x, w, u: F.silu(x @ w) * (x @ u),
                         half(0, 16), half(16, 8), half(16, 8)),
        "ragged_dot": (lambda x, w: pt.ragged_dot(x, w, sizes),
                       lambda x, w: x @ w[0] + 0 * (x @ w[1]), half(0, 16), half(2, 16, 8)),
        "attention": (pt.attention, lambda q, k, v: F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
            half(1, 0, 2, 64), half(1, 5, 2, 64), half(1, 5, 2, 64)),
        "column_sums": (pt.column_sums, lambda x: x.sum(0), half(0, 16)),
        "linear_cross_entropy": (lambda x, w: pt.linear_cross_entropy(x, w, sizes[:0]),
                                 lambda x, w: 0 * (x.sum() + w.sum()), half(0, 16), half(20, 16)),
    }  # fmt: skip


@pytest.mark.parametrize("name", empty_cases())
def test_tensors_without_elements(name):
    """As of torch's own functions: gradients of weights are zeros."""
    compare(*empty_cases()[name])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: pt.matmul(half(0, 16), half(15, 8)), "inner dims differ, 16 and 15"),
        (lambda: pt.matmul(half(0, 16), half(16, 8), half(7)), "bias must be .*8,.*got.*7,"),
        (lambda: pt.rms_norm(half(0, 64), half(63)), "weight must have the shape"),
        (lambda: pt.add_rms_norm(half(0, 64), half(5, 64)), "residual must be"),
        (lambda: pt.attention(half(1, 0, 2, 64), *[half(1, 5, 2, 32)] * 2), "head_dim"),
        (lambda: pt.softmax(half(0, 5), axis=3), "axis must be"),
        (lambda: pt.matmul(half(16, 0), half(1, 32)), "inner dims differ"),
        (lambda: pt.rms_norm(half(4, 0), half(1)), "weight must have the shape"),
        (lambda: pt.gated_linear_unit(half(0, 64), half(1, 64)), "up must be"),
        (lambda: pt.attention(half(0, 3, 2, 64), *[half(1, 5, 2, 64)] * 2), "differ in batch"),
        (
            lambda: pt.transposed_ragged_dot(half(0, 64), half(1, 32), torch.zeros(3).int()),
            "the same rows",
        ),
        (
            lambda: pt.linear_cross_entropy(half(0, 64), half(9, 48), torch.zeros(0)),
            "inner dims differ, 64 and 48",
        ),
        (
            lambda: pt.linear_cross_entropy(half(0, 64), half(9, 64), torch.zeros(1)),
            "must have the shapes",
        ),
    ],
)
def test_tensors_without_elements_of_wrong_shapes(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_gradients_that_were_not_asked_for():
    x, w = half(8, 16).requires_grad_(), half(20, 16).requires_grad_()
    f = torch.ops.pallas_mgpu.linear_cross_entropy_gradients
    with pytest.raises(NotImplementedError, match="no gradient by x: pass of_x=True"):
        f(x, w, torch.arange(8), of_x=False)[0].backward()


def test_add_norms():
    x, r, w, b = half(6, 130), half(6, 130), half(130), half(130)

    def both(f):
        def run(x, r, *vectors):
            y, total = f(x, r, *vectors)
            return y + 2 * total

        return run

    def rms(x, r, w):
        return F.rms_norm(x + r, (130,), w, 1e-6), x + r

    def layer(x, r, w, b):
        return F.layer_norm(x + r, (130,), w, b), x + r

    compare(both(ops.add_rms_norm), both(rms), x, r, w)
    compare(both(pt.add_layer_norm), both(layer), x, r, w, b)


def test_options_that_operators_do_not_have():
    x = half(4, 8).requires_grad_()
    with pytest.raises(NotImplementedError, match="rms_norm: out="):
        ops.rms_norm(x, out=torch.empty(4, 8, dtype=torch.float16))
    with pytest.raises(NotImplementedError, match="activation"):
        ops.matmul(x, half(8, 4), activation=lambda y: y)
    with pytest.raises(NotImplementedError, match="matmul: return_product="):
        ops.matmul(x, half(8, 4), activation="silu", return_product=True)
    with pytest.raises(NotImplementedError, match="gated_matmul: return_products="):
        ops.gated_matmul(x, half(8, 4), return_products=True)
    with pytest.raises(NotImplementedError, match="rms_norm: axis="):
        ops.rms_norm(x, axis=0)
    wide = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="matmul: precision="):
        ops.matmul(wide, wide, precision="tf32")
    assert ops.matmul(wide, wide, precision="bf16x3", batch_invariant=True).requires_grad


# ---- as_torch_kernel -----------------------------------------------------------------------------


def test_as_torch_kernel():
    def f(arrays):
        a, b = sum_and_difference(arrays["x"], arrays["y"])
        return {"difference": b, "sum": (a,)}

    x, y = torch.arange(8.0), torch.ones(8)
    found = plgpu.as_torch_kernel(f)({"x": x, "y": y})
    torch.testing.assert_close(found, {"difference": x - y, "sum": (x + y,)})


def test_as_torch_kernel_in_place():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    increment = pl.pallas_call(body, spec(8), input_output_aliases={0: 0})
    x = torch.zeros(8)
    before = x._version
    assert plgpu.as_torch_kernel(lambda x: increment(x))(x) is x
    assert x.sum() == 8 and x._version > before


@pytest.mark.parametrize(
    "f, text",
    [
        (lambda x, y: sum_and_difference(*sum_and_difference(x, y)), "several kernels"),
        (lambda x, y: x, "calls no kernel"),
        (lambda x, y: sum_and_difference(x + 1, y), "computes with its arguments"),
        (lambda x, y: sum_and_difference(torch.sin(x), y), "computes with its arguments"),
        (lambda x, y: sum_and_difference(x, y) if x == y else x, "computes with its arguments"),
        (lambda x, y: x.__setitem__(0, 1), "computes with its arguments"),
        (lambda x, y: (sum_and_difference(x, y), x), "returns an argument"),
    ],
)
def test_as_torch_kernel_refuses(f, text):
    with pytest.raises(ValueError, match=text):
        plgpu.as_torch_kernel(f)(torch.ones(8), torch.ones(8))
    with pytest.raises(ValueError, match="must be tensors"):
        plgpu.as_torch_kernel(f)(1.0, torch.ones(8))
