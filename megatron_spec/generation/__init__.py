"""Generation of training text: prompts, synthetic questions, answers from the base or a served model."""
