/* Float kernels written once for any vector width; each instruction set includes this after defining
 *
 *   HM_FN(name)   name with the level's suffix         HM_T    target attribute
 *   HM_SMALL(name)   name at the level used for short transforms
 *   HM_W, V       lanes, float vector
 *   V_LOAD V_STORE V_ADD V_SUB
 *   V_FLIP(v, b)  negate lane i where bit i of b is set
 *   V_INNER(v)    Walsh-Hadamard stages inside one vector, strides 1 .. HM_W / 2
 *   V_GE0(v)      bit i = lane i >= 0
 *   D, D_W        double vector, doubles per vector; without them there is no mean
 *   D_LOAD D_STORE D_ADD, D_WIDEN(p) (D_W floats as doubles), D_MEAN(p, sum, n) (store sum / n as floats)
 *
 * A transform of n floats first runs the stages inside 8 vectors, then three stages at a time over 8
 * streams, so that a float is loaded and stored once per three stages. The order of additions is that
 * of the plain loop: every stage pairs the same two numbers.
 */

HM_T HM_INLINE void HM_FN(hm_butterfly8)(V *v, int stages) {
    int i;
    V t;
#define HM_BUTTERFLY(a, b) (t = V_SUB(v[a], v[b]), v[a] = V_ADD(v[a], v[b]), v[b] = t)
    for (i = 0; i < 8; i += 2) HM_BUTTERFLY(i, i + 1);
    if (stages < 2) return;
    for (i = 0; i < 8; i += 4) {
        HM_BUTTERFLY(i, i + 2);
        HM_BUTTERFLY(i + 1, i + 3);
    }
    if (stages < 3) return;
    for (i = 0; i < 4; i++) HM_BUTTERFLY(i, i + 4);
#undef HM_BUTTERFLY
}

HM_T HM_INLINE uint32_t HM_FN(hm_flip_bits)(const uint64_t *flips, size_t i) {
    return (uint32_t)(flips[i >> 6] >> (i & 63)) & (uint32_t)((UINT64_C(1) << HM_W) - 1);
}

/* All stages with strides below 8 * HM_W, after the flips. */
HM_T HM_INLINE void HM_FN(hm_fwht_chunks)(float *y, size_t n, const uint64_t *flips, int flip) {
    V v[8];
    size_t start;
    int i;
    for (start = 0; start < n; start += 8 * HM_W) {
        for (i = 0; i < 8; i++) {
            size_t at = start + (size_t)i * HM_W;
            v[i] = V_LOAD(y + at);
            if (flip) v[i] = V_FLIP(v[i], HM_FN(hm_flip_bits)(flips, at));
            v[i] = V_INNER(v[i]);
        }
        HM_FN(hm_butterfly8)(v, 3);
        for (i = 0; i < 8; i++) V_STORE(y + start + (size_t)i * HM_W, v[i]);
    }
}

/* Stages of strides s, 2s and 4s. */
HM_T HM_INLINE void HM_FN(hm_fwht_pass8)(float *y, size_t n, size_t s) {
    V v[8];
    size_t start, at;
    int i;
    for (start = 0; start < n; start += 8 * s)
        for (at = start; at < start + s; at += HM_W) {
            for (i = 0; i < 8; i++) v[i] = V_LOAD(y + at + (size_t)i * s);
            HM_FN(hm_butterfly8)(v, 3);
            for (i = 0; i < 8; i++) V_STORE(y + at + (size_t)i * s, v[i]);
        }
}

/* Stages of strides s and 2s. */
HM_T HM_INLINE void HM_FN(hm_fwht_pass4)(float *y, size_t n, size_t s) {
    size_t start, at;
    for (start = 0; start < n; start += 4 * s)
        for (at = start; at < start + s; at += HM_W) {
            V a = V_LOAD(y + at), b = V_LOAD(y + at + s);
            V c = V_LOAD(y + at + 2 * s), d = V_LOAD(y + at + 3 * s);
            V e = V_ADD(a, b), f = V_SUB(a, b), g = V_ADD(c, d), h = V_SUB(c, d);
            V_STORE(y + at, V_ADD(e, g));
            V_STORE(y + at + s, V_ADD(f, h));
            V_STORE(y + at + 2 * s, V_SUB(e, g));
            V_STORE(y + at + 3 * s, V_SUB(f, h));
        }
}

