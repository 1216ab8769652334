"""Sharing a checkpoint on the hub."""

from pathlib import Path


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
