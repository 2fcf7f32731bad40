"""Hub names (`org/name`) in place of the folder of a base or draft.

Through huggingface_hub, with its cache, token and offline mode (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT). A
folder of that name on disk takes precedence.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from megatron_spec.config import UserError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = (["*.safetensors"], ["*.bin", "*.pt"])
"""Weight files in order of preference: pickles only if there are no safetensors."""


def is_hub_name(name: str | Path) -> bool:
    """True for `org/name` that is not a path on disk."""
    return _NAME.fullmatch(str(name)) is not None and not os.path.exists(name)


def model_folder(name: str | Path, weights: bool = True) -> Path:
    """The folder on disk; for a hub name, the folder in the cache, downloaded if necessary.

    Args:
        weights: download the weights, too; else only configuration and tokenizer.

    Raises UserError if the hub does not have the model, denies access, or cannot be reached.
    """
    if not is_hub_name(name):
        return Path(name)
    folder = _fetch(str(name), _SMALL)
    for patterns in _WEIGHTS if weights else ():
        folder = _fetch(str(name), [*_SMALL, *patterns])
        if any(any(folder.glob(pattern)) for pattern in patterns):
            break
    return folder


def _fetch(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        # Only files at the top level: subfolders have the same weights in other formats.
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        raise UserError(
            f"{name} is a gated model: accept its terms on its hub page and set your token (HF_TOKEN, or `hf auth "
            "login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name}: no such folder, and no such model on the hub (if it is private, set HF_TOKEN)"
        ) from None
    except Exception as e:
        if not isinstance(e, (OSError, ValueError)) and "http" not in type(e).__module__:
            raise
        mode = "HF_HUB_OFFLINE is set" if _offline() else f"the hub cannot be reached ({type(e).__name__})"
        raise UserError(
            f"{name}: no such folder, it is not in the hub's cache, and {mode}: run `hf download {name}` with network "
            "access, or give a folder"
        ) from None


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
