"""The names people import: parameters, enum values, older spellings, forms of calling a kernel.

SIGNATURES and MEMBERS are those of the language; an entry that differs on purpose says why."""

import ast
import copy
import dataclasses
import enum
import functools
import inspect
import pickle
import warnings
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, ops, pl
from pallas_mgpu import numpy as jnp

SPACE = "(shape, dtype, *, transforms=(), packed=None, collective=None, layout=None)"
ACC = "(shape, dtype=float32, _init=None)"
SIGNATURES = {
    plgpu: {
        "ACC": ACC,
        "Barrier": "(*, num_arrivals=1, num_barriers=1, orders_tensor_core=False)",
        "BlockSpec": "(block_shape=None, index_map=None, pipeline_mode=None, transforms=(),"
        " delay_release=0, collective_axes=None, oob_fill_mode=OOBFillMode.ZEROS, *,"
        " memory_space=None)",
        "ClusterBarrier": "(*, collective_axes, num_barriers=1, num_arrivals=1,"
        " orders_tensor_core=False, leader_tracked=False)",
        "CompilerParams": "(*, approx_math=False, dimension_semantics=None,"
        " max_concurrent_steps=1, unsafe_no_auto_barriers=False, reduction_scratch_bytes=2048,"
        " profile_space=0, profile_dir='', profile_trace_scope=TraceScope.WARPGROUP,"
        " profile_bounds_check=False, lowering_semantics=LoweringSemantics.Warpgroup,"
        " exact_division=False)",
        "GMEM": SPACE,
        "Layout": "(*args, **kwargs)",
        "MemorySpace": SPACE,
        "Mesh": "(*, grid=(), grid_names=(), cluster=(), cluster_names=(), num_threads=None,"
        " thread_name=None, kernel_name=None)",
        "NDLoopInfo": "(index, local_index, num_local_steps)",
        "REGS": SPACE,
        "RefType": "(transforms=())",
        "RefUnion": "(*groups)",
        "Replicated": "(times)",
        "SemaphoreSignal": "(ref, *, device_id, inc=1)",
        "SMEM": SPACE,
        # layout has a default: JAX has two types of this name, this one serves for both
        "ShapeDtypeStruct": "(shape, dtype, layout=None)",
        "SwizzleTransform": "(swizzle)",
        "TMEM": SPACE,
        "Tiling": "(tiles)",
        "TilingTransform": "(tiling)",
        "WGMMAAccumulatorRef": ACC,
        **{f"atomic_{k}": "(ref, val)" for k in ("add", "max", "min", "and", "or", "xor")},
        "async_prefetch": "(ref, *, collective_axes=None, leader_tracked=None)",
        "async_store_smem": "(src, ref, barrier, *, cluster_idx, cluster_dim, optimized=True,"
        " atomic=None)",
        "barrier_arrive": "(barrier, *, relaxed=False)",  # relaxed is ours
        "barrier_test": "(barrier)",
        "barrier_wait": "(barrier, *, phase=None)",  # phase is ours
        "broadcasted_iota": "(dtype, shape, dimension, *, layout=None)",
        "cluster_ref": "(ref, block_id)",
        "commit_smem": "()",
        "commit_smem_to_gmem_group": "()",
        # engine is ours
        "copy_gmem_to_smem": "(src, dst, barrier=None, *, collective_axes=None,"
        " leader_tracked=None, oob_mode=None, predicate=None, engine=None)",
        "copy_smem_to_gmem": "(src, dst, predicate=None, *, commit_group=True,"
        " reduction_op=None, engine=None, evict_first=False)",
        "dynamic_scheduling_loop": "(grid_names, thread_axis=None, cluster_axes=(),"
        " init_carry=None)",
        "emit_pipeline": "(body, *, grid, in_specs=(), out_specs=(), max_concurrent_steps=1,"
        " init_carry=None)",
        "emit_pipeline_warp_specialized": "(body, *, grid, memory_registers, in_specs=(),"
        " out_specs=(), max_concurrent_steps=2, wg_axis, num_compute_wgs, pipeline_state=None,"
        " manual_ready_barriers=False, manual_consumed_barriers=False, compute_context=None,"
        " memory_thread_idx=None)",
        "find_swizzle": "(minor_dim_bits, what='')",
        "griddepcontrol_launch_dependents": "()",
        "griddepcontrol_wait": "()",
        "inline_cuda": "(source, *, arg_types=(), return_type=None, interpret=None)",  # ours
        "kernel": "(body=NotSpecified(), out_shape=NotSpecified(), *, out_type=NotSpecified(),"
        " scratch_types=NotSpecified(), scratch_shapes=NotSpecified(), compiler_params=None,"
        " grid=(), grid_names=(), cluster=(), cluster_names=(), num_threads=None,"
        " thread_name=None, interpret=None, debug=False, **mesh_kwargs)",
        "layout_cast": "(x, new_layout)",
        "load": "(src, idx=NotSpecified(), *, layout=None, optimized=True)",
        "nd_loop": "(grid, *, collective_axes, tiling=None, init_carry=None)",
        "planar_snake": "(lin_idx, shape, minor_dim, tile_width)",
        "print_layout": "(fmt, x)",
        "semaphore_signal": "(semaphore, inc=1, *, device_id=None, memory_scope='sys')",
        "semaphore_signal_parallel": "(*signals)",
        "semaphore_wait": "(semaphore, value=1, *, decrement=True, memory_scope='sys')",
        "set_max_registers": "(n, *, action)",
        "transform_ref": "(ref, transform)",
        "transpose_ref": "(ref, permutation)",
        "vmap": "(f, in_axes=0, out_axes=0)",
        "wait_gmem_to_smem": "(n)",
        "wait_smem_to_gmem": "(n, wait_read_only=False)",
        "WarpMesh": "(*, axis_name)",
        "warp_map": "(f)",
        "wgmma": "(acc, a, b)",
        "wgmma_accumulator_load": "(acc, *, wait_n=0)",
        "wgmma_wait": "(n)",
    },
    pl: {
        "BlockSpec": "(block_shape=None, index_map=None, pipeline_mode=None, *, memory_space=None)",
        "Blocked": "(block_size)",
        "CostEstimate": "(flops, transcendentals, bytes_accessed, remote_bytes_transferred=0)",
        "Element": "(block_size, padding=(0, 0))",
        "GridSpec": "(grid=(), in_specs=NoBlockSpec(), out_specs=NoBlockSpec(), scratch_shapes=())",
        "MemoryRef": "(inner_aval, memory_space)",
        "MemorySpace": "(shape, dtype)",
        "Slice": "(start, size, stride=1)",
        "align_to": "(a, alignment)",
        "cdiv": "(a, b)",
        "core_map": "(mesh, *, compiler_params=None, interpret=False, debug=False,"
        " cost_estimate=None, name=None, metadata=None, scratch_shapes=())",
        "debug_print": "(fmt, *args)",
        "delay": "(nanos)",
        "ds": "(start, size=NotSpecified(), stride=None)",
        "dslice": "(start, size=NotSpecified(), stride=None)",
        "get_global": "(what)",
        "kernel": "(body=NotSpecified(), out_type=(), *, mesh, scratch_types=(),"
        " compiler_params=None, interpret=False, cost_estimate=None, debug=False, name=None,"
        " metadata=None)",
        "loop": "(lower, upper, *, init_carry=None, step=1, unroll=None)",
        "multiple_of": "(x, values)",
        "next_power_of_2": "(x)",
        "num_programs": "(axis)",
        "pallas_call": "(kernel, out_shape, *, grid_spec=None, grid=(), in_specs=NoBlockSpec(),"
        " out_specs=NoBlockSpec(), scratch_shapes=(), input_output_aliases={}, debug=False,"
        " interpret=False, name=None, compiler_params=None, cost_estimate=None, metadata=None)",
        "program_id": "(axis)",
        "run_scoped": "(f, *types, collective_axes=(), **kw_types)",
        "run_state": "(f)",
        "semaphore_read": "(sem_or_view)",
        "semaphore_signal": "(sem_or_view, inc=1, *, device_id=None,"
        " device_id_type=DeviceIdType.MESH, core_index=None)",
        "semaphore_wait": "(sem_or_view, value=1, *, decrement=True)",
        "strides_from_shape": "(shape)",
        "when": "(condition)",
        "with_scoped": "(*types, collective_axes=(), **kw_types)",
    },
}
MEMBERS = {
    plgpu.LoweringSemantics: {"Lane": 1, "Warpgroup": 2},
    plgpu.MemorySpace: {"GMEM": "gmem", "SMEM": "smem", "TMEM": "tmem", "REGS": "regs"},
    plgpu.OOBFillMode: {"UNDEFINED": 0, "PROMISE_IN_BOUNDS": 1, "ZEROS": 2},
    plgpu.SemaphoreType: {"REGULAR": "regular", "BARRIER": "barrier"},
    plgpu.PipelinePipeline: {"START": 0, "STEADY": 1, "STOP": 2},
    plgpu.TraceScope: {"WARP": "warp", "WARPGROUP": "warpgroup"},
    pl.MemorySpace: {k: k.lower() for k in ("ANY", "DEFAULT", "ERROR", "INDEX", "KEY")},
    plgpu.Layout: {
        name: k + 1
        for k, name in enumerate(
            "WGMMA WGMMA_8BIT WGMMA_UPCAST_2X WGMMA_UPCAST_4X WGMMA_TRANSPOSED WG_SPLAT WG_STRIDED"
            " TILED TCGEN05 TCGEN05_TRANSPOSED TCGEN05_M64_COLLECTIVE TCGEN05_TMEM_NATIVE"
            " TCGEN05_M64_COLLECTIVE_NATIVE SMEM_GMEM_COPY TMA_INDICES TMA_INDICES_4"
            " _WGMMA_ACC_32BIT MMA_LHS MMA_RHS MMA_ACC".split()
        )
    },
}
LATER = {
    plgpu: "inline_mgpu",
    pl: "BoundedSlice estimate_cost select_ref",
}
ALL_SIGNATURES = [(m, name, text) for m, t in SIGNATURES.items() for name, text in t.items()]


