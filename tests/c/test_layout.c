/* Layouts: properties that hold for any shapes and ranks, and padding of real models. */
#include "engine_fixture.h"

#include "engine/state_format.h"
#include "ops/block_code.h"

enum { MAX_SPECS = 12 };

/* Elements of padding in the unsharded parameters of all groups, over real ones. */
static double padding_of(const fsdpc_layout *layout)
{
    size_t unsharded = 0;
    for (int g = 0; g < layout->n_groups; g++)
        unsharded += layout->groups[g].unsharded_numel;
    if (layout->real_numel == 0)
        return 0;
    return (double)(unsharded - layout->real_numel) / (double)layout->real_numel;
}

static size_t gcd(size_t a, size_t b)
{
    return b ? gcd(b, a % b) : a;
}

static const fsdpc_slice *band_of(const fsdpc_layout *layout, int param)
{
    const fsdpc_place *place = &layout->params[param];
    return &layout->groups[place->group].bands[place->band];
}

/* ---- properties ---- */

static void check_place(const fsdpc_layout *layout, int param, const char *what)
{
    const fsdpc_place *place = &layout->params[param];
    const fsdpc_slice *band = band_of(layout, param);
    size_t row = place->row_numel, at = place->unsharded_offset - band->unsharded_offset;
    CHECK_NOTE(layout->groups[place->group].dtype == place->dtype, "%s", what);
    CHECK_NOTE(place->unsharded_offset >= band->unsharded_offset, "%s", what);
    CHECK_NOTE(band->unsharded_offset % 64 == 0 && band->shard_offset % 64 == 0, "%s", what);
    CHECK_NOTE(place->unsharded_offset % 64 == 0, "%s", what);
    CHECK_NOTE(row > 0 && at % (row / gcd(row, 64) * 64) == 0, "%s: starts at %zu, rows of %zu",
               what, at, row);
    CHECK_NOTE(band->numel % row == 0, "%s: a slice is whole rows", what);
    CHECK_NOTE(at + place->numel <= band->numel * (size_t)layout->ranks, "%s", what);
    CHECK_NOTE(place->leaf_numel > 0 && row % place->leaf_numel == 0,
               "%s: leaf %zu of a row of %zu may be cut", what, place->leaf_numel, row);
}

/* Every element has one owner; local shards are runs of whole rows, in rank order. */
static void check_local_shards(const fsdpc_layout *layout, int param, const char *what)
{
    const fsdpc_place *place = &layout->params[param];
    const fsdpc_slice *band = band_of(layout, param);
    size_t next = 0;
    for (int rank = 0; rank < layout->ranks; rank++) {
        fsdpc_local_shard local = fsdpc_layout_local_shard(layout, param, rank);
        CHECK_NOTE(local.first <= place->numel, "%s", what);
        if (local.numel == 0)
            continue;
        CHECK_NOTE(local.first == next, "%s: rank %d begins at %zu, not %zu", what, rank,
                   local.first, next);
        next = local.first + local.numel;
        CHECK_NOTE(local.first % place->row_numel == 0, "%s: cut inside a row", what);
        CHECK_NOTE(local.numel % place->row_numel == 0 || next == place->numel,
                   "%s: cut inside a row", what);
        CHECK_NOTE(local.shard_offset >= band->shard_offset &&
                       local.shard_offset + local.numel <= band->shard_offset + band->numel,
                   "%s: rank %d's piece leaves its slice", what, rank);
        CHECK_NOTE(fsdpc_slice_unsharded(band, rank, local.shard_offset) ==
                       place->unsharded_offset + local.first,
                   "%s: rank %d's shard and full disagree", what, rank);
    }
    CHECK_NOTE(next == place->numel, "%s: %zu of %zu elements are owned", what, next, place->numel);
}

static void check_apart(const fsdpc_layout *layout, const char *what)
{
    for (int a = 0; a < layout->n_params; a++) {
        for (int b = 0; b < layout->n_params; b++) {
            const fsdpc_place *x = &layout->params[a], *y = &layout->params[b];
            if (a == b || x->group != y->group || x->numel == 0 || y->numel == 0)
                continue;
            CHECK_NOTE(x->unsharded_offset + x->numel <= y->unsharded_offset ||
                           y->unsharded_offset + y->numel <= x->unsharded_offset,
                       "%s: '%s' and '%s' overlap", what, x->name, y->name);
            /* one order in a band: that of declaration */
            if (a < b && x->band == y->band)
                CHECK_NOTE(x->unsharded_offset < y->unsharded_offset, "%s", what);
        }
    }
}

