/* Scans with a running top-k: tiles of rows that stay in the L1 cache while every query of a batch
 * passes over them. Independent of the instruction set; the distances come from the kernel table. */
#ifndef HM_SEARCH_H
#define HM_SEARCH_H

#include "scalar.h"

#define HM_TILE_ROWS 64
#define HM_TILE_QUERIES 32
#define HM_TILE_BYTES 32768

/* Insert into a list sorted by (distance, slot). Slots come in ascending order, so an equal distance
 * goes behind those already there, and never displaces the last. */
HM_INLINE void hm_topk_insert(uint32_t *best_distance, int64_t *best_slot, size_t k,
                              uint32_t distance, int64_t slot) {
    size_t at = k - 1;
    while (at > 0 && best_distance[at - 1] > distance) {
        best_distance[at] = best_distance[at - 1];
        best_slot[at] = best_slot[at - 1];
        at--;
    }
    best_distance[at] = distance;
    best_slot[at] = slot;
}

HM_INLINE void hm_topk_tile(const uint32_t *distance, const uint8_t *alive, size_t n, int64_t slot,
                            uint32_t *best_distance, int64_t *best_slot, size_t k) {
    uint32_t worst = best_distance[k - 1];
    size_t r;
    for (r = 0; r < n; r++)
        if (distance[r] < worst && alive[r]) {
            hm_topk_insert(best_distance, best_slot, k, distance[r], slot + (int64_t)r);
            worst = best_distance[k - 1];
        }
}

static void hm_hamming_topk(const hm_kernels *kernels, const uint8_t *rows, const uint8_t *alive,
                            size_t n, const uint8_t *queries, size_t m, size_t bytes, size_t k,
                            int64_t first_slot, uint32_t *best_distance, int64_t *best_slot) {
    HM_ALIGN64 uint32_t distance[HM_TILE_QUERIES * HM_TILE_ROWS];
    size_t tile = HM_TILE_BYTES / bytes, r, q, i;
    tile = tile < 1 ? 1 : hm_min_size(tile, HM_TILE_ROWS);
    for (r = 0; r < n; r += tile) {
        size_t rows_here = hm_min_size(tile, n - r);
        for (q = 0; q < m; q += HM_TILE_QUERIES) {
            size_t queries_here = hm_min_size(HM_TILE_QUERIES, m - q);
            kernels->hamming(rows + r * bytes, rows_here, queries + q * bytes, queries_here, bytes,
                             distance, HM_TILE_ROWS);
            for (i = 0; i < queries_here; i++)
                hm_topk_tile(distance + i * HM_TILE_ROWS, alive + r, rows_here,
                             first_slot + (int64_t)r, best_distance + (q + i) * k,
                             best_slot + (q + i) * k, k);
        }
    }
}

/* All distances of one query, out[r]. */
static void hm_hamming_all(const hm_kernels *kernels, const uint8_t *rows, size_t n,
                           const uint8_t *query, size_t bytes, uint32_t *out) {
    kernels->hamming(rows, n, query, 1, bytes, out, n);
}

/* Length of the run of consecutive numbers that starts at[0], at most n: who steps in less than a run
 * must ask for no more than a step, or a long run is counted again and again. */
HM_INLINE size_t hm_run(const int64_t *at, size_t n) {
    size_t i = 1;
    while (i < n && at[i] == at[i - 1] + 1) i++;
    return i;
}

/* Distances of one query to chosen rows; the next ones are fetched while one is counted. */
static void hm_hamming_at(const hm_kernels *kernels, const uint8_t *rows, const int64_t *at,
                          size_t n, const uint8_t *query, size_t bytes, uint32_t *out) {
    size_t i, b, run;
    for (i = 0; i < n; i += run) {
        run = hm_run(at + i, n - i);
        if (run == 1 && i + 4 < n)
            for (b = 0; b < bytes && b < 1024; b += 64)
                HM_PREFETCH(rows + (size_t)at[i + 4] * bytes + b);
        kernels->hamming(rows + (size_t)at[i] * bytes, run, query, 1, bytes, out + i, n);
    }
}

