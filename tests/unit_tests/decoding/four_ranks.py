"""All tests of this folder that need several ranks, in one world of four, because start-up dominates their cost."""

from __future__ import annotations

from typing import Any


def all_cases(layouts: tuple[Any, ...], algorithms: tuple[Any, ...], questions: tuple[Any, ...]) -> dict[str, Any]:
    """The result of each test's function on this rank."""
    from tests.unit_tests.decoding import test_every_algorithm, test_parallel
    from tests.unit_tests.generation import test_questions

    return {
        "layouts": test_parallel.world_cases(*layouts),
        "algorithms": test_every_algorithm.parallel(*algorithms),
        "questions": test_questions.generated(*questions),
    }
