"""Training text that the base writes: prompts, synthetic questions, answers from the base or a served model."""
