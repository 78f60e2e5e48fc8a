"""Pytrees: nested containers of leaves, wherever values cross an API.

Containers: tuple, list, dict (by sorted key), OrderedDict, namedtuple, ``functools.partial``,
``None`` (no leaves) and classes registered here. Everything else is a leaf. A structure is a
hashable tuple ``(kind, metadata, children)``, or ``LEAF``.
"""

from collections import OrderedDict
from functools import partial

__all__ = [
    "LEAF",
    "children",
    "count",
    "describe",
    "flatten",
    "leaves",
    "map",
    "register_dataclass",
    "register_pytree_node",
    "register_pytree_node_class",
    "structure",
    "unflatten",
]

LEAF = "*"
_NONE = ("none", None, ())
_registry: dict[type, tuple] = {}


def register_pytree_node(cls, flatten_func, unflatten_func):
    """Make ``cls`` a container: ``flatten_func(x) -> (children, hashable)`` and its inverse
    ``unflatten_func(hashable, children)``."""
    _registry[cls] = (flatten_func, unflatten_func)


def register_pytree_node_class(cls):
    """Class decorator for classes with ``tree_flatten()`` and ``tree_unflatten(aux, children)``."""
    register_pytree_node(cls, lambda x: x.tree_flatten(), cls.tree_unflatten)
    return cls


def register_dataclass(cls, data_fields=None, meta_fields=()):
    """Make a dataclass a container of its ``data_fields``; ``meta_fields`` belong to the
    structure."""
    data = tuple(data_fields if data_fields is not None else cls.__dataclass_fields__)
    meta = tuple(meta_fields)

    def flatten_one(x):
        return [getattr(x, f) for f in data], tuple(getattr(x, f) for f in meta)

    def unflatten_one(aux, children):
        return cls(**dict(zip(data, children)), **dict(zip(meta, aux)))

    register_pytree_node(cls, flatten_one, unflatten_one)
    return cls


def _children(x):
    """``(kind, metadata, children)`` of a container, None of a leaf."""
    cls = type(x)
    if cls is tuple:
        return "tuple", None, x
    if cls is list:
        return "list", None, x
    if x is None:
        return "none", None, ()
    if cls is dict:
        try:
            keys = tuple(sorted(x))
        except TypeError:
            raise TypeError(f"a pytree needs dict keys that sort, got {tuple(x)}") from None
        return "dict", keys, [x[k] for k in keys]
    if cls is OrderedDict:
        return "odict", tuple(x), list(x.values())
    if cls is partial:
        keys = tuple(sorted(x.keywords))
        return "partial", (x.func, len(x.args), keys), [*x.args, *(x.keywords[k] for k in keys)]
    if cls in _registry:
        children, aux = _registry[cls][0](x)
        return "node", (cls, aux), children
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return "namedtuple", cls, x
    return None


def _rebuild(kind, meta, children):
    if kind == "tuple":
        return tuple(children)
    if kind == "list":
        return list(children)
    if kind == "none":
        return None
    if kind == "dict":
        return dict(zip(meta, children))
    if kind == "odict":
        return OrderedDict(zip(meta, children))
    if kind == "partial":
        func, n, keys = meta
        return partial(func, *children[:n], **dict(zip(keys, children[n:])))
    if kind == "namedtuple":
        return meta(*children)
    cls, aux = meta
    return _registry[cls][1](aux, children)


def flatten(tree, is_leaf=None):
    """``(leaves, structure)``."""
    leaves = []

    def walk(x):
        if is_leaf is not None and is_leaf(x):
            leaves.append(x)
            return LEAF
        node = _children(x)
        if node is None:
            leaves.append(x)
            return LEAF
        kind, meta, children = node
        return kind, meta, tuple([walk(c) for c in children])

    return leaves, walk(tree)


def unflatten(structure, leaves):
    """The inverse of :func:`flatten`. ValueError if the number of leaves differs."""
    it = iter(leaves)

    def build(s):
        if s == LEAF:
            return next(it)
        kind, meta, children = s
        return _rebuild(kind, meta, [build(c) for c in children])

    try:
        out = build(structure)
    except (StopIteration, RuntimeError):
        raise ValueError(f"too few leaves for the structure {describe(structure)}") from None
    if next(it, LEAF) is not LEAF:
        raise ValueError(f"too many leaves for the structure {describe(structure)}")
    return out


def leaves(tree, is_leaf=None):
    """The leaves, left to right."""
    return flatten(tree, is_leaf)[0]


def structure(tree, is_leaf=None):
    """The structure, a hashable value."""
    return flatten(tree, is_leaf)[1]


def count(s):
    """The number of leaves of a structure."""
    return 1 if s == LEAF else sum([count(c) for c in s[2]])


def leaf_names(s):
    """What each leaf is called by the container that holds it: the field of a named tuple, the key
    of a dict; None elsewhere."""
    if s == LEAF:
        return [None]
    kind, meta, parts = s
    keys = meta._fields if kind == "namedtuple" else meta if kind in ("dict", "odict") else ()
    names = []
    for k, part in enumerate(parts):
        key = keys[k] if keys else None
        named = part == LEAF and isinstance(key, str) and key.isidentifier()
        names += [key] if named else leaf_names(part)
    return names


def children(tree):
    """The children of a container as a list, None of a leaf."""
    node = _children(tree)
    return None if node is None else list(node[2])


def map(f, tree, *rest, is_leaf=None):  # noqa: A001 - the name users know
    """Apply ``f`` leaf by leaf. ValueError where the structures differ."""
    first, s = flatten(tree, is_leaf)
    columns = [first]
    for other in rest:
        more, s2 = flatten(other, is_leaf)
        if s2 != s:
            raise ValueError(f"trees differ in structure: {describe(s)} and {describe(s2)}")
        columns.append(more)
    return unflatten(s, [f(*xs) for xs in zip(*columns)])


def describe(s):
    """Text of a structure for messages."""
    if s == LEAF:
        return LEAF
    kind, meta, children = s
    inner = [describe(c) for c in children]
    if kind == "tuple":
        return "(" + ", ".join(inner) + ("," if len(inner) == 1 else "") + ")"
    if kind == "list":
        return "[" + ", ".join(inner) + "]"
    if kind == "none":
        return "None"
    if kind in ("dict", "odict"):
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(meta, inner)) + "}"
    return f"{kind}(" + ", ".join(inner) + ")"


def __dir__():
    return sorted(__all__)
