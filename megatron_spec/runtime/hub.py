"""Models by their name on the hub (`org/name`) wherever a folder of a base or draft is taken.

huggingface_hub does the work, with its own cache, token and offline mode (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
HF_ENDPOINT). A folder of that name on disk comes first.
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
"""Weight files in the order of preference: pickles only where there are no safetensors."""


def is_hub_name(name: str | Path) -> bool:
    """True for `org/name` that is no path on disk."""
    return _NAME.fullmatch(str(name)) is not None and not os.path.exists(name)


def model_folder(name: str | Path, weights: bool = True) -> Path:
    """The folder on disk; for a name on the hub that of the cache, downloaded when it is not there yet.

    Args:
        weights: fetch the weights, too; without them configuration and tokenizer alone.

    Raises UserError when the hub does not know the model, does not give it, or is not reached.
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
        # Files of the repository's top level: subfolders hold the same weights in other formats.
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        raise UserError(
            f"{name}: the hub gives this model only to those who accepted its terms: accept them on its page and give "
            "your token (HF_TOKEN, or `hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name}: no such folder, and the hub knows no model of this name (or it is private: give HF_TOKEN)"
        ) from None
    except Exception as e:
        if not isinstance(e, (OSError, ValueError)) and "http" not in type(e).__module__:
            raise
        mode = "HF_HUB_OFFLINE is set" if _offline() else f"the hub is not reached ({type(e).__name__})"
        raise UserError(
            f"{name}: no such folder, the hub's cache does not hold it, and {mode}: run `hf download {name}` where "
            "there is a network, or give a folder"
        ) from None


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