def text_of(o):
    """The signature with defaults as they are written."""
    call = type(o).__call__ if isinstance(o, enum.Enum) else o
    call = o.__call__ if isinstance(o, enum.EnumMeta) else call  # members are called
    parameters = list(inspect.signature(call).parameters.values())
    parts, keyword_only = [], False
    for p in parameters[call is not o :]:  # without self
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        if p.kind == p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if not any(x.startswith("*") for x in parts):
                parts.append("*")
        d = p.default
        if isinstance(d, enum.Enum):
            d = f"{type(d).__name__}.{d.name}"
        elif isinstance(d, type):
            d = d.__name__
        else:
            d = repr(d)
        parts.append(star + p.name + ("" if p.default is p.empty else f"={d}"))
    return f"({', '.join(parts)})"


@pytest.mark.parametrize(
    "module, name, text", ALL_SIGNATURES, ids=[f"{m.__name__}.{n}" for m, n, _ in ALL_SIGNATURES]
)
def test_signature(module, name, text):
    o = getattr(module, name)
    assert text_of(o) == text
    assert o.__doc__, "no docstring"


NAMESPACES = [plgpu, pl, lax, jnp, nn, ops, plgpu.ext, plgpu.tree]


@pytest.mark.parametrize("module", NAMESPACES, ids=lambda m: m.__name__)
def test_namespaces_show_their_own_names(module):
    """What dir() and `import *` give: all of it is there, none of it is a helper."""
    assert dir(module) == sorted(module.__all__) == sorted({*module.__all__})
    own = {plgpu: {"ext", "lax", "nn", "numpy", "pl", "testing", "tree"}}.get(module, set())
    for name in dir(module):
        assert not name.startswith("_")
        assert isinstance(getattr(module, name), ModuleType) == (name in own), name
    helpers = {"np", "math", "functools", "show", "finder", "tracing", "env", "Ref", "is_integer"}
    assert not helpers & {*dir(module)} - ({"Ref"} if module is plgpu else set())


