"""Import features computed by another tool into a store for finetune.py --offline-data.

    python tools/import_features.py --load DRAFT --dumps FOLDER --final-norm applied --output-dir FEATURES
    python finetune.py --load DRAFT --save RUN --offline-data FEATURES ...

FOLDER has one .pt or .safetensors file per sample, with input_ids [n], hidden_states [n, H], aux_hidden_states [n, C]
and, unless all tokens are the assistant's, loss_mask [n]. Every file is checked, the base recomputes the first
--check-samples of them to compare, and the first invalid file is named. An interrupted import resumes.
"""

from __future__ import annotations

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import ImportRun


def make_parser() -> cli.Parser:
    """The flags."""
    return cli.Parser(__doc__, ImportRun)


def main(args: argparse.Namespace) -> None:
    """Check and write. Raises UserError for invalid dumps."""
    from megatron_spec.commands.import_features import import_features

    import_features(args.run)


if __name__ == "__main__":
    cli.run(make_parser(), main)
