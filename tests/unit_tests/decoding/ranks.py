"""Everything of this folder that needs several ranks, in one world of four: start-up is most of its cost."""

from __future__ import annotations

from typing import Any


def all_cases(layouts: tuple[Any, ...], siblings: tuple[Any, ...], questions: tuple[Any, ...]) -> dict[str, Any]:
    """What each test's function gives on this rank."""
    from tests.unit_tests.decoding import test_parallel, test_siblings
    from tests.unit_tests.generation import test_questions

    return {
        "layouts": test_parallel.world_cases(*layouts),
        "siblings": test_siblings.parallel(*siblings),
        "questions": test_questions.generated(*questions),
    }
