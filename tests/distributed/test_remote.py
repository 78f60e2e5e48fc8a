"""Memory and semaphores of other devices: what arrives, in which order, and what is refused."""

import re

import numpy as np
import pytest
from distributed.meshes import Mesh, on_gpus, params, shards, struct
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

REGULAR = plgpu.SemaphoreType.REGULAR


@pytest.fixture(params=["interpret", "host", pytest.param("cuda", marks=on_gpus)])
def way(request):
    return request.param


@pytest.fixture(params=["interpret", "host"])
def on_cpu(request):
    """What needs NVLink multicast."""
    return request.param


@pytest.mark.parametrize("shape", [(128,), (3, 5), (64, 130)])
def test_remote_store(way, rng, shape):
    def body(x, y, sem):
        other = 1 - lax.axis_index("x")
        plgpu.remote_ref(y, other)[...] = x[...] * 2
        pl.semaphore_signal(sem, device_id=other)
        pl.semaphore_wait(sem)

    x = shards(rng, 2, shape)
    y = Mesh((2,), "x", way)(body, struct(shape), x, scratch_types=[REGULAR])
    np.testing.assert_array_equal(y[0], x[1] * 2)
    np.testing.assert_array_equal(y[1], x[0] * 2)


def test_remote_loads_of_slices(way, rng):
    """Slicing before remote_ref or after it is the same."""

    def body(x, y, z):
        other = (lax.axis_index("x") + 1) % 2
        y[...] = plgpu.remote_ref(x.at[3], other)[...]
        z[...] = plgpu.remote_ref(x, (other,)).at[3].at[pl.ds(2, 5)][...]

    x = shards(rng, 2, (7, 40))
    y, z = Mesh((2,), "x", way)(body, (struct((40,)), struct((5,))), x)
    for d in range(2):
        np.testing.assert_array_equal(y[d], x[1 - d][3])
        np.testing.assert_array_equal(z[d], x[1 - d][3, 2:7])


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("ids", ["tuple", "dict", "logical"])
def test_tma_copies_to_and_from_peers(way, rng, tiled, ids):
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)) if tiled else ()

    def at(other):
        if ids == "logical":
            return other, pl.DeviceIdType.LOGICAL
        return ((other,) if ids == "tuple" else {"x": other}), pl.DeviceIdType.MESH

    def body(x, y, z, smem, barrier, sem):
        other = 1 - lax.axis_index("x")
        source = plgpu.remote_ref(x, *at(other))
        plgpu.async_prefetch(source.at[pl.ds(8, 16)])
        plgpu.copy_gmem_to_smem(source.at[pl.ds(8, 16)], smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]
        to = plgpu.transform_ref(z, plgpu.PeerMemRef(*at(other)))
        plgpu.copy_smem_to_gmem(smem, to.at[pl.ds(16, 16)])
        plgpu.copy_smem_to_gmem(smem, z.at[pl.ds(0, 16)])
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(sem, device_id=other)
        pl.semaphore_wait(sem)

    x = shards(rng, 2, (32, 64))
    scratch = [plgpu.SMEM((16, 64), np.float32, transforms=transforms), plgpu.Barrier(), REGULAR]
    outs = struct((16, 64)), struct((32, 64))
    y, z = Mesh((2,), "x", way)(body, outs, x, scratch_types=scratch)
    for d in range(2):
        np.testing.assert_array_equal(y[d], x[1 - d][8:24])
        np.testing.assert_array_equal(z[d][:16], x[1 - d][8:24])
        np.testing.assert_array_equal(z[d][16:], x[d][8:24])


def test_peer_id_computed_from_data(way, rng):
    """With a contiguous copy, and a tiled one."""

    def body(x, who, y, smem, barrier):
        other = who[0]
        plgpu.copy_gmem_to_smem(plgpu.remote_ref(x, other), smem, barrier)
        plgpu.barrier_wait(barrier)
        y[...] = smem[...]

    x, who = shards(rng, 2, (4, 64)), [np.array([1, 9], np.int32), np.array([0, 9], np.int32)]
    scratch = [plgpu.SMEM((4, 64), np.float32), plgpu.Barrier()]
    y = Mesh((2,), "x", way)(body, struct((4, 64)), x, who, scratch_types=scratch)
    np.testing.assert_array_equal(y[0], x[1])