@pytest.mark.parametrize("cls", MEMBERS, ids=lambda c: c.__name__)
def test_members(cls):
    assert {k: v.value for k, v in cls.__members__.items()} == MEMBERS[cls]
    for m in cls:
        assert pickle.loads(pickle.dumps(m)) is m and copy.deepcopy(m) is m


@pytest.mark.parametrize("module", LATER, ids=lambda m: m.__name__)
def test_names_of_later_versions(module):
    short = {plgpu: "plgpu", pl: "pl"}[module]
    for name in LATER[module].split():
        o = getattr(module, name)
        assert f"{short}.{name}" in repr(o) and o.__name__ == name
        with pytest.raises(NotImplementedError, match=f"{short}.{name} is not supported yet; .*"):
            o()
        with pytest.raises(NotImplementedError, match=f"{short}.{name} is not supported yet"):
            _ = o.REGULAR


@pytest.mark.parametrize(
    "module, name, right",
    [
        (plgpu, "triton_call", "plgpu.kernel"),
        (plgpu, "Registers", "plgpu.REGS"),
        (plgpu, "TransposeTransform", "ref.transpose"),
        (plgpu, "unswizzle_ref", "without transforms"),
        (plgpu, "untile_ref", "without transforms"),
        (plgpu, "async_copy_gmem_to_smem", "plgpu.copy_gmem_to_smem"),
        (plgpu, "async_copy_smem_to_gmem", "plgpu.copy_smem_to_gmem"),
        (plgpu.Layout, "WGMMA_ROW_MAJOR", "Layout.WGMMA"),
        (pl, "optimization_barrier", "lax.optimization_barrier"),
        (pl, "PipelineParams", "emit_pipeline"),
        (plgpu, "in_turn", "plgpu.ext.ordered_section"),
        (plgpu, "lazy_where", "plgpu.ext.warp_where"),
        (plgpu, "next_tile", "plgpu.ext.TileScheduler.*fetch"),
        (plgpu, "broadcast_tile", "plgpu.ext.TileScheduler.*broadcast"),
        (plgpu, "kernel_family", "plgpu.specialize"),
        (plgpu, "core_count", "plgpu.sm_count"),
        (plgpu, "Operand", "plgpu.ArrayInfo"),
        (plgpu, "ordered_section", "plgpu.ext.ordered_section"),
        (plgpu.ext, "tile_scheduler", "plgpu.ext has no"),
        (plgpu, "no_such_name", "no_such_name"),
        (pl, "no_such_name", "no_such_name"),
        (lax, "no_such_name", "no_such_name"),
        (jnp, "no_such_name", "no_such_name"),
    ],
)
def test_names_that_never_were(module, name, right):
    with pytest.raises(AttributeError, match=right):
        getattr(module, name)


def test_wrong_forms_name_the_right_one():
    with pytest.raises(TypeError, match="max_concurrent_steps"):
        plgpu.pipelines.PipelineParams(num_stages=3, prefetch=True)
    with pytest.raises(TypeError, match=r"plgpu.Barrier\(num_arrivals=..., num_barriers=...\)"):
        plgpu.Barrier(num_threads=32)
    with pytest.raises(TypeError, match="BlockSpec"):
        plgpu.CompilerParams(delay_release=1)
    with pytest.raises(TypeError, match="index_map"):
        plgpu.BlockSpec(lambda i: (i,), (128,))
    with pytest.raises(TypeError, match="thead_name.*thread_name"):
        plgpu.kernel(lambda o: None, thead_name="t")
    with pytest.raises(TypeError, match="pl.Buffered"):
        plgpu.BlockSpec((1,), None, "buffered")