/* Bands lie end to end; each wastes less than a row a rank beyond the gaps between parameters. */
static void check_bands(const fsdpc_layout *layout, const char *what)
{
    for (int g = 0; g < layout->n_groups; g++) {
        const fsdpc_group *group = &layout->groups[g];
        size_t unsharded = 0, shard = 0;
        for (size_t b = 0; b < group->n_bands; b++) {
            const fsdpc_slice *band = &group->bands[b];
            size_t ranks = (size_t)layout->ranks, end = 0, row = 0;
            for (int i = 0; i < layout->n_params; i++) {
                const fsdpc_place *place = &layout->params[i];
                if (place->group != g || place->band != (int)b)
                    continue;
                end = place->unsharded_offset - band->unsharded_offset + place->numel;
                row = place->row_numel;
            }
            size_t align = row % 256 == 0 ? 256 : 64;
            CHECK_NOTE(band->unsharded_offset >= unsharded &&
                           band->unsharded_offset < unsharded + align,
                       "%s", what);
            CHECK_NOTE(band->shard_offset >= shard && band->shard_offset < shard + align, "%s",
                       what);
            CHECK_NOTE(band->shard_offset % align == 0 && band->unsharded_offset % align == 0, "%s",
                       what);
            unsharded = band->unsharded_offset + ranks * band->numel;
            shard = band->shard_offset + band->numel;
            if (end > 0)
                CHECK_NOTE(ranks * band->numel < end + row + (ranks - 1) * row,
                           "%s: slices of %zu for %zu elements", what, band->numel, end);
        }
        CHECK_NOTE(group->unsharded_numel == unsharded && group->shard_numel == shard, "%s", what);
    }
}

/* A rank's maxima and fp32 states lie apart in the side array, which is as long on every rank. */
static void check_sides(const fsdpc_layout *layout, const char *what)
{
    const fsdpc_state_format format = {.dtype = FSDPC_U8, .min_coded_numel = 100};
    fsdpc_state_place *places = calloc((size_t)layout->n_params + 1, sizeof *places);
    for (int g = 0; g < layout->n_groups; g++) {
        size_t numel = fsdpc_state_side(&format, layout, g, 0, NULL);
        for (int rank = 0; rank < layout->ranks; rank++) {
            unsigned char *taken = calloc(numel + 1, 1);
            if (!places || !taken)
                exit(2);
            CHECK_NOTE(fsdpc_state_side(&format, layout, g, rank, places) == numel, "%s", what);
            for (int i = 0; i < layout->n_params && numel > 0; i++) {
                const fsdpc_place *place = &layout->params[i];
                fsdpc_local_shard local = fsdpc_layout_local_shard(layout, i, rank);
                size_t row = places[i].code_row, begin = places[i].side, n = local.numel;
                if (place->group != g || n == 0)
                    continue;
                if (row)
                    CHECK_NOTE(n % row == 0 && local.first % row == 0, "%s: a cut row", what);
                CHECK_NOTE(row != 256 || local.shard_offset % 256 == 0, "%s: a split block", what);
                begin += row ? 0 : local.shard_offset;
                n = row ? fsdpc_code_blocks(n, row) : n;
                CHECK_NOTE(begin <= numel && n <= numel - begin, "%s: '%s'", what, place->name);
                for (size_t k = begin; k < begin + n && k < numel; k++)
                    CHECK_NOTE(!taken[k]++, "%s: '%s' overlaps", what, place->name);
            }
            free(taken);
        }
    }
    free(places);
}