def test_dict_ids_on_a_mesh_of_two_axes(way, rng):
    """Axes that a dict leaves out have the caller's coordinate; a tuple of names is one axis."""

    def body(x, y, z, sem):
        a, b = lax.axis_index("a"), lax.axis_index("b")
        assert lax.axis_size("a") == 2 and lax.axis_size(("a", "b")) == 6
        y[...] = plgpu.remote_ref(x, {"b": (b + 1) % 3})[...]
        z[...] = plgpu.remote_ref(x, {("a", "b"): (a * 3 + b + 4) % 6})[...]
        pl.semaphore_signal(sem, device_id={"a": 1 - a})
        pl.semaphore_wait(sem)

    x = shards(rng, 6, (70,))
    y, z = Mesh((2, 3), ("a", "b"), way)(body, (struct((70,)),) * 2, x, scratch_types=[REGULAR])
    for d in range(6):
        a, b = divmod(d, 3)
        np.testing.assert_array_equal(y[d], x[a * 3 + (b + 1) % 3])
        np.testing.assert_array_equal(z[d], x[(d + 4) % 6])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16, bfloat16])
def test_peer_atomics_add(way, rng, dtype):
    """All devices add to one, block after block."""

    def body(x, y, sem):
        y[...] = jnp.zeros((64,), dtype)
        pl.semaphore_signal(sem.at[0], device_id=1 - lax.axis_index("x"))
        pl.semaphore_wait(sem.at[0])
        plgpu.atomic_add(plgpu.remote_ref(y, 0), x[...])
        pl.semaphore_signal(sem.at[1], device_id=0)
        pl.semaphore_signal(sem.at[2], device_id=1 - lax.axis_index("x"))
        pl.semaphore_wait(sem.at[2])

        @pl.when(lax.axis_index("x") == 0)
        def _():
            pl.semaphore_wait(sem.at[1], 2)

    x = [np.arange(64).astype(dtype), np.full(64, 3).astype(dtype)]
    y = Mesh((2,), "x", way)(body, struct((64,), dtype), x, scratch_types=[REGULAR((3,))])
    np.testing.assert_array_equal(y[0].astype(np.float32), np.arange(64.0) + 3)


def test_tma_reduce_add_into_a_peer(way, rng):
    def body(x, y, smem, barrier, sem):
        me = lax.axis_index("x")
        y[...] = jnp.full((16, 64), me, np.float32)
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        pl.semaphore_signal(sem.at[0], device_id=1 - me)
        pl.semaphore_wait(sem.at[0])
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y, 1 - me), reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(sem.at[1], device_id=1 - me)
        pl.semaphore_wait(sem.at[1])

    x = shards(rng, 2, (16, 64))
    scratch = [plgpu.SMEM((16, 64), np.float32), plgpu.Barrier(), REGULAR((2,))]
    y = Mesh((2,), "x", way)(body, struct((16, 64)), x, scratch_types=scratch)
    np.testing.assert_array_equal(y[1], x[0] + 1)
    np.testing.assert_array_equal(y[0], x[1])


def test_semaphores_of_blocks_and_of_the_launch(way):
    """A signal reaches the block with the same number; one of get_global adds up over blocks."""
    blocks = 5

    def body(y, own):
        everyone = pl.get_global(REGULAR)
        other = 1 - lax.axis_index("x")
        block = lax.axis_index("i")
        plgpu.semaphore_signal(own, block + 1, device_id=other)
        plgpu.semaphore_wait(own, block + 1)
        pl.semaphore_signal(everyone, device_id=other)
        pl.semaphore_wait(everyone, blocks, decrement=False)
        y[block] = pl.semaphore_read(everyone)

    y = Mesh((2,), "x", way)(
        body,
        struct((blocks,), np.int32),
        grid=(blocks,),
        grid_names=("i",),
        scratch_types=[REGULAR],
    )
    np.testing.assert_array_equal(y, np.full((2, blocks), blocks))


