"""The engine: requests, scheduler, step batch, sampling rules and the step loop. Ids only, no text,
no torch."""
