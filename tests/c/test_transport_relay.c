/* comm/transport_relay: what is taken is what was sent, in order; messages find their receives,
 * early or late; bytes are copied once on each side, and none after an abort; wrong sizes, ends and
 * aborts are said.
 */
#include "comm/transport_relay.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { SECOND = 1000000000 };

static fsdpc_transport *make(int rank)
{
    fsdpc_transport *transport = NULL;
    CHECK_OK(fsdpc_transport_relay_create(rank, 2, &transport));
    return transport;
}

static void deliver(fsdpc_transport *transport, int peer, uint32_t tag, const char *text)
{
    fsdpc_message message = {.peer = peer, .tag = tag, .bytes = strlen(text)};
    CHECK_OK(fsdpc_message_reserve(&message, strlen(text)));
    memcpy(message.data, text, strlen(text));
    fsdpc_transport_relay_deliver(transport, &message);
    fsdpc_message_free(&message);
}

static fsdpc_status receive(fsdpc_transport *transport, uint32_t tag, char *data, size_t bytes,
                            fsdpc_transport_op *op)
{
    *op = (fsdpc_transport_op){
        .transport = transport, .peer = 1, .tag = tag, .data = (void *)data, .bytes = bytes};
    return transport->ops->post(op);
}

static fsdpc_status send_text(fsdpc_transport *transport, uint32_t tag, const char *text)
{
    fsdpc_transport_op op = {.transport = transport,
                             .sends = true,
                             .peer = 1,
                             .tag = tag,
                             .data = (unsigned char *)text,
                             .bytes = strlen(text)};
    FSDPC_TRY(transport->ops->post(&op));
    return transport->ops->test(&op);
}

static void test_small_sends_are_copied_and_in_order(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_message message = {0};
    char text[] = "first";
    CHECK(fsdpc_transport_relay_take(transport, 0, &message) == FSDPC_IN_PROGRESS);
    CHECK_OK(send_text(transport, 7, text)); /* done at once: its memory may change */
    memset(text, 'x', sizeof text - 1);
    CHECK_OK(send_text(transport, 3, "second"));
    CHECK_OK(fsdpc_transport_relay_take(transport, SECOND, &message));
    CHECK(message.tag == 7 && message.peer == 1 && message.bytes == 5);
    CHECK(memcmp(message.data, "first", 5) == 0);
    fsdpc_transport_relay_close(transport); /* what was sent is still carried */
    CHECK_OK(fsdpc_transport_relay_take(transport, SECOND, &message));
    CHECK(message.tag == 3 && memcmp(message.data, "second", 6) == 0);
    CHECK_FAILS(fsdpc_transport_relay_take(transport, SECOND, &message), FSDPC_ERR_PEER, "closed");
    CHECK_FAILS(send_text(transport, 3, "third"), FSDPC_ERR_PEER, "closed");
    fsdpc_message_free(&message);
    fsdpc_transport_destroy(transport);
}

static void test_receives_before_and_after(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_transport_op a, b, c, d;
    char data[4][8] = {{0}};
    CHECK_OK(receive(transport, 1, data[0], 2, &a));
    CHECK_OK(receive(transport, 2, data[1], 2, &b));
    CHECK(transport->ops->test(&a) == FSDPC_IN_PROGRESS);
    deliver(transport, 1, 2, "bb");
    CHECK(transport->ops->test(&a) == FSDPC_IN_PROGRESS);
    CHECK_OK(transport->ops->test(&b));
    deliver(transport, 1, 1, "a1");
    deliver(transport, 1, 1, "a2"); /* early: nobody waits for it */
    deliver(transport, 1, 1, "");
    CHECK_OK(transport->ops->test(&a));
    CHECK_OK(receive(transport, 1, data[2], 2, &c));
    CHECK_OK(receive(transport, 1, data[3], 0, &d));
    CHECK_OK(transport->ops->test(&c));
    CHECK_OK(transport->ops->test(&d));
    CHECK(memcmp(data[0], "a1", 2) == 0 && memcmp(data[1], "bb", 2) == 0);
    CHECK(memcmp(data[2], "a2", 2) == 0 && data[3][0] == 0);
    fsdpc_transport_destroy(transport);
}

static void test_another_size(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_transport_op op;
    char data[8] = {0};
    CHECK_OK(receive(transport, 1, data, 3, &op));
    deliver(transport, 1, 1, "longer");
    CHECK_FAILS(transport->ops->test(&op), FSDPC_ERR_MISMATCH, "6 bytes came from rank 1");
    CHECK(data[0] == 0);
    fsdpc_transport_destroy(transport);
}