def test_signals_of_two_and_waits(way):
    """Signal 2, then two waits of 1; waits without a decrement, then with one."""

    def body(y, sem):
        other = 1 - lax.axis_index("x")
        pl.semaphore_signal(sem, 2, device_id=other)
        pl.semaphore_wait(sem)
        pl.semaphore_wait(sem)
        pl.semaphore_signal(sem, 3, device_id=other)
        pl.semaphore_wait(sem, 2, decrement=False)
        pl.semaphore_wait(sem, 3, decrement=False)
        y[0] = pl.semaphore_read(sem)
        pl.semaphore_wait(sem, 3)
        y[1] = pl.semaphore_read(sem)

    y = Mesh((2,), "x", way)(body, struct((2,), np.int32), scratch_types=[REGULAR])
    np.testing.assert_array_equal(y, [[3, 0]] * 2)


def test_signal_parallel(way, rng):
    """One fence in front of all signals, which then need none."""

    def body(x, y, sem):
        me = lax.axis_index("x")
        for k in range(3):
            plgpu.remote_ref(y, k).at[me][...] = x[...]
        signal = plgpu.SemaphoreSignal
        plgpu.semaphore_signal_parallel(
            *(signal(sem, device_id=k) for k in range(3)), signal(sem, device_id=None, inc=2)
        )
        pl.semaphore_wait(sem, 5)

    x = shards(rng, 3, (33,))
    mesh = Mesh((3,), "x", way)
    y = mesh(body, struct((3, 33)), x, scratch_types=[REGULAR])
    for d in range(3):
        np.testing.assert_array_equal(y[d], x)
    kernel = mesh.kernel(body, struct((3, 33)), scratch_types=[REGULAR])
    text = plgpu.spmd(kernel, mesh.mesh).lower(x[0]).as_text("cuda")
    body = text[text.index("signal_kernel(") if "signal_kernel(" in text else 0 :]
    assert (
        body.count("semaphore_signal_first(") - body.count("FN void semaphore_signal_first(") == 1
    )


@pytest.mark.parametrize("warps", [False, True])
def test_signal_multicast(on_cpu, warps):
    """From the thread, and from single warps."""

    def body(y, sem):
        def send():
            plgpu.semaphore_signal_multicast(sem, 2, collective_axes="x")

        if warps:
            plgpu.warp_map(lambda w: pl.when(w == 1)(send))
        else:
            send()
        pl.semaphore_wait(sem, 8)
        y[0] = pl.semaphore_read(sem)

    y = Mesh((4,), "x", on_cpu)(body, struct((1,), np.int32), scratch_types=[REGULAR])
    np.testing.assert_array_equal(y, np.zeros((4, 1)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16, np.int32, np.uint32, np.int8])
def test_multimem_store(on_cpu, rng, dtype):
    """Each device stores its row on all of them: an array, and a number."""

    def body(x, y, z, sem):
        me = lax.axis_index("x")
        plgpu.multimem_store(x[...], y.at[me], "x")
        plgpu.multimem_store(jnp.full((512,), 3, dtype), z.at[me], ("x",))
        plgpu.semaphore_signal_multicast(sem, collective_axes=("x",))
        pl.semaphore_wait(sem, 3)

    x = [rng.integers(0, 99, 512).astype(dtype) for _ in range(3)]
    y, z = Mesh((3,), "x", way)(body, (struct((3, 512), dtype),) * 2, x, scratch_types=[REGULAR])
    for d in range(3):
        np.testing.assert_array_equal(y[d], x)
        np.testing.assert_array_equal(z[d], np.full((3, 512), 3, dtype))


both = pytest.mark.parametrize("backend", ["interpret", "emulate"])
SWITCH = [(np.float32, "add")]
SWITCH += [(t, op) for t in (np.float16, bfloat16) for op in ("add", "min", "max")]
SWITCH += [
    (t, op) for t in (np.int32, np.uint32) for op in ("add", "min", "max", "and", "or", "xor")
]


