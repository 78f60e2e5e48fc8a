"""What the extension calls in Python, registered once when the package is imported."""

from . import _clipped, _core, _frameworks, _introspect, _sizes, _types
from ._jnp import index, members, refs
from ._names import later


def register():
    """Give the extension its hooks, and `Array` its members."""
    _core.set_hooks(
        emulate=later("_emulate", "emulation"),
        export=later("_export", "export"),
        html=later("_notebook", "html"),
        index_array=index.index,
        index_ref=refs.at,
        memory_space=_types.MemorySpace,
        overhanging=_clipped.overhanging,
        pickle=_introspect.reduce,
        races=later("_races", "finish"),
        ref_transforms=_types.ref_transforms,
        size=_sizes.of_number,
        spills=later("_spills", "by_line"),
        tidy=later("_notebook", "tidy"),
        timeline=later("_timeline", "finish"),
        torch=_frameworks.torch_call,
    )
    members.add_members()