/* ---- Copies ---- */

enum { LARGE = 20000 };

static unsigned char *large(int value)
{
    unsigned char *data = malloc(LARGE);
    memset(data, value, LARGE);
    return data;
}

static void test_large_sends_are_taken_from_their_memory(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_message message = {0};
    fsdpc_transport_op op = {0};
    unsigned char *data = large(1);
    CHECK_OK(fsdpc_transport_send(transport, 1, 3, data, LARGE, &op));
    CHECK(fsdpc_transport_test(&op) == FSDPC_IN_PROGRESS); /* its memory is the transport's */
    data[LARGE - 1] = 2; /* against the rules: shows that there is no copy */
    CHECK_OK(fsdpc_transport_relay_take(transport, SECOND, &message));
    CHECK_OK(fsdpc_transport_test(&op));
    memset(data, 7, LARGE);
    CHECK(message.bytes == LARGE && message.data[0] == 1 && message.data[LARGE - 1] == 2);
    fsdpc_message_free(&message);
    free(data);
    fsdpc_transport_destroy(transport);
}

static bool bring(fsdpc_transport *transport, uint32_t tag, int value, fsdpc_message *message)
{
    if (fsdpc_message_reserve(message, LARGE) != FSDPC_OK)
        return false;
    message->peer = 1;
    message->tag = tag;
    message->bytes = LARGE;
    memset(message->data, value, LARGE);
    return fsdpc_transport_relay_deliver(transport, message);
}

/* A message whose receive waits, and a small one, leave the carrier its room. */
static void test_rooms_are_used_again(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_message message = {0};
    fsdpc_transport_op op = {0};
    unsigned char *data = large(0), *room;
    CHECK_OK(fsdpc_transport_receive(transport, 1, 3, data, LARGE, &op));
    CHECK(bring(transport, 3, 1, &message));
    room = message.data;
    CHECK(room && fsdpc_transport_test(&op) == FSDPC_OK && data[0] == 1 && data[LARGE - 1] == 1);
    message.tag = 5;
    message.bytes = 3;
    CHECK(fsdpc_transport_relay_deliver(transport, &message) && message.data == room);
    CHECK(bring(transport, 3, 2, &message));
    CHECK(!message.data && message.capacity == 0); /* it waits in the room that it came in */
    CHECK_OK(fsdpc_transport_receive(transport, 1, 3, data, LARGE, &op));
    CHECK(fsdpc_transport_test(&op) == FSDPC_OK && data[0] == 2 && data[LARGE - 1] == 2);
    CHECK(bring(transport, 4, 3, &message));
    CHECK_OK(fsdpc_transport_receive(transport, 1, 4, data, LARGE - 1, &op));
    CHECK_FAILS(fsdpc_transport_test(&op), FSDPC_ERR_MISMATCH, "20000 bytes came from rank 1");
    CHECK_OK(fsdpc_transport_receive(transport, 1, 5, data, 3, &op));
    CHECK(fsdpc_transport_test(&op) == FSDPC_OK && data[0] == 1 && data[3] == 2);
    fsdpc_message_free(&message);
    free(data);
    fsdpc_transport_destroy(transport);
}

/* Cut in one way where it is sent, in another where it comes. */
static void test_memory_in_runs(void)
{
    fsdpc_transport *a = make(0), *b = make(1);
    fsdpc_message message = {0};
    fsdpc_transport_op sent = {0}, came = {0};
    unsigned char *from = large(0), *to = large(0);
    for (int i = 0; i < LARGE; i++)
        from[i] = (unsigned char)(i % 251);
    const fsdpc_transport_run outs[] = {
        {from + 9000, 5000}, {from, 0}, {from + 100, 3000}, {from, 1}};
    const fsdpc_transport_run ins[] = {{to + 1, 1}, {to + 7000, 8000}};
    CHECK_OK(fsdpc_transport_post_runs(b, false, 0, 3, ins, 2, &came));
    CHECK_OK(fsdpc_transport_post_runs(a, true, 1, 3, outs, 4, &sent));
    CHECK_OK(fsdpc_transport_relay_take(a, SECOND, &message));
    message.peer = 0;
    fsdpc_transport_relay_deliver(b, &message);
    CHECK(fsdpc_transport_test(&sent) == FSDPC_OK && fsdpc_transport_test(&came) == FSDPC_OK);
    CHECK(to[1] == from[9000] && memcmp(to + 7000, from + 9001, 4999) == 0);
    CHECK(memcmp(to + 11999, from + 100, 3000) == 0 && to[14999] == from[0]);
    CHECK(to[0] == 0 && to[2] == 0 && to[6999] == 0 && to[15000] == 0);
    CHECK(a->sent_bytes == 8001 && b->received_bytes == 8001);
    fsdpc_message_free(&message);
    free(from);
    free(to);
    fsdpc_transport_destroy(a);
    fsdpc_transport_destroy(b);
}

