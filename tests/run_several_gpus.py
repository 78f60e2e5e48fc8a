"""What needs two GPUs or more: `python tests/run_several_gpus.py`, on a machine with them.

Runs the tests of `tests/distributed` on GPUs, in one process and by torchrun, and then the
benchmark of collectives and products. Prints its table last. Ends in about 15 minutes."""

import subprocess
import sys
from pathlib import Path

from pallas_mgpu import _core

HERE = Path(__file__).parent


def main():
    count = len(_core.system_info()["devices"])
    if count < 2:
        print(f"two GPUs are needed; there are {count}", file=sys.stderr)
        return 2
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", HERE / "distributed"]
    bench = [sys.executable, HERE.parent / "benchmarks" / "bench_distributed.py"]
    codes = []
    for command, seconds in ((tests, 600), (bench, 540)):
        try:
            codes.append(subprocess.run(list(map(str, command)), timeout=seconds).returncode)
        except subprocess.TimeoutExpired:
            print(f"{command[-1]}: not done after {seconds} s", flush=True)
            codes.append(124)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
