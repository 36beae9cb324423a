/* comm/link_relay: what is taken is what was sent, in order; messages find their receives, early or
 * late; wrong sizes, ends and aborts are said.
 */
#include "comm/link_relay.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { SECOND = 1000000000 };

static fsdpc_link *make(int rank)
{
    fsdpc_link *link = NULL;
    CHECK_OK(fsdpc_link_relay_create(rank, 2, &link));
    return link;
}

static void deliver(fsdpc_link *link, int peer, uint32_t tag, const char *text)
{
    fsdpc_message *message = NULL;
    CHECK_OK(fsdpc_message_create(peer, tag, strlen(text), &message));
    memcpy(message->data, text, strlen(text));
    fsdpc_link_relay_deliver(link, message);
}

static fsdpc_status receive(fsdpc_link *link, uint32_t tag, char *data, size_t bytes,
                            fsdpc_link_op *op)
{
    *op =
        (fsdpc_link_op){.link = link, .peer = 1, .tag = tag, .data = (void *)data, .bytes = bytes};
    return link->ops->post(op);
}

static fsdpc_status send_text(fsdpc_link *link, uint32_t tag, const char *text)
{
    fsdpc_link_op op = {.link = link,
                        .sends = true,
                        .peer = 1,
                        .tag = tag,
                        .data = (unsigned char *)text,
                        .bytes = strlen(text)};
    FSDPC_TRY(link->ops->post(&op));
    return link->ops->test(&op);
}

static void test_sends_are_copied_and_in_order(void)
{
    fsdpc_link *link = make(0);
    fsdpc_message *message = NULL;
    char text[] = "first";
    CHECK(fsdpc_link_relay_take(link, 0, &message) == FSDPC_IN_PROGRESS);
    CHECK_OK(send_text(link, 7, text)); /* done at once: its memory may change */
    memset(text, 'x', sizeof text - 1);
    CHECK_OK(send_text(link, 3, "second"));
    CHECK_OK(fsdpc_link_relay_take(link, SECOND, &message));
    CHECK(message->tag == 7 && message->peer == 1 && message->bytes == 5);
    CHECK(memcmp(message->data, "first", 5) == 0);
    fsdpc_message_free(message);
    fsdpc_link_relay_close(link); /* what was sent is still carried */
    CHECK_OK(fsdpc_link_relay_take(link, SECOND, &message));
    CHECK(message->tag == 3 && memcmp(message->data, "second", 6) == 0);
    fsdpc_message_free(message);
    CHECK_FAILS(fsdpc_link_relay_take(link, SECOND, &message), FSDPC_ERR_PEER, "closed");
    CHECK_FAILS(send_text(link, 3, "third"), FSDPC_ERR_PEER, "closed");
    fsdpc_link_destroy(link);
}

static void test_receives_before_and_after(void)
{
    fsdpc_link *link = make(0);
    fsdpc_link_op a, b, c, d;
    char data[4][8] = {{0}};
    CHECK_OK(receive(link, 1, data[0], 2, &a));
    CHECK_OK(receive(link, 2, data[1], 2, &b));
    CHECK(link->ops->test(&a) == FSDPC_IN_PROGRESS);
    deliver(link, 1, 2, "bb");
    CHECK(link->ops->test(&a) == FSDPC_IN_PROGRESS);
    CHECK_OK(link->ops->test(&b));
    deliver(link, 1, 1, "a1");
    deliver(link, 1, 1, "a2"); /* early: nobody waits for it */
    deliver(link, 1, 1, "");
    CHECK_OK(link->ops->test(&a));
    CHECK_OK(receive(link, 1, data[2], 2, &c));
    CHECK_OK(receive(link, 1, data[3], 0, &d));
    CHECK_OK(link->ops->test(&c));
    CHECK_OK(link->ops->test(&d));
    CHECK(memcmp(data[0], "a1", 2) == 0 && memcmp(data[1], "bb", 2) == 0);
    CHECK(memcmp(data[2], "a2", 2) == 0 && data[3][0] == 0);
    fsdpc_link_destroy(link);
}

static void test_another_size(void)
{
    fsdpc_link *link = make(0);
    fsdpc_link_op op;
    char data[8] = {0};
    CHECK_OK(receive(link, 1, data, 3, &op));
    deliver(link, 1, 1, "longer");
    CHECK_FAILS(link->ops->test(&op), FSDPC_ERR_MISMATCH, "6 bytes came from rank 1");
    CHECK(data[0] == 0);
    fsdpc_link_destroy(link);
}

static fsdpc_link *to_peer;

