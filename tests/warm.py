"""Where processes of tests come from: forked from a server that imported torch, megatron-core and this package once.

A new interpreter spends six seconds of processor time on these imports, more than most ranks and scripts of the tests
do afterwards. Forked processes do not show what differs between interpreters: an import that is missing but was made by
others, and the order of sets of strings, which is the same on all forked ranks. Some tests ask for new interpreters.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

PRELOADED = [
    "transformers.models.auto",
    *(f"megatron_spec.commands.{name}" for name in ("convert", "decode", "export", "features", "finetune", "quantize")),
    "megatron_spec.api",
    "megatron_spec.training.optimizer",
]


def context(fresh: bool = False) -> BaseContext:
    """The way to start processes.

    Args:
        fresh: new interpreters, which import everything themselves. With a GPU all are: CUDA does not survive a fork.
    """
    import torch

    if fresh or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found
