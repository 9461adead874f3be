"""Check a tiny model of every causal class of transformers, and print a table.

    python benchmarks/library_models.py                    # all types, about half an hour
    python benchmarks/library_models.py lfm2 granite       # some types
    python benchmarks/library_models.py rows.jsonl         # keep rows, and skip those kept there

Each type gets the default configuration of its class, made small by the names of its keys, and the
checks of `dtt verify --model`, and is trained, resumed, adapted and exported. Types with parts for
images or sound come last: a small folder of each is trained by its text model.
docs/library-models.md is the output of this script.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import chdir
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from small_models import PARTS, VOCABULARY, text_type, tiny, write_whole

MEMORY = 6 << 30
"""Bytes of memory that a process for one type may have."""
UNTRIED = {
    "blt": "a second model chooses its patches of bytes; there is no small configuration yet",
    "gemma4_assistant": "the library's own default configuration is invalid",
}
"""Types without a small configuration."""
PAGE = """# Causal models of transformers, type by type

`python benchmarks/library_models.py` printed this page with transformers {version} on a CPU. Each
type has the default configuration of its class, made small (width 64, mostly 4 layers), with
initial values, in fp32. It *works* if dtt's logits, losses and gradients equal those of the
library's own forward pass (within 1e-5), each parameter gets a gradient, no token sees a later one,
and the exported folder has equal logits. `dtt verify --model FOLDER` does the same with a model of
yours; [any-model.md](any-model.md) describes what else works. *Text part* is a folder with parts
for images, of which training computes the text model, and which is exported as a whole.

- *trained*: the loss in 6 steps of `dtt train` on documents of 40 to 70 words.
- *resumed*: a restart after step 3 ends with the same bits, in weights and in optimizers.
- *documents*: what keeps the documents of a packed row apart: `positions` that restart; `masks`,
  one for each type of layer; or nothing (`alone`): training needs `data.packing=none`, a sequence
  for each document, with which this type was trained.
- *export*: the largest difference of a logit between the trained model and the folder that
  `dtt export` writes, as `transformers` reads it.
- *LoRA*: the loss in 6 steps of adapters of all linear layers of this folder, and the largest
  difference of a logit between dtt and `PEFT` with what `dtt export --adapter` writes. Where PEFT
  cannot load it, that of the merged export, and the reason. A type with a family of dtt's own
  is adapted by that.
