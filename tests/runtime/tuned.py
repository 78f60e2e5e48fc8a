"""A function that test_autotune.py tunes: child processes import it."""

import os
import pathlib
import time

import numpy as np

import pallas_mgpu as plgpu

time.sleep(float(os.environ.get("TUNED_IMPORTS", 0)))  # as large packages take
EVENTS = []
SECONDS = {"slow": 3e-3, "fast": 1e-3, "near": 1.1e-3}


def timer(f):
    """What a configuration pretends to take, with noise."""
    f()
    return SECONDS[f.keywords["config"]] * (1 + 0.02 * np.random.default_rng().random())


@plgpu.autotune(
    ["slow", "hangs", "raises", "dies", "wrong", "near", "fast", "pruned"],
    prune=lambda config, x: config != "pruned",
    check=lambda result, x: bool((result == x + 1).all()),
    listener=EVENTS.append,
    timer=timer,
    timeout=6,
)
def add_one(x, *, config):
    if config == "hangs" and os.environ.get("TUNED_HANGS"):
        if "TUNED_PID" in os.environ:
            pathlib.Path(os.environ["TUNED_PID"]).write_text(str(os.getpid()))
        time.sleep(1000)
    if config in ("raises", "hangs"):
        raise ZeroDivisionError("as intended")
    if config == "dies":
        os._exit(7)
    return x + (2 if config == "wrong" else 1)
