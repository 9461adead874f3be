"""init.from: released weights go on as what they were, or it is said why they cannot."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from support.loopback_hub import LoopbackHub
from support.running import ROOT, Dtt
from support.tiny_job import make_tokenizer, write_job

from dtt.artifacts.manifests import CHAT_TEMPLATE, ChatFacts, DataManifest
from dtt.base import host_memory
from dtt.base.errors import ConfigError, InputError
from dtt.base.ranks import Ranks
from dtt.config.load import load_job
from dtt.config.model import ModelConfig
from dtt.data.conversations.template import CHATML
from dtt.data.samples.dataset import open_dataset
from dtt.data.text.tokenizer import open_tokenizer
from dtt.mesh import dist
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.train.find_job import model_of
from dtt.train.initial import initialise_from, new_tokens, untrained_tokens

TUTORIAL = (ROOT / "docs/tutorial-laptop.md").read_text()
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 5e5}


def write_released(folder: Path, tokenizer: Path) -> Any:
    """A Llama as others release them, with weights that are not tiny."""
    settings: dict[str, Any] = {
        "vocab_size": open_tokenizer(tokenizer).get_vocab_size(), "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "rope_theta": 5e5, "initializer_range": 0.3, "eos_token_id": 0,
        "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    model.save_pretrained(folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return model


@pytest.fixture
def released(tmp_path: Path, tokens: Path) -> Path:
    """A folder of such a model, for the tokenizer of `tokens`."""
    write_released(tmp_path / "released", tokens / "tokenizer.json")
    return tmp_path / "released"


def make(**changes: object) -> Decoder:
    cfg = ModelConfig.model_validate({"ffn_dim": 96, "norm_eps": 1e-6, **SIZES, **changes})
    model = Decoder(families.get(cfg.family).architecture(cfg, 300, 64))
    initialize(model, 0)
    return model


def begin(model: Decoder, source: Path, tokenizer: Path) -> None:
    initialise_from(f"hf:{source}", model, tokenizer, dist.start(Ranks(), "cpu"))


def test_a_hub_model_starts_with_the_loss_that_transformers_computes(
    dtt: Dtt, tokens: Path, tiny: Callable[..., list[str]]
) -> None:
    theirs = write_released(dtt.folder / "released", tokens / "tokenizer.json")
    files = {p.name: p.read_bytes() for p in (dtt.folder / "released").iterdir()}
    sizes = {f"model__{k}": v for k, v in {**SIZES, "ffn_dim": 96, "norm_eps": 1e-6}.items()}
    with LoopbackHub() as hub:
        hub.add("model", "org/released", files | {"onnx/model.bin": b"not wanted"})
        run = dtt(
            "train",
            *tiny(**sizes, model__vocab_size=300, train__steps=2, train__precision="fp32"),
            "init.from=hf:org/released@main", "train.eval_tokens=1000000",
            HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1",
            HF_HOME=str(dtt.folder / "cache"),
        )  # fmt: skip
        assert not any("onnx" in request for request in hub.requests)
    assert f"snapshots/{hub.repos['model', 'org/released'].commit}: 21 of 21 tensors" in run.stderr
    assert "other text" not in run.stderr
    first = json.loads((dtt.folder / "jobs/t/metrics.jsonl").open().readline())
    assert (first["kind"], first["step"]) == ("eval", 0)

    validation = open_dataset(load_job(dtt.folder / "jobs/t")).validation[0]
    assert validation is not None
    ids = torch.from_numpy(validation.read(np.arange(len(validation), dtype=np.uint64)).ids)
    with torch.no_grad():
        logits = theirs(ids[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert expected > 6.5  # nothing like ln 300, what an untrained model has
    assert first["loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("free", [10**5, 10**9])
def test_logits_are_compared_if_there_is_memory_for_it(
    released: Path,
    tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
) -> None:
    monkeypatch.setattr(host_memory, "free", lambda: free)
    with caplog.at_level(logging.INFO, logger="dtt"):
        begin(make(), released, tokens / "tokenizer.json")
    assert ("differ from those of transformers by" in caplog.text) == (free > 10**6)
    assert ("skipped comparing the logits" in caplog.text) != (free > 10**6)


def test_another_architecture_is_refused_with_the_section_that_fits(
    released: Path, tokens: Path
) -> None:
    with pytest.raises(ConfigError, match="n_heads 8 here, 4 there") as refused:
        begin(make(n_heads=8, n_kv_heads=4), released, tokens / "tokenizer.json")
    message = str(refused.value)
    assert "rope_theta" not in message.split("next:")[0]
    section = yaml.safe_load(message.partition("use its model section:\n\n")[2])["model"]
    assert section["vocab_size"] == 300
    begin(make(**section), released, tokens / "tokenizer.json")


@pytest.mark.parametrize(
    ("model", "arch", "message"),
    [
        ({}, {"logit_scale": 0.5}, r"the scaling multipliers differ\n.*scaling.type=standard"),
        ({"rope_theta": 1e4}, {}, r"rope_theta 10000.0 here, 500000.0 there"),
    ],
)
def test_multipliers_that_scaling_sets_and_another_rope_are_refused(
    released: Path, tokens: Path, model: Any, arch: Any, message: str
) -> None:
    made = make(**model)
    made.arch = replace(made.arch, **arch)
    with pytest.raises(ConfigError, match=message):
        begin(made, released, tokens / "tokenizer.json")


def test_ids_that_decode_to_other_text_cause_a_warning(
    released: Path, tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dtt"):
        begin(make(), released, tokens / "tokenizer.json")
        assert not caplog.text
        other = tmp_path / "tokenizer.json"
        make_tokenizer().save(str(other))
        begin(make(), released, other)
    assert "257 of the 257 token ids of the data decode to other text" in caplog.text
    assert "0 is '!' here, '<|endoftext|>' there" in caplog.text


def test_the_tokenizer_of_another_job_is_compared_too(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = write_job(tmp_path)
    cfg = load_job(job)
    arch = families.get(cfg.model.family).architecture(cfg.model, 257, cfg.train.seq_len)
    world = dist.start(Ranks(), "cpu")
    with caplog.at_level(logging.INFO, logger="dtt"):
        initialise_from(f"{job}@5", Decoder(arch), job / "tokenizer.json", world)
        assert "21 of 21 tensors" in caplog.text
        assert "other text" not in caplog.text
        assert "differs:" not in caplog.text
        initialise_from(str(job), Decoder(arch), None, world)  # of synthetic data
        assert "other text" not in caplog.text
        initialise_from(str(job), Decoder(arch), tokens / "tokenizer.json", world)
    assert "300 of the 300 token ids of the data decode to other text" in caplog.text


def test_another_model_with_the_same_shapes_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = write_job(tmp_path)
    cfg = load_job(job).model.model_copy(update={"rope_theta": 5e5})
    arch = families.get(cfg.family).architecture(cfg, 257, 64)
    world = dist.start(Ranks(), "cpu")
    with caplog.at_level(logging.INFO, logger="dtt"):
        initialise_from(str(job), Decoder(arch), job / "tokenizer.json", world)
    assert "differs: rope_theta 500000.0 here, 10000.0 there" in caplog.text
    assert "21 of 21 tensors" in caplog.text


@pytest.mark.parametrize("name", ["no such/folder", "/no/such/folder", "."])
def test_a_source_without_a_model_is_named(
    name: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no model in "):
        begin(make(), Path(name), tokens / "tokenizer.json")


def write_gpt2(folder: Path, tokenizer: Path, **settings: Any) -> None:
    """A tiny GPT-2 as transformers writes it."""
    sizes: dict[str, Any] = {
        "vocab_size": open_tokenizer(tokenizer).get_vocab_size() + 4, "n_embd": 24, "n_layer": 2,
        "n_head": 3, "n_positions": 96, "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    config = transformers.GPT2Config(**(sizes | settings))
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def write_run(folder: Path, tokens: Path, more: str = "") -> None:
    """The tutorial's run.yaml, shortened: it extends a Llama."""
    (folder / "run.yaml").write_text(
        f"extends: [models/llama-tiny.yaml]\nname: stories\ndata: {{tokens: {tokens}}}\n"
        "train: {steps: 4, seq_len: 32, micro_batch: 4, global_batch_tokens: 256, eval_every: 2}\n"
        "schedule: {warmup: 1}\ncheckpoint: {every: 2}\n" + more
    )


