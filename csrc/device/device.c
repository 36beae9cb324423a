/* Makes the host wait for an event.
 *
 * If the device has a watch for dead peers, the watch polls the event and checks that all peers are
 * alive.  Otherwise the host polls the device every 20 us.
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
    if (device->watch.wait_for)
        return device->watch.wait_for(device->watch.arg, event_poll, event);
    fsdpc_status status;
    while ((status = fsdpc_event_test(event)) == FSDPC_IN_PROGRESS)
        nanosleep(&(struct timespec){.tv_nsec = 20 * 1000}, NULL);
    return status;
}
