"""The array functions of kernel bodies: everything with a NumPy signature, the functions of `lax`
on arrays, and the activations of `nn`.

`pallas_mgpu.numpy`, `lax` and `nn` re-export what the modules here list in ``__all__``. Each module
uses only those before it:

- `base`: operands, axes, element numbers, and the decorators that send host arrays to NumPy
- `shape`: permute, join, split, repeat and pad
- `array`: dtypes and functions that make arrays
- `elementwise`: arithmetic, comparisons and special functions
- `index`: index expressions on arrays and on refs
- `reduce`: reductions, scans and statistics
- `sort`: sorting, order statistics and searches
- `linalg`, `einsum`: products
- `lax`, `activations`: the signatures of `lax` and of `nn`
- `members`: the table of the members of `Array`

Functions build the graph of the kernel that is being traced. Those of `jnp` also accept host
arrays, which NumPy computes in 32 bits.
"""
