"""Products over the devices of a mesh: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce.

The kernels are those of _distributed_products.py, where blocks move the data, and those of
_distributed_engine.py, where the copy engines do. Operands whose rows TMA cannot address are copied
first."""

import functools

import pallas_mgpu as plgpu
from pallas_mgpu import pl
from pallas_mgpu._caches import cached

from . import _distributed_engine as engine
from . import _distributed_products as products
from . import _tensor_memory, distributed
from ._padding import cropping, padding
from .distributed import Collective
from .matmul import Product

TRANSFERS = "push", "pull", "engine"


@cached
def _gathered(
    mesh,
    axis,
    m,
    k,
    n,
    dtype,
    out_dtype,
    blocks,
    interpret,
    tmem=False,
    config=None,
    transfer="push",
):
    size = distributed._size(mesh, axis)
    x = Product(m, n, k, (dtype, dtype), out_dtype, False, False)
    is_engine = transfer == "engine"
    kind, block = {
        "push": (products.GatherPlan, products.GatherBlock),
        "pull": (products.PullGatherPlan, products.PullGatherBlock),
        "engine": (engine.GatherPlan, engine.GatherBlock),
    }[transfer]
    plan = products.plan_of(kind, x, blocks, size, tmem, config)

    def body(refs, flags, epochs, **scratch):
        named = plan.named_by_engine(refs) if is_engine else plan.named(refs, "staging")
        named |= scratch
        named["o"] = named["o"].reshape((size, m, n))
        block(plan, axis, named, flags, epochs).run()

    make = functools.partial(engine.gathered, plan) if is_engine else Collective
    return make(
        mesh,
        body,
        "all_gather_matmul",
        [((size * m, n), out_dtype)],
        plan.staging(),
        plan.clusters,
        interpret,
        flags=(plan.flags, 1),
        scratch_types=products.scratch_types(plan, tmem),
        **plan.options(),
    )


@cached
def _scattered(
    mesh,
    axis,
    m,
    k,
    n,
    dtype,
    out_dtype,
    blocks,
    interpret,
    tmem=False,
    config=None,
    transfer="push",
):
    """m: rows of the result of a device."""
    size = distributed._size(mesh, axis)
    x = Product(m, n, k, (dtype, dtype), out_dtype, False, False)
    is_engine = transfer == "engine"
    kind, block = {
        "push": (products.SumPlan, products.SumBlock),
        "pull": (products.PullSumPlan, products.PullSumBlock),
        "engine": (engine.OwnSumPlan, engine.OwnSumBlock),
    }[transfer]
    plan = products.plan_of(kind, x, blocks, size, tmem, config)

    def body(refs, flags, epochs, **scratch):
        waits = "staging", "waiting"
        named = plan.named_by_engine(refs) if is_engine else plan.named(refs, *waits)
        named |= scratch
        named["a"] = named["a"].reshape((size, m, named["a"].shape[1]))
        block(plan, axis, named, flags, epochs).run()

    make = functools.partial(engine.scattered, plan) if is_engine else Collective
    return _summing("matmul_reduce_scatter", mesh, body, plan, interpret, tmem, make)


@cached
def _reduced(
    mesh,
    axis,
    m,
    k,
    n,
    dtype,
    out_dtype,
    blocks,
    interpret,
    tmem=False,
    config=None,
    transfer="push",
):
    size = distributed._size(mesh, axis)
    x = Product(m, n, k, (dtype, dtype), out_dtype, False, False)
    pull = transfer == "pull"
    kind = products.PullSumPlan if pull else products.SumPlan
    plan = products.plan_of(kind, x, blocks, size, tmem, config, dealt=True)
    block = products.PullEverySumBlock if pull else products.EverySumBlock

    def body(refs, flags, epochs, **scratch):
        named = plan.named(refs, "staging", "waiting") | scratch
        block(plan, axis, named, flags, epochs).run()

    return _summing("matmul_all_reduce", mesh, body, plan, interpret, tmem)


def _summing(name, mesh, body, plan, interpret, tmem, make=Collective):
    return make(
        mesh,
        body,
        name,
        [((plan.x.m, plan.x.n), plan.x.out_dtype)],
        plan.staging(),
        plan.clusters,
        interpret,
        flags=(plan.flags, 1),
        scratch_types=products.scratch_types(plan, tmem),
        **plan.options(),
    )


# ---- calls --------------------------------------------------------------------------------------


def _has_tensor_memory(mesh):
    return _tensor_memory.runs_here(mesh.devices[0] if mesh.devices else None)


