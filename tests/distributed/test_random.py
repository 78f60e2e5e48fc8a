"""Random programs on meshes: right ones give the same on the interpreter and the emulated machine,
and what NumPy says; of each kind of mistake, both refuse every seed. With the long ones these are
1,000 programs on both.

A program is a list of rounds. In each, every device writes a buffer of one that stands some places
on, by stores, a copy of TMA or atomic adds; signals it; waits; and adds what it got to its result.
Buffers are used again two rounds later, after an answer of the device that read them, so signals
depend on each other across devices."""

import numpy as np
import pytest
from distributed.meshes import Mesh, shards, struct

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

REGULAR = plgpu.SemaphoreType.REGULAR
MISTAKES = ["no signal", "early signal", "no wait", "no answer", "copy in flight"]
SHAPE = (4, 64)


class Program:
    """rounds: (places to the device that gets it, how it gets it, factor)."""

    def __init__(self, seed, mistake=None):
        rng = np.random.default_rng(seed)
        self.n = int(rng.integers(2, 5))
        count = int(rng.integers(3, 6))
        hows = ["store", "copy", "add"]
        self.rounds = [
            (int(rng.integers(1, self.n)), hows[rng.integers(3)], int(rng.integers(1, 4)))
            for _ in range(count)
        ]
        self.mistake, self.at = mistake, int(rng.integers(0, count))
        if mistake == "no answer":
            self._use_again(rng)
        if mistake == "copy in flight":
            self.rounds[self.at] = (self.rounds[self.at][0], "copy", self.rounds[self.at][2])

    def _use_again(self, rng):
        """Two rounds later, by a device that the reader has not signalled in between."""
        self.n = max(self.n, 3)
        self.at = int(rng.integers(0, len(self.rounds) - 2))
        second, third = self.rounds[self.at + 1 : self.at + 3]
        if (second[0] + third[0]) % self.n == 0:
            self.rounds[self.at + 2] = (third[0] % (self.n - 1) + 1, *third[1:])

    def wrong(self, k, mistake):
        return self.mistake == mistake and self.at == k

    def send(self, k, x, to, smem):
        _, how, factor = self.rounds[k]
        if how == "store":
            to[...] = x[...] * factor
        elif how == "add":
            to[...] = jnp.zeros(SHAPE, np.float32)
            plgpu.atomic_add(to, x[...] * factor)
        else:
            smem[...] = x[...] * factor
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.wrong(k, "copy in flight"))

    def body(self, x, y, buffers, smem, arrived, read):
        me = lax.axis_index("d")
        total = jnp.zeros(SHAPE, np.float32)
        for k, (places, _, _) in enumerate(self.rounds):
            to = (me + places) % self.n
            half = k % 2
            if k >= 2 and not self.wrong(k - 2, "no answer"):
                # everyone has read what the round before last put here
                pl.semaphore_wait(read.at[half], self.n)
            if self.wrong(k, "early signal"):
                pl.semaphore_signal(arrived.at[k], device_id=to)
            self.send(k, x, plgpu.remote_ref(buffers.at[half], to), smem)
            if not self.wrong(k, "early signal") and not self.wrong(k, "no signal"):
                pl.semaphore_signal(arrived.at[k], device_id=to)
            if not self.wrong(k, "no wait"):
                pl.semaphore_wait(arrived.at[k])
            total = total + buffers[half] * (k + 1)
            if k + 2 < len(self.rounds) and not self.wrong(k, "no answer"):
                for d in range(self.n):
                    pl.semaphore_signal(read.at[half], device_id=d)
        y[...] = total

    def run(self, x, way, seeds):
        def kernel(x, y, buffers, smem, arrived, read):
            self.body(x, y, buffers, smem, arrived, read)

        scratch = [plgpu.SMEM(SHAPE, np.float32), REGULAR((len(self.rounds),)), REGULAR((2,))]
        mesh = Mesh((self.n,), "d", way)
        outs = (struct(SHAPE), struct((2, *SHAPE)))
        return mesh(kernel, outs, x, seeds=seeds, compiles=False, scratch_types=scratch)[0]

    def want(self, x):
        total = [np.zeros(SHAPE, np.float32) for _ in x]
        for k, (places, _, factor) in enumerate(self.rounds):
            for d in range(self.n):
                total[d] = total[d] + x[(d - places) % self.n] * factor * (k + 1)
        return total


def cases(count, long, many):
    """Seeds of a run, of one with --long, and of an exhaustive one."""
    late = lambda s: pytest.mark.long if s < long else pytest.mark.exhaustive  # noqa: E731
    return [*range(count), *(pytest.param(s, marks=late(s)) for s in range(count, many))]


@pytest.mark.parametrize("seed", cases(12, 300, 700))
def test_right_programs(rng, seed):
    program = Program(seed)
    x = [np.round(a * 8) for a in shards(rng, program.n, SHAPE)]
    got = program.run(x, "interpret", (seed, seed + 1))
    np.testing.assert_array_equal(got, program.want(x))


@pytest.mark.parametrize("seed", cases(3, 120, 700))
def test_right_programs_on_the_emulated_machine(rng, seed):
    program = Program(seed)
    x = [np.round(a * 8) for a in shards(rng, program.n, SHAPE)]
    np.testing.assert_array_equal(program.run(x, "host", (seed,)), program.want(x))


@pytest.mark.parametrize("way", ["interpret", "host"])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", cases(1, 20, 60))
def test_wrong_programs_are_refused(rng, seed, mistake, way):
    program = Program(1000 + seed, mistake)
    x = shards(rng, program.n, SHAPE)
    expected = plgpu.DeadlockError if mistake == "no signal" else plgpu.RaceError
    with pytest.raises(expected) as e:
        program.run(x, way, (seed,))
    assert "device (" in str(e.value) and "test_random.py" in str(e.value)


@pytest.mark.parametrize("seed", cases(6, 100, 100))
@pytest.mark.gpu
def test_right_programs_on_gpus(rng, seed):
    program = Program(seed)
    x = [np.round(a * 8) for a in shards(rng, program.n, SHAPE)]
    np.testing.assert_array_equal(program.run(x, "cuda", (seed,)), program.want(x))
