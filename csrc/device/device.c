/* Makes the host wait for an event.
 *
 * If the device has a peer check, that check polls the event and verifies that all peers are alive.
 * Otherwise, the host polls the event every 20 us.
 */
#include "device/device.h"

#include <time.h>

static fsdpc_status event_poll(void *event)
{
    return fsdpc_event_test(event);
}

fsdpc_status fsdpc_event_await(fsdpc_event *event)
{
    const fsdpc_device *device = event->device;
    if (device->peer_check.wait_for)
        return device->peer_check.wait_for(device->peer_check.arg, event_poll, event);
    fsdpc_status status;
    while ((status = fsdpc_event_test(event)) == FSDPC_IN_PROGRESS)
        nanosleep(&(struct timespec){.tv_nsec = 20 * 1000}, NULL);
    return status;
}
