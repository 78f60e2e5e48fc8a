"""docs/names.md says what the code says."""

import names
import numpy as np

from pallas_mgpu import numpy as jnp


def test_table_of_names(recwarn):
    """Not stale; and the way it is made tells missing names from those that are there."""
    assert names.TABLE.read_text(encoding="utf-8") == names.page(), "run python tests/docs/names.py"
    assert names.gap("jnp.exp", "jnp.exp(x)", False) is None
    assert names.gap("plgpu.TMEM", "plgpu.TMEM((128, 128), f32)", False) is None
    assert names.gap("plgpu.remote_ref", None, False) is None
    assert "inline_cuda" in names.gap("plgpu.inline_mgpu", None, False)
    assert "has no" in names.gap("jnp.never", "jnp.never(x)", False)
    assert "has no" in names.gap("pl.never", None, False)


def test_every_name_once():
    listed = [name for _, of in names.read() for name, _, host in of if not host]
    assert len(listed) == len(set(listed)) > 400


def test_classes_of_dtypes():
    for x in (np.float32, "bfloat16", np.dtype("float16")):
        assert jnp.issubdtype(x, jnp.floating) and not jnp.issubdtype(x, jnp.integer)
    assert jnp.issubdtype(np.int8, jnp.integer) and jnp.issubdtype(np.int8, jnp.int8)