# ---- older spellings -------------------------------------------------------------------------


def test_older_names():
    assert plgpu.GPUBlockSpec is plgpu.BlockSpec
    assert plgpu.GPUCompilerParams is plgpu.CompilerParams
    assert plgpu.GPUMemorySpace is plgpu.MemorySpace
    assert plgpu.GPUMesh is plgpu.Mesh
    assert plgpu.GPUShapeDtypeStruct is plgpu.ShapeDtypeStruct
    assert plgpu.ThreadSemantics is plgpu.LoweringSemantics
    assert plgpu.TileTransform is plgpu.TilingTransform
    assert plgpu.MemoryRefTransform is plgpu.Transform
    assert plgpu.wait_barrier is plgpu.barrier_wait
    assert plgpu.ACC is plgpu.WGMMAAccumulatorRef
    assert plgpu.Layout.TMA_GATHER_INDICES is plgpu.Layout.TMA_INDICES
    with pytest.warns(DeprecationWarning, match=r"Layout.WGMMA.reduce\(1\)"):
        assert plgpu.Layout.WGMMA_ROW == plgpu.Layout.WGMMA.reduce(1)
    with pytest.warns(DeprecationWarning, match=r"Layout.WGMMA.reduce\(0\)"):
        assert plgpu.Layout.WGMMA_COL == plgpu.Layout.WGMMA.reduce(0)
    with pytest.warns(DeprecationWarning, match=r"TCGEN05_TMEM_NATIVE.reduce\(1\)"):
        found = plgpu.Layout.TCGEN05_TMEM_NATIVE_ROW
    assert found == plgpu.Layout.TCGEN05_TMEM_NATIVE(vector_length=2).reduce(1)


def older(text, f, *args, **kwargs):
    """f's result; it warns once, with this text and at this file."""
    with pytest.warns(DeprecationWarning, match=text) as found:
        out = f(*args, **kwargs)
    assert len(found) == 1 and found[0].filename == __file__
    return out


