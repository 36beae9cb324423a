/* A team of threads that share the work of one kernel.
 *
 * fsdpc_team_run(team, parts, fn, arg) calls fn(arg, part) once for every part in [0, parts). It
 * distributes the calls over the team, including the caller, and returns when all of them have
 * finished. Any thread may execute any part, and results must not depend on which: a kernel divides
 * its OUTPUT into parts and never sums across them. Nested calls run inline. Threads are started by
 * the first run that can use them; a team of one starts none. A call made during another thread's
 * run also runs inline. A forked child has no workers, so its caller executes every part.
 */
#ifndef FSDPC_BASE_TEAM_H
#define FSDPC_BASE_TEAM_H

#include "base/cpu.h" /* fsdpc_usable_cores */
#include "base/status.h"

typedef struct fsdpc_team fsdpc_team;
typedef void (*fsdpc_team_fn)(void *arg, size_t part);

fsdpc_status fsdpc_team_create(int threads, fsdpc_team **out);
void fsdpc_team_destroy(fsdpc_team *team);
int fsdpc_team_threads(const fsdpc_team *team); /* 1 for NULL */
int fsdpc_team_workers(const fsdpc_team *team); /* workers started in this process */
void fsdpc_team_run(fsdpc_team *team, size_t parts, fsdpc_team_fn fn, void *arg); /* NULL: inline */

#endif
