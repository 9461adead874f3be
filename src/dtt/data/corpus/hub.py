"""Access to the Hugging Face Hub: listing and fetching the files of a split at a pinned commit.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` work as in `huggingface_hub`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset_builder
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: its HTTP library's
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from dtt.base.errors import ConfigError, DamagedError, EnvironmentUnfit, InputError, StorageError
from dtt.base.files import sha256_file
from dtt.base.log import progress
from dtt.base.safe_names import checked_name

PARALLEL_FILES = 4
PATHS_PER_REQUEST = 500
TEMPLATE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of a model that may hold its chat template and the names of its special tokens."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "*processor_config.json",
    *TEMPLATE_FILES,
)
"""Files that `read_hf_folder`, `folder_chat_format` and `Released` read, and an export of a
multimodal model takes over, as patterns."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at the pinned commit."""

    path: str
    bytes: int
    sha256: str | None
    """sha256 of the content; known for LFS files only."""

    @classmethod
    def of(cls, entry: RepoFile) -> RemoteFile:
        """Return an entry of the Hub's listing."""
        return cls(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None)


def pin(repo: str, revision: str | None) -> str:
    """Return the commit that a branch or tag of a dataset points to; None is the main branch."""
    with _told_apart(repo, revision):
        return str(HfApi().dataset_info(repo, revision=revision).sha)


def files_of_split(repo: str, name: str | None, split: str, commit: str) -> list[RemoteFile]:
    """Return the raw data files of a split, resolved and ordered by the rules of `datasets`.

    Raises ConfigError for a subset or split that does not exist, InputError if there are no files
    that can be read without running the repository's code.
    """
    with _told_apart(repo, commit):
        try:
            builder = load_dataset_builder(repo, name, revision=commit)
        except ValueError as error:  # of `datasets`: no such subset, or one must be named
            raise ConfigError(
                f"cannot choose a subset of {repo}",
                where="download.name",
                why=" ".join(str(error).split("Example")[0].split()),
                next="download.name=SUBSET",
            ) from None
        except RuntimeError as error:  # of `datasets`: the repository is a script
            raise InputError(f"{repo} has no plain data files", why=str(error)) from None
        splits = builder.config.data_files or {}
        if split not in splits:
            raise ConfigError(
                f"{repo} has no split {split!r}",
                where="download.split",
                why=f"it has: {', '.join(splits) or 'none'}",
                next=f"download.split={next(iter(splits), 'NAME')}",
            )
        paths = [url.removeprefix(f"hf://datasets/{repo}@{commit}/") for url in splits[split]]
    return files_named(repo, paths, commit)


def all_files(repo: str, commit: str) -> list[RemoteFile]:
    """Return all files of a dataset, ordered by path."""
    with _told_apart(repo, commit):
        tree = HfApi().list_repo_tree(repo, recursive=True, repo_type="dataset", revision=commit)
        files = [RemoteFile.of(entry) for entry in tree if isinstance(entry, RepoFile)]
    return sorted(files, key=lambda file: checked_name(file.path, Path(repo)))


def files_named(repo: str, paths: Sequence[str], commit: str) -> list[RemoteFile]:
    """Return the files of a dataset with these paths, in this order.

    Raises InputError for a path that the repository does not contain.
    """
    found: dict[str, RemoteFile] = {}
    with _told_apart(repo, commit):
        for start in range(0, len(paths), PATHS_PER_REQUEST):
            part = list(paths[start : start + PATHS_PER_REQUEST])
            for entry in HfApi().get_paths_info(repo, part, repo_type="dataset", revision=commit):
                if isinstance(entry, RepoFile):
                    found[entry.path] = RemoteFile.of(entry)
    elsewhere = [path for path in paths if path not in found]
    if elsewhere:
        raise InputError(f"{repo} names files that it does not contain", where=elsewhere[0])
    return [found[checked_name(path, Path(repo))] for path in paths]


