"""Computing activations again changes no gradient, keeps less, and goes with the other layers."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Literal

import pytest
import torch
from support.ranks import on_ranks
from support.tiny_architectures import decoder
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import make_mesh
from dtt.mesh.sharding import local
from dtt.model.decoder import Decoder
from dtt.parallel.apply import apply, rematerialize

ROWS, SEQ_LEN, LAYERS = 2, 64, 4
KINDS: tuple[Literal["full", "selective"], ...] = ("full", "selective")


def make_model(family: str = "llama", dropout: float = 0.0, **keys: Any) -> Decoder:
    config = ModelConfig(family=family, dim=32, n_layers=LAYERS, n_heads=4, dropout=dropout, **keys)
    return decoder(config, 64, SEQ_LEN)


def documents() -> Tensor:
    return (torch.arange(SEQ_LEN) // 20).expand(ROWS, -1).contiguous()


def backward(module: torch.nn.Module, doc_ids_BT: Tensor | None = None) -> Tensor:
    """Forward and backward pass of a batch that is always the same, as are random numbers."""
    ids = torch.randint(64, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    loss: Tensor = module(ids[:, :-1], ids[:, 1:], doc_ids_BT=doc_ids_BT).loss
    loss.backward()
    return loss.detach()


def gradients(model: Decoder) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gpt2", {}),
        ("llama", {"n_kv_heads": 2}),
        ("qwen3", {}),
        ("mistral", {"window": 16}),
        ("gemma3", {"window": 16}),
    ],
)
def test_gradients_are_the_same_to_the_last_bit(
    family: str, keys: dict[str, Any], packed: bool
) -> None:
    expected = make_model(family, dropout=0.1, **keys)
    loss = backward(expected, documents() if packed else None)
    for kind in KINDS:
        model = make_model(family, dropout=0.1, **keys)
        rematerialize(model, kind)
        assert torch.equal(backward(model, documents() if packed else None), loss)
        found = gradients(model)
        for name, gradient in gradients(expected).items():
            assert torch.equal(found[name], gradient), (kind, name)


def peak(kind: Literal["none", "full", "selective"]) -> int:
    """Bytes, at most, of all tensors in forward and backward pass."""
    model = make_model(dropout=0.1)
    if kind != "none":
        rematerialize(model, kind)
    tracker = MemTracker()
    with tracker:
        backward(model)
    total: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return total


@pytest.mark.slow
def test_keeping_fewer_activations_lowers_the_peak() -> None:
    selective, full = peak("selective"), peak("full")
    assert peak("none") > 1.25 * selective
    assert selective > 1.15 * full


class Executed(TorchDispatchMode):
    """Counts the operators that are really run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


def executed(kind: Literal["none", "full", "selective"], backward_too: bool = True) -> Counter[str]:
    model = make_model("gemma3", window=16)
    if kind != "none":
        rematerialize(model, kind)
    with Executed() as operators:
        if backward_too:
            backward(model)
        else:
            with torch.no_grad():
                model(torch.zeros(1, SEQ_LEN, dtype=torch.int64))
    return operators.count


def test_selective_recomputes_neither_attention_nor_every_second_matmul() -> None:
    none, full, selective = executed("none"), executed("full"), executed("selective")
    attention = "dtt::tiled_attention"
    assert none[attention] == selective[attention] == LAYERS
    assert full[attention] == 2 * LAYERS
    again = {"full": full["aten::mm"], "selective": selective["aten::mm"]}
    assert {kind: n - none["aten::mm"] for kind, n in again.items()} == {
        "full": 7 * LAYERS,
        "selective": 3 * LAYERS,
    }


def test_without_gradients_nothing_is_recomputed() -> None:
    plain = executed("none", backward_too=False)
    for kind in KINDS:
        assert executed(kind, backward_too=False)["aten::mm"] == plain["aten::mm"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_recompute_too_and_share_one_compilation(
    kind: Literal["full", "selective"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    # Inductor but for its kernels, which take ten seconds to make.
    backend = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", backend)
    expected = make_model()
    backward(expected)
    model, world = make_model(), start(Ranks(), "cpu")
    torch.compiler.reset()
    counters.clear()
    layout = make_mesh(Sizes(), world)
    module = apply(model, world, layout, compile_blocks=True, remat=kind)
    backward(module)
    assert counters["stats"]["unique_graphs"] == 1
    found = gradients(model)
    for name, gradient in gradients(expected).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def differing(world: World) -> list[tuple[str, str, str]]:
    """Parameters whose part on this rank gets another gradient than without, by layout and kind."""
    torch.set_num_threads(1)
    different = []
    for layout in (make_mesh(Sizes(shard=2), world), make_mesh(Sizes(tensor=2), world)):
        found: dict[str, dict[str, Tensor]] = {}
        for kind in ("none", *KINDS):
            model = make_model(dropout=0.1)
            backward(apply(model, world, layout, compile_blocks=False, remat=kind))  # type: ignore[arg-type]
            found[kind] = {name: local(gradient) for name, gradient in gradients(model).items()}
        assert found["none"]["norm.weight"].any()
        for name, gradient in found["none"].items():
            different += [
                (layout.sizes.describe(), kind, name)
                for kind in KINDS
                if not torch.equal(found[kind][name], gradient)
            ]
    return different


@pytest.mark.slow
def test_on_sharded_and_divided_layers_gradients_are_the_same_to_the_last_bit() -> None:
    assert on_ranks(2, differing) == [[], []]
