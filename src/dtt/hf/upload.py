"""Upload of an export to the Hugging Face Hub, or to the server that HF_ENDPOINT names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, errors, get_token

from dtt.base.errors import ConfigError, DttError, EnvironmentUnfit

# Base class of the errors of the client's HTTP library: httpx or httpx2, depending on its version.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


def check(repo: str) -> None:
    """Raise the errors of `upload` to `repo` that can be detected before anything is sent."""
    _require_token(repo)
    api = HfApi(library_name="dtt")
    with _translated_errors(api, repo, "nothing was exported yet"):
        api.repo_exists(repo)  # raises for an invalid name
        api.whoami()


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload `folder` as the model `repo` (`org/name`, created if absent) and return its URL.

    Files that the Hub already has are not sent again. Raises EnvironmentUnfit if there is no token,
    the Hub refuses the token, or the Hub cannot be reached; ConfigError if `repo` is not a valid
    name.
    """
    _require_token(repo)
    api = HfApi(library_name="dtt")
    with _translated_errors(api, repo, f"the export itself is complete in {folder}"):
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
        return str(url)


def _require_token(repo: str) -> None:
    if get_token() is None:
        raise EnvironmentUnfit(
            f"cannot upload to {repo}: no Hugging Face token",
            next="`hf auth login`, or HF_TOKEN=hf_… in the environment, then the same command",
        )


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
        raise _hub_error(error.response.status_code, repo, str(error)) from None
    except (errors.OfflineModeIsEnabled, HTTPError) as error:
        raise EnvironmentUnfit(
            f"cannot reach {api.endpoint}",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            next=f"check the network and HF_ENDPOINT; {state}",
        ) from None


def _hub_error(status: int, repo: str, message: str) -> DttError:
    what = f"the Hub refused the upload to {repo} (HTTP {status})"
    match status:
        case 401:
            return EnvironmentUnfit(
                what, why="the token is not valid", next="`hf auth login` with a new token"
            )
        case 403:
            return EnvironmentUnfit(
                what,
                why=f"the token may not write to {repo.split('/')[0]}",
                next="use a token with write access, or upload to an organisation of yours",
            )
        case _:
            return EnvironmentUnfit(what, why=message.splitlines()[0], next="try again later")
