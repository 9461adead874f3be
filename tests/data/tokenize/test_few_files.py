"""How much must be read to know how a document becomes tokens."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import dtt as dtt_package
from dtt.config.load import resolve
from dtt.data.corpus import download
from dtt.data.tokenize import run as tokenize


def test_a_run_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {i} of some"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = ["download.dataset=a.jsonl", "tokenizer.vocab_size=260"]
    cfg = resolve(None, [*options, "tokenize.validation_fraction=0.1"], env={}).config
    download.run(cfg)
    package = Path(dtt_package.__file__).parent
    called: set[Path] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Of a function, not of a module or class, whose body runs when it is imported.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            called.add(Path(code.co_filename))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        tokenize.run(cfg)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = {path.relative_to(package) for path in called if path.is_relative_to(package)}
    assert Path("data/tokenize/encode_corpus.py") in files
    assert len(files) <= 40, "\n".join(sorted(map(str, files)))