/* The vector kernels count late distances in 16 bits. */
HM_INLINE const hm_kernels *hm_late_kernels(const hm_kernels *best, const hm_kernels *scalar,
                                            size_t bytes) {
    return bytes < 8192 ? best : scalar;
}

/* Late interaction. An entry has `lanes` lanes: a power of two up to 64 (entries share a group), or a
 * multiple of 64 (an entry has several groups). used[e] of them hold sub-signatures; the others of a
 * shared or started group repeat the first one, whole unused groups are never read. */
typedef struct {
    const uint8_t *groups;
    const uint32_t *used;
    size_t lanes;
    size_t bytes; /* of one sub-signature */
} hm_late_block;

/* Smallest distance of each of t <= HM_TOKENS prepared tokens to an entry, or to each of the entries that
 * share its group. */
HM_INLINE void hm_late_least(hm_late_fn late, const hm_late_block *block, size_t entry,
                             const uint8_t *prepared, size_t t, ptrdiff_t ahead, uint32_t *least) {
    const size_t group_bytes = block->bytes * HM_LANES;
    const uint8_t *group = block->groups + entry * block->lanes / HM_LANES * group_bytes;
    uint32_t more[HM_TOKENS];
    size_t g, i, groups;
    if (block->lanes < HM_LANES) {
        late(group, block->bytes, prepared, t, block->lanes, ahead, least);
        return;
    }
    late(group, block->bytes, prepared, t, HM_LANES, ahead, least);
    groups = (block->used[entry] + HM_LANES - 1) / HM_LANES;
    for (g = 1; g < groups; g++) {
        late(group + g * group_bytes, block->bytes, prepared, t, HM_LANES, ahead, more);
        for (i = 0; i < t; i++) least[i] = more[i] < least[i] ? more[i] : least[i];
    }
}

/* Distances of entries [first, first + n) to a query of t prepared tokens: sums over tokens of the
 * smallest distance. n entries must not leave a group when lanes < 64. `ahead`: bytes to what is to be
 * read next. */
HM_INLINE void hm_late_sum(const hm_kernels *kernels, const hm_late_block *block, size_t first,
                           size_t n, const uint8_t *prepared, size_t t, ptrdiff_t ahead,
                           uint32_t *out) {
    const size_t token_bytes = block->bytes * kernels->late_expand;
    uint32_t least[HM_TOKENS * HM_LANES];
    size_t e, token, i;
    for (e = 0; e < n; e++) out[e] = 0;
    for (token = 0; token < t; token += HM_TOKENS, ahead = 0) {
        size_t tokens = hm_min_size(HM_TOKENS, t - token);
        const uint8_t *query = prepared + token * token_bytes;
        if (block->lanes < HM_LANES) {
            size_t per_group = HM_LANES / block->lanes, offset = first % per_group;
            hm_late_least(kernels->late_min, block, first, query, tokens, ahead, least);
            for (i = 0; i < tokens; i++)
                for (e = 0; e < n; e++) out[e] += least[i * per_group + offset + e];
            continue;
        }
        for (e = 0; e < n; e++) {
            hm_late_least(kernels->late_min, block, first + e, query, tokens, ahead, least);
            for (i = 0; i < tokens; i++) out[e] += least[i];
        }
    }
}

/* How many of `n` entries from `first` on are taken at a time: those of one group, or one. */
HM_INLINE size_t hm_late_step(const hm_late_block *block, size_t first, size_t n) {
    size_t per_group = block->lanes < HM_LANES ? HM_LANES / block->lanes : 1;
    return hm_min_size(per_group - first % per_group, n);
}