@pytest.mark.parametrize("dtype,op", SWITCH, ids=str)
def test_multimem_load_reduce(on_cpu, rng, dtype, op):
    def body(x, y):
        y[...] = plgpu.multimem_load_reduce(x.at[1], collective_axes="x", reduction_op=op)

    x = [rng.integers(0, 9, (2, 1024)).astype(dtype) for _ in range(3)]
    y = Mesh((3,), "x", way)(body, struct((1024,), dtype), x)
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and}
    fn |= {"or": np.bitwise_or, "xor": np.bitwise_xor}
    want = fn[op](fn[op](x[0][1], x[1][1]), x[2][1])
    for d in range(3):
        np.testing.assert_array_equal(y[d], want)


@both
@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2])
def test_sums_of_float8_need_blackwell(rng, dtype, backend):
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}

    def body(x, y):
        for k, op in enumerate(functions):
            y[k] = plgpu.multimem_load_reduce(x, collective_axes="x", reduction_op=op)

    x = [rng.integers(0, 9, 2048).astype(dtype) for _ in range(2)]
    params = plgpu.InterpretParams(backend=backend)
    kernel = plgpu.kernel(body, out_type=struct((3, 2048), dtype), interpret=params)
    f = plgpu.spmd(kernel, plgpu.DeviceMesh(2, "x"))
    for y in f(x):
        np.testing.assert_array_equal(y, np.stack([g(*x) for g in functions.values()]))
    assert "multimem.ld_reduce" in f.lower(x[0], target="sm_100a").as_text("cuda")
    with pytest.raises(NotImplementedError, match="sums of float8.*sm_90a"):
        f.lower(x[0], target="sm_90a")


@pytest.mark.parametrize("tiled", [False, True])
def test_copy_to_multicast_ref(on_cpu, rng, tiled):
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)) if tiled else ()

    def body(x, y, smem, barrier, sem):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        to = plgpu.multicast_ref(y, ("x",)).at[lax.axis_index("x")]
        plgpu.copy_smem_to_gmem(smem, to)
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal_multicast(sem, collective_axes=("x",))
        pl.semaphore_wait(sem, 2)

    x = shards(rng, 2, (8, 64))
    scratch = [plgpu.SMEM((8, 64), np.float32, transforms=transforms), plgpu.Barrier(), REGULAR]
    y = Mesh((2,), "x", on_cpu)(body, struct((2, 8, 64)), x, scratch_types=scratch)
    for d in range(2):
        np.testing.assert_array_equal(y[d], x)


def test_semaphores_in_memory_that_lasts():
    """Words of an argument keep their values from launch to launch."""

    def body(flags, seen):
        words = plgpu.ext.as_semaphores(flags)
        other = 1 - lax.axis_index("x")
        pl.semaphore_signal(plgpu.remote_ref(words.at[1], other))
        round_ = pl.semaphore_read(words.at[0]) + 1
        pl.semaphore_wait(words.at[1], round_, decrement=False)
        pl.semaphore_signal(words.at[0])
        seen[0] = round_

    mesh = Mesh((2,), "x")
    f = plgpu.spmd(mesh.kernel(body, (struct((2,), np.int32), struct((1,), np.int32))), mesh.mesh)
    flags = plgpu.symm_empty((2,), np.int32, mesh.mesh)
    seen = plgpu.symm_empty((1,), np.int32, mesh.mesh)
    for k in range(4):
        f(out=(flags, seen))
        np.testing.assert_array_equal([np.asarray(x) for x in seen], [[k + 1]] * 2)
    np.testing.assert_array_equal([np.asarray(x) for x in flags], [[4, 4]] * 2)


