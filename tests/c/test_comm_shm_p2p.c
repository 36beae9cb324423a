/* Messages between two ranks, exchanges, and groups of some ranks of a group. */
#include "comm_ranks.h"

#include "comm/shm_p2p.h"
#include "comm/comm_shm.h"

enum { MOST = 3 << 20 };

static unsigned char byte_of(int from, size_t tag, size_t i)
{
    return (unsigned char)(i * 31 + i / 256 + (size_t)from * 7 + tag);
}

static size_t wrong_bytes(const unsigned char *data, size_t bytes, int from, size_t tag)
{
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++)
        wrong += data[i] != byte_of(from, tag, i);
    return wrong;
}

static fsdpc_p2p_work message(unsigned char *data, size_t bytes, int from, int to, size_t tag,
                              bool receives)
{
    for (size_t i = 0; i < bytes; i++)
        data[i] = receives ? 0xee : byte_of(from, tag, i);
    return (fsdpc_p2p_work){.receives = receives,
                            .peer = receives ? from : to,
                            .tag = tag,
                            .data = data,
                            .bytes = bytes};
}

/* Every rank sends to the next one, before it receives. */
static void ring_of_messages(rank_context *self, fsdpc_p2p *p2p, unsigned char *buffers)
{
    static const size_t sizes[] = {0, 1, 15, 4096, 100000, MOST};
    int next = (self->rank + 1) % self->size, last = (self->rank + self->size - 1) % self->size;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s];
        fsdpc_p2p_work out = message(buffers, bytes, self->rank, next, s, false);
        fsdpc_p2p_work in = message(buffers + MOST, bytes, last, self->rank, s, true);
        EXPECT_OK(self, fsdpc_p2p_post(p2p, &out));
        EXPECT_OK(self, fsdpc_p2p_post(p2p, &in));
        EXPECT_OK(self, fsdpc_p2p_wait(p2p, &in));
        EXPECT_OK(self, fsdpc_p2p_wait(p2p, &out));
        size_t wrong = wrong_bytes(in.data, bytes, last, s);
        EXPECT(self, wrong == 0, "%zu of %zu bytes are wrong", wrong, bytes);
    }
}

/* Receives come in the opposite order of the sends, some before them and some after. */
static void tags_in_any_order(rank_context *self, fsdpc_p2p *p2p, unsigned char *buffers)
{
    enum { N = 6, EACH = 50000 };
    fsdpc_p2p_work works[N];
    if (self->rank > 1)
        return;
    for (int i = 0; i < N; i++) {
        size_t tag = (size_t)(self->rank == 0 ? i : N - 1 - i);
        works[i] = message(buffers + i * EACH, EACH, 0, 1, tag, self->rank == 1);
        EXPECT_OK(self, fsdpc_p2p_post(p2p, &works[i]));
        if (self->rank == 1 && i == 2)
            EXPECT_OK(self, fsdpc_p2p_wait(p2p, &works[i]));
    }
    for (int i = 0; i < N; i++) {
        EXPECT_OK(self, fsdpc_p2p_wait(p2p, &works[i]));
        if (self->rank == 1)
            EXPECT(self, wrong_bytes(works[i].data, EACH, 0, works[i].tag) == 0, "tag %zu",
                   (size_t)works[i].tag);
    }
}

static void from_any_rank(rank_context *self, fsdpc_p2p *p2p, unsigned char *buffers)
{
    if (self->rank > 0) {
        fsdpc_p2p_work out = message(buffers, 1000, self->rank, 0, 9, false);
        EXPECT_OK(self, fsdpc_p2p_post(p2p, &out));
        EXPECT_OK(self, fsdpc_p2p_wait(p2p, &out));
        return;
    }
    int seen = 0;
    for (int i = 1; i < self->size; i++) {
        fsdpc_p2p_work in = message(buffers, 1000, FSDPC_P2P_ANY, 0, 9, true);
        EXPECT_OK(self, fsdpc_p2p_post(p2p, &in));
        EXPECT_OK(self, fsdpc_p2p_wait(p2p, &in));
        EXPECT(self, wrong_bytes(in.data, 1000, in.peer, 9) == 0, "from rank %d", in.peer);
        seen |= 1 << in.peer;
    }
    EXPECT(self, seen == (1 << self->size) - 2, "messages of ranks %x", seen);
}

static void another_size_is_named(rank_context *self, fsdpc_p2p *p2p, unsigned char *buffers)
{
    if (self->rank > 1)
        return;
    fsdpc_p2p_work work = message(buffers, self->rank ? 10 : 20, 0, 1, 3, self->rank == 1);
    EXPECT_OK(self, fsdpc_p2p_post(p2p, &work));
    if (self->rank == 0)
        EXPECT_OK(self, fsdpc_p2p_wait(p2p, &work));
    else
        EXPECT_FAILS(self, fsdpc_p2p_wait(p2p, &work), FSDPC_ERR_MISMATCH,
                     "rank 1 receives 10 bytes from rank 0 with tag 3, and was sent 20");
    fsdpc_p2p_work bad = message(buffers, 1, self->rank, self->rank, 0, false);
    EXPECT_FAILS(self, fsdpc_p2p_post(p2p, &bad), FSDPC_ERR_VALUE, "exchanges a message with");
}

/* Rank r sends (r + 1) * (p + 1) * EACH bytes to rank p. With `counts`, ranks learn of the others'
 * during the exchange, and nothing is exchanged if two ranks' counts differ. */
