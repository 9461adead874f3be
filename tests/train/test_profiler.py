"""Of a GPU's trace: the share of time in which it did nothing but exchange."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._C._autograd import DeviceType

from dtt.train.profiler import covered, exposed_share


def kernel(name: str, start: float, end: float, **other: object) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end)
    told = {"device_type": DeviceType.CUDA, "is_user_annotation": False} | other
    return SimpleNamespace(name=name, time_range=span, **told)


def test_what_overlaps_counts_once() -> None:
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered([]) == 0


def test_exchange_beside_other_kernels_is_not_exposed() -> None:
    events = [
        kernel("gemm", 0, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 6),
        kernel("step 5", 0, 100, is_user_annotation=True),
        kernel("aten::mm", 0, 100, device_type=DeviceType.CPU),
        kernel("adamw", 8, 10),
    ]
    assert exposed_share(events) == pytest.approx(2 / 10)


def test_without_a_gpu_it_is_not_known() -> None:
    assert exposed_share([kernel("aten::mm", 0, 1, device_type=DeviceType.CPU)]) is None
