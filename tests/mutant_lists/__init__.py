"""What tests/mutants.py breaks, and the tests that should notice it first."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA, DEVICE, PASSES = "csrc/cuda", "csrc/cuda/device", "csrc/passes"
PIPELINE = "pallas_mgpu/_pipeline.py"

ARRAYS, CONTROL, MEMORY = "test_arrays.py", "test_control.py", "test_memory.py"
PIPES, DOCUMENTS, HOST = "test_pipeline.py", "test_documents.py", "test_host.py"
TEXT, CATALOGUE, ERRORS = "test_text.py", "test_catalogue.py", "test_errors.py"
ACCESSES = "test_accesses.py"
RUNTIME, SURFACE = "test_runtime.py", "test_surface.py"
COMPILERS = "test_compilers.py"
CLUSTER, SPECIALISED, WS = "test_cluster.py", "test_specialised.py", "test_ws_steps.py"
TURNS, SCHEDULE = "test_turns.py", "test_schedule.py"
NAMED = "test_named_barriers.py"
ATTENTION, WS_PIPELINE = "test_attention.py", "test_ws_pipeline.py"
FUZZ = [f"test_fuzz.py::test_random_kernels[cover{k}]" for k in range(3)]
ALL = [MEMORY, ARRAYS, PIPES, TEXT, *FUZZ, CLUSTER, SPECIALISED, WS, CONTROL, DOCUMENTS, CATALOGUE]
ALL += ["test_call.py", "test_norms.py"]
ALL += [ACCESSES, "test_copies.py", "test_inline.py", "test_semaphores.py", "test_families.py"]
ALL += [COMPILERS, HOST, ERRORS, SURFACE, RUNTIME, TURNS, SCHEDULE, ATTENTION, WS_PIPELINE]

# name: (file, function, pattern, what replaces it, tests that come first); find.py says what a
# function and a pattern are
MUTANTS = {}


def breaks(file, *tests, **mutants):
    for name, (function, pattern, replacement) in mutants.items():
        name = name.replace("_", "-")
        assert name not in MUTANTS and pattern != replacement, name
        MUTANTS[name] = file, function, pattern, replacement, tests