def readme_command() -> list[str]:
    """The tutorial's command that begins with released weights, without its comment."""
    [line] = [line for line in TUTORIAL.splitlines() if re.match("dtt .*init.from=hf:", line)]
    return shlex.split(line, comments=True)


@pytest.mark.slow
def test_the_command_of_the_tutorial_adopts_the_family_and_sizes_of_the_source(
    dtt: Dtt, tokens: Path
) -> None:
    program, *arguments = readme_command()
    assert (program, arguments[-1]) == ("dtt", "init.from=hf:openai-community/gpt2")
    write_gpt2(dtt.folder / "openai-community/gpt2", tokens / "tokenizer.json")
    write_run(dtt.folder, tokens)
    run = dtt(*arguments)
    assert "init.from=hf:openai-community/gpt2: the model section is taken from these" in run.stderr
    assert "family gpt2" in run.stderr
    assert "36 of 36 tensors" in run.stderr
    assert "differ from those of transformers by" in run.stderr
    cfg = load_job(dtt.folder / "jobs/third")
    assert (cfg.model.family, cfg.model.dim, cfg.model.n_heads) == ("gpt2", 24, 3)
    assert (cfg.model.vocab_size, cfg.model.max_seq_len) == (304, 96)
    exported = dtt("export", "jobs/third", "--out", "back")
    assert "logits differ from those of transformers by at most" in exported.stdout
    back = json.loads((dtt.folder / "back/config.json").read_text())
    assert (back["n_positions"], back["vocab_size"]) == (96, 304)

    shutil.rmtree(dtt.folder / "openai-community")  # a job that has begun does without
    assert "jobs/third is done" in dtt(*arguments).stderr
    dtt(*arguments, "train.steps=6", "--allow-change", "train.steps")
    dtt("train", "jobs/third", "train.steps=8", "--allow-change", "train.steps")
    other = dtt(*arguments[:-1], "init.from=hf:elsewhere", expect=2).stderr
    assert "jobs/third was started with different values of: init.from" in other


