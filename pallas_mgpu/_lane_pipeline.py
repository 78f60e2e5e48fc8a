"""`emit_pipeline` on GPUs without TMA and barriers: sm_80, sm_86, sm_89.

Inputs are copied by cp.async. After the body of each step every input has one copy, of the step
that its released slot is for; steps that do not exist are empty groups. So a wait for all but the
latest groups finds the copies of a step, by counting: of an input with n slots, n - delay_release -
1 later steps are in flight, and in each of them a group of every input. What comes before the first
step follows the same order. Outputs are stored by the lanes, after the body, and need one slot."""

from . import _core, _ops
from ._clipped import window
from ._control import fori_loop, scoped, when
from ._schedule import unravel


def runs_here():
    """Is the kernel traced for such a GPU?"""
    return "CP_ASYNC" in _core.target()["features"]


def run_steps(body, grid, steps, ins, outs, init_carry, names, moved, traced):
    """Run the pipeline of checked operands, whose slots are set. ``names``: of their buffers;
    ``moved(o, now, s)``: does the block of an output change between steps s-1 and s?
    ``traced``: called in the scope of the buffers after the body has been traced."""
    inputs, stored = [o for o in ins if o.staged], [o for o in outs if o.staged]
    for o in stored:
        o.slots = 1
    once = [o for o in inputs if o.spec.pipeline_mode is not None and not o.variant]
    rings = [o for o in inputs if o not in once]
    ahead = {id(o): o.slots - o.spec.delay_release for o in rings}
    pending = (min(ahead.values()) - 1) * len(rings) if rings else 0

    def run(*refs):
        buffers = dict(zip(map(id, inputs + stored), refs))

        def fetch(o, step, more, slot):
            _ops.copy_gmem_to_smem(
                o.slice(o.index(unravel(step, grid))),
                buffers[id(o)].at[slot],
                oob_mode=o.spec.oob_fill_mode,
                predicate=more,
            )

        def store(o, step):
            there = window(o.ref, o.entries(o.index(unravel(step, grid))))
            there[...] = buffers[id(o)].at[0][...]

        def one_step(s, carry):
            indices = unravel(s, grid)
            if inputs:
                _ops.wait_gmem_to_smem(pending)
            for o in ins + outs:
                o.given = o.in_place(indices)
                if o.staged:
                    o.given = buffers[id(o)].at[s % o.slots if o.slots > 1 else 0]
            refs = [o.given for o in ins + outs]
            if init_carry is None:
                body(indices, *refs)
            else:
                carry = body(indices, *refs, carry)
            for o in stored:
                if o.variant:
                    first = (s == 0) | moved(o, o.index(indices), s)
                    when(first)(lambda o=o: store(o, s))
            for o in rings:
                step = s + ahead[id(o)]
                fetch(o, step, step < steps, step % o.slots)
            return carry

        for o in once:
            fetch(o, _core.as_array(0, "int32"), None, 0)
        most = max(ahead.values(), default=0)
        for t in range(most):  # the steps that come after step t - most
            for o in rings:
                step = t - most + ahead[id(o)]
                if step >= 0:
                    step = _core.as_array(step, "int32")
                    fetch(o, step, step < steps, step % o.slots)
        carry = fori_loop(0, steps, one_step, init_carry)
        if traced is not None:
            traced()
        if inputs:
            _ops.wait_gmem_to_smem(0)

        def finish():
            last = _core.as_array(steps - 1, "int32")
            for o in stored:
                if not o.variant:
                    store(o, last)
                    continue
                # what is revisited at the last step was stored before
                again = (last > 0) & ~moved(o, o.index(unravel(last, grid)), last)
                when(again)(lambda o=o: store(o, last))

        if stored and isinstance(steps, int):
            finish()
        elif stored:
            when(steps > 0)(finish)
        return carry

    named = [names.get(id(o)) for o in inputs + stored]
    return scoped(run, [o.buffer() for o in inputs + stored], {}, named, ())
