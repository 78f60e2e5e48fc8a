"""Products over the devices of a mesh: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce.

The kernels are those of _distributed_products.py, where blocks move the data, and those of
_distributed_engine.py, where the copy engines do. Operands whose rows TMA cannot address are copied
first. Those of float32 are first split into bfloat16 parts (_float32.py), so that their product is
one of bfloat16 with three times the K.

Who moves the data, unless `transfer=` says so: stores to another GPU delay the operands of the
products that run meanwhile; loads hardly do, but a summand that is fetched is told of, loaded and
stored again before it is added. So rows of A are fetched, where others can load them. Summands are
fetched if their transfer goes on during later waves of tiles, and sent if there is one wave of each
part, whose transfer ends after the products. Sums of `matmul_all_reduce` always end with a
transfer, so its summands are sent."""

import functools
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu import pl
from pallas_mgpu._caches import cached
from pallas_mgpu._names import show
from pallas_mgpu._spmd import is_symmetric

from . import _distributed_engine as engine
from . import _distributed_products as products
from . import _float32, _tensor_memory, distributed
from ._common import FLOATS, dtype_of
from ._padding import cropping, padding
from .distributed import Collective
from .matmul import MatmulConfig, Product, matmul

TRANSFERS = "push", "pull", "engine"  # None: chosen


class Call(NamedTuple):
    """What a kernel is made for: operands (m, k) and (k, n) of each device, or, where the result is
    scattered, m rows of a device's result."""

    mesh: plgpu.DeviceMesh
    axis: str
    m: int
    k: int
    n: int
    dtype: np.dtype
    out_dtype: np.dtype
    blocks: int
    interpret: object = None
    tmem: bool = False
    config: MatmulConfig | None = None
    transfer: str | None = "push"

    def plan(self, kind, **options):
        x = Product(self.m, self.n, self.k, (self.dtype,) * 2, self.out_dtype, False, False)
        size = distributed._size(self.mesh, self.axis)
        return products.plan_of(kind, x, self.blocks, size, self.tmem, self.config, **options)

    def make(self, name, plan, body, shape, make=Collective):
        """The kernel. body: of the memory by name, flags and epochs; shape: of the result."""
        waits = "staging", *(["waiting"] if isinstance(plan, products.SumPlan) else [])

        def run(refs, flags, epochs, **scratch):
            engines = self.transfer == "engine"
            named = plan.named_by_engine(refs) if engines else plan.named(refs, *waits)
            body(named | scratch, flags, epochs)

        return make(
            self.mesh,
            run,
            name,
            [(shape, self.out_dtype)],
            plan.staging(),
            plan.clusters,
            self.interpret,
            flags=(plan.flags, 1),
            scratch_types=products.scratch_types(plan, self.tmem),
            **plan.options(),
        )


@cached
def _gathered(call):
    kind, block, make = {
        "push": (products.GatherPlan, products.GatherBlock, None),
        "pull": (products.PullGatherPlan, products.PullGatherBlock, None),
        "engine": (engine.GatherPlan, engine.GatherBlock, engine.gathered),
    }[call.transfer]
    plan, size = call.plan(kind), distributed._size(call.mesh, call.axis)

    def body(named, flags, epochs):
        named["o"] = named["o"].reshape((size, call.m, call.n))
        block(plan, call.axis, named, flags, epochs).run()

    make = functools.partial(make, plan) if make else Collective
    return call.make("all_gather_matmul", plan, body, (size * call.m, call.n), make)


@cached
def _scattered(call):
    if call.transfer is None:
        plan = call.plan(products.SumPlan)
        return _scattered(call._replace(transfer="pull" if plan.each > plan.clusters else "push"))
    kind, block, make = {
        "push": (products.SumPlan, products.SumBlock, None),
        "pull": (products.PullSumPlan, products.PullSumBlock, None),
        "engine": (engine.OwnSumPlan, engine.OwnSumBlock, engine.scattered),
    }[call.transfer]
    plan, size = call.plan(kind), distributed._size(call.mesh, call.axis)

    def body(named, flags, epochs):
        named["a"] = named["a"].reshape((size, call.m, named["a"].shape[1]))
        block(plan, call.axis, named, flags, epochs).run()

    make = functools.partial(make, plan) if make else Collective
    return call.make("matmul_reduce_scatter", plan, body, (call.m, call.n), make)


@cached
def _reduced(call):
    kind, block = {
        "push": (products.SumPlan, products.EverySumBlock),
        "pull": (products.PullSumPlan, products.PullEverySumBlock),
    }[call.transfer]
    plan = call.plan(kind, dealt=True)

    def body(named, flags, epochs):
        block(plan, call.axis, named, flags, epochs).run()

    return call.make("matmul_all_reduce", plan, body, (call.m, call.n))


