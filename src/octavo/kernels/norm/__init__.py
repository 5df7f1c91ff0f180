"""RMSNorm, with the residual's addition of a post-normed sublayer in front of it."""