"""


class Row(NamedTuple):
    """What is known of a type."""

    result: str
    trained: str = ""
    resumed: str = ""
    documents: str = ""
    export: str = ""
    lora: str = ""
    remarks: str = ""


def row(kind: str, tokens: Path) -> Row:
    """Check, train, export and adapt a small model of a type; `tokens` is a token folder."""
    from dtt.base.errors import DttError
    from dtt.model.library.model import BY_MASKS
    from dtt.verify import folder

    if kind in UNTRIED:
        return Row("not tried", remarks=UNTRIED[kind])
    text = text_type(kind)
    # The compressors of deepseek_v4 see blocks of 128 tokens.
    length = 256 if kind == "deepseek_v4" else 64
    with tempfile.TemporaryDirectory() as name, chdir(name):
        try:
            if text is None:
                model, start = initial(kind, length)
                theirs: Any = folder.of_library(model)
            else:
                write_whole(kind, text, Path("whole"), tokens)
                model, theirs, _ = folder.models(Path("whole"))
                start = {"init": {"from": f"hf:{name}/whole"}}
            checks = {one.name: one for one in folder.checks(model, theirs)}
        except DttError as error:
            return Row("refused", remarks=reason(str(error)))
        except Exception as error:
            if text is None:
                raise
            why = " ".join(str(error).split())[:100]
            return Row("not tried", remarks=f"no small folder: {why}")
        failed = [one for one in checks.values() if one.verdict == "fails"]
        if failed:
            # A start of training refuses what does not pass these two.
            refused = {one.name for one in failed} <= {"gradients", "causal"}
            return Row("refused" if refused else "fails", remarks=reason(failed[0].detail))
        apart = "masks" if (text or kind) in BY_MASKS else "positions"
        documents = "alone" if checks["documents"].verdict != "works" else apart
        keys = settings_of(tokens, length, documents == "alone")
        fell, same = attempt(lambda: train({**keys, **start, "name": "t"}), 2)
        [export] = attempt(lambda: (exported("t"),), 1)
        [lora] = attempt(lambda: (adapt(keys),), 1)
    remarks = f"its text model is `{text}`" if text else ""
    if "dropout" in checks:
        remarks = checks["dropout"].detail.replace("model.config.", "")
    return Row("text part" if text else "works", fell, same, documents, export, lora, remarks)


def initial(kind: str, length: int) -> tuple[Any, dict[str, Any]]:
    """Return a small model with initial values, and the keys of a run that trains it."""
    from dtt.model.architecture import BuiltArchitecture
    from dtt.model.library.family import TransformersFamily
    from dtt.verify import folder

    section, size = TransformersFamily(config=tiny(kind)), VOCABULARY
    arch = BuiltArchitecture(section=section, vocab_size=size, max_seq_len=length)
    keys = {"family": "transformers", "config": tiny(kind), "max_seq_len": length}
    return folder.initialized(arch), {"model": keys}


def attempt(call: Callable[[], Sequence[str]], values: int) -> list[str]:
    """Return the texts of `call`, or the reason why there are none."""
    from dtt.base.errors import DttError

    try:
        return list(call())
    except DttError as error:
        return [f"refused: {reason(str(error))}"] + [""] * (values - 1)
    except Exception as error:  # noqa: BLE001  whatever a class of the library raises
        return [f"{type(error).__name__}: {error}".splitlines()[0]] + [""] * (values - 1)


def settings_of(tokens: Path, length: int, alone: bool) -> dict[str, Any]:
    """Return the keys of a run of 6 steps, without its model."""
    return {
        "data": {
            "tokens": str(tokens), "packing": "none" if alone else "best-fit",
            "mask_documents": True,
        },
        "train": {
            "steps": 6, "seq_len": length, "global_batch_tokens": 4 * length, "micro_batch": 4,
            "eval_every": 0, "eval_tokens": length, "sample_tokens": 0, "precision": "fp32",
            "device": "cpu",
        },
        "checkpoint": {"every": 3}, "schedule": {"warmup": 0},
    }  # fmt: skip


def train(keys: dict[str, Any]) -> tuple[str, str]:
    """Train 6 steps, and again from step 3; return how the loss falls, and if bits are equal."""
    import dtt

    job = dtt.train(dtt.load(keys))
    fell = falling(job, "train")
    last, whole = job.path / "checkpoints/step-000006", Path("whole_run")
    last.rename(whole)
    dtt.train(str(job.path))
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    same = [(whole / one).read_bytes() == (last / one).read_bytes() for one in files]
    return fell, "yes" if same and all(same) else "no"


def falling(job: Any, kind: str) -> str:
    """Return the first and the last loss of a job, and say so if the last is not lower."""
    losses = [one["loss"] for one in job.metrics.to_pylist() if one["kind"] == kind]
    fell = f"{losses[0]:.2f} to {losses[-1]:.2f}"
    return fell if losses[-1] < losses[0] else f"no: {fell}"


def exported(job: str) -> str:
    """Export a job to the folder of its name; return the largest difference of a logit."""
    import dtt

    return difference(dtt.export(f"jobs/{job}", f"out/{job}", "export.dtype=fp32"))


def difference(folder: Path) -> str:
    found = json.loads((folder / "dtt_export.json").read_text())["max_logit_difference"]
    return f"{found:.0e}" if found else "0"


def adapt(keys: dict[str, Any]) -> str:
    """Train adapters of all linear layers of the exported folder; compare with PEFT."""
    import dtt
    from dtt.base.errors import InputError
    from dtt.hf import export

    base = Path("out/t").absolute()
    adapter = {"type": "lora", "rank": 4}
    more = {"adapter": adapter, "init": {"from": f"hf:{base}"}, "optim": {"type": "adamw"}}
    job = dtt.train(dtt.load({**keys, **more, "name": "a"}))
    fell = falling(job, "eval")
    try:
        export.export(str(job.path), [], out=Path("adapter"), upload=None, adapter=True)
    except InputError as error:
        why = str(error).partition("why:")[2].strip().partition(". ")[0].splitlines()[0]
        return f"{fell}, merged {exported('a')}; not by PEFT: {why}"
    return f"{fell}, PEFT {difference(Path('adapter'))}"


def reason(text: str) -> str:
    """Return the reason in an error, on one line."""
    text = text.replace(f"{Path.cwd()}/", "")
    lines = [line.strip() for line in text.replace("; ", "\n").splitlines()]
    why = next((line.removeprefix("why:").strip() for line in lines if line[:4] == "why:"), "")
    first = lines[0]
    return why if first.startswith("dtt cannot train") else f"{first} ({why})" if why else first


def tokenized(folder: Path) -> Path:
    """Write a token folder of short documents, and return its path."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    texts = (" ".join(words[(i * 7 + j * j) % 10] for j in range(40 + i % 30)) for i in range(400))
    lines = (json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts))
    (folder / "counting.jsonl").write_text("".join(lines))
    made = (
        "tokenizer.vocab_size=300",
        "tokenize.out=tokens",
        "tokenize.validation_fraction=0.1",
        "tokenize.unit_bytes=8192",
    )
    for command in (("download",), ("tokenize", *made)):
        whole = [sys.executable, "-m", "dtt.main", *command, "-d", "counting.jsonl"]
        subprocess.run(whole, cwd=folder, check=True, stdout=sys.stderr)
    return folder / "tokens"


