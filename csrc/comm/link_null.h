/* A simulated link, for worlds of any size in one process.  Each peer has always just sent the same
 * bytes that this rank sends to it; data that this rank does not send in return is zero.
 */
#ifndef FSDPC_COMM_LINK_NULL_H
#define FSDPC_COMM_LINK_NULL_H

#include "comm/link.h"

fsdpc_status fsdpc_link_null_create(int rank, int size, fsdpc_link **out);

#endif