/* starts[q] .. starts[q + 1] are the tokens of query q. */
static void hm_late_topk(const hm_kernels *kernels, const hm_late_block *block,
                         const uint8_t *alive, size_t n, const uint8_t *prepared,
                         const int64_t *starts, size_t m, size_t k, int64_t first_slot,
                         uint32_t *best_distance, int64_t *best_slot) {
    const size_t token_bytes = block->bytes * kernels->late_expand;
    uint32_t distance[HM_LANES];
    size_t e, q, step;
    for (e = 0; e < n; e += step) {
        step = hm_late_step(block, e, n - e);
        for (q = 0; q < m; q++) {
            hm_late_sum(kernels, block, e, step, prepared + (size_t)starts[q] * token_bytes,
                        (size_t)(starts[q + 1] - starts[q]), q == 0 ? HM_LATE_AHEAD : 0, distance);
            hm_topk_tile(distance, alive + e, step, first_slot + (int64_t)e, best_distance + q * k,
                         best_slot + q * k, k);
        }
    }
}

static void hm_late_all(const hm_kernels *kernels, const hm_late_block *block, size_t n,
                        const uint8_t *prepared, size_t t, uint32_t *out) {
    size_t e, step;
    for (e = 0; e < n; e += step) {
        step = hm_late_step(block, e, n - e);
        hm_late_sum(kernels, block, e, step, prepared, t, HM_LATE_AHEAD, out + e);
    }
}

/* Bytes from the group of the i-th of some entries to that of a later one, which is fetched meanwhile. */
HM_INLINE ptrdiff_t hm_late_next(const hm_late_block *block, const int64_t *at, size_t i, size_t n) {
    const int64_t lanes = (int64_t)block->lanes;
    int64_t next = at[hm_min_size(i + 4, n - 1)] * lanes / HM_LANES;
    return (ptrdiff_t)(next - at[i] * lanes / HM_LANES) * (ptrdiff_t)(block->bytes * HM_LANES);
}

static void hm_late_at(const hm_kernels *kernels, const hm_late_block *block, const int64_t *at,
                       size_t n, const uint8_t *prepared, size_t t, uint32_t *out) {
    size_t i, run;
    for (i = 0; i < n; i += run) {
        run = hm_late_step(block, (size_t)at[i], hm_run(at + i, hm_min_size(HM_LANES, n - i)));
        hm_late_sum(kernels, block, (size_t)at[i], run, prepared, t, hm_late_next(block, at, i, n),
                    out + i);
    }
}

/* Tables for late_weighted of t tokens of integers, magnitudes at most HM_MOST: a bit that has not the sign
 * of its number adds the magnitude. sums[token] are all magnitudes of a token. */
static void hm_late_tables(const int8_t *query, size_t t, size_t bytes, uint8_t *tables,
                           int32_t *sums) {
    size_t token, nibble, v, i;
    for (token = 0; token < t; token++) {
        sums[token] = 0;
        for (nibble = 0; nibble < 2 * bytes; nibble++, query += 4, tables += 16) {
            const uint8_t a = (uint8_t)query[0], b = (uint8_t)query[1], c = (uint8_t)query[2],
                          d = (uint8_t)query[3];
            int when_none = 0; /* of the bits is set */
            for (i = 0; i < 4; i++) {
                when_none += query[i] > 0 ? query[i] : 0;
                sums[token] += query[i] > 0 ? query[i] : -query[i];
            }
            for (v = 0; v < 16; v++) /* all 16 at once, as compilers see */
                tables[v] = (uint8_t)(when_none - (a & -(v & 1)) - (b & -(v >> 1 & 1)) -
                                      (c & -(v >> 2 & 1)) - (d & -(v >> 3)));
        }
    }
}

/* Dot products of tokens of integers, as tables, with signs, +1 for a set bit: out[i * t + token] is the
 * largest with one of the sub-signatures of entry at[i]. */
static void hm_late_dots(const hm_kernels *kernels, const hm_late_block *block, const int64_t *at,
                         size_t n, const uint8_t *tables, const int32_t *sums, size_t t,
                         int32_t *out) {
    const size_t per_group = block->lanes < HM_LANES ? HM_LANES / block->lanes : 1;
    const int fits = block->bytes * 8 * HM_MOST <= UINT16_MAX;
    const hm_late_fn late = fits ? kernels->late_weighted : hm_late_weighted_scalar;
    uint32_t least[HM_TOKENS * HM_LANES];
    size_t i, token, j, e, run;
    for (i = 0; i < n; i += run) {
        ptrdiff_t ahead = hm_late_next(block, at, i, n);
        for (run = 1; i + run < n; run++) /* all that are in this group */
            if ((size_t)at[i + run] / per_group != (size_t)at[i] / per_group) break;
        for (token = 0; token < t; token += HM_TOKENS, ahead = 0) {
            size_t tokens = hm_min_size(HM_TOKENS, t - token);
            hm_late_least(late, block, (size_t)at[i], tables + token * block->bytes * 32, tokens, ahead,
                          least);
            for (e = i; e < i + run; e++)
                for (j = 0; j < tokens; j++)
                    out[e * t + token + j] =
                        sums[token + j] -
                        2 * (int32_t)least[j * per_group + (size_t)at[e] % per_group];
        }
    }
}

