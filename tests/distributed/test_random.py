"""Random programs on meshes: right ones give the same on the interpreter and the emulated machine,
and what NumPy says; wrong ones are refused by both, with the same exception. A third are wrong.

A program is a list of rounds. In each, every device passes an array to the one that stands some
places on: it writes a buffer of that device by stores, a copy of TMA or atomic adds, or it writes
its own buffer and the other device fetches it by a copy of TMA. At least one round is a copy to or
from the other device. The device that is to get the array waits for a signal and adds the array to
its result. Buffers are used again two rounds later, after an answer of all devices that read them,
so signals depend on each other across devices.

`PYTHONPATH=tests python tests/distributed/test_random.py 1000` runs the programs 0 to 999 both ways
and prints how many there were of each kind and whether the verdicts agree."""

import collections
import sys
import time

import numpy as np
import pytest
from distributed.meshes import Mesh, shards, struct

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

REGULAR = plgpu.SemaphoreType.REGULAR
MISTAKES = ["no signal", "early signal", "no wait", "no answer", "copy in flight"]
HOWS = ["store", "add", "copy", "fetch"]
SHAPE = (4, 64)


def mistake_of(seed):
    """That of program `seed`; None: it is right."""
    return MISTAKES[seed // 3 % len(MISTAKES)] if seed % 3 == 2 else None


class Program:
    """rounds: (places to the device that gets it, how it gets it, factor)."""

    def __init__(self, seed, mistake=None):
        rng = np.random.default_rng(seed)
        self.n = int(rng.integers(2, 5))
        count = int(rng.integers(3, 6))
        self.rounds = [
            (int(rng.integers(1, self.n)), HOWS[rng.integers(len(HOWS))], int(rng.integers(1, 4)))
            for _ in range(count)
        ]
        self.mistake, self.at = mistake, int(rng.integers(0, count))
        if mistake == "no answer":
            self._use_again(rng)
        copied = self.at if mistake == "copy in flight" else int(rng.integers(0, count))
        if mistake == "copy in flight" or not any(h in HOWS[2:] for _, h, _ in self.rounds):
            how = "copy" if mistake else HOWS[rng.integers(2, 4)]
            self.rounds[copied] = (self.rounds[copied][0], how, self.rounds[copied][2])

    def _use_again(self, rng):
        """Two rounds later, by a device that the reader has not signalled in between."""
        self.n = max(self.n, 3)
        self.at = int(rng.integers(0, len(self.rounds) - 2))
        for k in (self.at, self.at + 2):
            places, how, factor = self.rounds[k]
            self.rounds[k] = places, "copy" if how == "fetch" else how, factor
        second, third = self.rounds[self.at + 1 : self.at + 3]
        if (second[0] + third[0]) % self.n == 0:
            self.rounds[self.at + 2] = (third[0] % (self.n - 1) + 1, *third[1:])

    def wrong(self, k, mistake):
        return self.mistake == mistake and self.at == k

    def send(self, k, x, to, smem):
        _, how, factor = self.rounds[k]
        if how in ("store", "fetch"):
            to[...] = x[...] * factor
        elif how == "add":
            to[...] = jnp.zeros(SHAPE, np.float32)
            plgpu.atomic_add(to, x[...] * factor)
        else:
            smem[...] = x[...] * factor
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.wrong(k, "copy in flight"))

    def got(self, k, me, buffer, smem, barrier):
        """What a device was passed, after the signal."""
        places, how, _ = self.rounds[k]
        if how != "fetch":
            return buffer[...]
        source = plgpu.remote_ref(buffer, (me + self.n - places) % self.n)
        plgpu.copy_gmem_to_smem(source, smem, barrier)
        plgpu.barrier_wait(barrier)
        return smem[...]

    def body(self, x, y, buffers, smem, barrier, arrived, read):
        me = lax.axis_index("d")
        total = jnp.zeros(SHAPE, np.float32)
        for k, (places, how, _) in enumerate(self.rounds):
            to = (me + places) % self.n
            half = k % 2
            if k >= 2 and not self.wrong(k - 2, "no answer"):
                # everyone has read the round before last's buffers
                pl.semaphore_wait(read.at[half], self.n)
            if self.wrong(k, "early signal"):
                pl.semaphore_signal(arrived.at[k], device_id=to)
            target = buffers.at[half]
            self.send(k, x, target if how == "fetch" else plgpu.remote_ref(target, to), smem)
            if not self.wrong(k, "early signal") and not self.wrong(k, "no signal"):
                pl.semaphore_signal(arrived.at[k], device_id=to)
            if not self.wrong(k, "no wait"):
                pl.semaphore_wait(arrived.at[k])
            total = total + self.got(k, me, target, smem, barrier) * (k + 1)
            if k + 2 < len(self.rounds) and not self.wrong(k, "no answer"):
                for d in range(self.n):
                    pl.semaphore_signal(read.at[half], device_id=d)
        # a device may fetch from this one until it says that it has
        for d in range(self.n):
            pl.semaphore_signal(read.at[2], device_id=d)
        pl.semaphore_wait(read.at[2], self.n)
        y[...] = total

    def run(self, x, way, seeds):
        def kernel(x, y, buffers, smem, barrier, arrived, read):
            self.body(x, y, buffers, smem, barrier, arrived, read)

        scratch = [plgpu.SMEM(SHAPE, np.float32), plgpu.Barrier()]
        scratch += [REGULAR((len(self.rounds),)), REGULAR((3,))]
        mesh = Mesh((self.n,), "d", way)
        outs = (struct(SHAPE), struct((2, *SHAPE)))
        return mesh(kernel, outs, x, seeds=seeds, compiles=False, scratch_types=scratch)[0]

    def want(self, x):
        total = [np.zeros(SHAPE, np.float32) for _ in x]
        for k, (places, _, factor) in enumerate(self.rounds):
            for d in range(self.n):
                total[d] = total[d] + x[(d - places) % self.n] * factor * (k + 1)
        return total


