/* Process groups.
 *
 * Parts of a group share its world (sockets, life page, bell), so a rank that sleeps in one wakes
 * for all. They also share its lock and the list of groups that every wait advances.
 */
#include "comm/group.h"

#include <stdlib.h>

#include "comm/comm_shm.h"
#include "comm/shm_peers.h"

/* A group that met by itself, and its parts. */
typedef struct family {
    pthread_mutex_t lock;
    fsdpc_interrupt interrupt; /* the caller's */
    fsdpc_group *groups;
} family;

struct fsdpc_group {
    fsdpc_comm *comm;
    fsdpc_p2p *p2p;
    family *family;
    fsdpc_group *next;
};

/* Advances all groups' messages; polls advance all groups' collectives themselves. A failure is
 * reported by the next call on its own group. */
static void carry_on(void *arg)
{
    for (fsdpc_group *group = ((family *)arg)->groups; group; group = group->next) {
        if (!group->comm->poison[0])
            (void)fsdpc_p2p_progress(group->p2p);
    }
}

/* The caller's check may run a signal handler, which may use the groups. */
static fsdpc_status check_unlocked(void *arg)
{
    family *of = arg;
    pthread_mutex_unlock(&of->lock);
    fsdpc_status status = fsdpc_interrupt_check(&of->interrupt);
    pthread_mutex_lock(&of->lock);
    return status;
}

/* Takes ownership of `comm`, even on failure. */
static fsdpc_status group_over(fsdpc_comm *comm, family *of, fsdpc_group **out)
{
    fsdpc_group *group = calloc(1, sizeof *group);
    fsdpc_status status =
        group ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a process group");
    if (status == FSDPC_OK)
        status = fsdpc_p2p_create(comm, &group->p2p);
    if (status != FSDPC_OK) {
        fsdpc_comm_destroy(comm);
        free(group);
        return status;
    }
    comm->timeout_name = "the group's timeout";
    group->comm = comm;
    group->family = of;
    group->next = of->groups;
    of->groups = group;
    *out = group;
    return FSDPC_OK;
}

static void family_free(family *of)
{
    pthread_mutex_destroy(&of->lock);
    free(of);
}

fsdpc_status fsdpc_group_create(const fsdpc_comm_config *config, fsdpc_group **out)
{
    family *of = calloc(1, sizeof *of);
    if (!of)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a process group");
    pthread_mutex_init(&of->lock, NULL);
    fsdpc_comm *comm;
    fsdpc_status status = fsdpc_comm_shm_create(config, &comm);
    if (status == FSDPC_OK) {
        comm->carry = carry_on;
        comm->carry_arg = of;
        status = group_over(comm, of, out);
    }
    if (status != FSDPC_OK) {
        family_free(of);
        return status;
    }
    of->interrupt = comm->interrupt;
    comm->interrupt = (fsdpc_interrupt){check_unlocked, of};
    comm->lock = &of->lock;
    return status;
}

fsdpc_status fsdpc_group_part(fsdpc_group *whole, const int *members, int n, uint64_t id,
                              fsdpc_group **out)
{
    fsdpc_comm *comm;
    pthread_mutex_lock(&whole->family->lock);
    fsdpc_status status = fsdpc_shm_part(whole->comm, members, n, id, &comm);
    if (status == FSDPC_OK)
        status = group_over(comm, whole->family, out);
    pthread_mutex_unlock(&whole->family->lock);
    return status;
}

void fsdpc_group_destroy(fsdpc_group *group)
{
    if (!group)
        return;
    family *of = group->family;
    pthread_mutex_lock(&of->lock);
    fsdpc_group **at = &of->groups;
    while (*at && *at != group)
        at = &(*at)->next;
    if (*at)
        *at = group->next;
    fsdpc_p2p_destroy(group->p2p);
    fsdpc_comm_leave(group->comm);
    fsdpc_comm_destroy(group->comm);
    bool last = !of->groups;
    pthread_mutex_unlock(&of->lock);
    if (last)
        family_free(of);
    free(group);
}

const fsdpc_comm *fsdpc_group_comm(const fsdpc_group *group)
{
    return group->comm;
}

void fsdpc_group_set_timeout(fsdpc_group *group, double timeout_s)
{
    pthread_mutex_lock(&group->family->lock);
    group->comm->timeout_s = timeout_s;
    pthread_mutex_unlock(&group->family->lock);
}

