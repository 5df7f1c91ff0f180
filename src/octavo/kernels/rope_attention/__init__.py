"""From queries, keys and values to attention's output in one launch: QK-norm, rotation, the write
to the paged cache, split-KV attention over the history, and the merge."""
