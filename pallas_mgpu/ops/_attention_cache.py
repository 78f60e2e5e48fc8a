"""Arguments of attention that describe keys and values: lengths and page tables, both read when the
kernel runs, and the scales of 8-bit elements."""

from typing import NamedTuple

import numpy as np

from ._decode_shares import check_array, check_pages, check_scale

_NARROW = ("int8", "float8_e4m3fn")
DTYPES = (
    "float16 or all bfloat16 or, on Hopper, all float8_e4m3fn, or q of 16 bits and k and v both"
    " int8 or both float8_e4m3fn"
)


class Cache(NamedTuple):
    """The arrays, or None."""

    kv_lengths: object = None
    q_lengths: object = None
    page_table: object = None
    q_scale: object = None
    k_scale: object = None
    v_scale: object = None

    @property
    def given(self):
        return [n for n in self._fields if getattr(self, n) is not None]

    def check(self, q, k, v, target, others):
        """ValueError or NotImplementedError for arrays that do not fit. target: the name of the
        GPU; others: names of options that exclude lengths and pages."""
        given, narrow = self.given, k.dtype.itemsize == 1
        if (given or narrow) and target != "sm_90a":
            what = ", ".join(f"{n}=" for n in given) or f"k and v of {k.dtype}"
            raise NotImplementedError(
                f"attention: {what} needs Hopper (sm_90a), got {target}; use cu_seqlens_q and"
                " cu_seqlens_k, and k and v of 16 bits"
            )
        if others and any(n in given for n in ("kv_lengths", "q_lengths", "page_table")):
            raise ValueError(
                f"attention: {', '.join(given)} with {', '.join(others)}: lengths and pages are"
                " those of batch entries"
            )
        for n in ("kv_lengths", "q_lengths"):
            if n in given:
                check_array("attention", n, getattr(self, n), (q.shape[0],), np.int32)
        if self.page_table is not None:
            check_pages("attention", q, k, self.page_table)
        heads = {"q_scale": (q, q.shape[2]), "k_scale": (k, k.shape[2]), "v_scale": (v, k.shape[2])}
        for n, (x, count) in heads.items():
            check_scale("attention", n, getattr(self, n), x, (q.shape[0], count))
        if narrow and any(x.shape[3] % 16 for x in (q, v)):
            raise NotImplementedError(
                "attention: with k and v of 8 bits their last dims must be multiples of 16, got"
                f" {k.shape[3]} and {v.shape[3]}; pad q, k and v with zeros and give scale"
            )

    def keys(self, k):
        """How many of each batch entry there is room for."""
        return k.shape[1] if self.page_table is None else self.page_table.shape[1] * k.shape[1]

    @property
    def is_open(self):
        """Are lengths read when the kernel runs?"""
        return self.kv_lengths is not None or self.q_lengths is not None

    def of(self, problem, k):
        """The problem with such keys and values."""
        page = 0 if self.page_table is None else k.shape[1]
        scales = self.q_scale, self.k_scale, self.v_scale
        return problem._replace(
            keys=self.keys(k),
            kv_dtype=None if k.dtype == problem.dtype else k.dtype,
            page=page,
            lengths=(self.kv_lengths is not None, self.q_lengths is not None),
            scales=tuple(0 if a is None else len(a.shape) for a in scales),
        )


def is_narrow(q, k, v):
    """Are these dtypes with 8 bits that attention takes?"""
    if k.dtype != v.dtype or k.dtype.name not in _NARROW:
        return False
    same = q.dtype == k.dtype and k.dtype.name != "int8"
    return same or q.dtype.name in ("float16", "bfloat16")
