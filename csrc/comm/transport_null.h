/* A simulated transport, for worlds of any size in one process. Each peer appears to have sent the
 * same bytes that this rank sends to it; a receive without a matching send is filled with zeros.
 */
#ifndef FSDPC_COMM_TRANSPORT_NULL_H
#define FSDPC_COMM_TRANSPORT_NULL_H

#include "comm/transport.h"

fsdpc_status fsdpc_transport_null_create(int rank, int size, fsdpc_transport **out);

#endif
