"""Loops of more iterations than `plgpu.estimate` simulates.

Once a machine has simulated EVENTS, threads no longer wait for each other: each runs to its end,
and leaves out iterations on its way. Those are taken to last as long as the last half of the
iterations before, or, where these are few, as those of the loop's last run. They are added up in
`rest`. They are no time of the machine, whose engines would be busy until then.

How often a `while` loop goes on is not known beforehand. If it ends with a counter of the launch,
the counter runs faster from then on (`Place.next`). Otherwise it ends as soon as another thread of
the block has left out iterations of an outer `for` loop, which does its share of the same work."""

EVENTS = 400_000  # iterations and waits
MOST = 10  # times as many are simulated where nothing can be left out
FEW = 8  # iterations whose time says little of that of others


class Loop:
    """One loop of a thread while it runs. low, high: of a `for` loop; outer: a `for` loop that is
    in no `while` loop."""

    __slots__ = (
        "block", "high", "key", "low", "marks", "measured", "outer", "place", "rest", "sm",
    )  # fmt: skip

    def __init__(self, sm, key, low, high, rest, place, block, outer):
        self.sm, self.key, self.low, self.high = sm, key, low, high
        self.rest, self.place, self.block, self.outer = rest, place, block, outer
        self.marks, self.measured = (), None
        sm.known += outer

    def _mark(self, done, t):
        if done & (done - 1) == 0:  # 0, 1, 2, 4, 8, ...
            self.marks = (*self.marks[-1:], (done, t + self.rest[0]))

    def _last_half(self, done, t):
        """(a number of iterations, their cycles)"""
        since, then = self.marks[0]
        found = done - since, t + self.rest[0] - then
        return found if found[0] >= FEW else max(self.sm.loops.get(self.key, found), found)

    def _leave_out(self, left, n, cycles):
        self.rest[0] += left * cycles / n
        self.sm.left_out[self.place] = max(self.sm.left_out.get(self.place, 0), left)

    def is_over(self, step, t):
        """Called before each iteration."""
        done = step - self.low
        self._mark(done, t)
        self.sm.count(t, self.place)
        if not self.sm.over or not done:
            return False
        n, cycles = self._last_half(done, t)
        if max(n, done) < FEW:
            return False
        self._leave_out(self.high - step, n, cycles)
        self.block.told |= self.outer
        self.sm.loops[self.key] = n, cycles
        self.low = self.high  # so that `end` measures nothing
        return True

    def goes_on(self, done, t):
        """The same for a `while` loop."""
        if not self.measured:
            self._mark(done, t)
        self.sm.count(t, self.place)
        block = self.block
        if self.sm.over and block.skipped and done:
            self.measured = self.measured or self._last_half(done, t)
            self._leave_out(block.skipped, *self.measured)
        block.skipped = 0
        return not block.told

    def end(self, step, t):
        self.sm.known -= self.outer
        done = step - self.low
        if done > 0:
            self.sm.loops[self.key] = self._last_half(done, t)
