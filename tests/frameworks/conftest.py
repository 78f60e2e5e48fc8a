import os

import pytest


@pytest.fixture(scope="module")
def on_interpreter():
    before = os.environ.get("PALLAS_MGPU_BACKEND")
    os.environ["PALLAS_MGPU_BACKEND"] = "interpret"
    yield
    del os.environ["PALLAS_MGPU_BACKEND"]
    if before is not None:
        os.environ["PALLAS_MGPU_BACKEND"] = before