fsdpc_status fsdpc_group_post(fsdpc_group *group, const fsdpc_coll *op, fsdpc_group_work *work)
{
    *work = (fsdpc_group_work){.group = group};
    pthread_mutex_lock(&group->family->lock);
    fsdpc_status status = fsdpc_comm_post(group->comm, op, &work->coll);
    pthread_mutex_unlock(&group->family->lock);
    if (status != FSDPC_OK)
        work->group = NULL;
    return status;
}

/* An interrupt leaves a work in flight; any other result ends it. */
static fsdpc_status ended(fsdpc_group_work *work, fsdpc_status status)
{
    if (status == FSDPC_IN_PROGRESS || status == FSDPC_ERR_INTERRUPT)
        return status;
    if (work->is_message && work->message.state == FSDPC_P2P_POSTED)
        fsdpc_p2p_drop(work->group->p2p, &work->message);
    work->group = NULL;
    return status;
}

static fsdpc_status post_message(fsdpc_group *group, fsdpc_p2p_work message, fsdpc_group_work *work)
{
    *work = (fsdpc_group_work){.group = group, .is_message = true, .message = message};
    pthread_mutex_lock(&group->family->lock);
    fsdpc_status status = fsdpc_p2p_post(group->p2p, &work->message);
    if (status != FSDPC_OK)
        ended(work, status);
    pthread_mutex_unlock(&group->family->lock);
    return status;
}

fsdpc_status fsdpc_group_send(fsdpc_group *group, int peer, uint64_t tag, const void *data,
                              size_t bytes, fsdpc_group_work *work)
{
    const fsdpc_p2p_work message = {
        .peer = peer, .tag = tag, .data = (unsigned char *)(uintptr_t)data, .bytes = bytes};
    return post_message(group, message, work);
}

fsdpc_status fsdpc_group_recv(fsdpc_group *group, int peer, uint64_t tag, void *data, size_t bytes,
                              fsdpc_group_work *work)
{
    const fsdpc_p2p_work message = {
        .receives = true, .peer = peer, .tag = tag, .data = data, .bytes = bytes};
    return post_message(group, message, work);
}

static fsdpc_status test(fsdpc_group_work *work)
{
    return work->is_message ? fsdpc_p2p_test(work->group->p2p, &work->message)
                            : fsdpc_comm_test(&work->coll);
}

fsdpc_status fsdpc_group_test(fsdpc_group_work *work)
{
    fsdpc_group *group = work->group;
    if (!group)
        return FSDPC_OK;
    pthread_mutex_lock(&group->family->lock);
    carry_on(group->family);
    fsdpc_shm_comm *comm = (fsdpc_shm_comm *)group->comm;
    fsdpc_status status = test(work), peers = FSDPC_OK;
    if (status == FSDPC_IN_PROGRESS)
        peers = fsdpc_shm_peers_look(comm);
    if (peers != FSDPC_OK) {
        /* A peer may have done its part before it ended. */
        status = test(work);
        if (status == FSDPC_IN_PROGRESS)
            status = fsdpc_shm_fail(comm, peers);
    }
    status = ended(work, status);
    pthread_mutex_unlock(&group->family->lock);
    return status;
}

fsdpc_status fsdpc_group_wait(fsdpc_group_work *work)
{
    fsdpc_group *group = work->group;
    if (!group)
        return FSDPC_OK;
    pthread_mutex_lock(&group->family->lock);
    fsdpc_status status =
        ended(work, work->is_message ? fsdpc_p2p_wait(work->group->p2p, &work->message)
                                     : fsdpc_comm_wait(&work->coll));
    pthread_mutex_unlock(&group->family->lock);
    return status;
}

void fsdpc_group_drop(fsdpc_group_work *work)
{
    fsdpc_group *group = work->group;
    if (!group)
        return;
    pthread_mutex_lock(&group->family->lock);
    fsdpc_status status = test(work);
    if (status == FSDPC_IN_PROGRESS && !work->is_message)
        fsdpc_comm_abort(group->comm, "a process group was destroyed, or an operation's result "
                                      "dropped, before the operation was done");
    ended(work, FSDPC_OK);
    pthread_mutex_unlock(&group->family->lock);
}

void fsdpc_group_abort(fsdpc_group *group, const char *reason)
{
    pthread_mutex_lock(&group->family->lock);
    fsdpc_comm_abort(group->comm, reason);
    pthread_mutex_unlock(&group->family->lock);
}
