"""Upload of an export to the Hugging Face Hub, or to the server that HF_ENDPOINT names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import HfApi, errors, get_token

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.hf.publish import LOADED

# Base class of the errors of the client's HTTP library: httpx or httpx2, depending on its version.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


def prepare(repo: str, revision: str | None, *, private: bool) -> None:
    """Create the repository `repo` and its branch `revision`, unless they exist.

    An export takes minutes, and only the Hub knows which names it accepts and what a token may do,
    so this asks it before. Raises the errors of `upload`, and ConfigError if the Hub refuses the
    name of the branch, or if that is the name of a tag.
    """
    if get_token() is None:
        raise EnvironmentUnfit(
            f"cannot upload to {repo}: no Hugging Face token",
            next="`hf auth login`, or HF_TOKEN=hf_… in the environment, then the same command",
        )
    api = HfApi(library_name="dtt")
    with _translated_errors(api, repo, "nothing was exported yet"):
        api.whoami()
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            _create_branch(api, repo, revision)


def _create_branch(api: HfApi, repo: str, revision: str) -> None:
    why = "it is a tag, and a tag does not change"
    try:
        if revision:  # an empty name would be another address
            api.create_branch(repo, branch=revision, exist_ok=True)
            # The client takes any conflict for an existing branch, also one with a tag.
            if any(branch.name == revision for branch in api.list_repo_refs(repo).branches):
                return
        else:
            why = "it is empty"
    except errors.BadRequestError as error:
        why = error.server_message or "the Hub does not accept this name"
    raise ConfigError(
        f"cannot upload to the branch {revision!r} of {repo}",
        why=why,
        next="--revision NAME, such as step-400",
    )


def upload(
    folder: Path, names: Sequence[str], repo: str, revision: str | None, *, message: str
) -> str:
    """Upload the export in `folder` to the prepared model `repo` (`org/name`); return its URL.

    Only the files `names` are sent. Files of an earlier export that this one lacks are deleted
    there, because `transformers` would load them.

    `revision` is a branch, by default `main`. Files that the Hub already has are not sent again,
    and without a difference there is no commit. Raises EnvironmentUnfit if there is no token, the
    Hub refuses the token, or the Hub cannot be reached; ConfigError if `repo` is not a valid name.
    """
    api = HfApi(library_name="dtt")
    with _translated_errors(api, repo, f"the export itself is complete in {folder}"):
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            allow_patterns=list(names),
            delete_patterns=list(LOADED),
        )
        branch = "" if revision is None else f"/tree/{quote(revision)}"
        return f"{api.endpoint}/{repo}{branch}"


@contextmanager
def _translated_errors(api: HfApi, repo: str, state: str) -> Iterator[None]:
    """Convert errors of the client to those of dtt; `state` describes the progress so far."""
    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigError(
            f"{repo!r} is not the name of a Hub repository",
            why=str(error),
            next="--upload ORG/NAME",
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        why, remedy = {
            401: ("the token is not valid", "`hf auth login` with a new token"),
            403: (
                f"the token may not write to {repo.split('/')[0]}",
                "use a token with write access, or upload to an organisation of yours",
            ),
        }.get(status, (str(error).partition("\n")[0], "try again later"))
        what = f"the Hub refused the upload to {repo} (HTTP {status})"
        raise EnvironmentUnfit(what, why=why, next=remedy) from None
    except (errors.OfflineModeIsEnabled, HTTPError) as error:
        raise EnvironmentUnfit(
            f"cannot reach {api.endpoint}",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            next=f"check the network and HF_ENDPOINT; {state}",
        ) from None
