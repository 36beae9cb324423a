/* A plugin's side of the border: the core's functions that it compiles calls to.
 *
 * fsdpc_fail*, fsdpc_last_error, fsdpc_log_write and fsdpc_mem_* in a plugin are forwarders with
 * hidden visibility; they may be called once fsdpc_guest_init has been.
 */
#ifndef FSDPC_GUEST_GUEST_H
#define FSDPC_GUEST_GUEST_H

#include "plugin/plugin.h"

void fsdpc_guest_init(const fsdpc_plugin_host *host);

#endif