static bool same(const fsdpc_layout *a, const fsdpc_layout *b)
{
    bool equal = a->n_groups == b->n_groups && a->real_numel == b->real_numel;
    for (int i = 0; i < a->n_params; i++) {
        const fsdpc_place *x = &a->params[i], *y = &b->params[i];
        equal &= x->unsharded_offset == y->unsharded_offset && x->band == y->band &&
                 x->row_numel == y->row_numel && x->leaf_numel == y->leaf_numel;
    }
    for (int g = 0; equal && g < a->n_groups; g++) {
        equal &= a->groups[g].n_bands == b->groups[g].n_bands;
        equal &= memcmp(a->groups[g].bands, b->groups[g].bands,
                        a->groups[g].n_bands * sizeof(fsdpc_slice)) == 0;
    }
    return equal;
}

/* With a band per parameter, what torch.chunk gives each rank of dim 0. */
static void check_chunks(const fsdpc_layout *layout, int param, const char *what)
{
    const fsdpc_place *place = &layout->params[param];
    size_t rows = place->ndim > 0 ? place->shape[0] : 1, ranks = (size_t)layout->ranks;
    size_t row = rows > 0 ? place->numel / rows : 0, chunk = (rows + ranks - 1) / ranks;
    for (int rank = 0; row > 0 && rank < layout->ranks; rank++) {
        size_t begin = (size_t)rank * chunk, end = begin + chunk;
        begin = begin < rows ? begin : rows, end = end < rows ? end : rows;
        fsdpc_local_shard local = fsdpc_layout_local_shard(layout, param, rank);
        CHECK_NOTE(local.first == begin * row && local.numel == (end - begin) * row,
                   "%s: rank %d has %zu elements from %zu of %zu rows of %zu", what, rank,
                   local.numel, local.first, rows, row);
    }
}

static void check_layout(const fsdpc_param_spec *specs, int n, int ranks, bool band_per_param,
                         const char *what)
{
    fsdpc_layout *layout = NULL, *again = NULL;
    CHECK_OK(fsdpc_layout_create(specs, n, ranks, band_per_param, &layout));
    CHECK_OK(fsdpc_layout_create(specs, n, ranks, band_per_param, &again));
    CHECK_NOTE(same(layout, again), "%s", what);
    for (int i = 0; i < n; i++) {
        check_place(layout, i, what);
        check_local_shards(layout, i, what);
        if (band_per_param)
            check_chunks(layout, i, what);
    }
    check_apart(layout, what);
    check_sides(layout, what);
    check_bands(layout, what);
    if (ranks <= 8)
        check_sides(layout, what);
    fsdpc_layout_destroy(again);
    fsdpc_layout_destroy(layout);
}

static void random_spec(uint64_t *state, fsdpc_param_spec *spec)
{
    static const size_t dims[] = {0, 1, 2, 3, 5, 8, 17, 48, 63, 64, 65, 100, 128, 192};
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_F32, FSDPC_F32, FSDPC_BF16, FSDPC_F64};
    *spec = (fsdpc_param_spec){
        .name = "p", .dtype = dtypes[rig_random(state) % 5], .ndim = (int)(rig_random(state) % 5)};
    for (int d = 0; d < spec->ndim; d++) {
        size_t pick = rig_random(state) % 24; /* zeros are rarer, the first dim is longer */
        spec->shape[d] = d >= 2      ? 1 + pick % 7
                         : pick < 14 ? dims[pick]
                                     : 1 + rig_random(state) % 300;
    }
}

static void test_random(void)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 7, 8, 13, 64, 257};
    uint64_t state = 12345;
    for (int round = 0; round < 600; round++) {
        fsdpc_param_spec specs[MAX_SPECS];
        int n = (int)(rig_random(&state) % (MAX_SPECS + 1));
        for (int i = 0; i < n; i++)
            random_spec(&state, &specs[i]);
        int ranks = worlds[rig_random(&state) % 10];
        char what[64];
        snprintf(what, sizeof what, "round %d, %d parameters, %d ranks", round, n, ranks);
        check_layout(specs, n, ranks, round % 3 == 0, what);
    }
}

/* ---- cases by name ---- */

