"""What the attention ops of a CPU program read of a step: one record for each KV group."""