def _operands(a, b, mesh, what):
    x, y = distributed._operand(a, mesh, what), distributed._operand(b, mesh, what)
    dtype = distributed._dtype(x, what)
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[1] != y.shape[0]:
        raise ValueError(
            f"{what}: a must be (m, k) and b (k, n), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if distributed._dtype(y, what) != dtype or dtype.name not in ("float16", "bfloat16"):
        raise NotImplementedError(
            f"{what}: a and b of float16, or of bfloat16; got {x.dtype} and {y.dtype}"
        )
    return (*map(int, x.shape), int(y.shape[1])), dtype


@cached
def _padded(mesh, shape, dtype, interpret):
    return plgpu.spmd(padding(shape, dtype, True, interpret), mesh, ordered=False)


def _aligned(x, mesh, interpret):
    """The operand, or copies with rows that TMA can address."""
    one = x if mesh.group is not None else x[0]
    dtype = distributed._dtype(one, "")
    if one.shape[0] == 1 or one.shape[1] * dtype.itemsize % 16 == 0:
        return x
    return _padded(mesh, tuple(map(int, one.shape)), dtype, _interpreted(mesh, interpret))(x)


def _interpreted(mesh, interpret):
    nowhere = mesh.devices is None and mesh.group is None
    return interpret or True if nowhere else interpret


@cached
def _cropped(mesh, shape, n, dtype, interpret):
    return plgpu.spmd(cropping(shape, n, dtype, interpret), mesh, ordered=False)


def _prepare(
    what, a, b, mesh, axis_name, out_dtype, blocks, config, transfer, interpret, scatters=False
):
    """Checks a call. The operands, with rows that TMA can address; the shape of a device's result;
    its dtype; and a function of (make, n) that makes the kernel for n columns."""
    (m, k, n), dtype = _operands(a, b, mesh, what)
    axis, size = distributed._along(mesh, axis_name, what)
    if scatters:
        if m % size:
            raise ValueError(f"{what}: {m} rows have no {size} equal parts")
        m //= size
    out_dtype = dtype if out_dtype is None else plgpu.ShapeDtypeStruct((), out_dtype).dtype
    tmem = _has_tensor_memory(mesh)
    blocks = plgpu.sm_count() if blocks is None else distributed._blocks(blocks, what)
    if transfer not in TRANSFERS:
        raise ValueError(f"{what}: transfer must be one of {TRANSFERS}, got {transfer!r}")
    if tmem and transfer != "push":
        raise NotImplementedError(f'{what}: transfer="{transfer}" on Blackwell; use "push"')
    if transfer == "engine" and (what == "matmul_all_reduce" or k * dtype.itemsize % 16):
        raise NotImplementedError(
            f'{what}: transfer="engine" is there for all_gather_matmul and matmul_reduce_scatter,'
            ' with rows of a multiple of 16 bytes; use "push" or "pull"'
        )
    how = out_dtype, blocks, interpret, tmem, config, transfer
    products.checked(config, what, m, tmem)
    operands = [_aligned(z, mesh, interpret) for z in (a, b)]
    return operands, (m, n), out_dtype, lambda make, n: make(mesh, axis, m, k, n, dtype, *how)


def all_gather_matmul(
    a,
    b,
    mesh,
    axis_name=None,
    *,
    out_dtype=None,
    blocks=None,
    config=None,
    transfer="push",
    interpret=None,
    out=None,
):
    """The product of all devices' rows of A with each device's own B, computed while the rows
    arrive.

    a: (m, k) on each device; b: (k, n); float16 or bfloat16. Returns (devices * m, n), in
    ``out_dtype`` (that of the operands), the rows in the order of the devices. Arrays are
    passed as for :func:`all_gather`. ``blocks``: SMs of each device, all by default. ``config``: on
    Hopper, a :class:`MatmulConfig` without ``slices`` for the product of (m, k) and
    (k, n); chosen from the shape by default. ``transfer``: which device moves the data, by stores
    or by loads over NVLink: ``"push"``, the one that has it, or, on Hopper, ``"pull"``, the one
    that needs it; ``"engine"``, the copy engines, with a process group, rows of a multiple of 16
    bytes and a mesh of one axis. With a process group, ``"pull"`` copies an ``a`` that is not from
    ``plgpu.symm_empty``."""
    how = axis_name, out_dtype, blocks, config, transfer, interpret
    operands, (_, n), _, kernel = _prepare("all_gather_matmul", a, b, mesh, *how)
    return kernel(_gathered, n)(*operands, out=out)


def matmul_reduce_scatter(
    a,
    b,
    mesh,
    axis_name=None,
    *,
    out_dtype=None,
    blocks=None,
    config=None,
    transfer="push",
    interpret=None,
    out=None,
):
    """The sum over the devices of A @ B, scattered by rows; summands are sent while others are
    computed.

    a: (devices * m, k) on each device; b: (k, n); float16 or bfloat16. Returns (m, n): device d has
    the rows from d * m on. Summands are float32, added in the order of the devices. ValueError if
    the rows cannot be divided evenly. Everything else is as for :func:`all_gather_matmul`."""
    how = axis_name, out_dtype, blocks, config, transfer, interpret
    operands, (_, n), _, kernel = _prepare("matmul_reduce_scatter", a, b, mesh, *how, scatters=True)
    return kernel(_scattered, n)(*operands, out=out)


def matmul_all_reduce(
    a,
    b,
    mesh,
    axis_name=None,
    *,
    out_dtype=None,
    blocks=None,
    config=None,
    transfer="push",
    interpret=None,
    out=None,
):
    """The sum over the devices of A @ B, on all of them; summands are sent while others are
    computed.

    a: (m, k) on each device; b: (k, n); float16 or bfloat16. Returns (m, n), the same bits on all
    devices. Summands are float32, added in the order of the devices. Everything else is as for
    :func:`matmul_reduce_scatter`."""
    how = axis_name, out_dtype, blocks, config, transfer, interpret
    operands, (m, n), out_dtype, kernel = _prepare("matmul_all_reduce", a, b, mesh, *how)
    whole = 16 // out_dtype.itemsize
    if m == 1 or n % whole == 0:
        return kernel(_reduced, n)(*operands, out=out)
    # rows that TMA can write on the other devices
    padded = pl.cdiv(n, whole) * whole
    made = kernel(_reduced, padded)(*operands)
    crop = _cropped(mesh, (m, padded), n, out_dtype, _interpreted(mesh, interpret))
    return crop(made, out=out)