@pytest.mark.parametrize("way", ["interpret", pytest.param("cuda", marks=on_gpus)])
def test_one_kernel_many_times_and_several_in_turn(way, rng):
    """51 launches of one kernel; two kernels that alternate, without anything between them."""

    def body(scale, x, y, sem):
        other = 1 - lax.axis_index("x")
        plgpu.remote_ref(y, other)[...] = x[...] + scale
        pl.semaphore_signal(sem, device_id=other)
        pl.semaphore_wait(sem)

    mesh = Mesh((2,), "x", way)
    fs = []
    for scale in (1, 10):

        def one(x, y, sem, scale=scale):
            body(scale, x, y, sem)

        fs.append(plgpu.spmd(mesh.kernel(one, struct((130,)), scratch_types=[REGULAR]), mesh.mesh))
    y = x = mesh.put(shards(rng, 2, (130,)))
    for _ in range(51):
        y = fs[0](y)
    np.testing.assert_allclose(np.asarray(y[1]), np.asarray(x[0]) + 51, rtol=1e-5)
    for k in range(24):
        y = fs[k % 2](y)
    np.testing.assert_allclose(np.asarray(y[1]), np.asarray(x[0]) + 51 + 12 * 11, rtol=1e-5)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_no_communication(rng, n):
    """Whole arrays are split over the devices and joined again."""

    def body(x, y):
        i, wg = lax.axis_index("i"), lax.axis_index("wg")
        rows = pl.ds((i * 2 + wg) * 4, 4)
        y[rows] = x[rows] * 2 + lax.axis_index("d")

    x = rng.integers(0, 99, (1, 8 * n, 16)).astype(np.float32)
    kernel = plgpu.kernel(
        lambda x, y: body(x.at[0], y.at[0]),
        out_type=struct((1, 8, 16)),
        interpret=params(),
        grid=(1,),
        grid_names=("i",),
        num_threads=2,
        thread_name="wg",
    )
    mesh = plgpu.DeviceMesh((n,), ("d",))
    spec = plgpu.PartitionSpec(None, "d")
    y = plgpu.spmd(kernel, mesh, spec, spec)(x)
    np.testing.assert_array_equal(y, x * 2 + np.repeat(np.arange(n), 8)[None, :, None])


def test_nested_results(rng):
    def body(x, o):
        o["twice"][...] = x[...] * 2
        o["rest"][0][...] = x[pl.ds(2, 2)]

    out = {"twice": struct((4,)), "rest": (struct((2,)),)}
    mesh, spec = plgpu.DeviceMesh((2,), "d"), plgpu.PartitionSpec("d")
    f = plgpu.spmd(plgpu.kernel(body, out_type=out, interpret=True), mesh, spec, spec)
    x = shards(rng, 2, (4,))
    for found, join in ((f(x), np.concatenate), (f(np.concatenate(x)), lambda y: y)):
        np.testing.assert_array_equal(join(found["twice"]), np.concatenate(x) * 2)
        np.testing.assert_array_equal(join(found["rest"][0]), np.concatenate([a[2:] for a in x]))


# ---- what is refused ----------------------------------------------------------------------------


def call(body, n=2, outs=None, args=(), seed=0, backend="interpret", **options):
    how = params(seed, backend=backend)
    kernel = plgpu.kernel(body, out_type=outs or struct((4,)), interpret=how, **options)
    return plgpu.spmd(kernel, plgpu.DeviceMesh((n,), "x"))(*args)


def test_without_a_mesh():
    def body(y):
        plgpu.remote_ref(y, 0)[...] = y[...]

    with pytest.raises(ValueError, match="no mesh of devices; call it by plgpu.spmd"):
        plgpu.kernel(body, out_type=struct((4,)), interpret=True)()