def test_a_plan_and_a_configuration_show_the_adopted_sizes(dtt: Dtt, tokens: Path) -> None:
    write_gpt2(dtt.folder / "source", tokens / "tokenizer.json")
    write_run(dtt.folder, tokens)
    options = ["-c", "run.yaml", "init.from=hf:source"]
    shown = dtt("config", "show", *options).stdout
    assert yaml.safe_load(shown)["model"]["family"] == "gpt2"
    assert re.search(r"dim: 24 +# init.from=hf:source", shown)
    plan = json.loads(dtt("plan", *options, "--gpu", "H100", "--json").stdout)
    untouched = json.loads(dtt("plan", "-c", "run.yaml", "--gpu", "H100", "--json").stdout)
    assert plan["parameters"] == 304 * 24 + 96 * 24 + 2 * (12 * 24**2 + 13 * 24) + 2 * 24
    assert untouched["parameters"] > 20 * plan["parameters"]


@pytest.mark.parametrize(
    ("more", "arguments", "named"),
    [
        ("", ["model.dim=48"], "argument  model.dim: 48 here, 24 in the model of init.from"),
        ("", ["model.family=llama"], "model.family: 'llama' here, 'gpt2' in the model"),
        (
            "init: {from: hf:source}\nmodel: {n_layers: 3}\n",
            [],
            "run.yaml:8  model.n_layers: 3 here, 2 in the model of init.from",
        ),
    ],
)
def test_a_model_key_that_contradicts_the_source_is_refused(
    more: str, arguments: list[str], named: str, dtt: Dtt, tokens: Path
) -> None:
    write_gpt2(dtt.folder / "source", tokens / "tokenizer.json")
    write_run(dtt.folder, tokens, more)
    source = [] if more else ["init.from=hf:source"]
    refused = dtt("train", "-c", "run.yaml", *source, *arguments, expect=2)
    assert named in refused.stderr
    assert not (dtt.folder / "jobs").exists()


