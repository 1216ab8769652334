"""Upload of a checkpoint to the hub."""

from pathlib import Path

from midus_hf.config.errors import RequestError
from midus_hf.sources.names import answer_of_hub
from upscalers.request.errors import one_line


def check_repo_id(repo_id: str) -> None:
    """Raise `RequestError` if the hub allows no repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise RequestError(f"push-to-hub is {repo_id!r}; expected a repository such as me/model. {error}") from None


def check_account(repo_id: str) -> None:
    """Check the hub login before anything is downloaded; refuse if nobody is logged in or the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:
        raise _refusal(repo_id, error) from None


def prepare_repository(repo_id: str, private: bool) -> str:
    """Create the repository of a result unless it exists, before the first byte, and return its name with its owner."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
        public = private and api.repo_info(repository).private is False
    except Exception as error:
        raise _refusal(repo_id, error) from None
    if public:
        raise RequestError(
            f"push-to-hub is {repository!r}, which exists and is public; expected a new or a private repository with "
            "--private. Make it private in its settings on the hub, or choose another one."
        )
    return repository


def _refusal(repo_id: str, error: Exception) -> RequestError:
    """Return a message with the cause and remedy of an error of the hub's client."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    status, reason = error.response.status_code if isinstance(error, HfHubHTTPError) else None, one_line(error)
    if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
        return RequestError(
            f"push-to-hub is {repo_id!r}, but the Hub does not let this account write there ({reason}); expected your own "
            "repository, or one of an organisation with write access. Log in with 'hf auth login' and a token with write access."
        )
    answer = answer_of_hub(error) or f"the Hub does not answer ({type(error).__name__}: {reason}); try again later"
    return RequestError(f"push-to-hub is {repo_id!r}, but {answer}, or upload the output afterwards.")


def push_folder(folder: Path, repository: str) -> str:
    """Upload the folder of a complete checkpoint in one commit, and return the address of the commit."""
    from huggingface_hub import HfApi

    commit = HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload upscaled checkpoint")
    return str(commit.commit_url)
