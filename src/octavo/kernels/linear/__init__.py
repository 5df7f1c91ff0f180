"""Products with packed weight matrices: ``y[t, n] = sum_k x[t, k] * w[n, k]``.

``packing`` puts a checkpoint's matrices into the layout below, ``cpu`` has the ops, ``cpu_q8`` the
quantised activations; ``reference`` says it all in torch. Nothing is imported here.

**Packed weights** (:class:`~octavo.kernels.linear.packing.PackedLinear`). Rows go in blocks of 16,
one row for each lane of a 512-bit vector; the rows that are missing in the last block are zeros. A
block is a structure of arrays: for each group of 32 columns the weights of its 16 rows, then
the scales of all groups, then what else the format has (``cpu_formats``). Weights keep the bits
that they have in the file, scales too, and a block is as large as its 16 rows in the file, rounded
up to 64 bytes. Columns must fill groups of 32, except those of F32, F16 and BF16 matrices.

**Activations** come in two kinds, by the *mode* of the product:

- ``exact``: float32, a row per token, any stride of whole float32s. Weights are dequantised in
  registers and summed up in float32. F32, F16 and BF16 weights have this mode only.
- ``q8``: a row per token of :func:`~octavo.kernels.linear.cpu_q8.q8_row_bytes` ``(K)`` bytes,
  ``K`` a multiple of 32: K int8, then for each group of 32 of them four float32: its scale
  (largest magnitude / 127), the sum of its int8 values, and that of either half. Rows are
  an odd number of 64-byte lines apart, so that the same column of many rows doesn't fall on one set
  of the cache. ``quantize_row(x, columns, row)`` writes one row from the address of its float32s,
  and ``quantize_group(x, row, columns, group)`` 32 columns of it: ops that produce an
  activation call them as they go, and a row may be shared out by groups.

**The result of a token depends on that token's activations alone**, by bits: not on how many there
are beside it, nor on threads, tiles or (on CPUs with FMA) the level. The order is: in a group the
sum of int8 products, exact; times the weights' scale, plus their minimum times the sum of the
activations; times the activations' scale, added to the sum over the groups before it. In ``exact``
mode the columns are added up one after another.

**Ops** (``cpu``), all of them made by name of format, mode and level and compiled at that moment:

- ``linear(packed, ...)``: out = x w + bias, or out += x w + bias, or, where gate and up rows were
  packed together, out = act(gate) * up; on request the result is quantised for the next product.
  A head is this op over the rows that the norm before it has gathered.
- ``embed(packed, ...)``: rows of a packed matrix as float32, times a factor.
"""
