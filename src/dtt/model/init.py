"""Weight initialisation: a pure function of (seed, parameter name, expert).

The values do not depend on the device or on how parameters are sharded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from dtt.base import local as machine
from dtt.base.errors import ConfigError
from dtt.config.own import own_code
from dtt.mesh.sharding import TensorSlice, fill, local, local_shard
from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture
from dtt.model.contract import Model

RESIDUAL_WRITERS = (
    "attn.o.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight",
)  # fmt: skip
"""Endings of the names of matrices, or stacks of them, that write into the residual stream."""
BLOCK_ELEMENTS = 2**24
"""Maximum number of elements drawn from one generator."""
THREADS = 16
"""Most threads that draw, each a block of 64 MB. 8B take 46 s of CPU time in all."""

Fill = Callable[[], None]
"""Function that draws a block and copies it to its place."""


@torch.no_grad()
def initialize(model: Model, seed: int, base: AnyArchitecture | None = None) -> None:
    """Initialise the parameters in place: matrices normal, norms to the identity, biases to 0.

    `base` is the model whose standard deviations are used, as in `dtt.model.scaling`; None: `model`
    itself.
    """
    arch: AnyArchitecture = model.arch
    if isinstance(arch, BuiltArchitecture):
        initialize_built(model, arch, seed)
        return
    base = arch if base is None or isinstance(base, BuiltArchitecture) else base
    _draw(_drawn(model, arch, seed, base))


def _drawn(model: Model, arch: Architecture, seed: int, base: Architecture) -> Iterator[Fill]:
    """Set the parameters that are not random, and yield what draws the others."""
    for name, parameter in model.named_parameters():
        role = model.role(name, parameter)
        if not parameter.requires_grad:
            # Frozen: its values come from a checkpoint.
            continue
        if role == "adapter":
            yield from _adapter(parameter, seed, name)
        elif role == "balance":
            local(parameter).fill_(0.0)
        elif role == "vector":
            # Gemma's norm multiplies by 1 + weight, so 0 is its identity.
            zero = name.endswith("bias") or arch.norm == "rmsnorm_plus_one"
            local(parameter).fill_(0.0 if zero else 1.0)
        else:
            yield from normal(parameter, init_std(name, arch, base), seed, name)


def _draw(blocks: Iterable[Fill]) -> None:
    """Draw blocks in several threads; torch releases the interpreter meanwhile."""
    with ThreadPoolExecutor(min(THREADS, machine.cores())) as pool:
        # `no_grad` holds for one thread.
        for _ in pool.map(lambda fill: torch.no_grad()(fill)(), blocks):
            pass  # an exception of a thread is raised here


@torch.no_grad()
def initialize_built(model: Model, arch: BuiltArchitecture, seed: int) -> None:
    """Initialise a model by its own `init_weights`, with the same values on any layout.

    A second model is initialised on the CPU block by block, each module with a generator of its own
    name, and this rank's parts are copied. That takes the memory of the largest block, in fp32.
    """
    whole = arch.build()
    ours = dict(model.named_parameters())
    names = {module: name for name, module in whole.named_modules()}
    blocks = [names[block] for block in whole.blocks().values()]
    # The embedding, the head and the last norm are a unit of their own, outside of the blocks.
    for block in [*blocks, None]:
        unit = {
            name: module
            for name, module in whole.named_modules()
            if next((one for one in blocks if f"{name}.".startswith(f"{one}.")), None) == block
        }
        # Their parameters, without those inside them, get memory on the CPU.
        for module in unit.values():
            for name, parameter in list(module.named_parameters(recurse=False)):
                memory = torch.full_like(parameter, math.nan, device="cpu")
                values = getattr(parameter, "initial", memory)
                setattr(module, name, nn.Parameter(values.to(memory.dtype)))
        # Inner modules first, as `Module.apply` does: an outer one may set values of these, too.
        for name, module in reversed(unit.items()):
            with torch.random.fork_rng(devices=[]), own_code(arch.section, "model"):
                torch.manual_seed(_seed(f"{seed}:{name}"))
                whole.init_weights(module)
        for name, module in unit.items():
            for inner, values in module.named_parameters(recurse=False):
                whole_name = f"{name}.{inner}" if name else inner
                parameter = ours.get(whole_name)
                if parameter is None or not parameter.requires_grad:
                    continue  # frozen, perhaps in 4 bits under other names
                # A family that forgets one would train whatever the memory held.
                if values.isnan().any():
                    raise ConfigError(
                        f"the model gives no initial values to {whole_name}",
                        where=f"model.family={arch.family}",
                        why="`init_weights` leaves it as it is",
                        next="a model of your own sets it there",
                    )
                fill(parameter, values)
            # Their memory is freed before that of the next block is taken.
            module.to_empty(device="meta", recurse=False)
    for name, parameter in model.named_parameters():
        if model.role(name, parameter) == "adapter":
            _draw(_adapter(parameter, seed, name))


def init_std(name: str, arch: Architecture, base: Architecture) -> float:
    """Return the standard deviation for a matrix, or for each matrix of a stack.

    Embeddings and the head have that of their role. Hidden matrices have that of `matrix`, or, if
    they write into the residual stream, of `output`, divided by sqrt(dim / base dim). Without
    `output` it is `matrix` / sqrt(2 * layers of the base) (GPT-2, section 2.3).
    """
    of_role = arch.init_std
    if not name.startswith("layers."):
        return of_role.head if name.startswith("head.") else of_role.embed
    width = math.sqrt(base.dim / arch.dim)
    if not name.endswith(RESIDUAL_WRITERS):
        return of_role.matrix * width
    if of_role.output is not None:
        return of_role.output * width
    return of_role.matrix * width / math.sqrt(2 * base.n_layers)


def _adapter(parameter: Tensor, seed: int, name: str) -> Iterator[Fill]:
    """Fill A uniformly within 1 / sqrt(inputs), and B with 0, so that the adapter adds nothing.

    This is Kaiming's uniform distribution with a = sqrt(5), as in PEFT.
    """
    local_part, box, shape = local_shard(parameter)
    if name.endswith("lora_b"):
        local_part.fill_(0.0)
        return
    bound = 1 / math.sqrt(shape[1])

    def draw(drawn: Tensor, generator: torch.Generator) -> None:
        drawn.uniform_(-bound, bound, generator=generator)

    yield from _matrix(local_part, box, shape, draw, f"{seed}:{name}")


def normal(parameter: Tensor, std: float, seed: int, name: str) -> Iterator[Fill]:
    """Yield what fills a matrix, or a stack of them, with normal numbers.

    Each matrix of a stack [experts, out, in] is keyed by its index, so its values depend neither on
    the number of experts nor on which of them this rank holds.
    """
    local_part, box, shape = local_shard(parameter)

    def draw(drawn: Tensor, generator: torch.Generator) -> None:
        drawn.normal_(0.0, std, generator=generator)

    if parameter.ndim == 2:
        yield from _matrix(local_part, box, shape, draw, f"{seed}:{name}")
        return
    for e, matrix in enumerate(local_part, start=box.offset[0]):
        of_matrix = TensorSlice(box.offset[1:], box.shape[1:])
        yield from _matrix(matrix, of_matrix, shape[1:], draw, f"{seed}:{name}[{e}]")


def _matrix(
    local_part: Tensor,
    box: TensorSlice,
    shape: Sequence[int],
    draw: Callable[[Tensor, torch.Generator], None],
    key: str,
) -> Iterator[Fill]:
    """Yield what fills the part `box` of a matrix of `shape`: drawn on the CPU and copied.

    `draw` fills a block with the numbers of a generator.

    A CPU generator produces the same numbers for every kind of device. Rows are drawn in blocks,
    each with its own generator: a rank that holds a shard of the matrix draws only the blocks that
    overlap it.
    """
    rows, columns = shape
    block_rows = max(1, BLOCK_ELEMENTS // columns)
    (first, left), (count, width) = box
    # Start at the block that contains the first row: its generator must draw the rows before it as
    # well, to reach the same numbers.

    def fill(start: int) -> None:
        block_shape = min(block_rows, rows - start), columns
        # All columns, also those of other ranks: a generator cannot skip numbers. At most 64 MB.
        drawn = torch.empty(block_shape, dtype=torch.float32, device="cpu")
        draw(drawn, _generator(key, start // block_rows))
        begin, end = max(first, start), min(first + count, start + len(drawn))
        overlap = drawn[begin - start : end - start, left : left + width]
        local_part[begin - first : end - first] = overlap

    starts = range(first // block_rows * block_rows, first + count, block_rows)
    yield from (partial(fill, start) for start in starts)


def _generator(key: str, block: int) -> torch.Generator:
    # Block 0 has the key without a number, so that matrices of up to 2**24 elements do not depend
    # on the existence of blocks.
    return torch.Generator("cpu").manual_seed(_seed(f"{key}:{block}" if block else key))


def _seed(key: str) -> int:
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
