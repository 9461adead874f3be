"""Devices are what the system says they are, and one that multiplies wrong is found."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from dtt.doctor import devices
from dtt.doctor.devices import Device
from dtt.mesh.dist import native_bf16

CPU = torch.device("cpu")
GPU = Device("cuda:0", "H200", 2**37, 2**37, True, {"float32": 50.0, "bfloat16": 700.0}, ())


def test_a_working_cpu_is_reported_with_its_memory_and_speed() -> None:
    found = devices.examine(CPU)
    assert found.device == "cpu"
    assert found.name
    assert 0 < found.free <= found.total == psutil.virtual_memory().total
    assert set(found.tflops) == {"float32"} | ({"bfloat16"} if native_bf16(CPU) else set())
    assert min(found.tflops.values()) > 0
    assert found.wrong == ()
    assert list(devices.faults([(0, "n1", found)])) == []


def test_one_wrong_number_in_a_product_is_found_and_the_node_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = torch.Tensor.__matmul__

    def wrong(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(self, other)
        product[7, 300] *= 2
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    found = devices.examine(CPU)
    assert found.wrong == tuple(found.tflops)
    first, *_ = map(str, devices.faults([(0, "n1", replace(found, wrong=())), (3, "n2", found)]))
    assert "cpu multiplies wrong" in first
    assert "rank 3 on node n2" in first
    assert "launch.exclude=n2" in first


def test_a_gpu_much_slower_than_others_of_its_model_is_reported() -> None:
    slow = replace(GPU, tflops={"float32": 49.0, "bfloat16": 200.0})
    other = replace(GPU, name="RTX 4090", tflops={"float32": 40.0, "bfloat16": 160.0})
    found = [(0, "n1", GPU), (1, "n1", slow), (2, "n2", GPU), (3, "n2", other)]
    (problem,) = map(str, devices.faults(found))
    assert "cuda:0 is slow" in problem
    assert "rank 1 on node n1" in problem
    assert "200 TFLOP/s in bfloat16, usual here 700" in problem
