"""Reading of trained models from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dtt.artifacts.manifests import ExportManifest
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.log import log
from dtt.base.safe_names import checked_name
from dtt.checkpoint import tensors as stored
from dtt.data.text.tokenizer import add_in_front, begin_of_document, open_tokenizer
from dtt.hf.chat_format import FETCH_AGAIN, eos_token_ids, read_config
from dtt.hf.weights import from_hf
from dtt.mesh.sharding import FullTensor
from dtt.model import families
from dtt.model.architecture import AnyArchitecture, Architecture, decoder_architecture
from dtt.model.families import multimodal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dtt.data.conversations.chat_encoder import ChatEncoder
    from dtt.model.families.base import DecoderFamily

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedModel:
    """A trained model: architecture, weights and tokenizer."""

    arch: AnyArchitecture
    state: Mapping[str, FullTensor]
    """Parameters of the model, on the CPU or in files."""
    tokenizer: Path
    """A tokenizer.json."""
    end_of_document: int | None
    """Id of the token that ends a document; None if a Hugging Face folder names none."""
    until_ids: tuple[int, ...]
    """Ids that end a generated answer: of the end of a document and of a turn."""
    begin_of_document: int | None = None
    """Id of the token before a document; None if documents had none."""

    @property
    def decoder(self) -> Architecture:
        """The architecture of dtt's own decoder; raises ConfigError for another model."""
        return decoder_architecture(self.arch, "conversion to a Hugging Face folder")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters in memory; those in files are read at each access."""
        state = self.state.items()
        return {name: one if isinstance(one, Tensor) else one[()] for name, one in state}

    def stop_tokens(self, chat: ChatEncoder | None = None) -> tuple[int, ...]:
        """Return the ids before which a text ends, or an answer in the conversation format."""
        return (*self.until_ids, *(() if chat is None else chat.stop_tokens))

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which adds to a text what documents of this model began with."""
        return add_in_front(open_tokenizer(self.tokenizer), self.begin_of_document)

    def check_ids(self, ids: Iterable[int], name: str) -> None:
        """Raise ConfigError if the model has no embedding for one of the `ids` of the text `name`.

        Tokens that were added to a tokenizer have ids above the rows of the model, if these were
        not extended. Such a model is usable with any other text, so only the text is refused. On a
        GPU, an index beyond the embedding ends the process without naming anything.
        """
        rows = self.arch.vocab_size
        outside = sorted({id for id in ids if id >= rows})
        if not outside:
            return
        tokenizer = open_tokenizer(self.tokenizer)
        tokens = [f"{tokenizer.id_to_token(id)} (id {id})" for id in outside[:3]]
        raise ConfigError(
            f"{name} contains {', '.join(tokens)}, for which the model has no embedding",
            where=self.tokenizer,
            why=f"this tokenizer has more ids than the model has rows ({rows})",
            next="leave the token out, or use the tokenizer with which the model was trained",
        )


def read_hf_folder(folder: Path) -> LoadedModel:
    """Read the model of a Hugging Face folder with safetensors files.

    The weights keep their dtype. Raises InputError if dtt does not support the model.
    """
    whole = read_config(folder / "config.json")
    config = multimodal.text_config(whole)
    own = has_family(config)
    if not own:
        check_known(config, folder)
    files, tokenizer = weight_files(folder), folder / "tokenizer.json"
    missing = next((path for path in (*files, tokenizer) if not path.is_file()), None)
    if missing is not None:
        why = f"{missing.name} is missing"
        raise InputError(f"{folder} is not a complete model", why=why, next=FETCH_AGAIN)
    end, until_ids = _end_of_document(folder, config), eos_token_ids(folder)
    begin = begin_of_document(open_tokenizer(tokenizer), tokenizer)
    if not own:
        from dtt.hf import library_folder

        built = library_folder.architecture(config, folder)
        found = stored_tensors(files)
        found = _text_tensors(found, folder) if multimodal.is_multimodal(whole) else found
        state = library_folder.named_by_library(found, built.skeleton, folder)
        return LoadedModel(built, state, tokenizer, end, until_ids, begin)
    arch = _architecture(config, folder)
    tensors = {name: tensor for file in files for name, tensor in load_tensors(file).items()}
    if multimodal.is_multimodal(whole):
        tensors = _text_tensors(tensors, folder)
    return LoadedModel(arch, from_hf(tensors, arch), tokenizer, end, until_ids, begin)