static void exchange(rank_context *self, unsigned char *buffers, bool counted, bool differ)
{
    enum { EACH = 40000 };
    fsdpc_coll_extent extents[RANKS_MAX];
    uint64_t counts[RANKS_MAX * 2 * RANKS_MAX] = {0}, *row;
    row = counts + (size_t)self->rank * 2 * (size_t)self->size;
    unsigned char *recv = buffers + MOST, *at = buffers;
    size_t to = 0, all = (size_t)self->size * (size_t)(self->size + 1) / 2 * EACH;
    size_t mine = (size_t)(self->rank + 1);
    for (int p = 0; p < self->size; p++) {
        size_t sent = mine * (size_t)(p + 1) * EACH;
        message(at, sent, self->rank, p, (size_t)p, false);
        at += sent;
        row[p] = row[self->size + p] = sent;
        extents[p] =
            (fsdpc_coll_extent){.from = (size_t)(p + 1) * (size_t)self->rank * mine / 2 * EACH,
                                .numel = (size_t)(p + 1) * mine * EACH,
                                .to = to};
        to += extents[p].numel;
    }
    row[0] += differ && self->rank == self->size - 1;
    memset(recv, 0xee, to);
    EXPECT_OK(self,
              fsdpc_comm_run(self->comm,
                             &(fsdpc_coll){.kind = FSDPC_COLL_EXCHANGE,
                                           .unit = -1,
                                           .what = "exchange",
                                           .dtype = FSDPC_U8,
                                           .send = buffers,
                                           .recv = recv,
                                           .numel = mine * all,
                                           .extents = extents,
                                           .counts = counted ? counts : NULL,
                                           .most_sent = counted ? 0 : (size_t)self->size * all}));
    for (size_t i = 0; differ && i < to; i++)
        if (recv[i] != 0xee)
            EXPECT(self, false, "byte %zu was written", i);
    for (int p = 0; !differ && p < self->size; p++)
        EXPECT(self,
               wrong_bytes(recv + extents[p].to, extents[p].numel, p, (size_t)self->rank) == 0,
               "from rank %d", p);
}

/* A reduction of which each rank receives an equal part. */
static void partial_sum(rank_context *self, unsigned char *buffers)
{
    enum { EACH = 50001 };
    static const struct {
        fsdpc_red red;
        int32_t of_three[3]; /* results of 5, 6 and 7 over 1 to 3 ranks */
    } cases[] = {{FSDPC_RED_SUM, {5, 11, 18}}, {FSDPC_RED_PRODUCT, {5, 30, 210}},
                 {FSDPC_RED_AND, {5, 4, 4}},   {FSDPC_RED_OR, {5, 7, 7}},
                 {FSDPC_RED_XOR, {5, 3, 4}},   {FSDPC_RED_MAX, {5, 6, 7}},
                 {FSDPC_RED_MIN, {5, 5, 5}}};
    int32_t *send = (int32_t *)(void *)buffers, *recv = (int32_t *)(void *)(buffers + MOST);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        size_t all = (size_t)self->size * EACH, wrong = 0;
        for (size_t i = 0; i < all; i++)
            send[i] = 5 + self->rank;
        memset(recv, 0, 2 * EACH * sizeof *recv);
        EXPECT_OK(self,
                  fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                           .unit = -1,
                                                           .what = "part",
                                                           .dtype = FSDPC_I32,
                                                           .op = cases[c].red,
                                                           .send = send,
                                                           .recv = recv,
                                                           .numel = all,
                                                           .partial = true,
                                                           .part_first = (size_t)self->rank * EACH,
                                                           .part_numel = EACH}));
        for (size_t i = 0; i < EACH; i++)
            wrong += recv[i] != cases[c].of_three[self->size - 1];
        EXPECT(self, wrong == 0 && recv[EACH] == 0, "reduction %zu: %zu wrong", c, wrong);
    }
}

static void part_of_the_group(rank_context *self)
{
    const int members[] = {self->size - 1, 0};
    if (self->size < 2 || (self->rank != 0 && self->rank != self->size - 1))
        return;
    fsdpc_comm *part = NULL;
    EXPECT_OK(self, fsdpc_shm_part(self->comm, members, 2, 77, &part));
    int64_t mine = self->rank, both[2] = {-1, -1};
    EXPECT_OK(self, fsdpc_comm_run(part, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                                       .unit = -1,
                                                       .what = "part",
                                                       .dtype = FSDPC_I64,
                                                       .send = &mine,
                                                       .recv = both,
                                                       .numel = 1}));
    EXPECT(self, both[0] == self->size - 1 && both[1] == 0, "%d %d", (int)both[0], (int)both[1]);
    fsdpc_comm_destroy(part);
}

static void everything(rank_context *self)
{
    fsdpc_p2p *p2p = NULL;
    unsigned char *buffers = malloc(2 * MOST);
    exchange(self, buffers, false, false);
    exchange(self, buffers, true, false);
    exchange(self, buffers, true, true);
    partial_sum(self, buffers);
    part_of_the_group(self);
    EXPECT_OK(self, fsdpc_p2p_create(self->comm, &p2p));
    if (self->size > 1) {
        ring_of_messages(self, p2p, buffers);
        tags_in_any_order(self, p2p, buffers);
        from_any_rank(self, p2p, buffers);
        another_size_is_named(self, p2p, buffers);
    }
    EXPECT_OK(self,
              fsdpc_comm_run(self->comm,
                             &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = "end"}));
    fsdpc_p2p_destroy(p2p);
    free(buffers);
}

int main(void)
{
    for (int size = 1; size <= 3; size++) {
        ranks_run_threads(size, everything, &(rank_options){.spin = size <= 2});
        ranks_run_processes(size, everything, &(rank_options){.spin = false});
    }
    return check_report("test_comm_shm_p2p");
}
