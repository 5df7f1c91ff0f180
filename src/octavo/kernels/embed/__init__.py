"""Token ids to rows of the embedding, and the first half of the norm that comes next (see
``norm_linear``): where a decode step begins."""