/* Takes, brings and says that it did, until the transport ends. */
typedef struct busy {
    fsdpc_transport *transport;
    _Atomic int carried;
} busy;

static void *carry_busily(void *arg)
{
    busy *self = arg;
    fsdpc_message out = {0}, in = {0};
    while (fsdpc_transport_relay_take(self->transport, SECOND, &out) >= 0 &&
           bring(self->transport, 4, 1, &in))
        self->carried++;
    fsdpc_message_free(&out);
    fsdpc_message_free(&in);
    return NULL;
}

/* The memory of sends and receives is its owner's again, and may go, while a carrier is at work
 * (for sanitizers). What was done before arrives, and then the reason. */
static void test_nothing_is_touched_after_an_abort(void)
{
    enum { ROUNDS = 100, OPS = 8 };
    for (int round = 0; round < ROUNDS; round++) {
        busy carrier = {.transport = make(0)};
        fsdpc_transport_op ops[2 * OPS] = {{0}};
        unsigned char *memory[2 * OPS];
        pthread_t thread;
        for (int i = 0; i < 2 * OPS; i++)
            memory[i] = large(i);
        CHECK(pthread_create(&thread, NULL, carry_busily, &carrier) == 0);
        for (int i = 0; i < OPS; i++) {
            CHECK_OK(fsdpc_transport_receive(carrier.transport, 1, 4, memory[i], LARGE, &ops[i]));
            CHECK_OK(fsdpc_transport_send(carrier.transport, 1, 3, memory[OPS + i], LARGE,
                                          &ops[OPS + i]));
        }
        while (carrier.carried < round % OPS)
            sched_yield();
        fsdpc_transport_abort(carrier.transport, "out of disk");
        for (int i = 0; i < 2 * OPS; i++) {
            fsdpc_status status = fsdpc_transport_test(&ops[i]);
            CHECK(status == FSDPC_OK || status == FSDPC_ERR_PEER);
            memset(memory[i], 9, LARGE);
            free(memory[i]);
        }
        memset(ops, 0, sizeof ops);
        pthread_join(thread, NULL);
        fsdpc_transport_destroy(carrier.transport);
    }
}

static void test_destroy_drops_what_is_not_done(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_transport_op *ops = calloc(2, sizeof *ops);
    fsdpc_message message = {0};
    unsigned char *data = large(1);
    fsdpc_transport_relay_retain(transport);
    CHECK_OK(send_text(transport, 3, "small"));
    CHECK_OK(fsdpc_transport_send(transport, 1, 3, data, LARGE, &ops[0]));
    CHECK_OK(fsdpc_transport_receive(transport, 1, 4, data, LARGE, &ops[1]));
    fsdpc_transport_destroy(transport);
    free(data);
    free(ops);
    CHECK(bring(transport, 4, 2, &message));
    CHECK_OK(fsdpc_transport_relay_take(transport, SECOND, &message));
    CHECK(message.bytes == 5 && memcmp(message.data, "small", 5) == 0);
    CHECK_FAILS(fsdpc_transport_relay_take(transport, SECOND, &message), FSDPC_ERR_PEER, "closed");
    fsdpc_message_free(&message);
    fsdpc_transport_destroy(transport);
}

/* ---- The end ---- */

static fsdpc_transport *to_peer;

static void *carry_all(void *arg)
{
    fsdpc_message message = {0};
    fsdpc_status status;
    while ((status = fsdpc_transport_relay_take(arg, (int64_t)600 * SECOND, &message)) ==
           FSDPC_OK) {
        message.peer = 0;
        fsdpc_transport_relay_deliver(to_peer, &message);
    }
    fsdpc_message_free(&message);
    fsdpc_transport_destroy(arg); /* the carrier's share of it */
    return (void *)(intptr_t)status;
}

