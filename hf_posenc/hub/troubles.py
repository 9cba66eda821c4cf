"""What can go wrong between here and the Hub, as a ValueError that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NOTHING_CHANGED = "Nothing of this push is in the repo."


@contextmanager
def told_what_to_do(repo: str) -> Iterator[None]:
    """Turn whatever the client of the Hub raises into a ValueError; other errors go through."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.errors import HTTPError as RequestError  # of the client's own library, which has changed

    try:
        yield
    except HfHubHTTPError as error:
        raise ValueError(_advice(repo, error)) from error
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name for a repo, which is such as 'user/model': {error}") from error
    except LocalTokenNotFoundError as error:
        raise ValueError(f"there is no token to push to {repo} with: {_LOG_IN}") from error
    except (RequestError, ConnectionError, TimeoutError) as error:
        raise ValueError(f"the Hub could not be reached ({error}). {NOTHING_CHANGED} {_AGAIN}") from error
    except RuntimeError as error:
        if "upload" not in str(error).lower():
            raise
        cause = error.__cause__ or error
        raise ValueError(f"{error} {NOTHING_CHANGED} {_AGAIN} What happened: {cause}") from error


_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write, from https://huggingface.co/settings/tokens"
_AGAIN = "Push again: what was uploaded is not sent twice."


def _advice(repo: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    told = str(error).strip()
    if status == 401:
        return f"the Hub does not know who pushes to {repo}, or the token is not valid: {_LOG_IN}. It says: {told}"
    if status == 403:
        return (
            f"the token may not write to {repo}: take one that may, push to a name of your own, or propose it with "
            f"create_pr=True (--create-pr). The Hub says: {told}"
        )
    if status == 404:
        return f"{repo}, or that revision of it, is not on the Hub, or hidden from this token. The Hub says: {told}"
    if status in (409, 412):
        return f"{repo} was changed by someone else meanwhile. {NOTHING_CHANGED} Look at it, and push again: {told}"
    return f"the Hub did not take the push to {repo}. {NOTHING_CHANGED} It says: {told}"
