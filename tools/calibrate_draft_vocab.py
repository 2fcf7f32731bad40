"""Choose the draft vocabulary: the tokens the assistant uses most in the training conversations.

    python tools/calibrate_draft_vocab.py --model BASE --data train.jsonl --draft-vocab-size 32000 --save-dir vocab

Every token a turn can end with is always in. Writes draft_vocab.safetensors (for convert_model.py --draft-vocab),
d2t.pt (the same map for other tools) and coverage.json, and prints the share of assistant tokens covered.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_spec import cli, files
from megatron_spec.config import UserError

WRITTEN = {"draft_vocab.safetensors", "d2t.pt", "coverage.json"}


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--model", required=True, metavar="DIR", help="base, in Hugging Face or Megatron format")
    p.add_argument("--tokenizer", metavar="DIR", help="tokenizer folder (default: the base's)")
    p.add_argument("--data", required=True, metavar="JSONL", help="training conversations, answered")
    p.add_argument("--draft-vocab-size", required=True, type=int, metavar="D")
    p.add_argument("--save-dir", required=True, metavar="DIR")
    p.add_argument("--seq-length", type=int, default=4096, help="count the first tokens only (default: %(default)s)")
    return p


def check_output(folder: Path) -> None:
    """Raise UserError when the folder holds anything but an earlier result of this tool."""
    if folder.is_dir() and {p.name for p in folder.iterdir()} <= WRITTEN:
        return
    files.require_empty(folder, "choose another --save-dir")


def read_vocab_size(model: Path) -> object:
    """From config.json, or the arguments of a Megatron checkpoint. Raises UserError when there is neither."""
    if not (model / "config.json").is_file():
        from megatron_spec.checkpoint import megatron

        shards = megatron.checkpoint_folder(model) if model.is_dir() else None
        if shards is not None:
            return megatron.read_config(model, shards).vocab_size
    return files.read_json(model / "config.json").get("vocab_size")


def calibrate(args: argparse.Namespace) -> None:
    """Count, choose, write, report. Raises UserError for input that does not fit."""
    folder = Path(args.save_dir)
    check_output(folder)
    vocab_size = read_vocab_size(Path(args.model))
    if not isinstance(vocab_size, int) or not 1 <= args.draft_vocab_size <= vocab_size:
        raise UserError(f"--draft-vocab-size {args.draft_vocab_size}: expected 1 to the base's vocab_size {vocab_size}")
    import torch

    from megatron_spec.data.loader import ConversationDataset
    from megatron_spec.data.tokenizer import load_tokenizer, stop_token_ids
    from megatron_spec.data.vocab_counts import count_supervised, coverage, select_draft_ids
    from megatron_spec.drafts.vocab import DraftVocab

    source = args.tokenizer or args.model
    tokenizer = load_tokenizer(source)
    ends = stop_token_ids(source, tokenizer)
    dataset = ConversationDataset(args.data, tokenizer, args.seq_length, ends)
    counts_V = count_supervised(dataset, vocab_size)
    vocab = DraftVocab(select_draft_ids(counts_V, args.draft_vocab_size, ends), vocab_size)
    report = {**coverage(counts_V, vocab.target_ids), "always_included": list(ends), "data": args.data}
    with files.published_folder(folder, overwrite=True) as temporary:
        vocab.save(temporary / "draft_vocab.safetensors")
        torch.save(vocab.d2t, temporary / "d2t.pt")
        files.write_json(temporary / "coverage.json", report)
    sys.stdout.write(
        f"{len(vocab)} of {vocab_size} tokens cover {report['coverage']:.2%} of {report['supervised_tokens']} "
        f"assistant tokens ({report['distinct_tokens']} distinct); written to {folder}\n"
    )
    if report["draft_tokens_never_seen"]:
        sys.stdout.write(
            f"note: {report['draft_tokens_never_seen']} of them never occur in {args.data}: a smaller "
            "--draft-vocab-size would do\n"
        )


if __name__ == "__main__":
    cli.run(make_parser(), calibrate)
