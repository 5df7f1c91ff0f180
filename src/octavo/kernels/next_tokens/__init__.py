"""Between two decode steps of one program: the ids chosen, and what the next step reads."""
