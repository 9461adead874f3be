"""What cannot be compiled runs uncompiled, on all ranks alike, and a failure is told once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from support.own_classes import NOTHING
from support.running import Dtt
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from dtt.mesh.compilation import Compiler


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def works(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    return make_boxed_func(graph.forward)


def fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    raise RuntimeError("no valid Triton configuration")


def use(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def test_a_second_shape_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.append([i.shape for i in inputs if isinstance(i, Tensor)])
        assert not any(isinstance(i, torch.SymInt) for i in inputs)
        return graph.forward

    use(monkeypatch, record)
    double = Compiler().compiled(lambda x: 2 * x)
    for length in (64, 128, 256, 1024):
        double(torch.ones(length))
    assert shapes == [[(64,)], [(128,)], [(256,)], [(1024,)]]


def test_a_backward_graph_that_cannot_be_compiled_is_found_in_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, aot_autograd(fw_compiler=works, bw_compiler=fails))
    compiler = Compiler()
    sine = compiler.compiled(torch.sin)
    x = torch.ones(3, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sine(x).sum().backward()
    assert compiler.failure == "RuntimeError: no valid Triton configuration"
    assert [r.getMessage() for r in caplog.records] == [
        f"training continues uncompiled: {compiler.failure}"
    ]
    torch.testing.assert_close(x.grad, 2 * torch.ones(3).cos())


def test_after_one_failure_nothing_is_compiled_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fails)
    compiler = Compiler()
    first = compiler.compiled(torch.sin, otherwise=lambda x: "instead")
    second = compiler.compiled(torch.cos)
    assert first(torch.zeros(1)) == "instead"
    with torch.compiler.set_stance("fail_on_recompile"):
        assert second(torch.zeros(1)) == 1.0


def at_launch(error: Exception) -> Any:
    """Return a back end whose kernels compile, and raise `error` when they run."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def launch(*_: object) -> None:
            raise error

        return launch

    return backend


def test_a_kernel_that_does_not_fit_the_device_is_replaced_at_its_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OutOfResources(Exception):
        """Stands for the error of triton, which CPU builds of torch do not install."""

    OutOfResources.__module__ = "triton.runtime.errors"
    use(monkeypatch, at_launch(OutOfResources("out of resource: shared memory")))
    compiler = Compiler()
    assert compiler.compiled(torch.cos)(torch.zeros(1)) == 1.0
    assert compiler.failure == "out of resource: shared memory"


def test_an_error_of_the_function_itself_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, at_launch(RuntimeError("an illegal memory access was encountered")))
    compiler = Compiler()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compiler.compiled(torch.cos)(torch.zeros(1))
    assert not compiler.failure


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        # as Inductor and the driver report that a kernel does not find the memory of its stack
        RuntimeError("No valid triton configs. OutOfMemoryError: CUDA out of memory. Tried"),
        RuntimeError("CUDA driver error: out of memory"),
    ],
)
def test_a_device_without_memory_left_is_not_taken_for_a_failed_compilation(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def compiling(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise error

    for backend in (compiling, at_launch(error)):
        torch.compiler.reset()
        with monkeypatch.context() as patched:
            use(patched, backend)
            compiler = Compiler()
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                compiler.compiled(torch.cos)(torch.zeros(1))
            assert not compiler.failure


ON_RANK_1 = """
import os, torch
real = torch.compile
def broken(graph, inputs):
    raise RuntimeError("no compiler on this rank")
backend = broken if os.environ["RANK"] == "1" else "eager"
torch.compile = lambda *args, **how: real(*args, backend=backend, **how)
"""


@pytest.mark.slow
def test_where_one_rank_cannot_compile_none_does(dtt: Dtt, tiny: Any) -> None:
    (dtt.folder / "mine.py").write_text(ON_RANK_1 + NOTHING)
    keys = tiny(
        train__compile="true", train__steps=3, train__eval_every=0,
        actions="[{type: mine.py:Nothing}]",
    )  # fmt: skip
    run = dtt.wait(dtt.start_torchrun(2, "-m", "dtt.main", "train", *keys))
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if "uncompiled" in line]
    assert ["[rank 1]" in line for line in lines].count(True) == 1
    assert any("no compiler on this rank" in line for line in lines)
    assert any(
        "[rank 0] training continues uncompiled: another rank cannot compile" in line
        for line in lines
    )
    assert "step 3/3" in run.stderr
