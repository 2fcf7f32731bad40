"""Choose the draft vocabulary: the most frequent assistant tokens in the training conversations.

    python tools/calibrate_draft_vocab.py --model BASE --data train.jsonl --draft-vocab-size 32000 --save-dir vocab
    python tools/calibrate_draft_vocab.py --load DRAFT --data new.jsonl --save-dir vocab    # measure an existing one

Every token that can end a turn is included. Writes draft_vocab.safetensors (d2t and t2d, for convert_model.py
--draft-vocab), d2t.pt (the same map for other tools), coverage.json and coverage.png (with matplotlib), and prints the
share of assistant tokens that vocabularies of several sizes cover. An existing vocabulary, in a draft (--load) or in
--save-dir, is never replaced by another one. Tokenised data are cached beside the data, and reused in training.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_spec import cli
from megatron_spec.commands.runs import ChatText
from megatron_spec.config import UserError
from megatron_spec.runtime import files, folders

if TYPE_CHECKING:
    from megatron_spec.drafts.vocab import DraftVocab

WRITTEN = {"draft_vocab.safetensors", "d2t.pt", "coverage.json", "coverage.png"}
log = logging.getLogger("megatron_spec.tools")


def make_parser() -> cli.Parser:
    """The flags."""
    p = cli.Parser(__doc__)
    p.add_argument("--model", metavar="DIR", help="base, in Hugging Face or Megatron format (default: that of --load)")
    p.add_argument("--load", metavar="DIR", help="draft checkpoint whose vocabulary is written and measured")
    p.add_argument("--data", required=True, metavar="JSONL", help="training conversations with answers")
    p.add_argument("--draft-vocab-size", type=int, metavar="D", help="needed without --load")
    p.add_argument("--save-dir", required=True, metavar="DIR", help="folder of the vocabulary")
    p.add_argument(
        "--seq-length",
        type=int,
        default=4096,
        help="count only the first tokens of a conversation (default: %(default)s)",
    )
    p.add_fields(ChatText)
    p.add_argument("--data-cache-path", metavar="DIR", help="folder for tokenised data (default: beside the data)")
    p.add_argument(
        "--num-workers",
        type=cli.at_least_one,
        metavar="N",
        help="tokeniser processes (default: by the size of the data)",
    )
    return p


def check_output(folder: Path) -> None:
    """Raise UserError if the folder has anything but an earlier result of this tool."""
    if folder.is_dir() and any(folder.iterdir()) and {p.name for p in folder.iterdir()} <= WRITTEN:
        return
    folders.require_empty(folder, "choose another --save-dir", replaced=True)


def read_vocab_size(model: Path) -> object:
    """vocab_size from config.json or the arguments of a Megatron checkpoint. Raises UserError if there is neither."""
    if not (model / "config.json").is_file():
        from megatron_spec.checkpoint import megatron

        shards = megatron.checkpoint_folder(model) if model.is_dir() else None
        if shards is not None:
            return megatron.read_config(model, shards).vocab_size
    return files.read_object(model / "config.json", {"vocab_size": int}).get("vocab_size")


def given_vocabulary(args: argparse.Namespace) -> tuple[str, DraftVocab | None]:
    """(folder of the base, vocabulary of --load or None). Raises UserError for conflicting flags."""
    if args.load is None:
        if args.model is None or args.draft_vocab_size is None:
            raise UserError("give --model and --draft-vocab-size, or --load for a draft that has a vocabulary")
        return args.model, None
    from megatron_spec.checkpoint.spec import read_spec, resolve
    from megatron_spec.drafts.vocab import DraftVocab

    folder = resolve(args.load)
    vocab = DraftVocab.load(folder / "vocab.safetensors")
    if args.draft_vocab_size not in (None, len(vocab)):
        raise UserError(
            f"--load {args.load} has a draft vocabulary of {len(vocab)} tokens, and its head has no others: leave "
            f"--draft-vocab-size {args.draft_vocab_size} out, or convert a new draft"
        )
    return args.model or read_spec(folder).base.path, vocab


def calibrate(args: argparse.Namespace) -> None:
    """Count, choose, write, report. Raises UserError for invalid input."""
    folder = Path(args.save_dir)
    check_output(folder)
    model, vocab = given_vocabulary(args)
    vocab_size = read_vocab_size(Path(model)) if vocab is None else vocab.vocab_size
    if not isinstance(vocab_size, int) or (vocab is None and not 1 <= args.draft_vocab_size <= vocab_size):
        raise UserError(f"--draft-vocab-size {args.draft_vocab_size}: expected 1 to the base's vocab_size {vocab_size}")
    from megatron_spec.commands.data import open_dataset
    from megatron_spec.data.tokenizer import load_tokenizer, special_ids, stop_token_ids
    from megatron_spec.data.vocab_counts import choose, count_supervised, coverage, coverage_curve, turn_end_ids

    source = args.tokenizer or model
    tokenizer = load_tokenizer(source)
    stops = stop_token_ids(source, tokenizer, model)
    dataset = open_dataset(
        args.data, source, args.seq_length, args.data_cache_path,
        vocab_size=vocab_size, template_kwargs=args.chat_template_kwargs, workers=args.num_workers,
    )  # fmt: skip
    ends = sorted({*stops, *turn_end_ids(dataset, special_ids(tokenizer))})
    counts_V = count_supervised(dataset, vocab_size)
    if vocab is None:
        vocab = choose(counts_V, args.draft_vocab_size, ends)
        check_not_replaced(folder, vocab)
    curve = coverage_curve(counts_V, ends)
    report = {
        **coverage(counts_V, vocab.target_ids, ends), "always_included": list(ends), "data": args.data,
        "data_sha256": dataset.store.meta["data"], "curve": curve,
    }  # fmt: skip
    write(folder, vocab, report)
    say(folder, report, args.load is None)


def check_not_replaced(folder: Path, vocab: DraftVocab) -> None:
    """Raise UserError if the folder has another vocabulary, as a draft may use it."""
    from megatron_spec.drafts.vocab import DraftVocab

    path = folder / "draft_vocab.safetensors"
    if path.is_file() and DraftVocab.load(path) != vocab:
        raise UserError(f"{path} has another vocabulary, which a draft may use: choose another --save-dir")


def write(folder: Path, vocab: DraftVocab, report: dict[str, Any]) -> None:
    """Write the vocabulary for this package and for others, the figures and, with matplotlib, the curve."""
    import torch

    size = 2 * vocab.d2t.nbytes + vocab.t2d.nbytes + (1 << 16)
    with folders.published_folder(folder, overwrite=True, size=size) as temporary:
        vocab.save(temporary / "draft_vocab.safetensors")
        torch.save(vocab.d2t, temporary / "d2t.pt")
        files.write_json(temporary / "coverage.json", report)
        if importlib.util.find_spec("matplotlib"):
            draw(report, temporary / "coverage.png")
        else:
            log.warning("no coverage.png: matplotlib is not installed (pip install 'megatron-spec[demo]')")


def draw(report: dict[str, Any], path: Path) -> None:
    """The coverage curve, with the chosen size marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(*zip(*report["curve"], strict=True), marker=".")
    size, share = report["draft_vocab_size"], report["coverage"]
    axes.plot([size], [share], "o", color="tab:red", label=f"chosen: {size} tokens, {share:.2%}")
    axes.set_xlabel("draft vocabulary size")
    axes.set_ylabel("share of assistant tokens covered")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def say(folder: Path, report: dict[str, Any], free: bool) -> None:
    """Print the curve as a table, and what was written. Args: free: the size may be chosen."""
    sys.stdout.write("draft vocabulary   covered\n")
    sys.stdout.writelines(f"{size:16d}  {share:8.3%}\n" for size, share in report["curve"])
    sys.stdout.write(
        f"{report['draft_vocab_size']} of {report['vocab_size']} tokens cover {report['coverage']:.2%} of "
        f"{report['supervised_tokens']} assistant tokens ({report['distinct_tokens']} distinct); written to {folder}\n"
    )
    if report["draft_tokens_never_seen"] and free:
        sys.stdout.write(
            f"note: {report['draft_tokens_never_seen']} of them never occur in {report['data']}: --draft-vocab-size "
            f"{report['draft_vocab_size'] - report['draft_tokens_never_seen']} covers as much\n"
        )


if __name__ == "__main__":
    cli.run(make_parser(), calibrate)