def operands(seed, n):
    return [np.round(a * 8) for a in shards(np.random.default_rng(seed), n, SHAPE)]


def run(seed, way, seeds):
    """Nothing, where program `seed` gives what NumPy says; else the error, which must be the one of
    its mistake and name a device and a line."""
    program = Program(seed, mistake_of(seed))
    x = operands(seed, program.n)
    if not program.mistake:
        np.testing.assert_array_equal(program.run(x, way, seeds), program.want(x))
        return None
    expected = plgpu.DeadlockError if program.mistake == "no signal" else plgpu.RaceError
    with pytest.raises(expected) as e:
        program.run(x, way, seeds)
    assert "device (" in str(e.value) and "test_random.py" in str(e.value)
    return expected.__name__


def cases(count, long, many):
    """Seeds of a run, of one with --long, and of an exhaustive one."""
    late = lambda s: pytest.mark.long if s < long else pytest.mark.exhaustive  # noqa: E731
    return [*range(count), *(pytest.param(s, marks=late(s)) for s in range(count, many))]


@pytest.mark.parametrize("seed", cases(24, 120, 1000))
def test_on_the_interpreter(seed):
    run(seed, "interpret", (seed,) if mistake_of(seed) else (seed, seed + 1))


@pytest.mark.parametrize("seed", cases(9, 60, 1000))
def test_on_the_emulated_machine(seed):
    run(seed, "host", (seed,))


@pytest.mark.parametrize("seed", cases(6, 100, 100))
@pytest.mark.gpu
def test_right_programs_on_gpus(seed):
    program = Program(seed)
    x = operands(seed, program.n)
    np.testing.assert_array_equal(program.run(x, "cuda", (seed,)), program.want(x))


def verdict(seed, way):
    """What the error of `run` is called, or what it failed to be."""
    try:
        return run(seed, way, (seed,)) or "right"
    except (AssertionError, RuntimeError, pytest.fail.Exception) as e:
        return f"unexpected: {type(e).__name__}: {e}"


def main(count):
    start, found, devices = time.perf_counter(), collections.Counter(), collections.Counter()
    failed = 0
    for seed in range(count):
        program = Program(seed, mistake_of(seed))
        both = [verdict(seed, way) for way in ("interpret", "host")]
        found[program.mistake or "right"] += 1
        devices[program.n] += 1
        if both[0] != both[1] or both[0].startswith("unexpected"):
            failed += 1
            print(f"program {seed} ({program.mistake}): {both}", flush=True)
        if seed % 100 == 99:
            print(f"{seed + 1} programs, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"programs: {dict(found)}; of how many devices: {dict(sorted(devices.items()))}")
    print(f"{count - failed} as expected and alike both ways, {failed} not")
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])) > 0)