# ---- calls --------------------------------------------------------------------------------------


def _has_tensor_memory(mesh):
    return _tensor_memory.runs_here(mesh.devices[0] if mesh.devices else None)


def _operands(a, b, mesh, what):
    x, y = distributed._operand(a, mesh, what, "a"), distributed._operand(b, mesh, what, "b")
    dtype = distributed._dtype(x, what, "a")
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[1] != y.shape[0]:
        raise ValueError(
            f"{what}: a must be (m, k) and b (k, n), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if distributed._dtype(y, what, "b") != dtype or dtype.name not in FLOATS:
        raise NotImplementedError(
            f"{what}: a and b of the same dtype, one of {', '.join(FLOATS)}; got {x.dtype} and"
            f" {y.dtype}"
        )
    return (*map(int, x.shape), int(y.shape[1])), dtype


@cached
def _padded(mesh, shape, dtype, interpret):
    return plgpu.spmd(padding(shape, dtype, True, interpret), mesh, ordered=False)


@cached
def _splitting(mesh, number, shape, interpret):
    kernel = _float32.splitting(number, shape, _interpreted(mesh, interpret))
    return plgpu.spmd(kernel, mesh, ordered=False)


def _aligned(x, mesh, interpret):
    """The operand, or copies with rows that TMA can address."""
    one = x if mesh.group is not None else x[0]
    dtype = distributed._dtype(one, "")
    if one.shape[0] == 1 or one.shape[1] * dtype.itemsize % 16 == 0:
        return x
    return _padded(mesh, tuple(map(int, one.shape)), dtype, _interpreted(mesh, interpret))(x)


def _reachable(x, mesh):
    """Can the other devices surely load an operand?"""
    if mesh.group is not None:
        return is_symmetric(x)
    return mesh.devices is None or all(isinstance(a, plgpu.DeviceArray) for a in x)


def _interpreted(mesh, interpret):
    nowhere = mesh.devices is None and mesh.group is None
    return interpret or True if nowhere else interpret


@cached
def _cropped(mesh, shape, n, dtype, interpret):
    return plgpu.spmd(cropping(shape, n, dtype, interpret), mesh, ordered=False)


def _prepare(
    what, a, b, mesh, axis_name, out_dtype, blocks, config, transfer, interpret, scatters=False
):
    """Checks a call. The operands, with rows that TMA can address, and what the kernel is for."""
    (m, k, n), dtype = _operands(a, b, mesh, what)
    axis, size = distributed._along(mesh, axis_name, what)
    if scatters:
        if m % size:
            raise ValueError(f"{what}: {m} rows have no {size} equal parts")
        m //= size
    out_dtype = dtype_of(what, out_dtype, dtype)
    tmem = _has_tensor_memory(mesh)
    blocks = plgpu.sm_count() if blocks is None else distributed._blocks(blocks, what)
    if transfer not in (None, *TRANSFERS):
        raise ValueError(f"{what}: transfer must be one of {TRANSFERS}, got {transfer!r}")
    if tmem and transfer not in (None, "push"):
        raise NotImplementedError(f'{what}: transfer="{transfer}" on Blackwell; use "push"')
    if tmem or transfer is None and what == "matmul_all_reduce":
        transfer = "push"
    if transfer == "engine" and (what == "matmul_all_reduce" or k % 8):
        raise NotImplementedError(
            f'{what}: transfer="engine" is there for all_gather_matmul and matmul_reduce_scatter,'
            ' with rows of a multiple of 8 elements; use "push" or "pull"'
        )
    products.checked(config, what, m, tmem)
    if size == 1:
        interpret = _interpreted(mesh, interpret)
        return None, Call(mesh, axis, m, k, n, dtype, out_dtype, blocks, interpret, tmem, config)
    if dtype.name == "float32":
        shapes = (size * m if scatters else m, k), (k, n)
        operands = [
            _splitting(mesh, number, shape, interpret)(z)
            for number, (z, shape) in enumerate(zip((a, b), shapes))
        ]
        k, dtype = k * _float32.PARTS, jnp.dtype(jnp.bfloat16)
    else:
        operands = [_aligned(z, mesh, interpret) for z in (a, b)]
    how = dtype, out_dtype, blocks, interpret, tmem, config, transfer
    return operands, Call(mesh, axis, m, k, n, *how)


def _alone(what, a, b, call, out):
    """Products of devices that have no others."""
    mesh = call.mesh
    how = {"out_dtype": call.out_dtype, "config": call.config, "interpret": call.interpret}
    if mesh.group is not None:
        return matmul(a, b, out=out, **how)
    outs = [None] * mesh.size if out is None else out
    if not isinstance(outs, (list, tuple)) or len(outs) != mesh.size:
        raise ValueError(f"{what}: out must be a list of {mesh.size} arrays, got {show(out)}")
    return [matmul(x, y, out=o, **how) for x, y, o in zip(a, b, outs)]


def all_gather_matmul(
    a,
    b,
    mesh,
    axis_name=None,
    *,
    out_dtype=None,
    blocks=None,
    config=None,
    transfer=None,
    interpret=None,
    out=None,
):
    """The product of all devices' rows of A with each device's own B, computed while the rows
    arrive.

    a: (m, k) on each device; b: (k, n); both float16, bfloat16 or float32, which is split into
    bfloat16 parts as by :func:`matmul`, so that three times the columns travel. Returns (devices
    * m, n), in ``out_dtype`` (that of the operands), the rows in the order of the devices.
    Arrays are passed as for :func:`all_gather`. ``blocks``: SMs of each device, all by default.
    ``config``: on Hopper, a :class:`MatmulConfig` without ``slices`` for the product of (m, k)
    and (k, n); chosen from the shape by default. ``transfer``: which device moves the data, by
    stores or by loads over NVLink: ``"push"``, the one that has it, or, on Hopper, ``"pull"``,
    the one that needs it; ``"engine"``, the copy engines, with a process group, rows of a
    multiple of 8 elements and a mesh of one axis. With a process group, ``"pull"`` copies an ``a``
    that is not from ``plgpu.symm_empty``. By default ``"pull"`` on Hopper if all devices surely
    reach ``a``: a tensor from ``plgpu.symm_empty``, which it then must be on all ranks or on
    none, or DeviceArrays of one process; otherwise ``"push"``."""
    how = axis_name, out_dtype, blocks, config, transfer, interpret
    operands, call = _prepare("all_gather_matmul", a, b, mesh, *how)
    if operands is None:
        return _alone("all_gather_matmul", a, b, call, out)
    if call.transfer is None:
        call = call._replace(transfer="pull" if _reachable(operands[0], mesh) else "push")
    return _gathered(call)(*operands, out=out)


def matmul_reduce_scatter(
    a,
    b,
    mesh,
    axis_name=None,
    *,
    out_dtype=None,
    blocks=None,
    config=None,
    transfer=None,
    interpret=None,
    out=None,
):
    """The sum over the devices of A @ B, scattered by rows; summands are sent while others are
    computed.

    a: (devices * m, k) on each device; b: (k, n); both float16, bfloat16 or float32. Returns (m,
    n): device d has the rows from d * m on. Summands are float32, added in the order of the
    devices. ValueError if the rows cannot be divided evenly. ``transfer``: on Hopper ``"pull"``
    by default, but ``"push"`` where all tiles of a device's result are computed at once.
    Everything else is as for :func:`all_gather_matmul`."""
    how = axis_name, out_dtype, blocks, config, transfer, interpret
    operands, call = _prepare("matmul_reduce_scatter", a, b, mesh, *how, scatters=True)
    if operands is None:
        return _alone("matmul_reduce_scatter", a, b, call, out)
    return _scattered(call)(*operands, out=out)


def matmul_all_reduce(
    a,
    b,
    mesh,
    axis_name=None,
    *,
    out_dtype=None,
    blocks=None,
    config=None,
    transfer=None,
    interpret=None,
    out=None,
):
    """The sum over the devices of A @ B, on all of them; summands are sent while others are
    computed.

    a: (m, k) on each device; b: (k, n); both float16, bfloat16 or float32. Returns (m, n), the same
    bits on all devices. Summands are float32, added in the order of the devices. ``transfer``:
    ``"push"`` by default. Everything else is as for :func:`matmul_reduce_scatter`."""
    how = axis_name, out_dtype, blocks, config, transfer, interpret
    operands, call = _prepare("matmul_all_reduce", a, b, mesh, *how)
    if operands is None:
        return _alone("matmul_all_reduce", a, b, call, out)
    m, n, whole = call.m, call.n, 16 // call.out_dtype.itemsize
    if m == 1 or n % whole == 0:
        return _reduced(call)(*operands, out=out)
    # rows that TMA can write on the other devices
    padded = pl.cdiv(n, whole) * whole
    made = _reduced(call._replace(n=padded))(*operands)
    crop = _cropped(mesh, (m, padded), n, call.out_dtype, _interpreted(mesh, interpret))
    return crop(made, out=out)