@pytest.mark.parametrize(
    "use,error,text",
    [
        (lambda y, s: plgpu.remote_ref(y, 2), ValueError, "device_id: the coordinate on 'x' is 2"),
        (lambda y, s: plgpu.remote_ref(y, (0, 1)), ValueError, "one coordinate for each axis"),
        (lambda y, s: plgpu.remote_ref(y, {"z": 0}), ValueError, "'z' is no axis of the mesh"),
        (lambda y, s: plgpu.remote_ref(y, np.int64(1)), TypeError, "int32 scalar, got int64"),
        (lambda y, s: plgpu.remote_ref(y, 1.5), TypeError, "int32 scalar"),
        (lambda y, s: plgpu.remote_ref(y, 1, "mesh"), TypeError, "pl.DeviceIdType"),
        (lambda y, s: plgpu.remote_ref(3, 1), TypeError, "ref must be a ref"),
        (lambda y, s: plgpu.remote_ref(s, 1), ValueError, "ref must be in GMEM"),
        (
            lambda y, s: plgpu.remote_ref(plgpu.multicast_ref(y, "x"), 1),
            ValueError,
            "is a multicast_ref already",
        ),
        (
            lambda y, s: plgpu.multicast_ref(plgpu.remote_ref(y, 1), "x"),
            ValueError,
            "is a remote_ref already",
        ),
        (lambda y, s: plgpu.multicast_ref(y, "z"), ValueError, "all axes of the mesh"),
        (lambda y, s: plgpu.multicast_ref(y, None), TypeError, "must be names of axes, got None"),
        (lambda y, s: plgpu.multicast_ref(y, "x")[...], ValueError, "only copy_smem_to_gmem"),
        (
            lambda y, s: plgpu.multimem_store(jnp.zeros((3,), np.float32), y, "x"),
            ValueError,
            "shape and dtype must be equal",
        ),
        (
            lambda y, s: plgpu.multimem_load_reduce(y, collective_axes="x", reduction_op="max"),
            ValueError,
            "reduction_op 'max' of float32",
        ),
        (
            lambda y, s: plgpu.semaphore_signal(
                pl.get_global(REGULAR), device_id=1, memory_scope="gpu"
            ),
            ValueError,
            "memory_scope='sys'",
        ),
        (
            lambda y, s: pl.semaphore_wait(plgpu.remote_ref(pl.get_global(REGULAR), 1)),
            ValueError,
            "only its own device waits",
        ),
        (lambda y, s: plgpu.ext.as_semaphores(y), TypeError, "int32 is needed"),
    ],
)
def test_wrong_uses(use, error, text):
    def body(y, smem):
        use(y, smem)

    with pytest.raises(error, match=text) as e:
        call(body, scratch_types=[plgpu.SMEM((4,), np.float32)])
    assert "test_remote.py" in str(e.value)


def test_wrong_meshes():
    kernel = plgpu.kernel(
        lambda y: None, out_type=struct((4,)), interpret=True, grid=(1,), grid_names=("x",)
    )
    with pytest.raises(ValueError, match="one name for each axis"):
        plgpu.DeviceMesh((2, 2), ("x",))
    with pytest.raises(ValueError, match="at most 1024 devices, got 1180591620717411303424 of"):
        plgpu.DeviceMesh((2**70,), "x")
    with pytest.raises(ValueError, match="different strings"):
        plgpu.DeviceMesh((2, 2), ("x", "x"))
    with pytest.raises(ValueError, match="2 devices are needed"):
        plgpu.DeviceMesh((2,), ("x",), devices=(0,))
    with pytest.raises(ValueError, match="devices are numbers from 0 on"):
        plgpu.DeviceMesh((1,), ("x",), devices=(-1,))
    with pytest.raises(TypeError, match="axis_names must be strings, got None"):
        plgpu.DeviceMesh((2,), None)
    with pytest.raises(ValueError, match="axis of the kernel and of the mesh"):
        plgpu.spmd(kernel, plgpu.DeviceMesh((2,), "x"))
    with pytest.raises(TypeError, match="plgpu.DeviceMesh"):
        plgpu.spmd(kernel, (2,))


def test_arguments_of_devices_must_agree():
    def body(x, y):
        y[...] = x[...]

    x = np.zeros(4, np.float32)
    text = r"argument 0 differs between device 0 and device 1.*\(4,\) and float32 of shape \(5,\)"
    with pytest.raises(ValueError, match=text):
        call(body, args=([x, np.zeros(5, np.float32)],))
    with pytest.raises(ValueError, match="list of 1 arrays, for 2 devices"):
        call(body, args=([x],))
    with pytest.raises(ValueError, match="2 devices cannot share 5 elements"):
        kernel = plgpu.kernel(body, out_type=struct((4,)), interpret=True)
        spec = plgpu.PartitionSpec("x")
        plgpu.spmd(kernel, plgpu.DeviceMesh(2, "x"), spec)(np.zeros(5, np.float32))
    with pytest.raises(TypeError, match="in_specs must be a plgpu.PartitionSpec.*got 'x'"):
        plgpu.spmd(kernel, plgpu.DeviceMesh(2, "x"), "x")(np.zeros(8, np.float32))
    with pytest.raises(TypeError, match="lower: argument 0 must be .* one device, got a list of 2"):
        plgpu.spmd(kernel, plgpu.DeviceMesh(2, "x")).lower([np.zeros(8, np.float32)] * 2)


