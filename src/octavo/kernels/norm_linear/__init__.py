"""The second half of RMSNorm and a product: queries, keys and values of a layer, and the logits.

The norm of the fused decode kernels is done in two halves. Whoever writes the residual stream ``x``
also writes ``h = x * weight of the norm that comes next`` and the squares of its part of ``x``;
who reads ``h`` multiplies its product by ``1 / rms(x)`` at the end, a single factor of a row.
"""
