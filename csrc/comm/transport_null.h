/* A simulated transport, for worlds of any size in one process.  Each peer has always just sent the
 * same bytes that this rank sends to it; data that this rank does not send in return is zero.
 */
#ifndef FSDPC_COMM_TRANSPORT_NULL_H
#define FSDPC_COMM_TRANSPORT_NULL_H

#include "comm/transport.h"

fsdpc_status fsdpc_transport_null_create(int rank, int size, fsdpc_transport **out);

#endif