@both
@pytest.mark.parametrize("access", ["store", "atomic", "gather", "semaphore_signal"])
def test_out_of_bounds_on_another_device(access, backend):
    """Names whose memory it is, and the device, the block, the thread and the line."""

    def body(where, y):
        sems = pl.get_global(plgpu.SemaphoreType.REGULAR((3,)))

        @pl.when(lax.axis_index("x") == 1)
        def _():
            there = plgpu.remote_ref(y, 0)
            if access == "store":
                there[where[0]] = jnp.zeros((4,), np.float32)
            elif access == "atomic":
                plgpu.atomic_add(there.at[where[0], 0], 1.0)
            elif access == "gather":
                rows = lax.iota(jnp.int32, 128) % 3 + where[0] - 2
                y[0, 0] = jnp.max(there[rows, jnp.zeros_like(rows)])
            else:
                plgpu.semaphore_signal(sems.at[where[0]], device_id=0)

    with pytest.raises(IndexError) as e:
        call(
            body,
            outs=struct((3, 4)),
            args=([np.array([7], np.int32)] * 2,),
            grid=(2,),
            grid_names=("i",),
            backend=backend,
        )
    text = str(e.value)
    assert text.startswith(("load" if access == "gather" else access) + " out of bounds: index ")
    ref = r"'sems' of shape \(3,\)" if access == "semaphore_signal" else r"'y'( of shape \(3, 4\))?"
    assert re.search(rf"{ref} on device \(0,\)", text) and " a view " not in text
    assert (
        re.search(r"device \(1,\), grid point \([01],\), thread 0", text)
        and "test_remote.py:" in text
    )


def to_device(who, x, y, smem, sem):
    plgpu.remote_ref(y, who[0])[...] = x[...]


def from_device(who, x, y, smem, sem):
    y[...] = plgpu.remote_ref(x, who[0])[...]


def copy_to_device(who, x, y, smem, sem):
    smem[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y, who[0]))
    plgpu.wait_smem_to_gmem(0)


def signal_device(who, x, y, smem, sem):
    y[...] = x[...]
    pl.semaphore_signal(sem, device_id=who[0])


@both
@pytest.mark.parametrize("number", [5, -1])
@pytest.mark.parametrize("body", [to_device, from_device, copy_to_device, signal_device])
def test_no_such_device(body, number, backend):
    """The number of a device that a kernel computes is checked like any other index."""
    ref = {from_device: "x", signal_device: "sem"}.get(body, "y")
    text = rf"remote_ref of '{ref}' to device {number} of a mesh of 2 devices \(device \([01],\)"
    with pytest.raises(IndexError, match=text) as e:
        call(
            body,
            args=([np.array([number], np.int32)] * 2, [np.zeros(4, np.float32)] * 2),
            scratch_types=[plgpu.SMEM((4,), np.float32), REGULAR],
            backend=backend,
        )
    assert "test_remote.py" in str(e.value)


@both
@pytest.mark.parametrize("seed", range(4))
def test_deadlock_names_devices(seed, backend):
    """A device leaves without a signal; the other waits for it."""

    def body(y, sem):
        me = lax.axis_index("x")

        @pl.when(me == 0)
        def _():
            pl.semaphore_wait(sem)

    with pytest.raises(plgpu.DeadlockError) as e:
        call(body, scratch_types=[REGULAR], seed=seed, backend=backend)
    waits = {
        "interpret": "semaphore_wait at .*on 'sem' .*\\n.*",
        "emulate": "waits for a semaphore, element 0 of 'sem', to be 1, which is 0, at .*",
    }
    at = rf"device \(0,\), thread 0: {waits[backend]}test_remote.py"
    assert re.search(at, str(e.value)), str(e.value)