def test_older_keywords_of_descriptors():
    assert older("num_arrivals=", plgpu.Barrier, arrival_count=3) == plgpu.Barrier(num_arrivals=3)
    tensor = older("orders_tensor_core=", plgpu.Barrier, for_tensor_core=True)
    assert tensor == plgpu.Barrier(orders_tensor_core=True) != plgpu.Barrier()
    assert plgpu.Barrier(2, 3) == plgpu.Barrier(num_arrivals=2, num_barriers=3)
    with pytest.raises(TypeError, match="multiple values"):
        plgpu.Barrier(2, num_arrivals=3)
    with pytest.raises(ValueError, match="both"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plgpu.Barrier(num_arrivals=2, arrival_count=3)
    p = older("max_concurrent_steps=", plgpu.CompilerParams, num_stages=3)
    assert p == plgpu.CompilerParams(max_concurrent_steps=3)
    lane = plgpu.ThreadSemantics.Lane
    p = older("lowering_semantics=", plgpu.CompilerParams, thread_semantics=lane)
    assert p.lowering_semantics is lane
    want = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    with pytest.warns(DeprecationWarning, match="transforms="):
        assert plgpu.BlockSpec((64, 64), swizzle=128, tiling=(8, 64)).transforms == want
    with pytest.raises(ValueError, match="transforms="), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plgpu.BlockSpec((64, 64), transforms=want, swizzle=64)
    assert plgpu.BlockSpec((64, 64), transforms=want[0]).transforms == want[:1]
    assert plgpu.BlockSpec((64, 64), collective_axes=()).collective_axes is None
    m = older(
        "grid_names=",
        plgpu.GPUMesh,
        grid=(2, 3),
        cluster=(2,),
        num_threads=2,
        axis_names=("x", "y", "c", "wg"),
    )
    assert m.shape == {"x": 2, "y": 3, "c": 2, "wg": 2}
    assert list(m.shape) == ["x", "y", "c", "wg"]
    assert m.default_memory_space is plgpu.GMEM and m.core_type == "gpu"


F32 = plgpu.ShapeDtypeStruct((128,), jnp.float32)
X = np.arange(128, dtype=np.float32)


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def test_older_keywords_of_kernel():
    for make in (
        lambda: plgpu.kernel(add_one, F32, interpret=True),
        lambda: plgpu.kernel(add_one, out_shape=F32, interpret=True),
        lambda: plgpu.kernel(out_shape=F32, interpret=True)(add_one),
        lambda: functools.partial(plgpu.kernel, out_shape=F32, interpret=True)(add_one),
    ):
        np.testing.assert_array_equal(older("out_type=", make)(X), X + 1)

    def with_scratch(x_ref, o_ref, s):
        s[...] = x_ref[...]
        o_ref[...] = s[...] + 1

    k = older(
        "scratch_types=",
        plgpu.kernel,
        with_scratch,
        out_type=F32,
        scratch_shapes=[plgpu.SMEM((128,), jnp.float32)],
        interpret=True,
    )
    np.testing.assert_array_equal(k(X), X + 1)


def test_older_forms_inside_a_body(run, rng):
    """wgmma(rhs_transpose=, swizzle=), load(ref, idx), pl.load/store/swap, allow_groups=, impl=,
    keyword and positional copies."""
    a, b = (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(2))

    def body(a_gmem, b_gmem, o_gmem, p_gmem, a, b, bar):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            plgpu.copy_gmem_to_smem(a_gmem, a, barrier=bar)
            plgpu.copy_gmem_to_smem(b_gmem, b, bar, impl="tma")
            plgpu.wait_barrier(bar)

            def product(acc):
                plgpu.wgmma(acc, a, b, rhs_transpose=True, swizzle=128)
                plgpu.wgmma(acc, a, b, rhs_transpose=False)
                return acc[...]

            o_gmem[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))
            plgpu.wait_smem_to_gmem(allow_groups=0)
            pl.store(p_gmem, pl.ds(0, 64), pl.load(a_gmem, (3, slice(None))))
            pl.store(p_gmem, (pl.ds(64, 64),), plgpu.load(a_gmem, 5))
            p_gmem[0] = pl.swap(p_gmem, 1, a_gmem[0, 0])
        assert {w.category for w in found} == {DeprecationWarning}
        assert len(found) == 6 and all(w.filename == __file__ for w in found)

    got, p = run(
        body,
        (plgpu.ShapeDtypeStruct((64, 64), jnp.float32), plgpu.ShapeDtypeStruct((128,), a.dtype)),
        a,
        b,
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.float16),
            plgpu.SMEM((64, 64), jnp.float16),
            plgpu.Barrier(2),
        ],
    )
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_allclose(got, a32 @ b32.T + a32 @ b32, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(p, np.r_[a[3, 1], a[0, 0], a[3, 2:], a[5]])


def test_older_forms_that_are_refused():
    def body(x, o):
        with pytest.raises(TypeError, match="memory_space"):
            pl.load(x, 0, memory_space=plgpu.SMEM)
        with pytest.raises(TypeError, match="first argument"):
            pl.store(x[...], 0, 1.0)
        with pytest.raises(TypeError, match="'speed'"):
            pl.load(x, 0, speed=1)
        add_one(x, o)

    plgpu.kernel(body, out_type=F32, interpret=True)(X)


# ---- value classes ---------------------------------------------------------------------------

VALUES = [
    plgpu.ShapeDtypeStruct((2, 3), "bfloat16"),
    plgpu.SMEM((64, 64), jnp.float16),
    plgpu.SMEM(
        (64, 64),
        jnp.float16,
        transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    ),
    plgpu.GMEM((3,), jnp.int8),
    plgpu.ACC((64, 8)),
    plgpu.Barrier(num_barriers=(2, 3)),
    plgpu.TilingTransform((8, 64)),
    plgpu.SwizzleTransform(64),
    plgpu.CompilerParams(approx_math=True),
    plgpu.InterpretParams(seed=7),
    plgpu.Mesh(grid=(2,), grid_names=("x",)),
    plgpu.Tiling(((64, 8), (16, 8))),
    plgpu.Replicated(2),
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WG_STRIDED((128,), 1),
    pl.Blocked(8),
    pl.Element(8, (0, 0)),
    pl.squeezed,
]


@pytest.mark.parametrize("x", VALUES, ids=lambda x: type(x).__name__)
def test_values(x):
    """Equal, hashed, shown, copied and pickled by value; not changed."""
    for y in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert x == y and hash(x) == hash(y) and repr(x) == repr(y)
    assert x != 5 and x != plgpu.Barrier(num_arrivals=5)
    field = next(iter(type(x).__slots__), "anything")
    with pytest.raises((AttributeError, RuntimeError)):
        setattr(x, field, 1)
    with pytest.raises((AttributeError, RuntimeError)):
        delattr(x, field)


@pytest.mark.parametrize(
    "x, change",
    [
        (plgpu.CompilerParams(approx_math=True), dict(unsafe_no_auto_barriers=True)),
        (plgpu.Barrier(num_arrivals=2, num_barriers=3), dict(num_arrivals=1)),
        (plgpu.ClusterBarrier(collective_axes=("x", "y")), dict(num_barriers=(2,))),
        (plgpu.TilingTransform((8, 64)), dict(tiling=(8, 1, 64))),
        (plgpu.SwizzleTransform(64), dict(swizzle=32)),
        (plgpu.Mesh(num_threads=2, thread_name="t"), dict(grid=(3,), grid_names=("i",))),
        (plgpu.WarpMesh(axis_name="w"), dict(axis_name="v")),
        (plgpu.SMEM((8, 64), np.int8, transforms=plgpu.TilingTransform((8,))), dict(transforms=())),
        (plgpu.ACC((64, 8)), dict(dtype=np.dtype(np.float16))),
        (plgpu.ShapeDtypeStruct((2,), np.float16), dict(shape=(3, 4))),
        (plgpu.RefType(), dict(transforms=(plgpu.SwizzleTransform(64),))),
        (plgpu.InterpretParams(), dict(seed=4)),
        (plgpu.CopyPartition.PARTITIONED(1), dict(axis=0)),
        (plgpu.BlockSpec((8, 2), lambda i: i, delay_release=1), dict(delay_release=0)),
        (pl.BlockSpec((8, 2), lambda i: (i, 0)), dict(block_shape=(4, 2))),
        (pl.GridSpec(grid=(3,)), dict(grid=(2, 2))),
        (pl.Element(8), dict(block_size=4)),
    ],
    ids=lambda x: "" if isinstance(x, dict) else type(x).__name__,
)
def test_values_are_dataclasses(x, change):
    """`fields` names what makes it, with the defaults of the constructor; `replace` checks."""
    fields = {f.name: f for f in dataclasses.fields(x)}
    parameters = inspect.signature(type(x)).parameters
    assert fields.keys() == parameters.keys()
    for name, p in parameters.items():
        required = fields[name].default is dataclasses.MISSING
        assert required if p.default is p.empty else fields[name].default == p.default
        assert fields[name].kw_only == (p.kind is p.KEYWORD_ONLY)
    assert dataclasses.replace(x) == x
    y = dataclasses.replace(x, **change)
    assert type(y) is type(x) and y != x
    for name in fields:
        assert getattr(y, name) == change.get(name, getattr(x, name))
    with pytest.raises(TypeError, match="nonsense"):
        dataclasses.replace(x, nonsense=1)


def test_replace_checks():
    with pytest.raises(ValueError, match="tiles must be positive"):
        dataclasses.replace(plgpu.TilingTransform((8,)), tiling=(0,))
    with pytest.raises(ValueError, match="not divisible by the tiling"):
        smem = plgpu.SMEM((8, 64), np.int8)
        dataclasses.replace(smem, transforms=(plgpu.TilingTransform((3, 64)),))


def test_shape_dtype_struct():
    s = plgpu.ShapeDtypeStruct((2, 3), np.float16, sharding=None, weak_type=False)
    assert (s.shape, s.dtype, s.size, s.ndim) == ((2, 3), np.float16, 6, 2)
    assert s == plgpu.ShapeDtypeStruct([2, 3], "float16") != plgpu.ShapeDtypeStruct((2, 3), "int8")
    assert plgpu.ShapeDtypeStruct.like(X) == F32
    with pytest.raises(ValueError, match="dtype must be given"):
        plgpu.ShapeDtypeStruct((2,), None)
    with pytest.raises(TypeError, match="dtpye"):
        plgpu.ShapeDtypeStruct((2,), dtpye=jnp.float32)
    with pytest.raises(TypeError, match="complex64.*accepted are bool"):
        plgpu.ShapeDtypeStruct((2,), "complex64")
    with pytest.raises(TypeError, match="shape must be ints"):
        plgpu.ShapeDtypeStruct((2.5,), "int8")
    with pytest.raises(ValueError, match="negative"):
        plgpu.ShapeDtypeStruct((-1,), "int8")
    with pytest.raises(RuntimeError):
        s.shape = (1,)


def test_block_specs():
    def index_map(i):
        "a map"
        return i

    s = plgpu.BlockSpec((8, None), index_map, delay_release=1)
    assert s.index_map(3) == (3,) and s.index_map.__doc__ == "a map"
    assert plgpu.BlockSpec((8,), lambda i: [i, 0]).index_map(3) == (3, 0)
    for new in (s.replace(delay_release=2), dataclasses.replace(s, delay_release=2)):
        assert (new.block_shape, new.delay_release, new.index_map(3)) == ((8, None), 2, (3,))
        assert type(new) is plgpu.BlockSpec
    s.block_shape = (16, None)
    p = pl.BlockSpec((8,), memory_space=plgpu.GMEM)
    assert isinstance(s, pl.BlockSpec) and p.replace(block_shape=None).memory_space is plgpu.GMEM
    assert (p.transforms, p.delay_release, p.collective_axes) == ((), 0, None)
    assert "block_shape=(16, None)" in repr(s)
    with pytest.raises(TypeError, match="transforms"):
        pl.BlockSpec((8,), transforms=())
    for wrong in (dict(delay_release=-1), dict(delay_release=1.5)):
        with pytest.raises(ValueError, match="delay_release"):
            plgpu.BlockSpec((8,), **wrong)
    for wrong in (
        dict(block_shape=8),
        dict(index_map=3),
        dict(memory_space="smem"),
        dict(transforms=(128,)),
    ):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            plgpu.BlockSpec(**wrong)


def test_slices():
    assert pl.ds(4) == pl.Slice(0, 4) and pl.ds(2, 4) == pl.Slice(2, 4)
    assert pl.ds(None) == slice(None) and pl.ds(None, 4) == pl.Slice(0, 4)
    assert pl.ds(0, 4, 2) == pl.Slice(0, 4, 2) != pl.Slice(0, 4)
    assert pl.Slice.from_slice(slice(2, 10, 2), 8) == pl.Slice(2, 3, 2)
    assert plgpu.tree.leaves(pl.ds(2, 4)) == []
    with pytest.raises(TypeError, match="size"):
        pl.ds(4, None)
    with pytest.raises(TypeError, match="start"):
        pl.ds(1.5, 4)
    with pytest.raises(ValueError, match="stride"):
        pl.ds(1, 4, -1)


def test_host_helpers():
    assert [pl.cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert pl.align_to(5, 4) == 8
    assert [pl.next_power_of_2(n) for n in (0, 1, 3, 8)] == [1, 1, 4, 8]
    assert pl.strides_from_shape((2, 3, 4)) == (12, 4, 1)
    assert pl.multiple_of(8, (2, 4)) == 8
    assert plgpu.find_swizzle(128 * 8) == 128 and plgpu.find_swizzle(3 * 128, "x") == 16
    with pytest.raises(ValueError, match="of rows"):
        plgpu.find_swizzle(100, "rows")
    with pytest.raises(ValueError, match="negative"):
        pl.next_power_of_2(-1)
    with pytest.raises(ValueError, match="multiple"):
        pl.multiple_of(9, 4)
    rows = [[None] * 8 for _ in range(8)]
    for k in range(64):
        i, j = plgpu.planar_snake(k, (8, 8), 0, 2)
        rows[i][j] = k
    assert rows[0] == [0, 2, 4, 6, 8, 10, 12, 14] and rows[2] == list(range(30, 15, -2))
    rows = [[None] * 5 for _ in range(5)]
    for k in range(25):
        i, j = plgpu.planar_snake(k, (5, 5), 0, 3)
        rows[i][j] = k
    assert rows == [
        [0, 3, 6, 9, 12],
        [1, 4, 7, 10, 13],
        [2, 5, 8, 11, 14],
        [23, 21, 19, 17, 15],
        [24, 22, 20, 18, 16],
    ]


def test_accumulators_and_layouts():
    for shape in ((63, 8), (64, 7), (64,), (0, 8)):
        with pytest.raises(ValueError, match="multiple of 64"):
            plgpu.ACC(shape)
    for dtype in (jnp.uint32, jnp.bfloat16):
        with pytest.raises(ValueError, match="float32, float16 or int32"):
            plgpu.ACC((64, 8), dtype)
    assert plgpu.Layout.WG_SPLAT() == plgpu.Layout.WG_SPLAT
    assert plgpu.Layout.WGMMA.reduce(0) == plgpu.Layout.WGMMA.reduce((0,))
    for name in MEMBERS[plgpu.Layout]:
        layout = plgpu.Layout[name]
        try:
            assert repr(layout.reduce(0))
        except (NotImplementedError, ValueError) as e:
            assert name in str(e)


# ---- forms of a kernel -----------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@plgpu.tree.register_dataclass
@dataclasses.dataclass
class Point:
    x: object
    y: object


def test_forms_of_definition():
    @plgpu.kernel(out_type=F32, interpret=True)
    def decorated(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    @functools.partial(plgpu.kernel, out_type=F32, interpret=True)
    def partial(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    direct = plgpu.kernel(add_one, out_type=F32, interpret=True)
    bound = plgpu.kernel(
        functools.partial(lambda n, x, o: o.set(x[...] + n), 1), out_type=F32, interpret=True
    )

    class Body:
        def __call__(self, x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1

        def method(self, x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1

    call = plgpu.kernel(Body(), out_type=F32, interpret=True)
    method = plgpu.kernel(Body().method, out_type=F32, interpret=True)
    for k in (decorated, partial, direct, bound, call, method):
        np.testing.assert_array_equal(k(X), X + 1)
    assert decorated.__name__ == "decorated" and "decorated" in repr(decorated)
    assert plgpu.kernel(add_one, out_type=F32, kernel_name="mine").__name__ == "mine"
    assert call.__name__ == "anonymous"


def test_forms_of_outputs(run):
    """The body's arguments and the result follow the structure of out_type."""

    def one(x, o):
        o[...] = x[...] + 1

    y = X + 1
    np.testing.assert_array_equal(run(one, F32, X), y)

    def in_tuple(x, *outs):
        for o in outs:
            one(x, o)

    for form in ((F32,), [F32], (F32, F32), [F32, F32]):
        got = run(in_tuple, form, X)
        assert type(got) is type(form) and len(got) == len(form)
        for g in got:
            np.testing.assert_array_equal(g, y)

    def in_dict(x, o):
        assert set(o) == {"a", "b"}
        one(x, o["a"])
        o["b"][...] = x[...] * 2

    got = run(in_dict, {"b": F32, "a": F32}, X)
    np.testing.assert_array_equal(got["a"], y)
    np.testing.assert_array_equal(got["b"], X * 2)

    def in_class(x, o):
        one(x, o.x)
        o.y[...] = x[...] * 2

    for form in (Pair(F32, F32), Point(F32, F32)):
        got = run(in_class, form, X)
        assert type(got) is type(form)
        np.testing.assert_array_equal(got.x, y)
        np.testing.assert_array_equal(got.y, X * 2)

    def nested(x, first, none, second):
        assert none is None
        one(x, first)
        one(x, second["a"][0])

    got = run(nested, (F32, None, {"a": (F32,)}), X)
    assert got[1] is None
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[2]["a"][0], y)
    # things with shape and dtype serve as outputs: arrays, allocators
    np.testing.assert_array_equal(run(one, plgpu.GMEM((128,), jnp.float32), X), y)
    k = plgpu.kernel(one, out_type=X, interpret=True)
    np.testing.assert_array_equal(k(X), y)


def test_forms_of_arguments(run):
    def body(d, t, none, p, o):
        assert none is None and isinstance(p, Point)
        o[...] = d["a"][...] + d["b"]["c"][...] + t[0][...] + t[1][...] + p.x[...] + p.y[...]

    args = {"a": X, "b": {"c": X}}, (X, 2 * X), None, Point(X, 3 * X)
    np.testing.assert_array_equal(run(body, F32, *args), X * 9)

    def other(p, o):
        o[...] = p[0][...] + p[1][...]

    kernel = run.kernel(other, F32)
    for pair in (Pair(X, X), (X, X), [X, X]):  # each structure has its own trace
        np.testing.assert_array_equal(run.call(kernel, pair), 2 * X)

    def scalars(i, f, b, h, z, o_ref):
        assert [r.dtype.name for r in (i, f, b, h, z)] == [
            "int32",
            "float32",
            "bool",
            "float16",
            "int8",
        ]
        assert all(r.shape == () for r in (i, f, b, h, z))
        o_ref[0] = i[...].astype(jnp.float32) + f[...]
        o_ref[1] = jnp.where(b[...], h[...].astype(jnp.float32), 0.0)
        o_ref[2] = z[()].astype(jnp.float32)

    k = plgpu.kernel(scalars, out_type=plgpu.ShapeDtypeStruct((3,), jnp.float32), interpret=True)
    got = k(3, 0.5, True, np.float16(2), np.array(-7, np.int8))
    np.testing.assert_array_equal(got, [3.5, 2, -7])

    def nothing(o):
        o[...] = jnp.full((128,), 7.0)

    np.testing.assert_array_equal(run(nothing, F32), np.full(128, 7))
    assert run(lambda x: None, (), X) == ()


def test_forms_of_scratch(run):
    smem, bar = plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()

    def positional(x, o, s, none, nested):
        assert none is None and nested["b"].dtype == "barrier"
        plgpu.copy_gmem_to_smem(x, s, nested["b"])
        plgpu.barrier_wait(nested["b"])
        o[...] = s[...] + 1

    def keyword(x, o, *, s, bar):
        positional(x, o, s, None, {"b": bar})

    y = X + 1
    for scratch in ((smem, None, {"b": bar}), [smem, None, {"b": bar}]):
        np.testing.assert_array_equal(run(positional, F32, X, scratch_types=scratch), y)
    got = run(keyword, F32, X, scratch_types={"bar": bar, "s": smem})
    np.testing.assert_array_equal(got, y)

    @pl.with_scoped(smem, bar=bar)
    def scoped(x, o, s, *, bar):
        positional(x, o, s, None, {"b": bar})

    np.testing.assert_array_equal(run(lambda x, o: scoped(x, o), F32, X), y)

    def decorated(x, o):
        @functools.partial(pl.run_scoped, s=smem, bar=bar)
        def result(s, bar):
            positional(x, o, s, None, {"b": bar})
            return {"a": s[...], "n": 5}

        assert result["n"] == 5
        o[...] = result["a"] + 1

    np.testing.assert_array_equal(run(decorated, F32, X), y)


def test_memory_space_of_refs(run):
    def body(x, o, s, b):
        assert x.memory_space is o.memory_space is plgpu.GMEM
        assert s.memory_space is b.memory_space is plgpu.SMEM
        assert str(s.memory_space) == "smem"

        def inside(acc):
            assert acc.memory_space is plgpu.REGS

        pl.run_scoped(inside, plgpu.ACC((64, 64)))
        o[...] = x[...] + 1

    scratch = [plgpu.SMEM((8,), jnp.float32), plgpu.Barrier()]
    np.testing.assert_array_equal(run(body, F32, X, scratch_types=scratch), X + 1)


def test_lower_gives_texts_and_figures():
    low = plgpu.kernel(add_one, out_type=F32).lower(F32)
    assert low.as_text() == low.as_text("graph") and 'kernel "add_one"' in low.as_text("graph")
    assert "__global__" in low.as_text("cuda") and ".target sm_90a" in low.as_text("ptx")
    with pytest.raises(ValueError, match="graph, traced, cuda, ptx, sass"):
        low.as_text("mlir")
    used = low.resources()
    assert used["threads"] == 128 and used["grid"] == (1, 1, 1) and used["spill_bytes"] == 0


def test_stubs_name_what_the_extension_has():
    """pallas_mgpu/_core.pyi against pallas_mgpu._core: functions, classes, members, keywords."""
    core = plgpu._core
    text = Path(plgpu.__file__).with_name("_core.pyi").read_text()
    body = ast.parse(text).body
    found = {n.name: n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    here = {n for n in dir(core) if not n.startswith("_")}
    numbers = {n.target.id for n in body if isinstance(n, ast.AnnAssign)}
    assert {n for n in {*found, *numbers} if not n.startswith("_")} - {"RefIndexer"} == here
    for name, node in found.items():
        cls = getattr(core, name, None)
        if isinstance(node, ast.FunctionDef) or cls is None:
            continue
        bases = [ast.unparse(b) for b in node.bases]
        assert bases == [b.__name__ for b in cls.__bases__ if b is not object], name
        members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        members |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        public = {m for m in vars(cls) if not m.startswith("_")} - {"wait", "arrive"}
        if not issubclass(cls, BaseException):
            assert {m for m in members if not m.startswith("_")} == public, name
    for name in found:  # parameters by the signature in the docstring
        o = getattr(core, name, None)
        doc = (o.__doc__ or "").split(")")[0] if callable(o) and not isinstance(o, type) else ""
        if doc.startswith(f"{name}("):
            want = [p.split("=")[0].strip(" *") for p in doc[len(name) + 1 :].split(",")]
            a = found[name].args
            got = [x.arg for x in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if x]
            assert got == [w for w in want if w], name