def test_keys_that_agree_or_may_differ_are_accepted(dtt: Dtt, tokens: Path) -> None:
    write_gpt2(dtt.folder / "source", tokens / "tokenizer.json")
    write_run(dtt.folder, tokens, "model: {dropout: 0.25}\n")
    shown = dtt(
        "config", "show", "-c", "run.yaml", "init.from=hf:source", "model.dim=24",
        "model.vocab_size=null", "model.max_seq_len=64", "model.tie_embeddings=false",
    ).stdout  # fmt: skip
    model = yaml.safe_load(shown)["model"]
    assert (model["family"], model["dim"], model["dropout"]) == ("gpt2", 24, 0.25)
    assert (model["vocab_size"], model["max_seq_len"]) == (None, 64)
    assert model["tie_embeddings"] is False


@pytest.mark.slow
def test_tokens_with_a_larger_vocabulary_than_the_source_are_refused(
    dtt: Dtt, tokens: Path
) -> None:
    write_gpt2(dtt.folder / "source", tokens / "tokenizer.json", vocab_size=250)
    write_run(dtt.folder, tokens)
    options = ["-c", "run.yaml", "init.from=hf:source"]
    refused = dtt("train", *options, expect=2)
    assert "model.vocab_size (250) is smaller than the tokenizer's vocabulary (300)" in (
        refused.stderr
    )
    assert "model.vocab_size=null" in refused.stderr
    run = dtt("train", *options, "model.vocab_size=null", "name=second")
    assert "embed.weight: 250 rows copied, 320 here, 250 there" in run.stderr


def test_an_unsupported_model_is_refused_before_a_job_is_created(dtt: Dtt, tokens: Path) -> None:
    write_gpt2(dtt.folder / "source", tokens / "tokenizer.json")
    config = dtt.folder / "source/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_causal": False}))
    write_run(dtt.folder, tokens)
    refused = dtt("train", "-c", "run.yaml", "init.from=hf:source", expect=66)
    assert "config.json has is_causal: False; supported: True" in refused.stderr
    assert not (dtt.folder / "jobs").exists()


def test_a_folder_that_transformers_cannot_load_is_refused(dtt: Dtt, tokens: Path) -> None:
    write_released(dtt.folder / "source", tokens / "tokenizer.json")
    config = dtt.folder / "source/config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"model_type": "mistral", "attention_dropout": None}))
    write_run(dtt.folder, tokens)
    refused = dtt("train", "-c", "run.yaml", "init.from=hf:source", expect=66)
    assert "transformers cannot load it" in refused.stderr
    assert "attention_dropout" in refused.stderr


def test_layers_in_an_order_that_no_key_describes_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, layer_types=kinds, sliding_window=8,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no key of the model section describes"):
        model_of(f"hf:{tmp_path}")


@pytest.mark.slow
def test_trials_of_a_sweep_adopt_the_source(dtt: Dtt, tokens: Path) -> None:
    write_gpt2(dtt.folder / "source", tokens / "tokenizer.json")
    write_run(dtt.folder, tokens)
    (dtt.folder / "lr.yaml").write_text(
        "base: run.yaml\noverrides: [init.from=hf:source]\nparameters: {optim.lr: [0.001]}\n"
    )
    dtt("sweep", "submit", "lr.yaml", "--local", "1", "--yes")
    [job] = (dtt.folder / "jobs/lr").glob("001-*")
    assert load_job(job).model.family == "gpt2"
    assert (job / "checkpoints/step-000004").is_dir()


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Path:
    """The tokenizer of conversations, with their template beside it."""
    folder = tmp_path / "chat"
    folder.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|spare|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / CHAT_TEMPLATE).write_text(CHATML)
    return folder / "tokenizer.json"