static void test_small(void)
{
    fsdpc_param_spec scalar = rig_spec("scalar", FSDPC_F32, 0, 0, 0, 0);
    fsdpc_layout *layout;
    CHECK_OK(fsdpc_layout_create(&scalar, 1, 4, false, &layout));
    CHECK(layout->params[0].numel == 1);
    CHECK(fsdpc_layout_local_shard(layout, 0, 0).numel == 1);
    for (int rank = 1; rank < 4; rank++)
        CHECK(fsdpc_layout_local_shard(layout, 0, rank).numel == 0 &&
              fsdpc_layout_local_shard(layout, 0, rank).first == 1);
    fsdpc_layout_destroy(layout);

    fsdpc_param_spec empty[] = {rig_spec("rows", FSDPC_F32, 2, 0, 7, 0),
                                rig_spec("columns", FSDPC_F32, 2, 7, 0, 0),
                                rig_spec("x", FSDPC_F32, 1, 3, 0, 0)};
    CHECK_OK(fsdpc_layout_create(empty, 3, 3, false, &layout));
    CHECK(layout->real_numel == 3);
    for (int rank = 0; rank < 3; rank++)
        CHECK(fsdpc_layout_local_shard(layout, 2, rank).numel == 1);
    fsdpc_layout_destroy(layout);

    CHECK_OK(fsdpc_layout_create(NULL, 0, 3, false, &layout));
    CHECK(layout->n_groups == 0 && padding_of(layout) == 0);
    fsdpc_layout_destroy(layout);

    fsdpc_param_spec uneven = rig_spec("w", FSDPC_F32, 2, 7, 10, 0);
    CHECK_OK(fsdpc_layout_create(&uneven, 1, 3, false, &layout)); /* 3 + 3 + 1 rows */
    CHECK(fsdpc_layout_local_shard(layout, 0, 0).numel == 30);
    CHECK(fsdpc_layout_local_shard(layout, 0, 1).first == 30);
    CHECK(fsdpc_layout_local_shard(layout, 0, 2).numel == 10);
    fsdpc_layout_destroy(layout);
}

static void test_refused(void)
{
    fsdpc_layout *layout = NULL;
    fsdpc_param_spec bad = rig_spec("ids", FSDPC_I64, 1, 8, 0, 0);
    CHECK_FAILS(fsdpc_layout_create(&bad, 1, 2, false, &layout), FSDPC_ERR_DTYPE, "'ids'");
    bad = rig_spec("deep", FSDPC_F32, 9, 1, 1, 1);
    CHECK_FAILS(fsdpc_layout_create(&bad, 1, 2, false, &layout), FSDPC_ERR_SHAPE, "9 dimensions");
    bad = rig_spec("huge", FSDPC_F32, 3, SIZE_MAX / 2, 3, 1);
    fsdpc_status status = fsdpc_layout_create(&bad, 1, 2, false, &layout);
    CHECK(status < 0);
    bad = rig_spec("x", FSDPC_F32, 1, 8, 0, 0);
    CHECK_FAILS(fsdpc_layout_create(&bad, 1, 0, false, &layout), FSDPC_ERR_VALUE,
                "at least one rank");
    CHECK(layout == NULL);
}

/* Frozen groups come last, and no band has parameters of both kinds. */
static void test_frozen(void)
{
    fsdpc_param_spec specs[5];
    for (int i = 0; i < 5; i++) {
        specs[i] = rig_spec("w", i == 3 ? FSDPC_BF16 : FSDPC_F32, 2, 5, 9, 0);
        specs[i].frozen = i < 4 && i != 1;
    }
    fsdpc_layout *layout;
    CHECK_OK(fsdpc_layout_create(specs, 5, 3, false, &layout));
    CHECK(layout->n_groups == 3 && layout->n_trained == 1);
    const int groups[] = {1, 0, 1, 2, 0};
    for (int i = 0; i < 5; i++)
        CHECK(layout->params[i].group == groups[i]);
    for (int g = 0; g < 3; g++)
        CHECK(layout->groups[g].frozen == (g > 0));
    CHECK(layout->groups[2].dtype == FSDPC_BF16);
    fsdpc_layout_destroy(layout);
}

