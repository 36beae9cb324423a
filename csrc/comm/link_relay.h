/* A link whose messages are carried by somebody else: threads that hand them to a process group of
 * torch's, say (python/fsdpc/torch/_link.py).
 *
 * The relay keeps two lists.  Sends are copied to the outbox, from where carriers take them; what
 * carriers bring is delivered to the receive that waits for it, or kept until one is posted.  So no
 * carrier ever reads or writes memory of the engine, and a send is done when it is posted.
 *
 * Carriers may be any number of threads.  Messages of one peer have to be carried in order.
 */
#ifndef FSDPC_COMM_LINK_RELAY_H
#define FSDPC_COMM_LINK_RELAY_H

#include "comm/link.h"

typedef struct fsdpc_message {
    struct fsdpc_message *next; /* the relay's */
    int peer;                   /* where it goes, or comes from */
    uint32_t tag;
    size_t bytes;
    unsigned char data[];
} fsdpc_message;

fsdpc_status fsdpc_link_relay_create(int rank, int size, fsdpc_link **out);
/* For carriers, which may outlive the link's user: one destroy more is needed. */
void fsdpc_link_relay_retain(fsdpc_link *link);

fsdpc_status fsdpc_message_create(int peer, uint32_t tag, size_t bytes, fsdpc_message **out);
void fsdpc_message_free(fsdpc_message *message);

/* The oldest message of the outbox, now the carrier's; waits for one at most max_ns.
 * FSDPC_IN_PROGRESS: none yet.  FSDPC_ERR_PEER: the link was aborted or closed. */
fsdpc_status fsdpc_link_relay_take(fsdpc_link *link, int64_t max_ns, fsdpc_message **out);
/* A message has come; it is the relay's now.  False: no other will come, from anybody. */
bool fsdpc_link_relay_deliver(fsdpc_link *link, fsdpc_message *message);
/* No more is sent; carriers get what was, and then the end. */
void fsdpc_link_relay_close(fsdpc_link *link);

#endif
