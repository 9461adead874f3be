"""A share of the peak is given only where the peak is known; what is measured is a real product."""

from __future__ import annotations

import pytest
import torch

from dtt.mesh.peak_flops import PEAK_FLOPS, measured_flops, peak_by_name, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA L40", 181e12),
        ("Some Accelerator 9000", None),
        ("", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_or_none(name: str, peak: float | None) -> None:
    assert peak_by_name(name) == peak


def test_a_longer_name_comes_before_one_it_contains() -> None:
    names = list(PEAK_FLOPS)
    for i, name in enumerate(names):
        assert not [later for later in names[i + 1 :] if name in later]


def test_a_cpu_has_no_peak_but_one_that_is_measured() -> None:
    assert peak_flops(torch.device("cpu")) is None
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32) < 1e14