HM_T HM_INLINE void HM_FN(hm_fwht_pass2)(float *y, size_t n, size_t s) {
    size_t start, at;
    for (start = 0; start < n; start += 2 * s)
        for (at = start; at < start + s; at += HM_W) {
            V a = V_LOAD(y + at), b = V_LOAD(y + at + s);
            V_STORE(y + at, V_ADD(a, b));
            V_STORE(y + at + s, V_SUB(a, b));
        }
}

HM_T static void HM_FN(hm_flip_fwht)(float *y, size_t n, size_t keep, const uint64_t *flips) {
    size_t s = 8 * HM_W, start, at;
    if (n < 8 * HM_W) {
        HM_SMALL(hm_flip_fwht)(y, n, keep, flips);
        return;
    }
    if (flips != NULL)
        HM_FN(hm_fwht_chunks)(y, n, flips, 1);
    else
        HM_FN(hm_fwht_chunks)(y, n, NULL, 0);
    for (; 4 * s < keep; s *= 8) HM_FN(hm_fwht_pass8)(y, n, s);
    if (2 * s < keep) {
        HM_FN(hm_fwht_pass4)(y, n, s);
        s *= 4;
    }
    if (s < keep) {
        HM_FN(hm_fwht_pass2)(y, n, s);
        s *= 2;
    }
    for (; s < n; s *= 2) /* of the last stages only the sums are wanted */
        for (start = 0; start < n; start += 2 * s)
            for (at = start; at < start + keep; at += HM_W)
                V_STORE(y + at, V_ADD(V_LOAD(y + at), V_LOAD(y + at + s)));
}

HM_T static void HM_FN(hm_fold)(const float *x, size_t padded, size_t folded,
                                const uint64_t *flips, float *y) {
    size_t i, j;
    if (folded < 64) {
        HM_SMALL(hm_fold)(x, padded, folded, flips, y);
        return;
    }
    for (i = 0; i < folded; i += HM_W) {
        V sum = V_FLIP(V_LOAD(x + i), HM_FN(hm_flip_bits)(flips, i));
        for (j = i + folded; j < padded; j += folded)
            sum = V_ADD(sum, V_FLIP(V_LOAD(x + j), HM_FN(hm_flip_bits)(flips, j)));
        V_STORE(y + i, sum);
    }
}

HM_T static void HM_FN(hm_pack_signs)(const float *y, size_t n, uint8_t *out) {
    size_t i, at;
    for (i = 0; i < n; i += 64) {
        uint64_t word = 0;
        for (at = 0; at < 64; at += HM_W) word |= (uint64_t)V_GE0(V_LOAD(y + i + at)) << at;
        memcpy(out + i / 8, &word, 8);
    }
}

#ifdef D
/* Add `rows` rows to the sums of the columns [0, d); the first rows start the sums. */
HM_T HM_INLINE void HM_FN(hm_add_rows)(const float *x, size_t d, size_t rows, int first,
                                       double *acc) {
    size_t c, r;
    for (c = 0; c + D_W <= d; c += D_W) {
        D sum = first ? D_WIDEN(x + c) : D_LOAD(acc + c);
        for (r = first ? 1 : 0; r < rows; r++) sum = D_ADD(sum, D_WIDEN(x + r * d + c));
        D_STORE(acc + c, sum);
    }
    for (; c < d; c++) {
        double sum = first ? (double)x[c] : acc[c];
        for (r = first ? 1 : 0; r < rows; r++) sum += (double)x[r * d + c];
        acc[c] = sum;
    }
}

HM_T static void HM_FN(hm_mean)(const float *x, size_t n, size_t d, double *acc, float *out) {
    size_t r, c;
    if (n < 8) {
        HM_FN(hm_add_rows)(x, d, n, 1, acc);
    } else {
        HM_FN(hm_add_rows)(x, d, 8, 1, acc);
        for (r = 8; r + 8 <= n; r += 8) HM_FN(hm_add_rows)(x + r * d, d, 8, 0, acc);
        if (r < n) HM_FN(hm_add_rows)(x + r * d, d, n - r, 0, acc);
    }
    for (c = 0; c + D_W <= d; c += D_W) D_MEAN(out + c, D_LOAD(acc + c), (double)n);
    for (; c < d; c++) out[c] = (float)(acc[c] / (double)n);
}
#endif
