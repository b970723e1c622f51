/* The loops of attend.h, included once per instruction set: HM_ATTEND_FN(name) gives the functions
 * their names, HM_ATTEND_T their target. */

HM_ATTEND_T float HM_ATTEND_FN(dot)(const float *HM_RESTRICT x, const float *HM_RESTRICT y, size_t n) {
    float lane[HM_DOT_LANES] = {0};
    size_t i, j, width;
    for (i = 0; i + HM_DOT_LANES <= n; i += HM_DOT_LANES)
        for (j = 0; j < HM_DOT_LANES; j++) lane[j] += x[i + j] * y[i + j];
    for (j = 0; i + j < n; j++) lane[j] += x[i + j] * y[i + j];
    for (width = HM_DOT_LANES / 2; width > 0; width /= 2)
        for (j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

HM_ATTEND_T void HM_ATTEND_FN(add_scaled)(float weight, const float *HM_RESTRICT x, float *HM_RESTRICT y,
                                          size_t n) {
    size_t i;
    for (i = 0; i < n; i++) y[i] += weight * x[i];
}

/* Fetch a row that is read a block later: rows end at pages, where the processor stops fetching ahead. */
HM_ATTEND_T void HM_ATTEND_FN(fetch)(const float *row, size_t width) {
    size_t i;
    for (i = 0; i < width; i += 16) HM_PREFETCH(row + i);
}

/* Scores of up to HM_ATTEND_ROWS rows, then the weights that they become. v: their values, read next. */
HM_ATTEND_T void HM_ATTEND_FN(weigh)(const hm_attention *a, const float *k, const float *v, size_t n) {
    const size_t group = a->heads / a->kv_heads, d = a->head_dim, width = a->kv_heads * d;
    size_t row, kv, g, i, at;
    for (row = 0; row < n; row++) {
        const float *key = k + row * width;
        HM_ATTEND_FN(fetch)(v + row * width, width);
        for (kv = 0; kv < a->kv_heads; kv++)
            for (i = 0; i < a->queries; i++)
                for (g = 0; g < group; g++) {
                    at = i * a->heads + kv * group + g;
                    a->scores[at * HM_ATTEND_ROWS + row] =
                        a->scale * HM_ATTEND_FN(dot)(a->q + at * d, key + kv * d, d);
                }
    }
    for (at = 0; at < a->queries * a->heads; at++) {
        float *score = a->scores + at * HM_ATTEND_ROWS;
        float top = a->top[at], total = 0, old;
        for (row = 0; row < n; row++) top = score[row] > top ? score[row] : top;
        old = expf(a->top[at] - top); /* 0 at the start: exp(-inf) */
        for (row = 0; row < n; row++) total += score[row] = expf(score[row] - top);
        a->sum[at] = a->sum[at] * old + total;
        a->top[at] = top;
        if (old != 1.0f)
            for (i = 0; i < d; i++) a->acc[at * d + i] *= old;
    }
}

HM_ATTEND_T void HM_ATTEND_FN(attend)(const hm_attention *a, const hm_rows *some) {
    const float *k = some->k, *v = some->v;
    const size_t n = some->n;
    const size_t group = a->heads / a->kv_heads, d = a->head_dim, width = a->kv_heads * d;
    size_t first, row, kv, g, i;
    for (first = 0; first < n; first += HM_ATTEND_ROWS) {
        size_t rows = n - first < HM_ATTEND_ROWS ? n - first : HM_ATTEND_ROWS;
        HM_ATTEND_FN(weigh)(a, k + first * width, v + first * width, rows);
        for (row = 0; row < rows; row++) {
            const float *value = v + (first + row) * width;
            if (first + HM_ATTEND_ROWS + row < n)
                HM_ATTEND_FN(fetch)(k + (first + HM_ATTEND_ROWS + row) * width, width);
            else if (first + HM_ATTEND_ROWS >= n && row < some->next_n)
                HM_ATTEND_FN(fetch)(some->next + row * width, width);
            for (kv = 0; kv < a->kv_heads; kv++)
                for (i = 0; i < a->queries; i++)
                    for (g = 0; g < group; g++) {
                        size_t at = i * a->heads + kv * group + g;
                        HM_ATTEND_FN(add_scaled)
                        (a->scores[at * HM_ATTEND_ROWS + row], value + kv * d, a->acc + at * d, d);
                    }
        }
    }
}
