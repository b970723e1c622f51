/* Every instruction set that this machine (or emulator) offers against plain C, without Python.
 *
 * Prints the levels found and exits with 1 at the first difference. Build and run: see run.sh.
 */
#include <stdio.h>

#include "../../hybridmem/_simd/dispatch.h"
#include "../../hybridmem/_simd/fpenv.h"
#include "../../hybridmem/_simd/project.h"

static uint64_t state = 1;

static uint64_t next(void) {
    uint64_t z = (state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static void random_bytes(void *p, size_t n) {
    uint8_t *bytes = (uint8_t *)p;
    size_t i;
    for (i = 0; i < n; i++) bytes[i] = (uint8_t)next();
}

/* Finite floats of very different magnitudes. */
static void random_floats(float *p, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)next();
        if ((bits >> 23 & 255) == 255) bits ^= UINT32_C(1) << 30;
        if (next() % 4) bits = (bits & UINT32_C(0x807FFFFF)) | (uint32_t)(120 + bits % 16) << 23;
        p[i] = hm_bits_to_float(bits);
    }
}

static void *get(size_t n) {
    void *p = malloc(n + 1);
    if (p == NULL) exit(2);
    return p;
}

static int failures = 0;

static void same(const void *a, const void *b, size_t n, const char *what, const char *level,
                 size_t size) {
    if (memcmp(a, b, n) == 0) return;
    printf("%s: %s differs from scalar at size %zu\n", level, what, size);
    failures++;
}

static void check_projection(const hm_kernels *k) {
    static const size_t dims[] = {1, 2, 5, 16, 31, 33, 64, 100, 129, 300, 1000, 3584, 5000};
    static const size_t widths[] = {64, 192, 512, 4096};
    size_t i, j;
    for (i = 0; i < sizeof dims / sizeof *dims; i++)
        for (j = 0; j < sizeof widths / sizeof *widths; j++) {
            size_t d = dims[i], bits = widths[j], padded = 1, folded = 1, blocks, words;
            float *x, *scratch;
            uint64_t *flips;
            uint8_t *want, *got;
            float *wanted, *values;
            while (padded < d) padded *= 2;
            while (folded < 4 * bits) folded *= 2;
            folded = hm_min_size(folded, padded);
            blocks = (bits + folded - 1) / folded;
            words = blocks * (hm_flip_words(padded) + 2 * hm_flip_words(folded));
            x = get(4 * d);
            scratch = get(4 * (padded + folded));
            flips = get(8 * words);
            want = get(bits / 8);
            got = get(bits / 8);
            wanted = get(4 * bits);
            values = get(4 * bits);
            random_floats(x, d);
            random_bytes(flips, 8 * words);
            hm_project_row(&hm_table_scalar, x, d, flips, padded, folded, bits, scratch,
                           scratch + padded, want, NULL);
            hm_project_row(k, x, d, flips, padded, folded, bits, scratch, scratch + padded, got, NULL);
            same(want, got, bits / 8, "projection", k->name, d * 100000 + bits);
            hm_project_row(&hm_table_scalar, x, d, flips, padded, folded, bits, scratch,
                           scratch + padded, NULL, wanted);
            hm_project_row(k, x, d, flips, padded, folded, bits, scratch, scratch + padded, NULL,
                           values);
            /* as numbers: the levels may differ in the sign of a zero */
            for (words = 0; words < bits && wanted[words] == values[words]; words++);
            same(&words, &bits, sizeof bits, "values of the projection", k->name, d * 100000 + bits);
            free(x), free(scratch), free(flips), free(want), free(got), free(wanted), free(values);
        }
}

static void check_rows(const hm_kernels *k) {
    static const size_t dims[] = {1, 2, 3, 4, 7, 8, 9, 15, 17, 63, 65, 200};
    size_t i, n;
    for (i = 0; i < sizeof dims / sizeof *dims; i++)
        for (n = 1; n < 20; n++) {
            size_t d = dims[i], place = next() % (n * d);
            float *x = get(4 * n * d), *copy = get(4 * n * d), *want = get(4 * d), *got = get(4 * d);
            double *acc = get(8 * d);
            random_floats(x, n * d);
            hm_table_scalar.mean(x, n, d, acc, want);
            k->mean(x, n, d, acc, got);
            same(want, got, 4 * d, "mean", k->name, n * 1000 + d);
            if (!k->copy_finite(x, copy, n * d) || !k->copy_finite(x, NULL, n * d)) failures++;
            same(x, copy, 4 * n * d, "copy", k->name, n * d);
            x[place] = hm_bits_to_float(next() % 2 ? UINT32_C(0xFF800000) : UINT32_C(0x7F800001));
            if (k->copy_finite(x, copy, n * d) || k->copy_finite(x, NULL, n * d)) {
                printf("%s: not finite at %zu of %zu is missed\n", k->name, place, n * d);
                failures++;
            }
            free(x), free(copy), free(want), free(got), free(acc);
        }
}

