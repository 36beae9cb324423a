/* A team of threads that share one kernel's work.
 *
 * fsdpc_team_run(team, parts, fn, arg) calls fn(arg, part) once for every part in [0, parts),
 * spread over the team, the caller included, and returns when all are done.  Which thread takes
 * which part is not fixed; results must not depend on it, so a kernel cuts its OUTPUT into parts
 * and never sums across them.  Nested calls run inline.  Threads start at the first run that can
 * use them; a team of one never starts any.  A second caller while a run is on runs inline.  A
 * forked child does not have the workers its parent had: there the caller does all parts alone.
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
int fsdpc_team_workers(const fsdpc_team *team); /* that it has started in this process */
void fsdpc_team_run(fsdpc_team *team, size_t parts, fsdpc_team_fn fn, void *arg); /* NULL: inline */

#endif
