/* The plugin side of the interface: the core functions that a plugin calls.
 *
 * In a plugin, fsdpc_fail*, fsdpc_last_error, fsdpc_log_write and fsdpc_mem_* are forwarders with
 * hidden visibility. They may be called only after fsdpc_guest_init.
 */
#ifndef FSDPC_GUEST_GUEST_H
#define FSDPC_GUEST_GUEST_H

#include "plugin/plugin.h"

void fsdpc_guest_init(const fsdpc_plugin_host *host);

#endif
