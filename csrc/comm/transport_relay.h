/* A transport whose messages are carried by the user's threads, for example over a torch process
 * group (python/fsdpc/torch/_transport.py).
 *
 * Sends wait in the outbox until a carrier takes them. A message that a carrier delivers goes to
 * its waiting receive, or is kept until a receive is posted. Carriers keep copies in their own
 * memory, so they never use the engine's memory, even when the network is slow or after an abort.
 *
 * There may be any number of carrier threads. They must carry each peer's messages in order.
 */
#ifndef FSDPC_COMM_TRANSPORT_RELAY_H
#define FSDPC_COMM_TRANSPORT_RELAY_H

#include "comm/transport.h"

/* A message held by a carrier. Zero it before its first use; its memory is reused. */
typedef struct fsdpc_message {
    int peer; /* destination or source */
    uint32_t tag;
    size_t bytes;
    size_t capacity; /* capacity of data, which comes from malloc */
    unsigned char *data;
} fsdpc_message;

fsdpc_status fsdpc_transport_relay_create(int rank, int size, fsdpc_transport **out);
/* Retains the transport for a carrier, which may outlive the transport's user. Each retain must be
 * matched by an additional destroy. */
void fsdpc_transport_relay_retain(fsdpc_transport *transport);

/* Ensures capacity for `bytes` bytes and discards the contents. */
fsdpc_status fsdpc_message_reserve(fsdpc_message *message, size_t bytes);
void fsdpc_message_free(fsdpc_message *message); /* frees its memory */

/* Takes the oldest message from the outbox, waiting for at most max_ns. FSDPC_IN_PROGRESS: none
 * yet. Returns FSDPC_ERR_PEER if the transport was aborted or closed. */
fsdpc_status fsdpc_transport_relay_take(fsdpc_transport *transport, int64_t max_ns,
                                        fsdpc_message *message);
/* Delivers a message; the relay may keep its memory. Returns false if no peer will send any more
 * messages. */
bool fsdpc_transport_relay_deliver(fsdpc_transport *transport, fsdpc_message *message);
/* Ends sending: carriers take the remaining messages and are then told that there are no more. */
void fsdpc_transport_relay_close(fsdpc_transport *transport);

#endif
