"""The library's programs of README and docs/scale.md where a GPU is: batches of the loader are on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.functional_tests import test_api

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_readme_example(tmp_path: Path) -> None:
    test_api.test_readme_example(tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_training_loop_of_the_docs(tmp_path: Path) -> None:
    test_api.test_training_loop_of_the_docs(tmp_path)