def limited() -> None:
    """Limit the memory of this process: a type that needs more fails by itself."""
    import transformers

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    settings: Any = transformers.utils.logging
    settings.set_verbosity_error()


def in_process(kind: str, tokens: Path) -> Row:
    """Return the row of a type, made by a process of its own."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "peft", "dtt.train.run"])
    try:
        with ProcessPoolExecutor(1, mp_context=context, initializer=limited) as pool:
            return pool.submit(row, kind, tokens).result()
    except BrokenProcessPool as error:
        return Row("fails", remarks=f"its process ended: {error}")
    except Exception as error:  # noqa: BLE001  whatever a class of the library raises
        return Row("fails", remarks=f"{type(error).__name__}: {error}".splitlines()[0])


def table(kinds: Sequence[str], found: dict[str, Row], kept: Path | None) -> Iterator[str]:
    """Yield the lines of the table of some types; rows that are `found` are not made again."""
    with tempfile.TemporaryDirectory() as name:
        tokens = tokenized(Path(name))
        for kind in kinds:
            if kind not in found:
                found[kind] = in_process(kind, tokens)
                print(kind, *found[kind], file=sys.stderr, flush=True)
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps([kind, *found[kind]]) + "\n")
    counts = Counter(found[kind].result for kind in kinds)
    yield ", ".join(f"{count} {result}" for result, count in counts.most_common()) + "."
    yield ""
    yield "| type | | trained | resumed | documents | export | LoRA | remarks |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for kind in kinds:
        cells = (cell.replace("|", "/") for cell in found[kind])
        yield f"| `{kind}` | {' | '.join(cells)} |"


def main() -> None:
    """Print the page, or the table of the types that are named."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kept = next((Path(one) for one in sys.argv[1:] if one.endswith(".jsonl")), None)
    rows = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    found = {kind: Row(*cells) for kind, *cells in map(json.loads, rows)}
    kinds = [one for one in sys.argv[1:] if not one.endswith(".jsonl")]
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *PARTS})
    lines = list(table(kinds or every, found, kept))
    if not kinds:
        print(PAGE.format(version=transformers.__version__))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