/* The peer gets what was sent before, and then learns why there is no more. */
static void test_an_abort_ends_all(void)
{
    fsdpc_transport *transport = make(0);
    fsdpc_transport_op op, early = {0}, never = {0};
    char data[8], sent[6];
    pthread_t carrier;
    void *status;
    to_peer = make(1);
    CHECK_OK(fsdpc_transport_receive(to_peer, 0, 3, sent, sizeof sent, &early));
    CHECK_OK(fsdpc_transport_receive(to_peer, 0, 4, data, 3, &never));
    fsdpc_transport_relay_retain(transport);
    CHECK_OK(send_text(transport, 3, "before"));
    CHECK_OK(receive(transport, 1, data, 3, &op));
    fsdpc_transport_abort(transport, "host 1 is gone");
    fsdpc_transport_abort(transport, "another reason"); /* the first is kept */
    CHECK_FAILS(transport->ops->test(&op), FSDPC_ERR_PEER, "host 1 is gone");
    CHECK_FAILS(receive(transport, 1, data, 3, &op), FSDPC_ERR_PEER, "host 1 is gone");
    CHECK(pthread_create(&carrier, NULL, carry_all, transport) == 0);
    fsdpc_transport_destroy(transport);
    pthread_join(carrier, &status);
    CHECK((intptr_t)status == FSDPC_ERR_PEER);
    CHECK_OK(fsdpc_transport_test(&early));
    CHECK(memcmp(sent, "before", sizeof sent) == 0);
    CHECK_FAILS(fsdpc_transport_test(&never), FSDPC_ERR_PEER, "rank 0: host 1 is gone");
    fsdpc_transport_destroy(to_peer);
}

/* Whoever leaves is answered, so that its carrier, which sleeps until something comes, ends. */
static void test_leaving_is_answered(void)
{
    fsdpc_transport *a = make(0), *b = make(1);
    fsdpc_transport_op op = {0}, never = {0};
    fsdpc_message message = {0};
    char data[2];
    CHECK_OK(fsdpc_transport_send(a, 1, 3, "ab", 2, &op));
    CHECK_OK(fsdpc_transport_receive(b, 0, 3, data, 2, &never));
    snprintf(a->farewells[0], FSDPC_TRANSPORT_FAREWELL, "; it was in a test");
    fsdpc_transport_leave(a);
    for (int i = 0; i < 2; i++) { /* what was sent, and that it left */
        CHECK_OK(fsdpc_transport_relay_take(a, SECOND, &message));
        message.peer = 0;
        CHECK(fsdpc_transport_relay_deliver(b, &message) == (i == 0)); /* nobody else may send */
    }
    CHECK_FAILS(fsdpc_transport_relay_take(a, SECOND, &message), FSDPC_ERR_PEER, "closed");
    CHECK_OK(fsdpc_transport_test(&never));
    CHECK_OK(fsdpc_transport_relay_take(b, SECOND, &message));
    message.peer = 1;
    CHECK(!fsdpc_transport_relay_deliver(a, &message));
    CHECK_OK(fsdpc_transport_receive(b, 0, 3, data, 2, &never));
    CHECK_FAILS(fsdpc_transport_test(&never), FSDPC_ERR_PEER,
                "rank 1 waits for it; it was in a test");
    fsdpc_message_free(&message);
    fsdpc_transport_destroy(a);
    fsdpc_transport_destroy(b);
}

static void *deliver_reason(void *arg)
{
    deliver(arg, 1, UINT32_MAX, "out of disk");
    return NULL;
}

/* Whoever posts while a peer's reason arrives finds the reason, or nothing yet. */
static void test_a_reason_is_never_a_departure(void)
{
    enum { ROUNDS = 500, POSTS = 5000 };
    static fsdpc_transport_op ops[POSTS];
    for (int round = 0; round < ROUNDS; round++) {
        fsdpc_transport *transport = make(0);
        char data[2];
        pthread_t peer;
        fsdpc_status status = FSDPC_IN_PROGRESS;
        memset(ops, 0, sizeof ops);
        CHECK(pthread_create(&peer, NULL, deliver_reason, transport) == 0);
        for (int i = 0; i < POSTS && status == FSDPC_IN_PROGRESS; i++) {
            status = receive(transport, 1, data, 2, &ops[i]);
            if (status == FSDPC_OK)
                status = transport->ops->test(&ops[i]);
        }
        if (status != FSDPC_IN_PROGRESS)
            CHECK_FAILS(status, FSDPC_ERR_PEER, "out of disk");
        pthread_join(peer, NULL);
        fsdpc_transport_destroy(transport);
    }
}

int main(void)
{
    test_a_reason_is_never_a_departure();
    test_leaving_is_answered();
    test_small_sends_are_copied_and_in_order();
    test_large_sends_are_taken_from_their_memory();
    test_rooms_are_used_again();
    test_memory_in_runs();
    test_nothing_is_touched_after_an_abort();
    test_destroy_drops_what_is_not_done();
    test_receives_before_and_after();
    test_another_size();
    test_an_abort_ends_all();
    return check_report("test_transport_relay");
}