static void *carry_all(void *arg)
{
    fsdpc_message *message = NULL;
    fsdpc_status status;
    while ((status = fsdpc_link_relay_take(arg, (int64_t)600 * SECOND, &message)) == FSDPC_OK) {
        message->peer = 0;
        fsdpc_link_relay_deliver(to_peer, message);
    }
    fsdpc_link_destroy(arg); /* the carrier's share of it */
    return (void *)(intptr_t)status;
}

/* The peer gets what was sent before, and then learns why there is no more. */
static void test_an_abort_ends_all(void)
{
    fsdpc_link *link = make(0);
    fsdpc_link_op op, early = {0}, never = {0};
    char data[8], sent[6];
    pthread_t carrier;
    void *status;
    to_peer = make(1);
    CHECK_OK(fsdpc_link_receive(to_peer, 0, 3, sent, sizeof sent, &early));
    CHECK_OK(fsdpc_link_receive(to_peer, 0, 4, data, 3, &never));
    fsdpc_link_relay_retain(link);
    CHECK_OK(send_text(link, 3, "before"));
    CHECK_OK(receive(link, 1, data, 3, &op));
    fsdpc_link_abort(link, "host 1 is gone");
    fsdpc_link_abort(link, "another reason"); /* the first is kept */
    CHECK_FAILS(link->ops->test(&op), FSDPC_ERR_PEER, "host 1 is gone");
    CHECK_FAILS(receive(link, 1, data, 3, &op), FSDPC_ERR_PEER, "host 1 is gone");
    CHECK(pthread_create(&carrier, NULL, carry_all, link) == 0);
    fsdpc_link_destroy(link);
    pthread_join(carrier, &status);
    CHECK((intptr_t)status == FSDPC_ERR_PEER);
    CHECK_OK(fsdpc_link_test(&early));
    CHECK(memcmp(sent, "before", sizeof sent) == 0);
    CHECK_FAILS(fsdpc_link_test(&never), FSDPC_ERR_PEER, "rank 0: host 1 is gone");
    fsdpc_link_destroy(to_peer);
}

/* Whoever leaves is answered, so that its carrier, which sleeps until something comes, ends. */
static void test_leaving_is_answered(void)
{
    fsdpc_link *a = make(0), *b = make(1);
    fsdpc_link_op op = {0}, never = {0};
    fsdpc_message *message = NULL;
    char data[2];
    CHECK_OK(fsdpc_link_send(a, 1, 3, "ab", 2, &op));
    CHECK_OK(fsdpc_link_receive(b, 0, 3, data, 2, &never));
    fsdpc_link_leave(a);
    for (int i = 0; i < 2; i++) { /* what was sent, and that it left */
        CHECK_OK(fsdpc_link_relay_take(a, SECOND, &message));
        message->peer = 0;
        CHECK(fsdpc_link_relay_deliver(b, message) == (i == 0)); /* nobody else may send */
    }
    CHECK_FAILS(fsdpc_link_relay_take(a, SECOND, &message), FSDPC_ERR_PEER, "closed");
    CHECK_OK(fsdpc_link_test(&never));
    CHECK_OK(fsdpc_link_relay_take(b, SECOND, &message));
    message->peer = 1;
    CHECK(!fsdpc_link_relay_deliver(a, message));
    CHECK_OK(fsdpc_link_receive(b, 0, 3, data, 2, &never));
    CHECK_FAILS(fsdpc_link_test(&never), FSDPC_ERR_PEER, "rank 0 left");
    fsdpc_link_destroy(a);
    fsdpc_link_destroy(b);
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
    static fsdpc_link_op ops[POSTS];
    for (int round = 0; round < ROUNDS; round++) {
        fsdpc_link *link = make(0);
        char data[2];
        pthread_t peer;
        fsdpc_status status = FSDPC_IN_PROGRESS;
        memset(ops, 0, sizeof ops);
        CHECK(pthread_create(&peer, NULL, deliver_reason, link) == 0);
        for (int i = 0; i < POSTS && status == FSDPC_IN_PROGRESS; i++) {
            status = receive(link, 1, data, 2, &ops[i]);
            if (status == FSDPC_OK)
                status = link->ops->test(&ops[i]);
        }
        if (status != FSDPC_IN_PROGRESS)
            CHECK_FAILS(status, FSDPC_ERR_PEER, "out of disk");
        pthread_join(peer, NULL);
        fsdpc_link_destroy(link);
    }
}

int main(void)
{
    test_a_reason_is_never_a_departure();
    test_leaving_is_answered();
    test_sends_are_copied_and_in_order();
    test_receives_before_and_after();
    test_another_size();
    test_an_abort_ends_all();
    return check_report("test_link_relay");
}
