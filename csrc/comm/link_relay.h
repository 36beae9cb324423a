/* A link whose messages are carried by somebody else: threads that hand them to a process group of
 * torch's, say (python/fsdpc/torch/_link.py).
 *
 * Sends wait in the outbox until a carrier takes them, and what carriers bring is delivered to the
 * receive that waits for it, or kept until one is posted.  Carriers see copies, in rooms of their
 * own: no memory of the engine is theirs while a network is slow, or after an abort.
 *
 * Carriers may be any number of threads.  Messages of one peer have to be carried in order.
 */
#ifndef FSDPC_COMM_LINK_RELAY_H
#define FSDPC_COMM_LINK_RELAY_H

#include "comm/link.h"

/* What a carrier has in its hands, zeroed before its first use; its room is used again. */
typedef struct fsdpc_message {
    int peer; /* where it goes, or comes from */
    uint32_t tag;
    size_t bytes;
    size_t room; /* bytes that data, of malloc, has room for */
    unsigned char *data;
} fsdpc_message;

fsdpc_status fsdpc_link_relay_create(int rank, int size, fsdpc_link **out);
/* For carriers, which may outlive the link's user: one destroy more is needed. */
void fsdpc_link_relay_retain(fsdpc_link *link);

/* Room for so many bytes; what was in it is lost. */
fsdpc_status fsdpc_message_reserve(fsdpc_message *message, size_t bytes);
void fsdpc_message_free(fsdpc_message *message); /* its room */

/* The oldest message of the outbox; waits for one at most max_ns.  FSDPC_IN_PROGRESS: none yet.
 * FSDPC_ERR_PEER: the link was aborted or closed. */
fsdpc_status fsdpc_link_relay_take(fsdpc_link *link, int64_t max_ns, fsdpc_message *message);
/* A message has come; the relay may keep its room.  False: no other will come, from anybody. */
bool fsdpc_link_relay_deliver(fsdpc_link *link, fsdpc_message *message);
/* No more is sent; carriers get what was, and then the end. */
void fsdpc_link_relay_close(fsdpc_link *link);

#endif
