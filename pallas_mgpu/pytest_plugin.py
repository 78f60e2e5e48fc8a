"""A plugin of pytest: the fixture ``check_kernel`` checks a kernel on every backend there is.

    @pytest.mark.pallas(seeds=20, backends=("interpret", "emulate", "cuda"))
    def test_add(check_kernel):
        check_kernel(add, x, y, ref=x + y)

A test with the fixture has a case for each backend: the interpreter and the emulated machine, under
that many schedules, and a GPU. Where there is no C++ compiler or no GPU its case is skipped. The
marker can be left out. ``--kernel-seeds`` and ``--kernel-backends`` go before it: a case that fails
prints the command line that repeats it."""

import argparse
import importlib
import os
import re
import shlex

import pytest

from . import _core


def _module(name):
    """One of the package, when a test needs it."""
    return importlib.import_module(f".{name}", __package__)


def _testing():
    return _module("_testing")


def _seeds(text):
    """ "20": so many; "3,", "0,7": these."""
    if not re.fullmatch(r"\d+|(\d+,)+\d*", text):
        raise argparse.ArgumentTypeError(
            f"a number of schedules (20) or seeds (3, or 0,7), got {text}"
        )
    return tuple(int(k) for k in text.split(",") if k) if "," in text else int(text)


def pytest_addoption(parser):
    group = parser.getgroup("pallas_mgpu", "kernels of pallas_mgpu")
    group.addoption(
        "--kernel-seeds",
        type=_seeds,
        metavar="SEEDS",
        help="schedules of check_kernel: how many, or seeds with commas ('7,' is seed 7)",
    )
    group.addoption(
        "--kernel-backends",
        metavar="NAMES",
        help="backends of check_kernel: some of interpret,emulate,cuda",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "pallas(seeds=20, backends=('interpret', 'emulate', 'cuda')): how the fixture check_kernel"
        " runs kernels",
    )


def _marked(node):
    """The fields of the marker, the nearest first."""
    out = {}
    for mark in node.iter_markers("pallas"):
        if mark.args or not mark.kwargs.keys() <= {"seeds", "backends"}:
            pytest.fail(
                f"{node.nodeid}: pytest.mark.pallas takes seeds= and backends=, got"
                f" {mark.args or ''}{mark.kwargs or ''}",
                pytrace=False,
            )
        out = {**mark.kwargs, **out}
    return out


def pytest_generate_tests(metafunc):
    if "check_kernel" not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption("kernel_backends")
    names = _marked(metafunc.definition).get("backends", _testing()._BACKENDS)
    names = given.split(",") if given else names
    try:
        names = _testing()._chosen(names, "--kernel-backends" if given else "pytest.mark.pallas")
    except (TypeError, ValueError) as e:
        pytest.fail(str(e), pytrace=False)
    metafunc.parametrize("check_kernel", names, indirect=True)


def _skip_without(backend):
    if backend == "emulate":
        try:
            importlib.import_module(".machine.run", __package__).compiler()
        except NotImplementedError as e:
            pytest.skip(str(e))
    elif backend == "cuda":
        found = _core.system_info()
        if found["device"] < 0:
            pytest.skip(f"no GPU: {found['no_gpu']}")


@pytest.fixture
def check_kernel(request):
    """``check_kernel(kernel, *args, ref=None, rtol=None, atol=None)``, the result of the kernel.

    Arguments, checks and errors are those of :func:`pallas_mgpu.testing.check`, on the backend of
    the case."""
    config, node, backend = request.config, request.node, request.param
    _skip_without(backend)
    given = config.getoption("kernel_seeds")
    seeds = _marked(node).get("seeds", 20) if given is None else given
    try:
        who = "pytest.mark.pallas" if given is None else "--kernel-seeds"
        numbers = _testing().seeds_of(seeds, who)
    except (TypeError, ValueError) as e:
        pytest.fail(str(e), pytrace=False)

    def repeat(again):
        shown = ",".join(map(str, again)) + ("," if len(again) == 1 else "")
        file = os.path.relpath(node.path, config.invocation_params.dir)
        case = shlex.quote("::".join((file, *node.nodeid.split("::")[1:])))
        return f"pytest {case} --kernel-seeds={shown}"

    def check(kernel, *args, ref=None, rtol=None, atol=None):
        __tracebackhide__ = True
        at = _testing()._Checked(kernel, args, backend)
        try:
            return at.run(numbers, ref, (rtol, atol), repeat)
        except Exception as e:
            if not config.getoption("fulltrace"):
                e.__traceback__ = _module("_notebook").without_ours(e.__traceback__)
            raise

    return check
