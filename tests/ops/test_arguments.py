"""Arguments of functions of ops that are no arrays, or arrays where options are expected."""

import numpy as np
import pytest

from pallas_mgpu import ops

F16, F32, I32 = np.float16, np.float32, np.int32
X, W = np.ones((5, 64), F16), np.ones((64,), F16)
Q, K = np.ones((1, 3, 2, 64), F16), np.ones((1, 9, 2, 64), F16)
TARGETS, SOMETHING = np.zeros(5, I32), np.zeros((), F32)

CALLS = {
    "matmul": lambda **o: ops.matmul(X, X, transpose_b=True, **o),
    "attention": lambda **o: ops.attention(Q, K, K, **o),
    "attention_decode": lambda **o: ops.attention_decode(Q, K, K, **o),
    "layer_norm_backward": lambda **o: ops.layer_norm_backward(X, X, W, **o),
    "activation_backward": lambda **o: ops.activation_backward(X, X, **o),
    "add_rms_norm": lambda **o: ops.add_rms_norm(X, X, W, **o),
    "cross_entropy": lambda **o: ops.cross_entropy(X, TARGETS, **o),
    "gated_matmul": lambda **o: ops.gated_matmul(X, np.ones((64, 32), F16), **o),
}
WRONG = [
    ("matmul", "bias", True, "an array or None"),
    ("matmul", "bias", "x", "an array or None"),
    ("matmul", "return_product", SOMETHING, "no array"),
    ("attention", "kv_lengths", 3, "an array or None"),
    ("attention", "causal", SOMETHING, "no array"),
    ("attention", "causal", "False", "True or False"),
    ("attention", "mask", np.ones((3, 9), bool), "no array"),
    ("attention_decode", "return_lse", 2, "True or False"),
    ("attention", "dropout", "x", "a number"),
    ("attention_decode", "sinks", 0.5, "an array or None"),
    ("layer_norm_backward", "add", 1, "an array or None"),
    ("layer_norm_backward", "bias", SOMETHING, "no array"),
    ("activation_backward", "bias", SOMETHING, "no array"),
    ("add_rms_norm", "eps", None, "a number"),
    ("cross_entropy", "ignore_index", 1.5, "an int"),
    ("gated_matmul", "transpose_b", SOMETHING, "no array"),
]


@pytest.mark.parametrize("function, name, value, wanted", WRONG)
def test_kinds_of_arguments(function, name, value, wanted):
    with pytest.raises(TypeError, match=f"^{function}: {name} must be {wanted}, got"):
        CALLS[function](**{name: value})
    CALLS[function]()


def test_what_came_is_described():
    with pytest.raises(TypeError, match=r"mask must be no array, got bool of shape \(3, 9\)$"):
        CALLS["attention"](mask=np.ones((3, 9), bool))


def test_numbers_of_numpy_are_numbers():
    o, by_numpy = (CALLS["attention"](causal=kind(1)) for kind in (bool, np.bool_))
    assert (o == by_numpy).all()
    want = CALLS["add_rms_norm"](eps=0.5)
    assert all((a == b).all() for a, b in zip(want, CALLS["add_rms_norm"](eps=np.float32(0.5))))
    assert (CALLS["cross_entropy"](ignore_index=np.int64(0))[0] == 0).all()


def test_numbers_that_do_not_fit():
    with pytest.raises(ValueError, match="ignore_index must fit an int32"):
        CALLS["cross_entropy"](ignore_index=2**31)
    for block in (2.5, np.float64(32)):
        with pytest.raises(ValueError, match="quantize: block must be None"):
            ops.quantize(X, block=block)
    for k in (np.inf, np.nan):
        with pytest.raises(ValueError, match="sample: top_k must be an int from 0"):
            ops.sample(X, np.zeros(1, I32), top_k=k)