def fetch(repo: str, commit: str, files: list[RemoteFile], folder: Path) -> list[str]:
    """Download `files` into `folder`, under their paths in the repository; return their sha256.

    Existing files are not downloaded again, and partial downloads are resumed.
    """
    with progress(f"downloading {repo}", sum(file.bytes for file in files)) as advance:

        def bring(file: RemoteFile) -> str:
            shown = 0

            class ForwardingBar(tqdm):  # type: ignore[misc]  # tqdm is not typed
                """A tqdm bar that only forwards the received bytes to dtt's progress bar."""

                def __init__(self, *_: object, **__: object) -> None:
                    super().__init__(disable=True)

                def update(self, n: float | None = 1) -> bool | None:
                    nonlocal shown
                    shown += int(n or 0)
                    advance(int(n or 0))
                    return None

            path = Path(
                hf_hub_download(
                    repo,
                    file.path,
                    repo_type="dataset",
                    revision=commit,
                    local_dir=folder,
                    tqdm_class=ForwardingBar,
                )
            )
            advance(file.bytes - shown)
            sha256 = sha256_file(path)
            if path.stat().st_size != file.bytes or sha256 != (file.sha256 or sha256):
                path.unlink()
                raise DamagedError("a downloaded file differs from that on the Hub", where=path)
            return sha256

        with _told_apart(repo, commit), ThreadPoolExecutor(PARALLEL_FILES) as pool:
            return list(pool.map(bring, files))


def fetch_tokenizer(repo: str, revision: str | None) -> Path:
    """Fetch the `tokenizer.json` of a model on the Hub; return its path in the Hub's cache.

    Also fetches those of TEMPLATE_FILES that the model has.
    """
    with _told_apart(repo, revision, "model"):
        for name in TEMPLATE_FILES:
            try:
                hf_hub_download(repo, name, revision=revision)
            except LocalEntryNotFoundError:
                if not constants.is_offline_mode():  # then the cache does not know either
                    raise
            except EntryNotFoundError:
                continue
        try:
            return Path(hf_hub_download(repo, "tokenizer.json", revision=revision))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise InputError(
                f"{repo} has no tokenizer.json",
                next="use a model with a fast tokenizer, or a local tokenizer.json",
            ) from None


def fetch_model(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    """Fetch the `files` (patterns) of a model; return its folder in the Hub's cache."""
    with _told_apart(repo, revision, "model"):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))


@contextmanager
def _told_apart(repo: str, revision: str | None, kind: str = "dataset") -> Iterator[None]:
    """Turn exceptions of the Hub's libraries into dtt errors that describe the fix."""
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    sign_in = "hf auth login (or set HF_TOKEN)"
    try:
        yield
    except RevisionNotFoundError:
        raise ConfigError(f"{repo} has no revision {revision!r}", where=page) from None
    except (GatedRepoError, DatasetNotFoundError) as error:
        if isinstance(error, DatasetNotFoundError) and "gated" not in str(error):
            raise InputError(f"{repo} cannot be read", where=page, why=str(error)) from None
        raise InputError(
            f"{repo} is gated: its owner decides who may read it",
            where=page,
            next=f"request access on that page, then {sign_in}",
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(
            f"there is no {kind} {repo}: neither a local file or folder nor on the Hub",
            where=page,
            next=f"check the name: a path, or ORG/NAME of the Hub; if it is private: {sign_in}",
        ) from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if not constants.is_offline_mode():  # the cache does not have it, and the Hub is away
            raise _unreachable(repo, kind, error) from None
        raise EnvironmentUnfit(
            f"there is no {kind} {repo} on this machine, and access to the Hub is disabled",
            why=f"there is no file or folder {repo}, nor a copy in the Hub's cache; "
            "HF_HUB_OFFLINE is set",
            next="specify an existing file or folder, or unset HF_HUB_OFFLINE and specify ORG/NAME",
        ) from None
    except HfHubHTTPError as error:
        raise EnvironmentUnfit(
            f"the Hub did not answer the request for {repo}",
            where=page,
            why=str(error).splitlines()[0],
            next="try again later; what has been fetched is kept",
        ) from None
    except (HTTPError, ConnectionError) as error:
        raise _unreachable(repo, kind, error) from None
    except FileNotFoundError as error:  # EmptyDatasetError, DataFilesNotFoundError
        raise InputError(f"{repo} has no data files", where=page, why=str(error)) from None
    except OSError as error:
        raise StorageError(f"cannot fetch {repo}", why=str(error)) from None


def _unreachable(repo: str, kind: str, error: Exception) -> EnvironmentUnfit:
    # A local path with a typing error looks like a name on the Hub: say that neither was found.
    return EnvironmentUnfit(
        f"there is no file or folder {repo}, and dtt cannot reach the Hub for a {kind} {repo}",
        where=constants.ENDPOINT,
        why=str(error).splitlines()[0],
        next="specify an existing file or folder, check the network, or set HF_ENDPOINT to a "
        "mirror; what has been fetched is kept",
    )
