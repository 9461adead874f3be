"""Products in fp8 are those of their definition, alone, below an adapter and divided over ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.guarded_runs import build
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtt.config.parallel import Sizes
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.model.adapted_layers import Adapted
from dtt.model.linear import Linear
from dtt.model.lora import LoraLinear
from dtt.parallel import fp8

BF16, FP8 = 2.0**-7, 2.0**-3
"""Distance of two neighbours at 1."""
TOKENS, INPUTS, OUTPUTS = (3, 7), 64, 48


def rounded(x: Tensor) -> Tensor:
    """A matrix with the values that its rows have in fp8, by the definition, in fp64."""
    rows = []
    for row in x.double():
        scale = 2.0 ** torch.ceil(torch.log2(row.abs().max() / 448))
        scaled = row / scale
        # Three bits behind the first one, down to 2^-6; below that, multiples of 2^-9.
        step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
        rows.append(torch.round(scaled / step) * step * scale)
    return torch.stack(rows)


def given() -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of the output; rows and columns have very different sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        sizes = [torch.randint(-8, 8, (n,), generator=generator) for n in shape[-2:]]
        scales = torch.outer(*(2.0**size for size in sizes))
        return (torch.randn(shape, generator=generator) * scales).bfloat16()

    return draw(*TOKENS, INPUTS), draw(OUTPUTS, INPUTS), draw(*TOKENS, OUTPUTS)


def passes(layer: Any, x: Tensor, grad: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = layer(x)
    y.backward(grad)  # type: ignore[no-untyped-call]
    return y.detach()


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def assert_product(found: Tensor, a: Tensor, b: Tensor) -> None:
    """Compare with A Bᵀ of the values in fp8: rounded once to bf16, after a sum in fp32."""
    exact = a @ b.t()
    summands = a.abs() @ b.abs().t()
    assert ((flat(found).double() - exact).abs() <= BF16 / 2 * exact.abs() + 1e-5 * summands).all()


def test_all_three_products_are_those_of_rows_rounded_to_fp8() -> None:
    x, weight, grad = given()
    x.requires_grad_()
    layer = Linear(INPUTS, OUTPUTS, bias=False)
    layer.weight.data = weight.float()
    layer.product = fp8.linear
    y = passes(layer, x, grad)
    x2, grad2 = flat(x.detach()), flat(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert_product(y, rounded(x2), rounded(weight))
    assert_product(x.grad, rounded(grad2), rounded(weight.t()))
    # 21 tokens: rows of zeros are added.
    assert_product(layer.weight.grad, rounded(grad2.t()), rounded(x2.t()))


@pytest.mark.parametrize("largest", [0.0, 1e-42, 1.75, 1.7578125, 448.0, 450.0, 3e38])
def test_the_scale_of_a_row_is_the_smallest_power_of_two_with_which_it_fits(largest: float) -> None:
    values, scale = fp8.quantize(torch.tensor([[largest, -largest / 2]]))
    assert torch.frexp(scale).mantissa.item() == 0.5
    assert largest / scale.item() <= 448
    assert largest < 1e-30 or largest / scale.item() > 224
    step = max(largest, 1e-38) * FP8
    restored = values.float() * scale
    torch.testing.assert_close(restored, torch.tensor([[largest, -largest / 2]]), rtol=0, atol=step)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_row_with_a_number_that_is_not_finite_is_not_a_number(bad: float) -> None:
    x = torch.ones(2, 16)
    x[1, 3] = bad
    y = fp8.product(x, torch.ones(16, 16))
    assert y[0].eq(16).all()
    assert y[1].isnan().all()


def test_generation_which_has_no_autocast_computes_in_the_dtype_of_its_input() -> None:
    x, weight, _ = given()
    assert torch.equal(fp8.linear(x, weight, None), F.linear(x, weight))


# ---- below an adapter ----------------------------------------------------------------------------


def adapted() -> LoraLinear:
    base = Linear(INPUTS, OUTPUTS, bias=True)
    base.weight.data = given()[1]
    base.bias.data = torch.linspace(-1, 1, OUTPUTS)
    base.requires_grad_(requires_grad=False)
    layer = LoraLinear(base, Adapted(4, 8.0, rslora=False), 0.0)
    for parameter in (layer.lora_a, layer.lora_b):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    return layer


def test_the_base_of_an_adapter_is_in_fp8_and_its_own_products_are_in_bf16() -> None:
    x, weight, grad = given()
    found = {}
    for name in ("bf16", "fp8"):
        layer, own_x = adapted(), x.clone().requires_grad_()
        if name == "fp8":
            layer.product = fp8.linear
        y = passes(layer, own_x, grad)
        assert layer.weight.grad is None
        assert own_x.grad is not None
        assert layer.lora_a.grad is not None
        assert layer.lora_b.grad is not None
        found[name] = y, own_x.grad, layer.lora_a.grad, layer.lora_b.grad
    # The gradients of A and B do not pass the product of the base.
    for mine, plain in zip(found["fp8"][2:], found["bf16"][2:], strict=True):
        assert torch.equal(mine, plain)
    with torch.autocast("cpu", torch.bfloat16):
        update = layer.update(x).detach()
        base = fp8.linear(x, weight, layer.bias)
    assert torch.equal(found["fp8"][0], torch.add(base, update, alpha=layer.scale))
    assert not torch.equal(found["fp8"][0], found["bf16"][0])


# ---- divided over ranks --------------------------------------------------------------------------


def divided(world: World, by: str) -> list[Any]:
    """A layer of which each rank has a part: output, gradients of input, weight and bias."""
    mesh = make_mesh(Sizes(tensor=2), world).part("tensor")
    x, weight, grad = given()
    layer = Linear(INPUTS, OUTPUTS, bias=True)
    layer.weight.data, layer.bias.data = weight.float(), torch.linspace(-1, 1, OUTPUTS)
    layer.product = fp8.linear
    for name, parameter in list(layer.named_parameters()):
        whole = by == "inputs" and name == "bias"
        place = Replicate() if whole else Shard(0 if by == "outputs" else 1)
        part = nn.Parameter(distribute_tensor(parameter, mesh, [place]))
        layer.register_parameter(name, part)
    place_x = Replicate() if by == "outputs" else Shard(2)
    own_x = distribute_tensor(x, mesh, [place_x]).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(own_x)
    assert isinstance(y, DTensor)
    y.redistribute(placements=[Replicate()]).backward(distribute_tensor(grad, mesh, [Replicate()]))
    parts = y, own_x.grad, layer.weight.grad, layer.bias.grad
    return [part.full_tensor().float().tolist() for part in parts]  # type: ignore[union-attr]


@pytest.mark.parametrize("by", ["outputs", "inputs"])
def test_two_ranks_compute_what_one_does_but_for_the_rounding_of_sums(by: str) -> None:
    """The ranks' values in fp8 are those of one process: what differs is rounded to bf16."""
    x, weight, grad = given()
    found, others = on_ranks(2, divided, by)
    assert found == others
    layer, own_x = Linear(INPUTS, OUTPUTS), x.clone().requires_grad_()
    layer.weight.data, layer.bias.data = weight.float(), torch.linspace(-1, 1, OUTPUTS)
    layer.product = fp8.linear
    y = passes(layer, own_x, grad)
    wanted = [y, own_x.grad, layer.weight.grad, layer.bias.grad]
    plain = F.linear(x.float(), weight.float(), layer.bias)
    for mine, one in zip(map(torch.tensor, found), wanted, strict=True):
        assert one is not None
        # Two summands and their sum are rounded to bf16, by at most half of a step each.
        assert (mine - one.float()).norm() <= 1.5 * BF16 * one.float().norm()
    # Where no sum is divided, the numbers are the same.
    same = [0, 2, 3] if by == "outputs" else [1, 2, 3]
    for i in same:
        assert torch.equal(torch.tensor(found[i]), wanted[i].float())  # type: ignore[union-attr]
    assert (y.float() - plain).norm() > 3 * BF16 * plain.norm()  # in fp8


