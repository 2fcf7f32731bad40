"""Runs in the environment of speculators: converts an exported draft, and loads drafts in its own format.

    python speculators_worker.py CASES.json RESULTS.json

A case: {name, convert: folder of a Hugging Face export | null, load: folder, base}.
A result: configuration, sums of tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def convert(case: dict[str, Any]) -> None:
    """By the library's own converter, which validates what it wrote."""
    from speculators.convert import convert_model

    convert_model(case["convert"], verifier=case["base"], algorithm="eagle3", output_path=case["load"])


def load(case: dict[str, Any]) -> dict[str, Any]:
    """The library's own model: its configuration and the sum of magnitudes of every tensor."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = Eagle3SpeculatorConfig.from_pretrained(case["load"])
    model = Eagle3DraftModel.from_pretrained(case["load"], config=config)
    sums = {n: float(t.double().abs().sum()) for n, t in model.state_dict().items()}
    return {"sums": sums, "config": config.to_dict()}


def main() -> None:
    """All cases."""
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            if case["convert"]:
                convert(case)
            results[case["name"]] = load(case)
        except Exception as e:
            results[case["name"]] = {"error": f"{type(e).__name__}: {e}"[:2000]}
    Path(sys.argv[2]).write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main()
