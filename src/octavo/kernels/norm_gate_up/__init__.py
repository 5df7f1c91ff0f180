"""The second half of RMSNorm (see ``norm_linear``), the two products of a gated feed-forward layer,
and its activation."""
