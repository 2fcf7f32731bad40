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


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--load", required=True, metavar="DIR", help="draft checkpoint: says which base and captures")
    p.add_argument("--dumps", required=True, metavar="DIR", help="folder of the dumps (and folders in it)")
    p.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the features")
    p.add_argument(
        "--final-norm", required=True, choices=["applied", "missing"],
        help="whether hidden_states has passed the base's final norm (what transformers returns last has)",
    )  # fmt: skip
    p.add_argument("--seq-length", type=int, default=2048, help="tokens a sample is cut to (default: %(default)s)")
    p.add_argument(
        "--check-samples", type=cli.at_least_zero, default=2, metavar="N",
        help="run the base over the first N and compare (default: %(default)s); 0 loads embedding and head alone",
    )  # fmt: skip
    p.add_argument(
        "--features-dtype", choices=["float32", "bfloat16", "float16", "float8_e4m3fn"],
        help="on disk (default: that of the first dump)",
    )  # fmt: skip
    p.add_model_flags(tokenizer=False)
    return p


def main(args: argparse.Namespace) -> None:
    """Check and write. Raises UserError for dumps that do not fit."""
    from megatron_spec.commands.import_features import import_features

    names = ("final_norm", "seq_length", "base", "bf16", "features_dtype")
    options = {name: getattr(args, name) for name in names}
    import_features(args.load, args.dumps, args.output_dir, check=args.check_samples, **options)


if __name__ == "__main__":
    cli.run(make_parser(), main)
