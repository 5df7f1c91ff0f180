"""One module per attention candidate; ``attention.candidates`` imports them when they are asked."""