@pytest.mark.parametrize(
    "backend", ["interpret", pytest.param("emulate", marks=pytest.mark.exhaustive)]
)
def test_endless_polls_name_devices(backend):
    """A loop of the kernel that reads a semaphore, which nobody signals."""

    def body(y, sem):
        def polls():
            lax.while_loop(lambda n: n < 1, lambda n: pl.semaphore_read(sem), jnp.int32(0))

        pl.when(lax.axis_index("x") == 1)(polls)

    with pytest.raises(plgpu.DeadlockError) as e:
        call(body, scratch_types=[REGULAR], backend=backend)
    polls = {
        "interpret": "keeps polling at .*",
        "emulate": "waits for a value that nobody .*, at .*",
    }
    at = rf"device \(1,\), thread 0: {polls[backend]}test_remote.py"
    assert re.search(at, str(e.value)), str(e.value)


RACES = {
    "no wait": (True, False, False),
    "signal before the store": (False, True, False),
    "copy not awaited": (True, True, True),
}


@both
@pytest.mark.parametrize("kind", RACES)
@pytest.mark.parametrize("seed", range(3))
def test_races_between_devices(kind, seed, backend):
    after, waits, copies = RACES[kind]

    def body(x, y, z, smem, sem):
        other = 1 - lax.axis_index("x")
        signal = lambda: pl.semaphore_signal(sem, device_id=other)  # noqa: E731
        if not after:
            signal()
        if copies:
            smem[...] = x[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y, other))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        else:
            plgpu.remote_ref(y, other)[...] = x[...]
        if after:
            signal()
        if waits:
            pl.semaphore_wait(sem)
        z[...] = y[...]

    x = [np.zeros((4, 64), np.float32)] * 2
    with pytest.raises(plgpu.RaceError) as e:
        call(
            body,
            outs=(struct((4, 64)),) * 2,
            args=(x,),
            seed=seed,
            backend=backend,
            scratch_types=[plgpu.SMEM((4, 64), np.float32), REGULAR],
        )
    text = str(e.value)
    race = plgpu.get_races().races[0]
    assert {race.first.ref, race.second.ref} == {"y"} and race.first.line and race.second.line
    assert "device (0,)" in text and "device (1,)" in text and "test_remote.py" in text


@both
@pytest.mark.parametrize("way", ["plain", "copy"])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_ends_too_early(way, waits, seed, backend):
    """While another device may still write to its memory, which the host may use by then."""

    def body(x, y, smem, sem):
        other = 1 - lax.axis_index("x")
        if way == "plain":
            plgpu.remote_ref(y, other)[...] = x[...]
        else:
            smem[...] = x[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y, other))
            plgpu.wait_smem_to_gmem(0, wait_read_only=not waits)
        if waits or way == "copy":
            pl.semaphore_signal(sem, device_id=other)
            pl.semaphore_wait(sem)

    x = [np.zeros((4, 64), np.float32)] * 2
    scratch = [plgpu.SMEM((4, 64), np.float32), REGULAR]
    options = dict(outs=(struct((4, 64)),), args=(x,), scratch_types=scratch)
    if waits:
        call(body, seed=seed, backend=backend, **options)
        return
    with pytest.raises(
        plgpu.RaceError, match=r"what follows the kernel on device \(.,\)\n.*signal"
    ):
        call(body, seed=seed, backend=backend, **options)
    race = plgpu.get_races().races[0]
    assert race.first.ref == "y" and race.first.line and race.first.file.endswith("test_remote.py")


@both
def test_relay_is_ordered(backend):
    """What device 0 wrote is ordered for device 2 by signals by way of device 1."""

    def body(x, y, z, sem):
        me = lax.axis_index("x")

        @pl.when(me == 0)
        def _():
            plgpu.remote_ref(y, 2)[...] = x[...]
            pl.semaphore_signal(sem, device_id=1)

        @pl.when(me == 1)
        def _():
            pl.semaphore_wait(sem)
            pl.semaphore_signal(sem, device_id=2)

        @pl.when(me == 2)
        def _():
            pl.semaphore_wait(sem)
            z[...] = y[...]

    x = [np.full(4, 7, np.float32)] * 3
    _, z = call(
        body, 3, outs=(struct((4,)),) * 2, args=(x,), scratch_types=[REGULAR], backend=backend
    )
    np.testing.assert_array_equal(z[2], x[0])
