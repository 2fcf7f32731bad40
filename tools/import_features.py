"""Features that another tool computed -> a store for finetune.py --offline-data.

    python tools/import_features.py --load DRAFT --dumps FOLDER --final-norm applied --output-dir FEATURES
    python finetune.py --load DRAFT --save RUN --offline-data FEATURES ...

FOLDER holds one .pt or .safetensors per sample, with input_ids [n], hidden_states [n, H], aux_hidden_states [n, C] and,
where not all tokens are the assistant's, loss_mask [n]. Every file is checked, the base runs over the first
--check-samples of them to compare, and the first file that does not fit is named. A killed import goes on where it
stopped.
"""

from __future__ import annotations

import argparse

from megatron_spec import cli
from megatron_spec.commands.runs import ImportRun


def make_parser() -> cli.Parser:
    """The flags."""
    return cli.Parser(__doc__, ImportRun)


def main(args: argparse.Namespace) -> None:
    """Check and write. Raises UserError for dumps that do not fit."""
    from megatron_spec.commands.import_features import import_features

    import_features(args.run)


if __name__ == "__main__":
    cli.run(make_parser(), main)
