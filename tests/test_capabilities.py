"""A sample of the suite under lowered instruction sets: promises of equal bits and tolerances must not depend on one CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLE = (
    "test_augment.py",
    "test_keyed.py",
    "test_optimizers.py",
    "test_training.py::test_losses_equal_a_naive_loop",
    "test_training.py::test_golden_losses",
    "test_training.py::test_three_ranks_with_accumulation_follow_the_same_curve",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "setting",
    ["ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2", "ONEDNN_MAX_CPU_ISA=SSE41"],
)
def test_a_sample_of_the_suite_passes(setting: str) -> None:
    name, _, value = setting.partition("=")
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *SAMPLE]
    done = subprocess.run(argv, cwd=HERE, env={**os.environ, name: value}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