#define HM_LATE_FAR UINT32_MAX

/* Distances of all n entries, or of those `at`, that come near with the first query tokens already:
 * after ends[g] tokens an entry whose sum exceeds limits[g] is given up, and its distance HM_LATE_FAR. */
static void hm_late_gated(const hm_kernels *kernels, const hm_late_block *block, const int64_t *at,
                          size_t n, const uint8_t *prepared, size_t t, const uint32_t *ends,
                          const uint32_t *limits, size_t gates, uint32_t *out) {
    const size_t token_bytes = block->bytes * kernels->late_expand;
    uint32_t more[HM_LANES];
    size_t i, run, e, gate;
    for (i = 0; i < n; i += run) {
        size_t first = at == NULL ? i : (size_t)at[i], done = 0, near = 1;
        ptrdiff_t ahead = HM_AHEAD; /* few tokens wait for the memory: more at once was slower */
        if (at != NULL) ahead = hm_late_next(block, at, i, n);
        run = hm_min_size(HM_LANES, n - i);
        run = hm_late_step(block, first, at == NULL ? run : hm_run(at + i, run));
        for (e = 0; e < run; e++) out[i + e] = 0;
        for (gate = 0; gate <= gates && near > 0; gate++) {
            size_t until = gate < gates ? ends[gate] : t;
            hm_late_sum(kernels, block, first, run, prepared + done * token_bytes, until - done,
                        done == 0 ? ahead : 0, more);
            for (e = 0, near = 0; e < run; e++) {
                if (out[i + e] == HM_LATE_FAR) continue;
                out[i + e] += more[e];
                if (gate < gates && out[i + e] > limits[gate]) out[i + e] = HM_LATE_FAR;
                near += out[i + e] != HM_LATE_FAR;
            }
            done = until;
        }
    }
}

/* Put the sub-signatures of one record into its lanes. */
static void hm_late_pack(const uint8_t *record, size_t used, size_t entry, size_t lanes,
                         size_t bytes, uint8_t *groups) {
    size_t lane, b, upto = lanes < HM_LANES ? lanes : (used + HM_LANES - 1) / HM_LANES * HM_LANES;
    for (lane = 0; lane < upto; lane++) {
        size_t place = entry * lanes + lane;
        const uint8_t *from = record + (lane < used ? lane : 0) * bytes;
        uint8_t *to = groups + place / HM_LANES * bytes * HM_LANES + place % HM_LANES;
        for (b = 0; b < bytes; b++) to[b * HM_LANES] = from[b];
    }
}

/* The k smallest live distances, ties to the smaller index, in that order, by counting: O(n + limit).
 * counts holds limit + 1 zeros, no distance exceeds limit. Returns how many were written. */
static size_t hm_select(const uint32_t *distance, const uint8_t *alive, size_t n, size_t limit,
                        size_t k, uint64_t *counts, int64_t *out) {
    size_t i, total = 0, value;
    for (i = 0; i < n; i++) counts[distance[i]] += alive[i] != 0;
    for (value = 0; value <= limit; value++) { /* counts become the place of the next one */
        size_t here = (size_t)counts[value];
        counts[value] = total;
        total += here;
    }
    total = hm_min_size(total, k);
    for (i = 0; i < n; i++)
        if (alive[i]) {
            uint64_t place = counts[distance[i]]++;
            if (place < k) out[place] = (int64_t)i;
        }
    return total;
}

#endif