static void check_hamming(const hm_kernels *k) {
    size_t bytes;
    for (bytes = 8; bytes < 2600; bytes += bytes < 200 ? 8 : 152) {
        enum { N = 11, M = 3 };
        uint8_t *rows = get(N * bytes), *queries = get(M * bytes);
        uint32_t want[N * M], got[N * M];
        random_bytes(rows, N * bytes);
        random_bytes(queries, M * bytes);
        memset(rows, 0, bytes);
        memset(queries, 255, bytes);
        hm_table_scalar.hamming(rows, N, queries, M, bytes, want, N);
        k->hamming(rows, N, queries, M, bytes, got, N);
        same(want, got, sizeof want, "Hamming distance", k->name, bytes);
        k->hamming(rows, N, queries, 1, bytes, got, N);
        same(want, got, 4 * N, "Hamming distance of one query", k->name, bytes);
        free(rows), free(queries);
    }
}

static void check_late(const hm_kernels *k) {
    static const size_t sizes[] = {8, 16, 24, 32, 40, 64, 72, 128, 136};
    size_t span, t, i;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (span = 1; span <= 64; span *= 2)
            for (t = 1; t <= HM_TOKENS; t++) {
                size_t n = t * HM_LANES / span, bytes = sizes[i];
                uint8_t *group = get(bytes * HM_LANES), *queries = get(t * bytes);
                uint8_t *plain = get(t * bytes), *prepared = get(t * bytes * k->late_expand);
                uint32_t *want = get(4 * n), *got = get(4 * n);
                random_bytes(group, bytes * HM_LANES);
                random_bytes(queries, t * bytes);
                if (t == 3) { /* the largest distance, in all lanes */
                    memset(group, 0, bytes * HM_LANES);
                    memset(queries, 255, bytes);
                }
                hm_table_scalar.late_prepare(queries, t, bytes, plain);
                hm_table_scalar.late_min(group, bytes, plain, t, span, 0, want);
                k->late_prepare(queries, t, bytes, prepared);
                k->late_min(group, bytes, prepared, t, span, HM_LATE_AHEAD, got);
                same(want, got, 4 * n, "late interaction", k->name, bytes * 1000 + span);
                free(group), free(queries), free(plain), free(prepared), free(want), free(got);
            }
}

static void check_weighted(const hm_kernels *k) {
    static const size_t sizes[] = {8, 16, 24, 32, 40, 64, 72, 512, 544};
    size_t span, t, i, j;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (span = 1; span <= 64; span *= 2)
            for (t = 1; t <= HM_TOKENS; t++) {
                size_t n = t * HM_LANES / span, bytes = sizes[i];
                uint8_t *group = get(bytes * HM_LANES), *tables = get(t * bytes * 32);
                uint32_t *want = get(4 * n), *got = get(4 * n);
                random_bytes(group, bytes * HM_LANES);
                random_bytes(tables, t * bytes * 32);
                for (j = 0; j < t * bytes * 32; j++)
                    tables[j] = (uint8_t)(t == 3 ? 4 * HM_MOST : tables[j] % (4 * HM_MOST + 1));
                hm_table_scalar.late_weighted(group, bytes, tables, t, span, 0, want);
                k->late_weighted(group, bytes, tables, t, span, HM_LATE_AHEAD, got);
                same(want, got, 4 * n, "weighted late interaction", k->name, bytes * 1000 + span);
                free(group), free(tables), free(want), free(got);
            }
}

int main(void) {
    const hm_kernels *levels[HM_MAX_LEVELS] = {NULL};
    size_t n = hm_levels(levels), i;
    hm_fpenv saved = hm_fpenv_enter();
    for (i = 0; i < n; i++) {
        printf("%s ", levels[i]->name);
        check_rows(levels[i]);
        check_projection(levels[i]);
        check_hamming(levels[i]);
        check_late(levels[i]);
        check_weighted(levels[i]);
    }
    hm_fpenv_leave(saved);
    printf(failures ? "FAILED\n" : "ok\n");
    return failures != 0;
}
