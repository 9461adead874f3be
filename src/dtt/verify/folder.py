"""`dtt verify --model`: check the model of a Hugging Face folder before a GPU is spent on it.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from dtt.base.errors import DttError
from dtt.config.init import HF
from dtt.hf import write_folder
from dtt.hf.model_source import find_model, on_device
from dtt.hf.read import read_hf_architecture, read_hf_folder
from dtt.hf.verify import random_ids
from dtt.hf.weights import to_hf
from dtt.model import count
from dtt.model.architecture import AnyArchitecture, BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import make_model
from dtt.model.init import initialize
from dtt.model.output import Output
from dtt.parallel.apply import allocate
from dtt.train.contract_check import check_causal, check_documents, check_gradients
from dtt.verify.run import Wrong

EXACT = 1e-5
"""Largest relative difference of logits, losses and gradients in fp32 of the same computation."""
CPU = torch.device("cpu")
Verdict = Literal["works", "limit", "fails"]


@dataclass(frozen=True)
class Check:
    """The result of one check of a model."""

    name: str
    verdict: Verdict
    """`limit`: training works, without one of its features."""
    detail: str


def run(source: str, *, as_json: bool) -> None:
    """Check the model of a folder, print a table, and raise `Wrong` if a check fails.

    Raises InputError or ConfigError for a model that cannot be trained at all. It runs on the CPU
    in fp32, and takes the memory of three models.
    """
    folder = find_model(source.removeprefix(HF), where=f"--model {source}")
    model, theirs, origin = models(folder)
    found = list(checks(model, theirs))
    failed = [check for check in found if check.verdict == "fails"]
    if as_json:
        facts = {"model": source, "verified": not failed, "checks": [asdict(x) for x in found]}
        print(json.dumps(facts, indent=1))
    else:
        size = count.parameters(model.arch) / 1e6
        blocks = f"{size:.1f}M parameters, {len(model.blocks())} blocks"
        print(f"{source}: family {model.arch.family}, {blocks}, {origin}")
        print("\n".join(table(found)))
    if failed:
        names = ", ".join(check.name for check in failed)
        raise Wrong(
            f"{len(failed)} of {len(found)} checks fail: {names}",
            where=source,
            why=failed[0].detail,
            next="do not train this model; please report it with its config.json",
        )


def table(found: list[Check]) -> Iterator[str]:
    """Yield a line for each check."""
    width = max(len(check.name) for check in found)
    for check in found:
        yield f"{check.name:<{width}}  {check.verdict:<5}  {check.detail}"


def models(folder: Path) -> tuple[Model, Any, str]:
    """Return the model of a folder in fp32, that of the library, and where the weights are from.

    Without weights in the folder, they have initial values.
    """
    if any(folder.glob("*.safetensors")):
        trained = read_hf_folder(folder)
        model, origin = on_device(trained, CPU).float(), "weights of the folder"
    else:
        model, origin = initialized(read_hf_architecture(folder)), "initial values (no weights)"
    return model, of_library(model, folder), origin


def initialized(arch: AnyArchitecture) -> Model:
    """Return a model with initial values, in fp32 on the CPU."""
    model = make_model(arch)
    allocate(model, CPU)
    initialize(model, seed=0)
    return model


def of_library(model: Model, folder: str | Path = "") -> Any:
    """Return the library's model with the weights of `model`, which a folder describes."""
    if isinstance(model.arch, BuiltArchitecture):
        built: Any = model
        library = built.library
        if built.tied:
            library.tie_weights()  # its head is none of ours
        return library
    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = config.get_text_config()
    # In a multimodal folder, such as that of GOT-OCR2, it may be a key of the whole alone.
    config.tie_word_embeddings = model.arch.tie_embeddings
    library = auto.from_config(config, trust_remote_code=False).float()
    tensors = to_hf(model.state_dict(), model.arch)
    missing, extra = library.load_state_dict({k: tensors[k] for k in tensors}, strict=False)
    tied = {"lm_head.weight"} if library.config.tie_word_embeddings else set()
    if extra or set(missing) - tied:
        raise Wrong("the names of weights differ", why=f"missing {missing}, extra {extra}")
    return library


def checks(model: Model, theirs: Any) -> Iterator[Check]:
    """Yield the result of each check of a model in fp32 on the CPU; `theirs` is the library's."""
    arch = model.arch
    model.eval()
    theirs.eval()
    ids_1T = random_ids(arch)[None]
    yield _check("logits", lambda: _logits(model, theirs, ids_1T))
    yield _check("loss", lambda: _loss(model, theirs, ids_1T))
    built = isinstance(arch, BuiltArchitecture)
    if built:
        yield _check("gradients", lambda: check_gradients(arch, model))
    yield _check("causal", lambda: check_causal(model, CPU))
    yield _check("documents", lambda: check_documents(model, CPU), "limit")
    notes = list(model.notes())
    if notes:
        yield Check("dropout", "limit", "; ".join(notes))
    if built:
        yield _check("export", lambda: _export(model, ids_1T[0]))


def _check(name: str, check: Callable[[], str], otherwise: Verdict = "fails") -> Check:
    try:
        return Check(name, "works", check())
    except DttError as error:
        parts = [line.strip() for line in str(error).splitlines() if "where:" not in line]
        return Check(name, otherwise, "; ".join(parts))
    except Exception as error:  # noqa: BLE001  the library's own code: all that it may raise
        return Check(name, "fails", f"{type(error).__name__}: {error}".splitlines()[0])


@torch.no_grad()
def _logits(model: Model, theirs: Any, ids_1T: Tensor) -> str:
    ours, expected = model(ids_1T), theirs(input_ids=ids_1T, use_cache=False).logits
    assert isinstance(ours, Tensor)
    return _equal("logits", ours, expected)


def _loss(model: Model, theirs: Any, ids_1T: Tensor) -> str:
    """Compare loss and gradients with those of cross-entropy of the library's own logits."""
    inputs, targets = ids_1T[:, :-1], ids_1T[:, 1:]
    output = model(inputs, targets)
    assert isinstance(output, Output)
    trained = [*model.parameters()]
    how: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad(output.loss, trained, **how)
    logits_TV = theirs(input_ids=inputs, use_cache=False).logits[0].float()
    loss = F.cross_entropy(logits_TV, targets[0], reduction="sum")
    result = _equal("losses", output.loss, loss)
    if not isinstance(model.arch, BuiltArchitecture):
        return result  # the library's parameters are others
    expected = torch.autograd.grad(loss, trained, **how)
    flat = [torch.cat([one.flatten() for one in side]) for side in (ours, expected)]
    return f"{result}; {_equal('gradients', *flat)}"


def _equal(what: str, ours: Tensor, expected: Tensor) -> str:
    difference = float(((ours - expected).abs().max() / expected.abs().max()).detach())
    text = f"{what} differ by {difference:.0e} from those of transformers"
    if not difference <= EXACT:
        raise Wrong(text)
    return text


def _export(model: Model, ids_T: Tensor) -> str:
    """Write the model as the library does, read it, and compare; the model is in fp32 after it."""
    with tempfile.TemporaryDirectory(prefix="dtt-verify-") as name:
        write_folder.write_library(model, Path(name), torch.float32, "5GB")
        difference = write_folder.check_library(model, Path(name), ids_T)
    return f"logits of the folder that dtt export writes differ by {difference:.0e}"