static void test_refinement(void)
{
    /* experts: few long rows; dim 1 is cut if its rows are multiples of 256 */
    fsdpc_param_spec experts[] = {rig_spec("up", FSDPC_F32, 3, 8, 28672, 4096),
                                  rig_spec("norm", FSDPC_F32, 1, 4096, 0, 0)};
    const struct {
        int ranks;
        size_t row;
    } cases[] = {{2, (size_t)28672 * 4096}, {8, (size_t)28672 * 4096}, {64, 4096}, {3, 4096}};
    for (size_t i = 0; i < 4; i++) {
        fsdpc_layout *layout;
        CHECK_OK(fsdpc_layout_create(experts, 2, cases[i].ranks, false, &layout));
        CHECK_NOTE(layout->params[0].row_numel == cases[i].row, "%d ranks: %zu", cases[i].ranks,
                   layout->params[0].row_numel);
        CHECK(layout->params[0].leaf_numel == 64);
        CHECK(padding_of(layout) < 0.01);
        fsdpc_layout_destroy(layout);
    }
    /* a convolution: rows of dim 1 are 9, so chunks of 256; the leaf stays what it is elsewhere */
    fsdpc_param_spec conv = {
        .name = "conv", .dtype = FSDPC_F32, .ndim = 4, .shape = {512, 511, 3, 3}};
    for (int ranks = 4; ranks <= 1000; ranks += 996) {
        fsdpc_layout *layout;
        CHECK_OK(fsdpc_layout_create(&conv, 1, ranks, false, &layout));
        CHECK(layout->params[0].row_numel == (ranks == 4 ? 511 * 9 : 256));
        CHECK(layout->params[0].leaf_numel == 1);
        fsdpc_layout_destroy(layout);
    }
    /* rows of dim 1 that are multiples of 64 but not of 256 */
    fsdpc_param_spec narrow = rig_spec("narrow", FSDPC_F32, 3, 8, 2048, 320);
    fsdpc_layout *layout;
    CHECK_OK(fsdpc_layout_create(&narrow, 1, 64, false, &layout));
    CHECK(layout->params[0].row_numel == 256 && layout->params[0].leaf_numel == 64);
    fsdpc_layout_destroy(layout);
    /* rows that are no longer than that are left alone */
    fsdpc_param_spec kernels = {
        .name = "kernels", .dtype = FSDPC_F32, .ndim = 4, .shape = {64, 4, 7, 7}};
    CHECK_OK(fsdpc_layout_create(&kernels, 1, 1024, false, &layout));
    CHECK(layout->params[0].row_numel == 4 * 49 && layout->params[0].leaf_numel == 4);
    fsdpc_layout_destroy(layout);
    /* two dimensions are never cut finer than rows, and small waste is left alone */
    fsdpc_param_spec head = rig_spec("head", FSDPC_F32, 2, 768, 50257, 0);
    CHECK_OK(fsdpc_layout_create(&head, 1, 1024, false, &layout));
    CHECK(layout->params[0].row_numel == 50257);
    fsdpc_layout_destroy(layout);
    fsdpc_param_spec small = rig_spec("small", FSDPC_F32, 3, 2, 64, 64);
    CHECK_OK(fsdpc_layout_create(&small, 1, 8, false, &layout));
    CHECK(layout->params[0].row_numel == 64 * 64);
    fsdpc_layout_destroy(layout);
}

/* Rows of a 1-D parameter are its elements, whatever is in its band. */
static void test_one_dimension(void)
{
    fsdpc_param_spec specs[] = {
        rig_spec("w", FSDPC_F32, 2, 10, 64, 0), rig_spec("a", FSDPC_F32, 1, 10, 0, 0),
        rig_spec("column", FSDPC_F32, 2, 7, 1, 0), rig_spec("b", FSDPC_F32, 1, 70, 0, 0)};
    fsdpc_layout *layout;
    CHECK_OK(fsdpc_layout_create(specs, 4, 4, false, &layout)); /* a: 0, column: 64, b: 128 */
    CHECK(layout->params[1].row_numel == 1 && layout->params[1].leaf_numel == 1);
    CHECK(layout->params[1].band != layout->params[0].band);
    CHECK(layout->params[1].band == layout->params[2].band);
    CHECK(band_of(layout, 3)->numel == 50); /* 198 rows */
    const size_t a[] = {10, 0, 0, 0}, column[] = {0, 7, 0, 0}, b[] = {0, 0, 22, 48};
    for (int rank = 0; rank < 4; rank++) {
        CHECK(fsdpc_layout_local_shard(layout, 1, rank).numel == a[rank]);
        CHECK(fsdpc_layout_local_shard(layout, 2, rank).numel == column[rank]);
        CHECK(fsdpc_layout_local_shard(layout, 3, rank).numel == b[rank]);
    }
    fsdpc_layout_destroy(layout);
}

