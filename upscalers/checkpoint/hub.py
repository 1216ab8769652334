"""Upload of a checkpoint to the hub."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upscalers.request.errors import RequestError, one_line

_LOG_IN = "Log in with 'hf auth login', with a token that may write."


def check_repo_id(repo_id: str) -> None:
    """Check that the hub allows a repository of this name.

    Raises:
        RequestError: If the name is not allowed.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise RequestError(f"push-to-hub is {repo_id!r}; expected a repository such as me/model. {error}") from None


def check_write_access(repo_id: str, private: bool) -> str:
    """Check, before work begins, that the result can be uploaded: that the account is logged in and may write.

    For a repository that exists, the hub itself says whether the account may write. For a new repository, the roles of
    the account and its token are checked as far as the hub reveals them; unknown roles are no reason to refuse.

    Args:
        repo_id: Repository with or without its owner; without an owner, the account owns it.
        private: Whether the repository is to be private.

    Returns:
        The repository with its owner.

    Raises:
        RequestError: If the result cannot be uploaded there.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        raise RequestError(
            f"push-to-hub is {repo_id!r}, but HF_HUB_OFFLINE is set; expected a hub that can be reached. "
            "Unset it, or upload the output later."
        )
    api = HfApi()
    account = _account(api, repo_id)
    repository = repo_id if "/" in repo_id else f"{account['name']}/{repo_id}"
    exists, public = False, False
    try:
        api.auth_check(repository, write=True)
        exists, public = True, api.repo_info(repository).private is False if private else False
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 403 or isinstance(error, GatedRepoError):
            raise RequestError(
                f"push-to-hub is {repository!r}, which {account['name']} may not write to with this token; "
                f"expected a repository of your own. {_LOG_IN}"
            ) from None
        if status not in (401, 404):  # both mean that this account sees no repository of this name
            raise RequestError(_unreachable(repository, error)) from None
    except Exception as error:
        raise RequestError(_unreachable(repository, error)) from None
    if not exists:
        _check_may_create(account, repository)
    elif public:
        raise RequestError(
            f"push-to-hub is {repository!r}, which exists and is public; expected a new or a private repository with "
            "--private. Make it private in its settings on the hub, or choose another one."
        )
    return repository


def _account(api: Any, repo_id: str) -> Mapping[str, Any]:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        return api.whoami()
    except LocalTokenNotFoundError:
        raise RequestError(f"push-to-hub is {repo_id!r}, but nobody is logged in to the hub here. {_LOG_IN}") from None
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise RequestError(
                f"push-to-hub is {repo_id!r}, but the hub does not accept the token ({one_line(error)}). {_LOG_IN}"
            ) from None
        raise RequestError(_unreachable(repo_id, error)) from None
    except Exception as error:
        raise RequestError(_unreachable(repo_id, error)) from None


def _unreachable(repo_id: str, error: Exception) -> str:
    return (
        f"push-to-hub is {repo_id!r}, but the hub does not answer ({type(error).__name__}: {one_line(error)}). "
        "Try again later, or upload the output afterwards."
    )


def _check_may_create(account: Mapping[str, Any], repository: str) -> None:
    """Check that the account may create a repository, by its token's role and its role in the organisation."""
    owner = repository.partition("/")[0]
    token = (account.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise RequestError(
            f"push-to-hub is {repository!r}, but the token {token.get('displayName')!r} may only read. {_LOG_IN}"
        )
    if token.get("role") == "fineGrained" and isinstance(token.get("fineGrained"), Mapping):
        scopes = token["fineGrained"].get("scoped") or []
        if any(_grants_writing(scope, owner, repository) for scope in scopes):
            return
        raise RequestError(
            f"push-to-hub is {repository!r}, but the token {token.get('displayName')!r} may not write to repositories of "
            f"{owner!r}; expected the permission repo.write. {_LOG_IN}"
        )
    if account.get("type", "user") != "user" or owner.casefold() == account["name"].casefold():
        return
    # The hub ignores upper and lower case in names.
    organisations = {str(org.get("name")): org.get("roleInOrg") for org in account.get("orgs") or []}
    roles = {name.casefold(): role for name, role in organisations.items()}
    if owner.casefold() not in roles:
        raise RequestError(
            f"push-to-hub is {repository!r}, but {account['name']} is no member of {owner!r}; "
            f"expected a repository of one of: {', '.join([account['name'], *organisations])}."
        )
    if roles[owner.casefold()] == "read":
        raise RequestError(
            f"push-to-hub is {repository!r}, but {account['name']} may only read in {owner!r}; expected the role "
            "contributor, write or admin. Ask the organisation, or choose a repository of your own."
        )


def _grants_writing(scope: Mapping[str, Any], owner: str, repository: str) -> bool:
    name = str((scope.get("entity") or {}).get("name")).casefold()
    return "repo.write" in (scope.get("permissions") or []) and name in (owner.casefold(), repository.casefold())


def push_folder(folder: Path, repository: str, private: bool) -> str:
    """Create the repository if need be, and upload the folder in one commit.

    Args:
        folder: Folder of a complete checkpoint.
        repository: Repository with its owner, such as `"me/llama-3.2-1b-hml"`.
        private: Whether a new repository is private. False leaves this to the owner's default.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private or None, exist_ok=True)
    commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload upscaled checkpoint")
    return str(commit.commit_url)


def upload_command(folder: Path, repository: str, private: bool) -> str:
    """Return the shell command that uploads a folder, for a person to type after `push_folder` failed."""
    return shlex.join(["hf", "upload", repository, str(folder), *(["--private"] if private else [])])
