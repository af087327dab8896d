"""Quotas of control groups, in trees as containers see them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.cli import doctor
from lockstep.machine.cores import cores
from lockstep.machine.quota import cpu_quota

AFFINITY = len(os.sched_getaffinity(0))
V1 = "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/y\n"


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def v1(folder: str, value: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{value}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "800000 100000\n"}, 2.0),
        ("0::/a\n", {"other/cpu.max": "50000 100000\n"}, None),
        ("0::/../other\n", {"other/cpu.max": "50000 100000\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        (V1, v1("cpu,cpuacct/docker/abc", 150_000), 1.5),
        (V1, v1("cpu", 25_000, 50_000), 0.5),
        (V1, v1("cpu,cpuacct", -1), None),
        (V1, v1("memory/x", 50_000), None),
        (V1 + "0::/\n", v1("cpu,cpuacct/docker/abc", 300_000), 3.0),
    ],
)
def test_the_smallest_quota_on_the_way_up_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: float | None
) -> None:
    assert cpu_quota(tree(tmp_path, groups, files)) == expected


def test_without_control_groups_nothing_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert cores(tmp_path) == AFFINITY


@pytest.mark.parametrize(("allowed", "expected"), [(0.1, 1), (1.0, 1), (1.5, 2), (1000.0, AFFINITY)])
def test_a_quota_counts_rounded_up_where_it_is_less_than_the_affinity(
    tmp_path: Path, allowed: float, expected: int
) -> None:
    root = tree(tmp_path, "0::/\n", {"cpu.max": f"{round(allowed * 100_000)} 100000\n"})
    assert cores(root) == min(expected, AFFINITY)


def test_doctor_says_that_a_quota_limits(tmp_path: Path) -> None:
    said = [finding.what for finding in doctor._machine(tree(tmp_path, "0::/\n", {"cpu.max": "50000 100000\n"}))]
    assert f"1 of {os.cpu_count()} cores usable (a control group allows 0.5 cores' worth of time)" in said[0]
    assert "threads per rank: 1 with 1 rank, 1 with 2, 1 with 4" in said
    assert not any("control group" in finding.what for finding in doctor._machine(tmp_path / "none"))
