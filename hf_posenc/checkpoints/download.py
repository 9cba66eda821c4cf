"""Download checkpoints from the Hub, and turn errors of the Hub client into messages with advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import PosEncError
from .files import COMPANION_FILES, WEIGHT_FILES

_LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN to a valid token from https://huggingface.co/settings/tokens."
_ADVICE = {
    401: _LOG_IN,
    403: "Use a token with permission for it, push to your own namespace, or open a pull request with --create-pr.",
    404: "Check the name and the revision; a private repository needs a token that can read it.",
    409: "Someone else changed the repository in the meantime; nothing was committed. Check it and push again.",
}
_ADVICE[412] = _ADVICE[409]


@contextmanager
def translate_hub_errors(repo: str) -> Iterator[None]:
    """Raise errors of the Hub client as `PosEncError`, with one line of advice; let all others pass.

    Args:
        repo: The repository that is read or written, for the message.

    Raises:
        PosEncError: If the Hub refuses a request, cannot be reached, or an upload fails.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
    )

    try:
        yield
    except HfHubHTTPError as error:
        advice = _ADVICE.get(error.response.status_code, "")
        raise PosEncError(f"The Hub refused access to {repo!r}. {advice}\n{error}") from error
    except HFValidationError as error:
        raise PosEncError(f"{repo!r} is not a valid repository id such as 'user/model': {error}") from error
    except LocalTokenNotFoundError as error:
        raise PosEncError(f"No Hub token found for {repo!r}. {_LOG_IN}") from error
    except (HTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise PosEncError(f"Could not reach the Hub for {repo!r}: {error}") from error
    except RuntimeError as error:  # raised by the client when a file cannot be uploaded
        if "upload" not in str(error).lower():
            raise
        raise PosEncError(
            f"{error} Nothing was committed. Push again: files already uploaded are not sent twice. "
            f"Cause: {error.__cause__ or error}"
        ) from error


def download_checkpoint(source: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Return the directory of a checkpoint, downloading it if `source` is a Hub id.

    Only safetensors weights, the config and companion files are downloaded.

    Args:
        source: A directory or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        token: A Hub token; by default the stored one.

    Returns:
        The local directory.

    Raises:
        PosEncError: If `source` is neither a directory nor a checkpoint that can be downloaded.
    """
    try:
        directory = Path(source).expanduser()
    except RuntimeError as error:  # an unknown home directory
        raise PosEncError(f"{source} cannot be read: {error}") from error
    if directory.is_dir():
        return directory
    if directory.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
        raise PosEncError(f"{source} is not a directory; expected a checkpoint directory or a Hub id (user/model)")
    from huggingface_hub import snapshot_download

    with translate_hub_errors(str(source)):
        patterns = [*WEIGHT_FILES, *COMPANION_FILES]
        return Path(snapshot_download(str(source), revision=revision, token=token, allow_patterns=patterns))
