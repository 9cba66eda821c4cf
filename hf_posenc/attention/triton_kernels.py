"""Triton kernels of attention with a bias by head and distance: forward pass, and the gradients of all inputs.

Scores are computed tile by tile, never stored, and computed again in the backward pass. They are in units of log2, so
that weights are powers of two; the bias comes multiplied by log2(e). What a query sees is a span of keys, from `first`
up to but not including `stop`. That covers causal attention, padding at the ends of rows, documents that share a row,
and sliding windows, and lets tiles outside of all spans be skipped.

The gradient of the bias sums each diagonal of the scores' gradient. All square tiles between the same distances are a
band. A program adds up the tiles of a band, in all rows of the batch, then the diagonals of their sum, so it adds 2 N
numbers to memory for a whole band of N x N tiles. Each distance is in two bands, and two additions give the same sum in
either order.

The gradient of a score subtracts the sum over keys of weights times their gradient, `delta`. It is usually computed
as the product of output and gradient, where a half-precision output makes all scores of a query wrong in the same
direction, which adds up in the gradient of the bias. `backward_query_kernel` starts from that, finds by how much the
gradients of a query's scores miss their sum of zero, and stores the corrected sum for the other kernels.

Triton is imported at the top: import this module only where it is used.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, E head size of the values, L = Q + K - 1
distances, M queries of a tile, N keys of a tile. Strides are those of batch, head and token.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(pointer, rows, num_rows, stride, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Some rows of a matrix with SIZE columns, padded with zeros to a power of two."""
    columns = tl.arange(0, PADDED_SIZE)
    mask = rows[:, None] < num_rows
    if SIZE != PADDED_SIZE:
        mask = mask & (columns[None, :] < SIZE)
    return tl.load(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, values, rows, num_rows, stride, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    columns = tl.arange(0, PADDED_SIZE)
    mask = rows[:, None] < num_rows
    if SIZE != PADDED_SIZE:
        mask = mask & (columns[None, :] < SIZE)
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def visible_spans(spans, batch, queries, num_queries, num_keys, VISIBLE: tl.constexpr):
    """The first key that each query sees, and the end of its span. Rows after the last query see nothing."""
    exists = queries < num_queries
    if VISIBLE == "spans":
        offsets = (batch.to(tl.int64) * num_queries + queries) * 2
        first = tl.load(spans + offsets, mask=exists, other=0)
        stop = tl.load(spans + offsets + 1, mask=exists, other=0)
    else:
        first = tl.zeros_like(queries)
        stop = first + num_keys
        if VISIBLE == "causal":  # the last query sees all keys
            stop = queries + 1 + num_keys - num_queries
        stop = tl.where(exists, stop, 0)
    return first, stop


@triton.jit
def tile_scores(query, key, bias, first, stop, queries, keys, num_queries, scaling, PRECISION: tl.constexpr):
    """(M, N): scores in units of log2, minus infinity where a key is hidden."""
    visible = (keys[None, :] >= first[:, None]) & (keys[None, :] < stop[:, None])
    distances = keys[None, :] - queries[:, None] + (num_queries - 1)
    bias_tile = tl.load(bias + distances, mask=visible, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scaling * LOG2_E) + bias_tile
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def dropout_factors(seed, batch_head, queries, start, dropout, BLOCK_K: tl.constexpr):
    """(M, N): zero for weights that are dropped, 1 / (1 - dropout) for others.

    They depend on head, query and key only, so every kernel draws the same, whatever its tiles. `start`, the first key,
    must be a multiple of four: a draw yields four numbers.
    """
    groups = start // 4 + tl.arange(0, BLOCK_K // 4)
    counter_q = queries[:, None] + tl.zeros_like(groups)[None, :]
    counter_k = groups[None, :] + tl.zeros_like(queries)[:, None]
    counter_h = tl.zeros_like(counter_q) + batch_head
    draws = tl.philox(tl.load(seed), counter_q, counter_k, counter_h, tl.zeros_like(counter_q))
    draws = tl.join(tl.join(draws[0], draws[2]), tl.join(draws[1], draws[3]))  # (M, N / 4, 2, 2)
    uniform = tl.uint_to_uniform_float(tl.reshape(draws, (queries.shape[0], BLOCK_K)))
    return tl.where(uniform >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def tile_gradients(
    query,
    key,
    value,
    d_output,
    bias,
    first,
    stop,
    log_sum,
    delta,
    seed,
    batch_head,
    queries,
    keys,
    first_key,
    num_queries,
    scaling,
    dropout,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(M, N), both: the weights that the values were multiplied by, and the gradients of the scores."""
    scores = tile_scores(query, key, bias, first, stop, queries, keys, num_queries, scaling, PRECISION)
    weights = tl.exp2(scores - log_sum[:, None])
    d_weights = tl.dot(d_output, tl.trans(value), input_precision=PRECISION)
    kept = weights
    if HAS_DROPOUT:
        factors = dropout_factors(seed, batch_head, queries, first_key, dropout, BLOCK_K)
        kept = weights * factors
        d_weights *= factors
    return kept, weights * (d_weights - delta[:, None])


@triton.jit
def diagonal_sums(tile, BLOCK: tl.constexpr):
    """The sums of a square tile's diagonals, from the lowest distance: those up to the main one, and those above it.

    Row i is rotated to the left by i + 1, which puts each diagonal into a column. The columns of a row that wrapped
    around belong to distances of at most zero.
    """
    shifted = tl.arange(0, BLOCK)[:, None] + 1 + tl.arange(0, BLOCK)[None, :]
    wrapped = shifted >= BLOCK
    rotated = tl.gather(tile, shifted % BLOCK, axis=1)
    lower = tl.sum(tl.where(wrapped, rotated, 0.0), axis=0)
    upper = tl.sum(tl.where(wrapped, 0.0, rotated), axis=0)
    return lower, upper


@triton.jit
def add_to_bias(d_bias, sums, position, num_distances, BLOCK: tl.constexpr):
    """Add sums of diagonals to the gradient of a head's vector, from a position on."""
    positions = position + tl.arange(0, BLOCK)
    tl.atomic_add(d_bias + positions, sums, mask=(positions >= 0) & (positions < num_distances), sem="relaxed")


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    bias,
    spans,
    seed,
    output,
    log_sums,
    query_strides,
    key_strides,
    value_strides,
    output_strides,
    bias_stride,
    scaling,
    dropout,
    num_heads,
    heads_per_key,
    num_queries,
    num_keys,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The output of a tile of queries of one head, and the log2 of the sum of its exponentials."""
    num_tiles = tl.cdiv(num_queries, BLOCK_Q)
    batch_head = tl.program_id(0) // num_tiles
    batch, head = batch_head // num_heads, batch_head % num_heads
    queries = tl.program_id(0) % num_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query += batch.to(tl.int64) * query_strides[0] + head.to(tl.int64) * query_strides[1]
    key += batch.to(tl.int64) * key_strides[0] + (head // heads_per_key).to(tl.int64) * key_strides[1]
    value += batch.to(tl.int64) * value_strides[0] + (head // heads_per_key).to(tl.int64) * value_strides[1]
    output += batch.to(tl.int64) * output_strides[0] + head.to(tl.int64) * output_strides[1]
    bias += head.to(tl.int64) * bias_stride

    first, stop = visible_spans(spans, batch, queries, num_queries, num_keys, VISIBLE)
    begin = tl.min(tl.where(first < stop, first, num_keys), axis=0) // BLOCK_K * BLOCK_K
    end = tl.max(stop, axis=0)
    query_tile = load_rows(query, queries, num_queries, query_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, PADDED_VALUE_SIZE], tl.float32)
    for start in range(begin, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        key_tile = load_rows(key, keys, num_keys, key_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
        scores = tile_scores(query_tile, key_tile, bias, first, stop, queries, keys, num_queries, scaling, PRECISION)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows that have seen nothing yet
        weights = tl.exp2(scores - shift[:, None])
        rescaled = tl.exp2(highest - shift)
        total = total * rescaled + tl.sum(weights, axis=1)
        if HAS_DROPOUT:
            weights *= dropout_factors(seed, batch_head, queries, start, dropout, BLOCK_K)
        value_tile = load_rows(value, keys, num_keys, value_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)
        added = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision=PRECISION)
        weighted = weighted * rescaled[:, None] + added
        highest = new_highest
    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    result = weighted / total[:, None]
    store_rows(output, result, queries, num_queries, output_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)
    log_sum = tl.where(saw_nothing, 0.0, highest + tl.log2(total))
    tl.store(log_sums + batch_head.to(tl.int64) * num_queries + queries, log_sum, mask=queries < num_queries)


@triton.jit
def backward_query_kernel(
    query,
    key,
    value,
    bias,
    spans,
    seed,
    output,
    log_sums,
    d_output,
    deltas,
    d_query,
    query_strides,
    key_strides,
    value_strides,
    output_strides,
    d_output_strides,
    d_query_strides,
    bias_stride,
    scaling,
    dropout,
    num_heads,
    heads_per_key,
    num_queries,
    num_keys,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of a tile of queries of one head, and the deltas of its rows."""
    num_tiles = tl.cdiv(num_queries, BLOCK_Q)
    batch_head = tl.program_id(0) // num_tiles
    batch, head = batch_head // num_heads, batch_head % num_heads
    queries = tl.program_id(0) % num_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query += batch.to(tl.int64) * query_strides[0] + head.to(tl.int64) * query_strides[1]
    key += batch.to(tl.int64) * key_strides[0] + (head // heads_per_key).to(tl.int64) * key_strides[1]
    value += batch.to(tl.int64) * value_strides[0] + (head // heads_per_key).to(tl.int64) * value_strides[1]
    output += batch.to(tl.int64) * output_strides[0] + head.to(tl.int64) * output_strides[1]
    d_output += batch.to(tl.int64) * d_output_strides[0] + head.to(tl.int64) * d_output_strides[1]
    d_query += batch.to(tl.int64) * d_query_strides[0] + head.to(tl.int64) * d_query_strides[1]
    bias += head.to(tl.int64) * bias_stride
    row_offsets = batch_head.to(tl.int64) * num_queries + queries

    first, stop = visible_spans(spans, batch, queries, num_queries, num_keys, VISIBLE)
    begin = tl.min(tl.where(first < stop, first, num_keys), axis=0) // BLOCK_K * BLOCK_K
    end = tl.max(stop, axis=0)
    query_tile = load_rows(query, queries, num_queries, query_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
    output_tile = load_rows(output, queries, num_queries, output_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)
    d_output_tile = load_rows(d_output, queries, num_queries, d_output_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)
    log_sum = tl.load(log_sums + row_offsets, mask=queries < num_queries, other=0.0)
    delta = tl.sum(output_tile.to(tl.float32) * d_output_tile.to(tl.float32), axis=1)
    excess = tl.zeros([BLOCK_Q], tl.float32)
    d_query_tile = tl.zeros([BLOCK_Q, PADDED_HEAD_SIZE], tl.float32)
    for start in range(begin, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        key_tile = load_rows(key, keys, num_keys, key_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
        value_tile = load_rows(value, keys, num_keys, value_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)
        _, d_scores = tile_gradients(
            query_tile,
            key_tile,
            value_tile,
            d_output_tile,
            bias,
            first,
            stop,
            log_sum,
            delta,
            seed,
            batch_head,
            queries,
            keys,
            start,
            num_queries,
            scaling,
            dropout,
            HAS_DROPOUT,
            PRECISION,
            BLOCK_K,
        )
        excess += tl.sum(d_scores, axis=1)
        d_query_tile += tl.dot(d_scores.to(key_tile.dtype), key_tile, input_precision=PRECISION)
    tl.store(deltas + row_offsets, delta + excess, mask=queries < num_queries)
    d_query_tile *= scaling
    store_rows(d_query, d_query_tile, queries, num_queries, d_query_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)


@triton.jit
def backward_key_kernel(
    query,
    key,
    value,
    bias,
    spans,
    query_ranges,
    seed,
    log_sums,
    d_output,
    deltas,
    d_key,
    d_value,
    query_strides,
    key_strides,
    value_strides,
    d_output_strides,
    d_key_strides,
    d_value_strides,
    bias_stride,
    scaling,
    dropout,
    num_heads,
    heads_per_key,
    num_queries,
    num_keys,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradients of a tile of keys and values of one key head, from all heads that share it."""
    num_tiles = tl.cdiv(num_keys, BLOCK_K)
    num_key_heads = num_heads // heads_per_key
    batch_key_head, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    batch, key_head = batch_key_head // num_key_heads, batch_key_head % num_key_heads
    first_key = tile * BLOCK_K
    keys = first_key + tl.arange(0, BLOCK_K)
    query += batch.to(tl.int64) * query_strides[0]
    d_output += batch.to(tl.int64) * d_output_strides[0]
    key += batch.to(tl.int64) * key_strides[0] + key_head.to(tl.int64) * key_strides[1]
    value += batch.to(tl.int64) * value_strides[0] + key_head.to(tl.int64) * value_strides[1]
    d_key += batch.to(tl.int64) * d_key_strides[0] + key_head.to(tl.int64) * d_key_strides[1]
    d_value += batch.to(tl.int64) * d_value_strides[0] + key_head.to(tl.int64) * d_value_strides[1]

    begin, end = first_key * 0, first_key * 0 + num_queries
    if VISIBLE == "causal":  # the first query that sees one of these keys
        begin = tl.maximum(first_key - (num_keys - num_queries), 0) // BLOCK_Q * BLOCK_Q
    if VISIBLE == "spans":
        range_offset = (batch * num_tiles + tile) * 2
        begin, end = tl.load(query_ranges + range_offset), tl.load(query_ranges + range_offset + 1)
    key_tile = load_rows(key, keys, num_keys, key_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
    value_tile = load_rows(value, keys, num_keys, value_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)
    d_key_tile = tl.zeros([BLOCK_K, PADDED_HEAD_SIZE], tl.float32)
    d_value_tile = tl.zeros([BLOCK_K, PADDED_VALUE_SIZE], tl.float32)
    for member in range(heads_per_key):
        head = key_head.to(tl.int64) * heads_per_key + member
        batch_head = batch * num_heads + head
        query_head, d_output_head = query + head * query_strides[1], d_output + head * d_output_strides[1]
        bias_head = bias + head * bias_stride
        for start in range(begin, end, BLOCK_Q):
            queries = start + tl.arange(0, BLOCK_Q)
            row_offsets = batch_head * num_queries + queries
            first, stop = visible_spans(spans, batch, queries, num_queries, num_keys, VISIBLE)
            log_sum = tl.load(log_sums + row_offsets, mask=queries < num_queries, other=0.0)
            delta = tl.load(deltas + row_offsets, mask=queries < num_queries, other=0.0)
            query_tile = load_rows(query_head, queries, num_queries, query_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
            d_output_tile = load_rows(
                d_output_head, queries, num_queries, d_output_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE
            )
            kept, d_scores = tile_gradients(
                query_tile,
                key_tile,
                value_tile,
                d_output_tile,
                bias_head,
                first,
                stop,
                log_sum,
                delta,
                seed,
                batch_head.to(tl.int32),
                queries,
                keys,
                first_key,
                num_queries,
                scaling,
                dropout,
                HAS_DROPOUT,
                PRECISION,
                BLOCK_K,
            )
            d_value_tile += tl.dot(tl.trans(kept.to(value_tile.dtype)), d_output_tile, input_precision=PRECISION)
            d_key_tile += tl.dot(tl.trans(d_scores.to(query_tile.dtype)), query_tile, input_precision=PRECISION)
    d_key_tile *= scaling
    store_rows(d_key, d_key_tile, keys, num_keys, d_key_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE)
    store_rows(d_value, d_value_tile, keys, num_keys, d_value_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE)


@triton.jit
def backward_bias_kernel(
    query,
    key,
    value,
    bias,
    spans,
    band_ranges,
    seed,
    log_sums,
    d_output,
    deltas,
    d_bias,
    query_strides,
    key_strides,
    value_strides,
    d_output_strides,
    bias_stride,
    batch_size,
    scaling,
    dropout,
    num_heads,
    heads_per_key,
    num_queries,
    num_keys,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What a band of tiles adds to the gradient of one head's bias: tiles with their keys `offset` tiles ahead."""
    tl.static_assert(BLOCK_Q == BLOCK_K)
    BLOCK: tl.constexpr = BLOCK_K
    num_query_tiles, num_key_tiles = tl.cdiv(num_queries, BLOCK), tl.cdiv(num_keys, BLOCK)
    num_bands = num_query_tiles + num_key_tiles - 1
    head, band = tl.program_id(0) // num_bands, tl.program_id(0) % num_bands
    offset = band - (num_query_tiles - 1)
    begin, end = tl.maximum(-offset, 0), tl.minimum(num_query_tiles, num_key_tiles - offset)
    if VISIBLE == "causal":  # later keys are hidden
        end = tl.where(offset * BLOCK < num_keys - num_queries + BLOCK, end, begin)
    head_64, key_head_64 = head.to(tl.int64), (head // heads_per_key).to(tl.int64)
    bias += head_64 * bias_stride
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for row in range(batch_size):
        batch = head_64 * 0 + row
        batch_head = batch * num_heads + head
        query_row = query + batch * query_strides[0] + head_64 * query_strides[1]
        d_output_row = d_output + batch * d_output_strides[0] + head_64 * d_output_strides[1]
        key_row = key + batch * key_strides[0] + key_head_64 * key_strides[1]
        value_row = value + batch * value_strides[0] + key_head_64 * value_strides[1]
        if VISIBLE == "spans":
            range_offset = (batch * num_bands + band) * 2
            begin, end = tl.load(band_ranges + range_offset), tl.load(band_ranges + range_offset + 1)
        for tile in range(begin, end):
            first_key = (tile + offset) * BLOCK
            queries, keys = tile * BLOCK + tl.arange(0, BLOCK), first_key + tl.arange(0, BLOCK)
            first, stop = visible_spans(spans, batch, queries, num_queries, num_keys, VISIBLE)
            row_offsets = batch_head * num_queries + queries
            log_sum = tl.load(log_sums + row_offsets, mask=queries < num_queries, other=0.0)
            delta = tl.load(deltas + row_offsets, mask=queries < num_queries, other=0.0)
            _, d_scores = tile_gradients(
                load_rows(query_row, queries, num_queries, query_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE),
                load_rows(key_row, keys, num_keys, key_strides[2], HEAD_SIZE, PADDED_HEAD_SIZE),
                load_rows(value_row, keys, num_keys, value_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE),
                load_rows(d_output_row, queries, num_queries, d_output_strides[2], VALUE_SIZE, PADDED_VALUE_SIZE),
                bias,
                first,
                stop,
                log_sum,
                delta,
                seed,
                batch_head.to(tl.int32),
                queries,
                keys,
                first_key,
                num_queries,
                scaling,
                dropout,
                HAS_DROPOUT,
                PRECISION,
                BLOCK,
            )
            total += d_scores
    lower, upper = diagonal_sums(total, BLOCK)
    num_distances = num_queries + num_keys - 1
    # between the last query and the first key of a tile, as an index of the bias
    position = offset * BLOCK - (BLOCK - 1) + num_queries - 1
    d_bias += head_64 * num_distances
    add_to_bias(d_bias, lower, position, num_distances, BLOCK)
    add_to_bias(d_bias, upper, position + BLOCK, num_distances, BLOCK)
