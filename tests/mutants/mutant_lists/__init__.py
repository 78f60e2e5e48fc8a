"""What tests/mutants/mutants.py breaks, and the tests that should notice it first."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
CUDA, DEVICE, PASSES = "csrc/cuda", "csrc/cuda/device", "csrc/passes"
PIPELINE = "pallas_mgpu/_pipeline.py"

ARRAYS, CONTROL, MEMORY = (
    "arrays/test_arrays.py",
    "language/test_control.py",
    "memory/test_memory.py",
)
PIPES, DOCUMENTS, HOST = (
    "pipelines/test_pipeline.py",
    "docs/test_documents.py",
    "compiler/test_host.py",
)
TEXT, CATALOGUE, ERRORS = (
    "compiler/test_text.py",
    "compiler/test_catalogue.py",
    "language/test_errors.py",
)
ACCESSES = "compiler/test_accesses.py"
RUNTIME, SURFACE = "runtime/test_runtime.py", "language/test_surface.py"
COMPILERS = "compiler/test_compilers.py"
CLUSTER, SPECIALISED, WS = (
    "memory/test_cluster.py",
    "pipelines/test_specialised.py",
    "pipelines/test_ws_steps.py",
)
SECTIONS, SCHEDULE = "pipelines/test_ordered_section.py", "pipelines/test_schedule.py"
NAMED, EVAL = "pipelines/test_named_barriers.py", "compiler/test_eval.py"
ATTENTION, WS_PIPELINE = "ops/test_attention.py", "pipelines/test_ws_pipeline.py"
FUZZ = [f"fuzz/test_fuzz.py::test_random_kernels[cover{k}]" for k in range(3)]
ALL = [MEMORY, ARRAYS, PIPES, TEXT, *FUZZ, CLUSTER, SPECIALISED, WS, CONTROL, DOCUMENTS, CATALOGUE]
ALL += ["language/test_call.py", "ops/test_norms.py"]
ALL += [
    ACCESSES,
    "memory/test_copies.py",
    "language/test_inline.py",
    "memory/test_semaphores.py",
    "compiler/test_ptx.py",
]
ALL += [COMPILERS, HOST, ERRORS, SURFACE, RUNTIME, SECTIONS, SCHEDULE, ATTENTION, WS_PIPELINE]

# name: (file, function, pattern, what replaces it, tests that come first); find.py says what a
# function and a pattern are
MUTANTS = {}


def breaks(file, *tests, **mutants):
    for name, (function, pattern, replacement) in mutants.items():
        name = name.replace("_", "-")
        assert name not in MUTANTS and pattern != replacement, name
        MUTANTS[name] = file, function, pattern, replacement, tests
