"""What all tests share: one thread, fixed seeds, and when a marked test is skipped."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

# Derandomised: a failure seen once is seen every time. HYPOTHESIS_PROFILE=search tries others.
settings.register_profile("repeat", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("search", deadline=None, print_blob=True, database=None)


def pytest_addoption(parser):
    parser.addoption("--weights", metavar="DIR", help="checkpoint for tests marked weights")
    parser.addoption("--run-benchmark", action="store_true", help="run tests marked benchmark")


def pytest_configure(config):
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
    # One thread unless told otherwise: the test processes fill the cores already. Commands that
    # tests start inherit the variable.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    for name in [name for name in os.environ if name.startswith("FLASHREPLAY_")]:
        del os.environ[name]  # a developer's own switches must not reach the tests


def missing_condition(item):
    """Return why a test cannot run here, or None."""
    num_gpus = torch.cuda.device_count()
    if item.get_closest_marker("gpu") and num_gpus == 0:
        return "needs a CUDA device"
    for marker in item.iter_markers("multi_gpu"):
        if num_gpus < marker.args[0]:
            return f"needs {marker.args[0]} CUDA devices, this machine has {num_gpus}"
    if item.get_closest_marker("weights") and not item.config.getoption("--weights"):
        return "needs --weights DIR"
    if item.get_closest_marker("benchmark") and not item.config.getoption("--run-benchmark"):
        return "needs --run-benchmark"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        reason = missing_condition(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Start every test from the same state of the global generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
