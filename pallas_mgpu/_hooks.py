"""What the extension calls in Python, registered once when the package is imported."""

from . import (
    _clipped,
    _core,
    _emulate,
    _frameworks,
    _introspect,
    _notebook,
    _races,
    _spills,
    _timeline,
    _types,
)
from ._jnp import index, members, refs


def register():
    """Give the extension its hooks, and `Array` its members."""
    _core.set_hooks(
        emulate=_emulate.emulation,
        html=_notebook.html,
        index_array=index.index,
        index_ref=refs.at,
        memory_space=_types.MemorySpace,
        overhanging=_clipped.overhanging,
        pickle=_introspect.reduce,
        races=_races.finish,
        ref_transforms=_types.ref_transforms,
        spills=_spills.by_line,
        tidy=_notebook.tidy,
        timeline=_timeline.finish,
        torch=_frameworks.torch_call,
    )
    members.add_members()
