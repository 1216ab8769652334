"""Sharing a checkpoint on the hub."""

from pathlib import Path

from upscalers.engine.errors import RequestError


def check_repo_id(repo_id: str) -> None:
    """Check, before work begins, that the hub could have a repository of this name.

    Raises:
        RequestError: If it could not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise RequestError(f"push-to-hub is {repo_id!r}; expected a repository such as me/model. {error}") from None


def push_folder(folder: Path, repo_id: str) -> str:
    """Create the repository if need be and upload the folder in one commit.

    Args:
        folder: A complete checkpoint.
        repo_id: Such as `"me/llama-3.2-1b-hml"`.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload upscaled checkpoint")
    return str(commit.commit_url)