# ---- gathered by FSDP2, and whole runs -----------------------------------------------------------

LAYOUTS = {"tensor": ["parallel.tensor=2"], "shard": ["parallel.shard=2"]}


def trained(
    world: World, folder: Path, tokens: Path, layout: str, how: str
) -> tuple[str, list[float], set[tuple[str, str]]]:
    """Train, or continue, a run on two ranks.

    Return the folder of its last step, its losses, and the dtypes in which weights were gathered.
    """
    # A benchmark on a CPU would find no speedup.
    fp8.find_gains = lambda layers, seconds: dict.fromkeys(layers.values(), 2.0)
    if how == "gathered in bf16":
        fp8.gather_in_fp8 = lambda model, mesh: None
    pack, gathered = fp8._pack, set()

    def watch(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        packed = pack(mesh, outer_size, outer_stride, module, mp_policy)
        gathered.add(tuple(str(tensor.dtype) for tensor in packed[0]))
        return packed

    fp8._pack = watch
    precision = "bf16" if how == "bf16" else "fp8"
    trainer = build(
        world, folder, tokens, "model.dim=32", f"train.precision={precision}", *LAYOUTS[layout],
        "train.remat=full", "train.compile=false", "train.steps=4", "train.log_every=1",
        "checkpoint.every=2",
    )  # fmt: skip
    assert trainer.run()
    last = next(folder.rglob("step-000004"))
    lines = (last.parents[1] / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return str(last), [one["loss"] for one in records if one["kind"] == "train"], gathered  # type: ignore[return-value]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_in_fp8_ends_bit_for_bit_the_same(
    tokens: Path, tmp_path: Path, layout: str
) -> None:
    files: dict[str, list[bytes]] = {}
    for name in ("bf16", "whole", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "resumed":
            shutil.copytree(tmp_path / "whole", folder, dirs_exist_ok=True)
            shutil.rmtree(next(folder.rglob("step-000004")))
        (last, _, gathered), _ = on_ranks(2, trained, folder, tokens, layout, name)
        in_fp8 = layout == "shard" and name != "bf16"
        assert gathered == ({("torch.uint8", "torch.float32")} if in_fp8 else set())
        files[name] = [file.read_bytes() for file in sorted(Path(last).glob("*.safetensors"))]
        assert files[name]
    assert files["whole"] == files["resumed"]
    assert files["whole"] != files["bf16"]


def test_weights_gathered_in_fp8_have_the_products_of_those_gathered_in_bf16(
    tokens: Path, tmp_path: Path
) -> None:
    found = {}
    for name in ("gathered in bf16", "gathered in fp8"):
        folder = tmp_path / name
        folder.mkdir()
        (_, losses, gathered), _ = on_ranks(2, trained, folder, tokens, "shard", name)
        assert len(losses) == 4
        assert bool(gathered) == (name == "gathered in fp8")
        found[name] = losses
    in_bf16, in_fp8 = found.values()
    assert in_fp8[0] == in_bf16[0]
    # Later ones follow gradients of inputs, in which the smallest numbers of a row can differ.
    assert in_fp8 == pytest.approx(in_bf16, rel=1e-4)


def test_a_weight_that_is_packed_and_unpacked_has_its_numbers_in_fp8() -> None:
    _, weight, _ = given()
    weight[3, 5] = torch.inf
    layer, policy = nn.Linear(INPUTS, OUTPUTS), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    layer.weight.data = weight.float()
    (values, scales), metadata = fp8._pack(None, weight.shape, weight.stride(), layer, policy)  # type: ignore[arg-type]
    assert values.nbytes == weight.numel()
    out, version = torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16), 0
    fp8._unpack((values.clone(), scales.clone()), metadata, out.dtype, out=out)
    assert out._version == version
    first = fp8._unpack((values, scales), metadata, out.dtype)
    assert first is not None
    assert torch.equal(first[0].view(torch.int16), out.view(torch.int16))
    assert values.untyped_storage().size() == scales.untyped_storage().size() == 0
    assert out[3].isnan().all()
    kept = [i for i in range(OUTPUTS) if i != 3]
    assert torch.equal(out[kept].double(), rounded(weight[kept]))
    # Scaled by row again, nothing is rounded.
    again, its_scales = fp8.quantize(out[kept])
    assert torch.equal(again.float() * its_scales, out[kept].float())
