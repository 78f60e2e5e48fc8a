"""What _symmetric.py takes from nvshmem4py, with the package itself as far as it goes without GPUs.
Its use by two ranks is in fake_ranks.py, with a stand-in."""

import inspect

import numpy as np
import pytest

core = pytest.importorskip("nvshmem.core")


def test_functions():
    for f, names in (
        (core.init, ["device", "uid", "rank", "nranks", "initializer_method"]),
        (core.buffer, ["size"]),
        (core.get_peer_buffer, ["buffer", "pe"]),
        (core.get_multicast_buffer, ["team", "buffer"]),
        (core.barrier_all, ["stream"]),
        (core.free, ["buffer"]),
        (core.NvshmemStream, ["pt_stream"]),
    ):
        assert set(names) <= set(inspect.signature(f).parameters), f
    assert core.Teams.TEAM_WORLD == 0
    assert issubclass(core.NvshmemError, Exception) and issubclass(core.NvshmemInvalid, Exception)


def test_states_and_unique_ids():
    """An id travels as bytes."""
    if int(core.init_status()) >= int(core.InitStatus.STATUS_IS_INITIALIZED):
        pytest.skip("nvshmem.core runs already")
    unique, other = core.get_unique_id(), core.get_unique_id(empty=True)
    raw = unique._data.tobytes()
    assert raw != other._data.tobytes()
    other._data.view(np.int8)[:] = np.frombuffer(raw, np.int8)
    assert raw == other._data.tobytes()
    with pytest.raises(core.NvshmemInvalid, match="not initialized"):
        core.buffer(256)