UNTRAINED = {257: "<|im_start|>", 258: "<|im_end|>"}


def test_tokens_of_the_template_are_untrained_after_a_job_on_text(
    tmp_path: Path, chat_tokenizer: Path
) -> None:
    job = write_job(tmp_path)
    assert untrained_tokens(str(job), chat_tokenizer) == UNTRAINED
    assert untrained_tokens(f"{job}@5", chat_tokenizer) == UNTRAINED
    later = shutil.copytree(job, tmp_path / "jobs/later")
    config = yaml.safe_load((job / "config.yaml").read_text())
    (later / "config.yaml").write_text(yaml.safe_dump(config | {"init": {"from": str(job)}}))
    assert untrained_tokens(str(later), chat_tokenizer) == UNTRAINED
    data = DataManifest.read(job)
    facts = ChatFacts(template_sha256="0" * 64, kwargs={}, stop_tokens=(258,))
    (job / data.filename).write_text(data.model_copy(update={"chat": facts}).dump())
    assert untrained_tokens(str(job), chat_tokenizer) == {}
    assert untrained_tokens(str(later), chat_tokenizer) == {}
    shutil.rmtree(job)  # nobody knows what the later job started from
    assert untrained_tokens(str(later), chat_tokenizer) == {}


def test_no_tokens_are_untrained_without_a_template_or_after_token_files_of_other_tools(
    tmp_path: Path, chat_tokenizer: Path
) -> None:
    job = write_job(tmp_path)
    assert untrained_tokens(str(job), job / "tokenizer.json") == {}
    data = DataManifest.read(job)
    sources = tuple(source.model_copy(update={"corpus": None}) for source in data.sources)
    (job / data.filename).write_text(data.model_copy(update={"sources": sources}).dump())
    assert untrained_tokens(str(job), chat_tokenizer) == {}


def test_released_weights_with_a_chat_template_have_no_untrained_tokens(
    released: Path, chat_tokenizer: Path
) -> None:
    assert untrained_tokens(f"hf:{released}", chat_tokenizer) == UNTRAINED
    (released / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert untrained_tokens(f"hf:{released}", chat_tokenizer) == {}
    (released / "tokenizer_config.json").unlink()
    (released / CHAT_TEMPLATE).write_text(CHATML)
    assert untrained_tokens(f"hf:{released}", chat_tokenizer) == {}


def test_tokens_that_begin_documents_are_trained(
    tmp_path: Path, released: Path, chat_tokenizer: Path
) -> None:
    """A template that spells the token before each document does not make it a new one."""
    job = write_job(tmp_path)
    data = DataManifest.read(job)
    (job / data.filename).write_text(data.model_copy(update={"begin_of_document": 257}).dump())
    assert untrained_tokens(str(job), chat_tokenizer) == {258: "<|im_end|>"}
    config = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps(config | {"bos_token_id": 258}))
    assert untrained_tokens(f"hf:{released}", chat_tokenizer) == {257: "<|im_start|>"}


def test_tokens_in_rows_without_a_token_are_new(tmp_path: Path, chat_tokenizer: Path) -> None:
    job = write_job(tmp_path)  # 257 tokens
    new = new_tokens(str(job), chat_tokenizer, job / "tokenizer.json", 259)
    assert (new.added, new.untrained, new.unused) == (UNTRAINED, {}, {257, 258})
    new = new_tokens(str(job), chat_tokenizer, chat_tokenizer, 320)
    assert (new.added, new.untrained, new.unused) == ({}, UNTRAINED, set(range(260, 320)))
