"""A product added to the residual stream, and the first half of the norm that comes next (see
``norm_linear``): what attention and the feed-forward layer give back."""
