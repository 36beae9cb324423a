/* Memory of the host as the place of a remote device's saved tensors (tier/saved.h).
 *
 * Copies run on a stream of their own, in both directions in order, and the host never waits: where
 * a disk's owner would wait, the main stream does. Memory that is freed or reused afterwards is so
 * in the main stream's order.
 */
#ifndef FSDPC_NN_SAVED_HOST_H
#define FSDPC_NN_SAVED_HOST_H

#include "device/device.h"
#include "tier/saved.h"

fsdpc_status fsdpc_saved_host_create(fsdpc_device *device, fsdpc_saved_mover **out);

#endif