/* A band per parameter: torch's even chunks, also of what the ordinary layout would cut finer. */
static void test_band_per_param(void)
{
    fsdpc_param_spec specs[] = {rig_spec("a", FSDPC_F32, 1, 10, 0, 0),
                                rig_spec("b", FSDPC_F32, 1, 10, 0, 0),
                                rig_spec("up", FSDPC_F32, 3, 8, 28672, 4096)};
    fsdpc_layout *layout;
    CHECK_OK(fsdpc_layout_create(specs, 3, 3, true, &layout));
    CHECK(layout->n_groups == 1 && layout->groups[0].n_bands == 3);
    CHECK(layout->params[2].row_numel == (size_t)28672 * 4096);
    for (int param = 0; param < 2; param++)
        for (int rank = 0; rank < 3; rank++)
            CHECK(fsdpc_layout_local_shard(layout, param, rank).numel == (rank < 2 ? 4 : 2));
    fsdpc_layout_destroy(layout);
}

/* ---- real models ---- */

typedef struct model {
    const char *name;
    int n;
    size_t dims[12][3]; /* trailing zeros: fewer dimensions */
    double bound;       /* of padding, up to 1024 ranks */
} model;

/* h hidden, k key and value heads together, f inner */
#define LLAMA(h, k, f)                                                                             \
    {h, h}, {k, h}, {k, h}, {h, h}, {f, h}, {f, h}, {h, f}, {h},                                   \
    {                                                                                              \
        h                                                                                          \
    }
#define ATTENTION                                                                                  \
    {4096, 4096}, {1024, 4096}, {1024, 4096}, {4096, 4096}, {4096},                                \
    {                                                                                              \
        4096                                                                                       \
    }

static const model models[] = {
    {"llama 7B", 9, {LLAMA(4096, 4096, 11008)}, 0.011},
    {"llama 13B", 9, {LLAMA(5120, 5120, 13824)}, 0.01},
    {"llama 70B", 9, {LLAMA(8192, 1024, 28672)}, 0.01},
    {"qwen2 7B", 12, {LLAMA(3584, 512, 18944), {3584}, {512}, {512}}, 0.042},
    {"qwen2.5 72B", 12, {LLAMA(8192, 1024, 29568), {8192}, {1024}, {1024}}, 0.01},
    {"smollm3 block", 9, {LLAMA(2048, 512, 11008)}, 0.014},
    {"smollm3 root", 2, {{128256, 2048}, {2048}}, 0.01},
    {"gpt2 root", 4, {{50257, 768}, {1024, 768}, {768}, {768}}, 0.019},
    {"experts", 9, {ATTENTION, {8, 4096}, {8, 28672, 4096}, {8, 4096, 14336}}, 0.01},
};

static void test_real_models(void)
{
    static const int worlds[] = {1, 2, 3, 4, 8, 64, 512, 1024};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        fsdpc_param_spec specs[12];
        for (int i = 0; i < models[m].n; i++) {
            const size_t *dims = models[m].dims[i];
            int ndim = dims[2] ? 3 : dims[1] ? 2 : 1;
            specs[i] = rig_spec("w", FSDPC_BF16, ndim, dims[0], dims[1], dims[2]);
        }
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
            fsdpc_layout *layout;
            CHECK_OK(fsdpc_layout_create(specs, models[m].n, worlds[w], false, &layout));
            double padding = padding_of(layout);
            CHECK_NOTE(padding <= models[m].bound, "%s over %d ranks: %.4f", models[m].name,
                       worlds[w], padding);
            fsdpc_layout_destroy(layout);
        }
        check_layout(specs, models[m].n, 64, false, models[m].name);
        check_layout(specs, models[m].n, 64, true, models[m].name);
    }
}

int main(void)
{
    test_random();
    test_small();
    test_refused();
    test_frozen();
    test_refinement();
    test_one_dimension();
    test_band_per_param();
    test_real_models();
    return check_report("test_layout");
}
