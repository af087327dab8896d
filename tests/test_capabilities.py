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
    "test_strategies.py::test_diloco_equals_models_and_an_outer_optimizer_in_one_process",
    "test_verify.py::test_running_error_bounds_hold",
    "test_verify.py::test_a_right_strategy_of_ones_own_passes",
    "test_shm.py::test_all_reduce_gives_every_rank_the_bits_of_the_sum_in_order[aaa]",
    "test_shm.py::test_ddp_computes_what_one_process_computes[aaa-one bucket]",
    "test_mpi.py::test_training_equals_one_process_and_gloo_to_the_bit",
    "test_predict.py::test_a_step_adds_up_from_what_was_planted",
    "test_explain.py::test_the_loss_of_speed_up_is_split_and_adds_up",
    "test_kernels.py::test_published_shapes_in_float32",
    "test_kernels_fuse.py::test_a_fused_net_has_the_same_gradients_by_every_way[tied-conv-{'k': 3}-2-False-WINOGRAD]",
    "test_quantize.py::test_an_int8_convolution_computes_with_integers",
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