def stored_tensors(files: Iterable[Path]) -> dict[str, FullTensor]:
    """Return the tensors of safetensors files by name, read when indexed; DamagedError as below."""
    try:
        return {**stored.read(files)}
    except DamagedError as error:
        raise DamagedError(f"{error}", next=FETCH_AGAIN) from None


def _text_tensors(tensors: Mapping[str, T], folder: Path) -> dict[str, T]:
    """Return the tensors of the text model of a multimodal model, by their names in it."""
    named = {name: multimodal.text_name(name) for name in tensors}
    text = {text_name: tensors[name] for name, text_name in named.items() if text_name is not None}
    log.warning(
        "%s is a multimodal model: training computes its text model, without %d tensors of its "
        "other parts, which the export of a job has as they are",
        folder,
        len(tensors) - len(text),
    )
    return text


def read_hf_architecture(folder: Path) -> AnyArchitecture:
    """Return the architecture of a Hugging Face folder; reads only config.json."""
    config = multimodal.text_config(read_config(folder / "config.json"))
    if has_family(config):
        return _architecture(config, folder)
    check_known(config, folder)
    from dtt.hf import library_folder

    return library_folder.architecture(config, folder)


def has_family(config: Mapping[str, Any]) -> bool:
    """Return True if dtt has a family of its own for the model_type in a config.json."""
    return config.get("model_type") in {family.hf_model_type for family in families.every()}


def check_known(config: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError unless transformers has a causal model of the type in config.json."""
    from dtt.hf import library_folder

    if library_folder.knows(config):
        return
    known = [family.hf_model_type for family in families.every()]
    raise InputError(
        f"the model in {folder} is not supported",
        why=f"config.json has model_type {config.get('model_type')!r}, "
        "which is no causal model of transformers; "
        f"dtt's own are {', '.join((*known, multimodal.MODEL_TYPE))}",
        next="use a folder written by `dtt export`, or a model of a supported type",
    )


def _architecture(config: Mapping[str, Any], folder: Path) -> Architecture:
    """Return the architecture that config.json describes; InputError if dtt does not support it."""
    family = next(one for one in families.every() if one.hf_model_type == config["model_type"])
    try:
        return family.from_hf_config(config, partial(transformers_defaults, family))
    except KeyError as error:
        why = f"config.json lacks {error}"
        raise InputError(f"{folder} is not a complete model", why=why, next=FETCH_AGAIN) from None


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files as transformers does: model.safetensors, or the files of the index.

    Other files in the folder do not belong to the model. The index is untrusted input: raises
    DamagedError for a name that leads out of the folder.
    """
    # The order of transformers. A folder may hold both, and the other set may be older.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single]
    names = read_config(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise DamagedError(f"{index} has no weight_map", next=FETCH_AGAIN)
    # Sorted, so that messages and memory use do not depend on the order in the file.
    return [folder / checked_name(name, index) for name in sorted(set(names.values()))]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; DamagedError if it is malformed."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DamagedError(f"{path} is damaged", why=str(error), next=FETCH_AGAIN) from None


def transformers_defaults(family: DecoderFamily) -> dict[str, Any]:
    """Return the default configuration of the family's transformers class.

    A key that dtt does not know is harmless if it has its default value.
    """
    from transformers import AutoConfig

    # Asked of the installed version: its defaults are those the folder relies on.
    defaults: dict[str, Any] = AutoConfig.for_model(family.hf_model_type).to_dict()
    return defaults


def _end_of_document(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Return the end-of-document id: if several tokens end generation, the one that also begins
    documents, otherwise the first.

    Chat models end generation at the end of a turn, too. The manifest of an export names the token.
    Returns None if the folder names no token.
    """
    ends = eos_token_ids(folder)
    exported = ExportManifest.read(folder) if ExportManifest.exists(folder) else None
    if exported is not None and exported.end_of_document in ends:
        return exported.end_of_document
    # Chat models list the end of a turn as well. The token that also begins documents separates
    # them.
    begin = config.get("bos_token_id")
    return begin if begin in ends else next(iter(ends), None)
